"""A slow, obvious model of a manager: what must be cached, held, free and found.

It does not choose block ids: it takes those the manager chose and verifies that they could be
taken. Everything else (hits, room, null positions, counts, roll-backs) it works out itself, from
plain dicts of tuples of tokens.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

SEALED = ("", 0)


@dataclass
class Group:
    block_size: int
    window: int | None = None

    @property
    def run_blocks(self) -> int:
        assert self.window is not None
        return max(1, -(-(self.window - 1) // self.block_size))


@dataclass
class Content:
    """What a block holds, and whose unfinished step made it hittable (SEALED: nobody's)."""

    group: int
    prefix: tuple[object, ...]
    since: tuple[str, int]


@dataclass
class ModelRequest:
    tokens: list[int]
    salt: str | None = None
    client: str = ""
    slot: int | None = None
    computed: int = 0
    num_preemptions: int = 0
    tables: list[list[int]] = field(default_factory=list)


@dataclass
class Figures:
    tokens: int
    computed: int
    is_running: bool
    num_admissions: int


class SlowModel:
    def __init__(self, num_blocks: int, groups: list[Group], max_model_len: int) -> None:
        self.num_blocks = num_blocks
        self.groups = groups
        self.max_model_len = max_model_len
        self.contents: dict[int, Content] = {}
        self.requests: dict[str, ModelRequest] = {}
        self.pins: dict[int, list[list[int]]] = {}
        self.is_draining = False
        self.epoch = 0

    # Counting.

    def references(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        held = [table for request in self.requests.values() for table in request.tables]
        held += [table for tables in self.pins.values() for table in tables]
        for table in held:
            for block in table:
                if block:
                    counts[block] = counts.get(block, 0) + 1
        return counts

    def num_free(self) -> int:
        return self.num_blocks - 1 - len(self.references())

    # Content.

    def prefix(self, request: ModelRequest, index: int, group: int) -> tuple[object, ...]:
        end = (index + 1) * self.groups[group].block_size
        return (self.epoch, request.salt, *request.tokens[:end])

    def is_cached(self, request: ModelRequest, index: int, group: int, client: str) -> bool:
        return bool(self.copies(request, index, group, client))

    def hit(self, request: ModelRequest, client: str) -> int:
        """The most tokens that every group can serve; at most all but the last."""
        if self.is_draining:
            return 0
        size = self.groups[0].block_size
        for num in range((len(request.tokens) - 1) // size, 0, -1):
            if all(self._serves(request, num, g, client) for g in range(len(self.groups))):
                return num * size
        return 0

    def _serves(self, request: ModelRequest, num: int, group: int, client: str) -> bool:
        window = self.groups[group].window
        first = 0 if window is None else max(0, num - self.groups[group].run_blocks)
        return all(self.is_cached(request, i, group, client) for i in range(first, num))

    def first_hit_index(self, num: int, group: int) -> int:
        """Positions of a hit of `num` blocks before this one are null."""
        if self.groups[group].window is None:
            return 0
        return max(0, num - self.groups[group].run_blocks)

    # Blocks.

    def adopt(
        self,
        request: ModelRequest,
        num_hit: int,
        real: tuple[list[int], ...],
        client: str,
        skip: int = 0,
    ) -> None:
        """Take the blocks of a hit from the real table, after looking at what they hold."""
        request.tables = []
        for g, group in enumerate(self.groups):
            num = num_hit // group.block_size
            ids = real[g][:num]
            first = max(self.first_hit_index(num, g), self.num_skipped(skip, g))
            for index, block in enumerate(ids):
                if index < first:
                    assert block == 0, f"position {index} of group {g} should be null: {ids}"
                    continue
                content = self.contents[block]
                assert (content.group, content.prefix) == (g, self.prefix(request, index, g))
                assert content.since[0] in ("", client)
            request.tables.append(list(ids))

    def num_skipped(self, confirmed: int, group: int) -> int:
        """Leading blocks that no token behind the confirmed ones reads."""
        window, size = self.groups[group].window, self.groups[group].block_size
        if window is None:
            return 0
        return sum((i + 1) * size <= confirmed - window + 1 for i in range(confirmed))

    def skip(self, request: ModelRequest, confirmed: int) -> None:
        for g, table in enumerate(request.tables):
            for index in range(min(len(table), self.num_skipped(confirmed, g))):
                table[index] = 0

    def num_wanted(
        self,
        request: ModelRequest,
        slot_tokens: int,
        num_hit: int = 0,
        client: str = "",
        skip: int = 0,
    ) -> range:
        """How many blocks must be free: new ones, and those of the hit that nobody holds.

        A range, because a content may be in a free block and in a held one, and the choice is the
        manager's.
        """
        wanted = 0
        for g, group in enumerate(self.groups):
            have = num_hit // group.block_size if not request.tables else len(request.tables[g])
            have = max(have, self.num_skipped(skip, g))
            wanted += max(0, -(-slot_tokens // group.block_size) - have)
        least = most = wanted
        held = self.references()
        for g, group in enumerate(self.groups):
            num = num_hit // group.block_size
            first = max(self.first_hit_index(num, g), self.num_skipped(skip, g))
            for index in range(first, num):
                copies = self.copies(request, index, g, client)
                least += not any(block in held for block in copies)
                most += not all(block in held for block in copies)
        return range(least, most + 1)

    def copies(self, request: ModelRequest, index: int, group: int, client: str) -> list[int]:
        """Blocks in which the client finds one block of the request's content."""
        wanted = self.prefix(request, index, group)
        return [
            block
            for block, c in self.contents.items()
            if c.group == group and c.prefix == wanted and c.since[0] in ("", client)
        ]

    def extend(
        self,
        request: ModelRequest,
        real: tuple[list[int], ...],
        slot_tokens: int,
        skip: int = 0,
    ) -> None:
        """Take the new blocks the manager chose; they must have been free, null ones excepted."""
        for g, group in enumerate(self.groups):
            table = request.tables[g]
            wanted = max(len(table), -(-slot_tokens // group.block_size))
            assert len(real[g]) == wanted, f"group {g} has {len(real[g])} blocks, not {wanted}"
            for index in range(len(table), wanted):
                block = real[g][index]
                if index < self.num_skipped(skip, g):
                    assert block == 0, f"position {index} of group {g} should be null"
                    table.append(0)
                    continue
                assert block and block not in self.references(), f"block {block} was not free"
                self._evict(block)
                table.append(block)
        assert request.tables == [list(ids) for ids in real]

    def _evict(self, block: int) -> None:
        """A block with content is taken only when nothing else is free, and children go first."""
        content = self.contents.pop(block, None)
        if content is None:
            return
        held = self.references()
        unused = set(range(1, self.num_blocks)) - held.keys() - self.contents.keys() - {block}
        assert not unused, f"block {block} was evicted while {sorted(unused)} hold nothing"
        if self.groups[content.group].window is not None:
            return
        same = (content.group, content.prefix)
        copies = [c for c in self.contents.values() if (c.group, c.prefix) == same]
        size = self.groups[content.group].block_size
        children = [
            c
            for c in self.contents.values()
            if c.group == content.group and c.prefix[:-size] == content.prefix
        ]
        assert copies or not children, f"block {block} was evicted before its child"

    def cache(self, request: ModelRequest, num_tokens: int, since: tuple[str, int]) -> None:
        if self.is_draining:
            return
        for g, group in enumerate(self.groups):
            for index in range(min(num_tokens // group.block_size, len(request.tables[g]))):
                block = request.tables[g][index]
                if block and block not in self.contents:
                    self.contents[block] = Content(g, self.prefix(request, index, g), since)

    def release(self, request: ModelRequest) -> None:
        request.tables = []
        request.slot = None

    # Steps.

    def complete(self, client: str, step: int) -> None:
        for content in self.contents.values():
            if content.since[0] == client and content.since[1] <= step:
                content.since = SEALED

    def fail(self, client: str, step: int) -> None:
        for block, content in list(self.contents.items()):
            if content.since[0] == client and content.since[1] >= step:
                del self.contents[block]

    def empty(self) -> None:
        self.contents.clear()

    def snapshot(self) -> dict[str, ModelRequest]:
        return copy.deepcopy(self.requests)
