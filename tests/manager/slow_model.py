"""A slow, obvious model of a manager: what must be cached, held, free and found.

It does not choose block ids: it takes those the manager chose and verifies that they could be
taken. Everything else (hits, room, null positions, counts, roll-backs) it works out itself, from
plain dicts of tuples of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm

from tests.core.model_group import ModelGroup

SEALED = ("", 0)


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
    # Where its last forward ended, and how many drafts followed; matters for states.
    num_own: int = 0
    num_drafts: int = 0
    num_encoder: int = 0
    # Group and column of every state at its block's end.
    boundaries: set[tuple[int, int]] = field(default_factory=set)


@dataclass(frozen=True)
class Wanted:
    """What a request is to get: slots up to, tokens computed before, the own end of its forward,
    and how many of the last forward's drafts were accepted."""

    slots: int
    computed: int = 0
    own: int = 0
    accepted: int = 0


class SlowModel:
    def __init__(self, num_blocks: int, groups: Sequence[ModelGroup], max_model_len: int) -> None:
        self.num_blocks = num_blocks
        self.groups = groups
        self.max_model_len = max_model_len
        self.contents: dict[int, Content] = {}
        self.requests: dict[str, ModelRequest] = {}
        self.pins: dict[int, list[list[int]]] = {}
        self.is_draining = False
        self.epoch = 0
        self.open_step = SEALED
        self.keeps_states = any(group.states for group in groups)
        self.max_drafts = min((g.num_drafts for g in groups if g.states), default=2)

    @property
    def may_cache(self) -> bool:
        return not self.is_draining and all(group.can_be_hit for group in self.groups)

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
        if not self.may_cache:
            return 0
        step = lcm(*(group.block_size for group in self.groups))
        for length in range((len(request.tokens) - 1) // step * step, 0, -step):
            if all(self._serves(request, length, g, client) for g in range(len(self.groups))):
                return length
        return 0

    def _serves(self, request: ModelRequest, length: int, group: int, client: str) -> bool:
        needed = self.hit_blocks(length, group)
        return all(self.is_cached(request, i, group, client) for i in needed)

    def hit_blocks(self, length: int, group: int, skip: int = 0) -> range:
        """Positions of a hit that are not null: of one so long, where so much is computed."""
        kind = self.groups[group]
        first = max(kind.first_needed(length), kind.num_skipped(skip)) if length else 0
        return range(first, length // kind.block_size)

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
            kept = self.hit_blocks(num_hit, g, skip)
            for index, block in enumerate(ids):
                if index not in kept:
                    assert block == 0, f"position {index} of group {g} should be null: {ids}"
                    continue
                content = self.contents[block]
                assert (content.group, content.prefix) == (g, self.prefix(request, index, g))
                assert content.since[0] in ("", client)
            request.tables.append(list(ids))

    def skip(self, request: ModelRequest, confirmed: int) -> None:
        for group, table in zip(self.groups, request.tables, strict=True):
            for index in range(min(len(table), group.num_skipped(confirmed))):
                table[index] = 0

    def new_columns(
        self, request: ModelRequest, number: int, wanted: Wanted, held: int | None = None
    ) -> dict[int, bool]:
        """Positions that enter a table of `held` ones, and whether a block stands there."""
        group = self.groups[number]
        if held is None:
            held = len(request.tables[number])
        if group.is_cross:
            num = 0 if request.slot is not None else -(-request.num_encoder // group.block_size)
            return dict.fromkeys(range(num), True)
        tokens = wanted.own if group.states else wanted.slots
        count = 1 if group.states == "none" else -(-tokens // group.block_size)
        columns = range(held, count + group.num_drafts)
        if not group.states:
            return {i: i >= group.num_skipped(wanted.computed) for i in columns}
        read, written = group.column(wanted.computed), group.column(wanted.own)
        return {i: i >= written or i == read for i in columns}

    def passes(self, request: ModelRequest, number: int, wanted: Wanted) -> bool:
        """Whether the forward of a running request leaves out columns of states."""
        group = self.groups[number]
        if not group.states or not any(request.tables):
            return False
        return group.column(wanted.own) > group.column(request.num_own) + 1

    def moving(self, request: ModelRequest, number: int, wanted: Wanted) -> list[int]:
        """Columns whose blocks move to the new ones: of states that are not read any more."""
        if not self.passes(request, number, wanted):
            return []
        group, table = self.groups[number], request.tables[number]
        num_new = sum(self.new_columns(request, number, wanted).values())
        read = group.column(request.num_own) + wanted.accepted
        held = self.references()
        return [
            i
            for i, block in enumerate(table[: group.column(wanted.own)])
            if block and i != read and held[block] == 1 and block not in self.contents
        ][:num_new]

    def jumps(self, request: ModelRequest, wanted: Wanted) -> bool:
        """Whether a table grows otherwise than by blocks at its end."""
        return any(
            self.passes(request, g, wanted) and bool(self.new_columns(request, g, wanted))
            for g in range(len(self.groups))
        )

    def num_new(self, request: ModelRequest, wanted: Wanted) -> int:
        """How many blocks a running request gets, those that move included."""
        groups = range(len(self.groups))
        return sum(sum(self.new_columns(request, g, wanted).values()) for g in groups)

    def num_wanted(
        self, request: ModelRequest, wanted: Wanted, num_hit: int = 0, client: str = ""
    ) -> range:
        """How many blocks must be free: new ones, and those of the hit that nobody holds.

        A range, because a content may be in a free block and in a held one, and the choice is the
        manager's.
        """
        least = 0
        for g, group in enumerate(self.groups):
            held = None if request.tables else num_hit // group.block_size
            least += sum(self.new_columns(request, g, wanted, held).values())
            if request.tables:
                least -= len(self.moving(request, g, wanted))
        most = least
        held_blocks = self.references()
        for g in range(len(self.groups)):
            for index in self.hit_blocks(num_hit, g, wanted.computed):
                copies = self.copies(request, index, g, client)
                least += not any(block in held_blocks for block in copies)
                most += not all(block in held_blocks for block in copies)
        return range(least, most + 1)

    def copies(self, request: ModelRequest, index: int, group: int, client: str) -> list[int]:
        """Blocks in which the client finds one block of the request's content."""
        wanted = self.prefix(request, index, group)
        return [
            block
            for block, c in self.contents.items()
            if c.group == group and c.prefix == wanted and c.since[0] in ("", client)
            if c.since == SEALED or not self.groups[group].states or c.since != self.open_step
        ]

    def extend(self, request: ModelRequest, real: tuple[list[int], ...], wanted: Wanted) -> None:
        """Take the new blocks the manager chose; they must have been free, null ones excepted."""
        for g in range(len(self.groups)):
            table, columns = request.tables[g], self.new_columns(request, g, wanted)
            moving = self.moving(request, g, wanted)
            own = [table[i] for i in moving]
            for i in moving:
                table[i] = 0
            wanted_len = len(table) + len(columns)
            assert len(real[g]) == wanted_len, f"group {g}: {len(real[g])} blocks, not {wanted_len}"
            for index, has_block in columns.items():
                block = real[g][index]
                assert bool(block) == has_block, f"position {index} of group {g}: {block}"
                if block and own:
                    assert block == own.pop(0), f"position {index} of group {g} takes another block"
                elif block:
                    assert block not in self.references(), f"block {block} was not free"
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
        if not self.groups[content.group].is_ordered:
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

    def ran(self, request: ModelRequest, own: int, num_drafts: int) -> None:
        """A forward is scheduled that ends after so many own tokens, and drafts."""
        request.num_own, request.num_drafts = own, num_drafts
        for g, group in enumerate(self.groups):
            if group.states and own % group.block_size == 0:
                request.boundaries.add((g, own // group.block_size - 1))

    def cache(self, request: ModelRequest, num_tokens: int, since: tuple[str, int]) -> None:
        if not self.may_cache:
            return
        for g, group in enumerate(self.groups):
            for index in range(min(num_tokens // group.block_size, len(request.tables[g]))):
                block = request.tables[g][index]
                if group.states and (g, index) not in request.boundaries:
                    continue
                if block and block not in self.contents:
                    self.contents[block] = Content(g, self.prefix(request, index, g), since)

    def release(self, request: ModelRequest) -> None:
        request.tables = []
        request.slot = None
        request.boundaries.clear()

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
