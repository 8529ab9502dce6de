"""A slow, obvious model of the reference core: objects, lists, whole prefixes as keys.

Everything is found by searching. It shares no code with the core, and no cleverness either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import lcm

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


@dataclass(frozen=True)
class ModelGroup:
    block_size: int
    window: int | None = None


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
    def num_out(self) -> int:
        """Blocks that cannot be handed out."""
        return len(self.held) + len([b for b in self.quarantined if not b.is_held])

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_out

    # --- look-up ---

    def usable(self, key: Key) -> ModelBlock | None:
        for block in self.cached:
            if block.key == key and block.client in (None, self.client):
                return block
        return None

    def hit_at(self, request: ModelRequest, length: int) -> list[list[ModelBlock | None]] | None:
        """Whether all groups can start from `length` tokens, the EAGLE block still included."""
        extra = self.step_tokens if self.use_eagle else 0
        tables: list[list[ModelBlock | None]] = []
        for number, group in enumerate(self.groups):
            size = group.block_size
            count = length // size
            first = 0
            if group.window is not None:
                blocks = 1
                while blocks * size < group.window - 1:
                    blocks += 1
                first = max(0, count - blocks - extra // size)
            table: list[ModelBlock | None] = [None] * first
            for index in range(first, count):
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
        while length > 0 and not self.is_draining:
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
        placed = [
            (-(index + 1) * group.block_size, number, block)
            for number, (group, table) in enumerate(zip(self.groups, tables, strict=True))
            for index, block in enumerate(table)
            if block is not None
        ]
        return [block for _, _, block in sorted(placed, key=lambda place: place[:2])]

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
            if in_windows or self.groups[key[1]].window is None:
                below = [b for b in self.cached if self.parent(b) == key]
                self.forget(below, in_windows=in_windows)

    def parent(self, block: ModelBlock) -> Key | None:
        assert block.key is not None
        namespace, group, tokens = block.key
        return (namespace, group, tokens[: -self.groups[group].block_size])

    def is_needed(self, block: ModelBlock) -> bool:
        if self.groups[block.group].window is not None:
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

    def skipped(self, group: ModelGroup, computed: int) -> int:
        if group.window is None:
            return 0
        count = 0
        while (count + 1) * group.block_size - 1 < computed - group.window + 1:
            count += 1
        return count

    def skip(self, request: ModelRequest, computed: int) -> None:
        for number, group in enumerate(self.groups):
            table = request.tables[number]
            for index in reversed(range(min(self.skipped(group, computed), len(table)))):
                block = table[index]
                if block is not None:
                    self.release([block], "request")
                table[index] = None

    def reserve(
        self,
        request: ModelRequest,
        computed: int,
        slots: int,
        cached: int,
        hit: list[list[ModelBlock | None]] | None,
    ) -> bool:
        if hit is None:
            self.skip(request, computed)
        else:
            hit = [
                [None if i < self.skipped(group, computed) else b for i, b in enumerate(table)]
                for group, table in zip(self.groups, hit, strict=True)
            ]
        wanted = []
        tables = hit if hit is not None else request.tables
        for group, table in zip(self.groups, tables, strict=True):
            total = -(-slots // group.block_size)
            entries = list(range(len(table), total))
            wanted.append([index >= self.skipped(group, computed) for index in entries])
        adopted = {b for table in hit or [] for b in table if b is not None and not b.is_held}
        if sum(map(sum, wanted)) + len(adopted) > self.num_free:
            return False
        if hit is not None:
            for number, table in enumerate(hit):
                for block in table:
                    if block is not None:
                        self.hold(block, "request")
                request.tables[number] = list(table)
                request.num_cached[number] = len(table)
        for number, flags in enumerate(wanted):
            new = self.take(number, sum(flags))
            request.tables[number] += [new.pop(0) if flag else None for flag in flags]
        self.requests[request.name] = request
        self.cache(request, cached)
        return True

    def cache(self, request: ModelRequest, num_tokens: int) -> None:
        if self.is_draining:
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
            if start and group.window is None:
                above = table[start - 1]
                if above is None or above.key != keys[start - 1]:
                    continue
            for index in range(start, end):
                block = table[index]
                if block is not None and block.is_quarantined:
                    if group.window is None:
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
        self.forget(void)
