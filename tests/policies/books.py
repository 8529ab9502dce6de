"""A book that says of each entry what a test has written into it."""

from __future__ import annotations

from kvcache.arrays import IndexArray, index_array
from kvcache.policies import EntryInfo, EvictionPolicy, make_eviction_policy


class WrittenBook:
    """Entries without a line in `infos` are single blocks with a name of their own."""

    def __init__(self, *, is_uniform: bool = True) -> None:
        self.is_uniform = is_uniform
        self.infos: dict[int, EntryInfo] = {}

    def describe(self, entry: int) -> EntryInfo:
        return self.infos.get(entry) or EntryInfo(content=name_of(entry))

    def weight(self, entry: int) -> int:
        return self.describe(entry).weight_blocks

    def weights(self, entries: IndexArray) -> IndexArray:
        return index_array([self.describe(entry).weight_blocks for entry in entries.tolist()])

    def hold(self, entry: int, content: int) -> None:
        """Let an entry hold a content."""
        self.infos[entry] = EntryInfo(content=name_of(content))


def name_of(content: int) -> bytes:
    return content.to_bytes(4, "big")


def make_policy(
    name: str, capacity: int = 100, *, is_uniform: bool = True
) -> tuple[EvictionPolicy, WrittenBook]:
    book = WrittenBook(is_uniform=is_uniform)
    return make_eviction_policy(name, capacity, book), book


def use(policy: EvictionPolicy, *entries: int) -> None:
    """Use entries, and let them come out of use again."""
    for entry in entries:
        policy.remove([entry])
        policy.insert([entry])


def evict(policy: EvictionPolicy, num_blocks: int) -> list[int]:
    return [int(entry) for entry in policy.choose(num_blocks).entries]
