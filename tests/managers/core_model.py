"""A slow, obvious model of the reference core: objects, lists, whole prefixes as keys.

Everything is found by searching. It shares no code with the core, and no cleverness either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import lcm

from kvcache.core import Reservation

Key = tuple[str, int, tuple[int, ...]]  # namespace, group, all tokens up to the block's end


@dataclass(eq=False)
class ModelBlock:
    group: int
    references: Counter[str] = field(default_factory=Counter)
    key: Key | None = None
    client: str | None = None  # set while unsealed
    step: int = -1
    id: int = -1  # what the core calls it
    is_quarantined: bool = False

    @property
    def is_held(self) -> bool:
        return sum(self.references.values()) > 0


@dataclass(eq=False)
class ModelRequest:
    name: str
    namespace: str
    tokens: list[int]
    tables: list[list[ModelBlock | None]]
    num_cached: list[int]
    # client, step, group and index of every block made hittable in a step that is not settled
    made: list[tuple[str, int, int, int]] = field(default_factory=list)
    # group and index of every column whose last token ended a forward
    boundaries: set[tuple[int, int]] = field(default_factory=set)
    # it lost contents to `evict`, and caches none any more
    is_mute: bool = False


@dataclass(frozen=True)
class ModelGroup:
    block_size: int
    window: int | None = None
    chunk: int | None = None
    states: str | None = None  # "none" or "align"
    num_drafts: int = 0
    is_cross: bool = False
    is_latent: bool = False

    @property
    def is_ordered(self) -> bool:
        return not (self.window or self.chunk or self.states or self.is_cross)

    @property
    def can_be_hit(self) -> bool:
        return not self.is_cross and self.states != "none"

    def column(self, num_tokens: int) -> int:
        """Where the state after so many tokens is, -1 for none."""
        if self.states == "none" or not num_tokens:
            return 0 if num_tokens else -1
        index = 0
        while (index + 1) * self.block_size < num_tokens:
            index += 1
        return index

    def num_skipped(self, computed: int) -> int:
        """Leading blocks that nothing reads after so many tokens."""
        if self.window is not None:
            count = 0
            while (count + 1) * self.block_size - 1 < computed - self.window + 1:
                count += 1
            return count
        if self.chunk is not None:
            return computed // self.chunk * self.chunk // self.block_size
        return max(0, self.column(computed)) if self.states == "align" else 0

    def first_needed(self, num_tokens: int) -> int:
        """The first block that a hit of so many tokens must have."""
        count = num_tokens // self.block_size
        if self.window is not None:
            blocks = 1
            while blocks * self.block_size < self.window - 1:
                blocks += 1
            return max(0, count - blocks)
        if self.chunk is not None:
            return num_tokens // self.chunk * self.chunk // self.block_size
        return count - 1 if self.states else 0


class SlowModel:
    def __init__(self, num_blocks: int, groups: list[ModelGroup], use_eagle: bool) -> None:
        self.num_blocks = num_blocks - 1
        self.groups = groups
        self.use_eagle = use_eagle
        self.step_tokens = lcm(*(group.block_size for group in groups))
        self.cached: list[ModelBlock] = []  # in order of caching
        self.unused: list[ModelBlock] = []  # cached and unheld, next victim first
        self.held: list[ModelBlock] = []
        self.requests: dict[str, ModelRequest] = {}
        self.quarantined: list[ModelBlock] = []
        self.is_draining = False
        self.client: str | None = None
        self.step = -1

    @property
    def may_cache(self) -> bool:
        return not self.is_draining and all(group.can_be_hit for group in self.groups)

    @property
    def num_out(self) -> int:
        """Blocks that cannot be handed out."""
        return len(self.held) + len([b for b in self.quarantined if not b.is_held])

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_out

    # --- look-up ---

    def usable(self, key: Key) -> ModelBlock | None:
        for block in self.cached:
            is_too_new = self.groups[key[1]].states is not None and block.step == self.step
            is_mine = block.client == self.client and not is_too_new
            if block.key == key and (block.client is None or is_mine):
                return block
        return None

    def hit_at(self, request: ModelRequest, length: int) -> list[list[ModelBlock | None]] | None:
        """Whether all groups can start from `length` tokens, the EAGLE block still included."""
        extra = self.step_tokens if self.use_eagle else 0
        tables: list[list[ModelBlock | None]] = []
        for number, group in enumerate(self.groups):
            size = group.block_size
            first = max(0, group.first_needed(length) - (extra // size if group.window else 0))
            table: list[ModelBlock | None] = [None] * first
            for index in range(first, length // size):
                key = (request.namespace, number, tuple(request.tokens[: (index + 1) * size]))
                block = self.usable(key)
                if block is None:
                    return None
                table.append(block)
            tables.append(table)
        return [
            table[: (length - extra) // group.block_size]
            for table, group in zip(tables, self.groups, strict=True)
        ]

    def look_up(self, request: ModelRequest) -> list[list[ModelBlock | None]]:
        length = (len(request.tokens) - 1) // self.step_tokens * self.step_tokens
        while length > 0 and self.may_cache:
            hit = self.hit_at(request, length)
            if hit is not None:
                return hit
            length -= self.step_tokens
        return [[] for _ in self.groups]

    # --- references ---

    def hold(self, block: ModelBlock, kind: str) -> None:
        block.references[kind] += 1
        if block in self.unused:
            self.unused.remove(block)
        if block not in self.held:
            self.held.append(block)

    def release(self, blocks: Iterable[ModelBlock], kind: str) -> None:
        for block in blocks:
            block.references[kind] -= 1
            if not block.is_held:
                self.held.remove(block)
                if block.key is not None:
                    self.unused.append(block)

    def tail_first(self, tables: list[list[ModelBlock | None]]) -> list[ModelBlock]:
        """Groups whose blocks can go one by one first, each from its end; then the others."""
        placed = [
            ((True, -(index + 1) * group.block_size, number), block)
            if group.is_ordered
            else ((False, number, -index), block)
            for number, (group, table) in enumerate(zip(self.groups, tables, strict=True))
            for index, block in enumerate(table)
            if block is not None
        ]
        return [block for _, block in sorted(placed, key=lambda place: place[0])]

    # --- contents ---

    def forget(self, blocks: Iterable[ModelBlock], *, in_windows: bool = False) -> None:
        """Forget contents and what continues them; of windows only if `in_windows`."""
        doomed = [block for block in blocks if block.key is not None]
        keys = {block.key for block in doomed}
        for block in doomed:
            block.key = block.client = None
            self.cached.remove(block)
            if block in self.unused:
                self.unused.remove(block)
        for key in keys:
            if key is None or any(block.key == key for block in self.cached):
                continue
            if in_windows or self.groups[key[1]].is_ordered:
                below = [b for b in self.cached if self.parent(b) == key]
                self.forget(below, in_windows=in_windows)

    def parent(self, block: ModelBlock) -> Key | None:
        assert block.key is not None
        namespace, group, tokens = block.key
        return (namespace, group, tokens[: -self.groups[group].block_size])

    def is_needed(self, block: ModelBlock) -> bool:
        if not self.groups[block.group].is_ordered:
            return False
        if any(b is not block and b.key == block.key for b in self.cached):
            return False
        return any(self.parent(b) == block.key for b in self.cached)

    def take(self, group: int, count: int) -> list[ModelBlock]:
        empty = self.num_free - len(self.unused)
        missing = max(0, count - empty)
        passed: list[ModelBlock] = []
        for block in list(self.unused):
            if missing and self.is_needed(block):
                passed.append(block)
            elif missing:
                self.cached.remove(block)
                self.unused.remove(block)
                block.key = block.client = None
                missing -= 1
        self.forget(passed[:missing])
        blocks = [ModelBlock(group) for _ in range(count)]
        for block in blocks:
            self.hold(block, "request")
        return blocks

    def quarantine(self, block: ModelBlock) -> None:
        self.forget([block], in_windows=True)
        block.is_quarantined = True
        self.quarantined.append(block)

    def reset(self) -> bool:
        if self.held:
            return False
        self.cached.clear()
        self.unused.clear()
        self.is_draining = False
        return True

    # --- a request's way ---

    def skip(self, request: ModelRequest, computed: int) -> None:
        for number, group in enumerate(self.groups):
            table = request.tables[number]
            for index in reversed(range(min(group.num_skipped(computed), len(table)))):
                block = table[index]
                if block is not None:
                    self.release([block], "request")
                table[index] = None

    def columns(
        self, number: int, request: ModelRequest, wanted: Reservation, held: int
    ) -> list[bool]:
        """The columns that a table of `held` ones gets more: whether a block comes there."""
        group = self.groups[number]
        if group.is_cross:
            is_running = request.name in self.requests
            return [] if is_running else [True] * -(-wanted.num_encoder_tokens // group.block_size)
        tokens = wanted.own_end if group.states else wanted.num_slot_tokens
        count = 1 if group.states == "none" else -(-tokens // group.block_size)
        columns = range(held, count + group.num_drafts)
        if not group.states:
            return [i >= group.num_skipped(wanted.num_computed_tokens) for i in columns]
        written, read = group.column(wanted.own_end), group.column(wanted.num_computed_tokens)
        return [i >= written or i == read for i in columns]

    def jump(self, number: int, wanted: Reservation) -> int:
        """How many columns of states a running request's forward passes by."""
        group, newest = self.groups[number], wanted.newest_state
        if not group.states or newest is None:
            return 0
        last = group.column(newest.num_own_tokens)
        return max(0, group.column(wanted.own_end) - last - 1)

    def spares(self, number: int, request: ModelRequest, wanted: Reservation) -> list[int]:
        """Columns of states that a jumping forward neither reads nor writes."""
        group, newest, table = self.groups[number], wanted.newest_state, request.tables[number]
        if not self.jump(number, wanted) or newest is None:
            return []
        read = group.column(newest.num_own_tokens) + newest.num_accepted_drafts
        return [
            i
            for i, block in enumerate(table[: group.column(wanted.own_end)])
            if i != read and block is not None and block.references.total() == 1
            if block.key is None and not block.is_quarantined
        ]

    def jumps(self, request: ModelRequest, wanted: Reservation) -> bool:
        """Whether a table grows otherwise than by blocks at its end."""
        return any(
            self.jump(number, wanted) > 0 and self.columns(number, request, wanted, len(table))
            for number, table in enumerate(request.tables)
        )

    def num_wanted(self, request: ModelRequest, wanted: Reservation) -> int:
        """Blocks that a running request needs if none of its own move."""
        return sum(
            sum(self.columns(number, request, wanted, len(table)))
            for number, table in enumerate(request.tables)
        )

    def reserve(
        self,
        request: ModelRequest,
        wanted: Reservation,
        hit: list[list[ModelBlock | None]] | None,
    ) -> bool:
        computed = wanted.num_computed_tokens
        if hit is None:
            self.skip(request, computed)
        else:
            hit = [
                [None if i < group.num_skipped(computed) else b for i, b in enumerate(table)]
                for group, table in zip(self.groups, hit, strict=True)
            ]
        tables = hit if hit is not None else request.tables
        columns = [self.columns(n, request, wanted, len(t)) for n, t in enumerate(tables)]
        spares = [self.spares(n, request, wanted)[: sum(flags)] for n, flags in enumerate(columns)]
        adopted = {b for table in hit or [] for b in table if b is not None and not b.is_held}
        needed = sum(map(sum, columns)) - sum(map(len, spares)) + len(adopted)
        if needed > self.num_free:
            return False
        if hit is not None:
            for number, table in enumerate(hit):
                for block in table:
                    if block is not None:
                        self.hold(block, "request")
                request.tables[number] = list(table)
                request.num_cached[number] = len(table)
        for number, flags in enumerate(columns):
            table = request.tables[number]
            moved = [table[i] for i in spares[number]]
            for i in spares[number]:
                table[i] = None
            new = [*moved, *self.take(number, sum(flags) - len(moved))]
            table += [new.pop(0) if flag else None for flag in flags]
        self.requests[request.name] = request
        self.note_boundary(request, wanted.own_end)
        self.cache(request, wanted.num_cached_tokens)
        return True

    def note_boundary(self, request: ModelRequest, own_end: int) -> None:
        for number, group in enumerate(self.groups):
            if self.may_cache and group.states and own_end and own_end % group.block_size == 0:
                request.boundaries.add((number, own_end // group.block_size - 1))

    def cache(self, request: ModelRequest, num_tokens: int) -> None:
        if not self.may_cache or request.is_mute:
            return
        for number, group in enumerate(self.groups):
            size, table = group.block_size, request.tables[number]
            end, start = num_tokens // size, request.num_cached[number]
            if end <= start:
                continue
            keys = [
                (request.namespace, number, tuple(request.tokens[: (i + 1) * size]))
                for i in range(end)
            ]
            if start and group.is_ordered:
                above = table[start - 1]
                if above is None or above.key != keys[start - 1]:
                    continue
            for index in range(start, end):
                block = table[index]
                if group.states and (number, index) not in request.boundaries:
                    continue
                if block is not None and block.is_quarantined:
                    if group.is_ordered:
                        break
                elif block is not None and block.key is None:
                    block.key, block.client, block.step = keys[index], self.client, self.step
                    self.cached.append(block)
                    if self.client is not None:
                        request.made.append((self.client, self.step, number, index))
            request.num_cached[number] = end

    def free(self, name: str) -> None:
        request = self.requests.pop(name)
        self.release(self.tail_first(request.tables), "request")

    def complete(self, client: str, step: int) -> None:
        for block in self.cached:
            if block.client == client and block.step <= step:
                block.client = None
        for request in self.requests.values():
            request.made = [m for m in request.made if m[0] != client or m[1] > step]

    def fail(self, client: str, step: int) -> None:
        void = [b for b in self.cached if b.client == client and b.step >= step]
        for request in self.requests.values():
            for made in list(request.made):
                if made[0] == client and made[1] >= step:
                    request.made.remove(made)
                    number, index = made[2:]
                    request.num_cached[number] = min(request.num_cached[number], index)
                    kept = {b for b in request.boundaries if b[0] != number or b[1] < index}
                    request.boundaries = kept
        self.forget(void)
