"""An `EntryTable` whose entries a test sets."""

from __future__ import annotations

from kvcache.policies import EntryInfo, EvictionPolicy, make_eviction_policy


class WrittenTable:
    """Entries that are not in `infos` have a name of their own."""

    def __init__(self) -> None:
        self.infos: dict[int, EntryInfo] = {}

    def describe(self, entry: int) -> EntryInfo:
        return self.infos.get(entry) or EntryInfo(content=name_of(entry))

    def hold(self, entry: int, content: int) -> None:
        """Set the content of an entry."""
        self.infos[entry] = EntryInfo(content=name_of(content))


def name_of(content: int) -> bytes:
    return content.to_bytes(4, "big")


def make_policy(name: str, capacity: int = 100) -> tuple[EvictionPolicy, WrittenTable]:
    table = WrittenTable()
    return make_eviction_policy(name, capacity, table), table


def use(policy: EvictionPolicy, *entries: int) -> None:
    """Use entries and release them again."""
    for entry in entries:
        policy.remove([entry])
        policy.insert([entry])


def evict(policy: EvictionPolicy, num_entries: int) -> list[int]:
    return [int(entry) for entry in policy.choose(num_entries)]
