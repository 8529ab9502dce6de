"""Random walks of forks by per-request calls, with a worker made of lists."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from kvcache import Request
from kvcache.protocol.commands import BlockTablePatch, Copy, Zero
from tests.audits import Audits
from tests.manager.managers_under_test import FULL, HYBRID, Shape, make_manager
from tests.walks import random_walk

SIZE = 4
WINDOW = 9
NUM_BLOCKS = 26
NUM_STEPS = 120

Cell = tuple[int, ...] | None
"""The content of a position: all tokens up to it."""


@dataclass
class Live:
    """A request, its slot, and up to where its forward writes next."""

    request: Request
    slot: int
    scheduled: int


class Worker:
    """Tables and bytes as the commands leave them."""

    def __init__(self, num_groups: int) -> None:
        self.tables: dict[tuple[int, int], list[int]] = {}
        self.cells: list[list[Cell]] = [[None] * SIZE for _ in range(NUM_BLOCKS)]
        self.num_copies = 0

    def obey(self, command: object) -> None:
        if isinstance(command, Zero):
            for block in command.block_ids.tolist():
                self.cells[block] = [None] * SIZE
        elif isinstance(command, Copy):
            destinations = command.destinations.tolist()
            assert len(set(destinations)) == len(destinations)
            read = [list(self.cells[block]) for block in command.sources.tolist()]
            for block, cells in zip(destinations, read, strict=True):
                self.cells[block] = cells
            self.num_copies += len(read)
        elif isinstance(command, BlockTablePatch):
            ids = command.block_ids.tolist()
            runs = zip(
                command.slots.tolist(),
                command.groups.tolist(),
                command.first_indices.tolist(),
                command.counts.tolist(),
                strict=True,
            )
            for slot, group, first, count in runs:
                table = self.tables.setdefault((slot, group), [])
                del table[first:]
                table += ids[:count]
                del ids[:count]


class Walk:
    def __init__(self, seed: int, shape: Shape) -> None:
        self.random = random.Random(seed)
        # Scheduled blocks can be hit before their forward ran, which it never does for a request
        # that ends earlier: either nothing is hit, or no request ends then.
        self.hits = seed % 3 == 0
        self.num_groups = len(shape.groups)
        self.manager = make_manager(
            shape,
            num_blocks=NUM_BLOCKS,
            max_num_seqs=6,
            zero_new_blocks=seed % 2 == 0,
        )
        self.audits = Audits(seed, self.manager.check)
        self.worker = Worker(self.num_groups)
        self.live: list[Live] = []
        self.count = 0

    def check(self) -> None:
        self.audits.perhaps()
        held = {b for one in self.live for t in self.tables(one) for b in t if b}
        core = self.manager.statistics().core
        # A row whose content is cached elsewhere holds the cached block, too.
        assert core.num_free_blocks + len(held) <= core.num_blocks

    def tables(self, one: Live) -> tuple[list[int], ...]:
        return self.manager.get_block_ids(one.request.request_id)

    def idle(self) -> list[Live]:
        """Requests without an unfinished forward."""
        return [one for one in self.live if one.scheduled == one.request.num_computed_tokens]

    def start(self) -> None:
        self.count += 1
        tokens = [self.random.randrange(2) for _ in range(self.random.randint(1, 20))]
        salt = None if self.hits else f"salt of {self.count}"
        request = Request(f"r{self.count}", tokens, cache_salt=salt)
        hit, num_hit = self.manager.get_computed_blocks(request)
        num_new = self.random.randint(1, len(tokens) - num_hit)
        blocks = self.manager.allocate_slots(request, num_new, num_hit, hit)
        if blocks is None:
            self.free()
            return
        slot = self.manager.slot_of(request.request_id)
        assert slot is not None
        request.num_computed_tokens = num_hit
        self.live.append(Live(request, slot, num_hit + num_new))

    def append(self) -> None:
        if not self.idle():
            return
        one = self.random.choice(self.idle())
        request = one.request
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids([self.random.randrange(2)])
        left = request.num_tokens - request.num_computed_tokens
        num_new = self.random.randint(1, left)
        lookahead = self.random.choice([0, 0, 5])
        before = self.tables(one)
        if self.manager.allocate_slots(request, num_new, num_lookahead_tokens=lookahead) is None:
            assert self.tables(one)[0] == before[0]
            self.free()
        else:
            one.scheduled += num_new

    def fork(self) -> None:
        if not self.idle():
            return
        parent = self.random.choice(self.idle())
        self.count += 1
        computed = parent.request.num_computed_tokens
        tokens = parent.request.all_token_ids[:computed].tolist()
        tokens.append(self.random.randrange(2))
        child = Request(f"r{self.count}", tokens, cache_salt=parent.request.cache_salt)
        free = self.manager.statistics().core.num_free_blocks
        if self.manager.fork(parent.request, child) is None:
            assert len(self.live) == 6
            return
        assert self.manager.statistics().core.num_free_blocks == free
        slot = self.manager.slot_of(child.request_id)
        assert slot is not None
        self.live.append(Live(child, slot, computed))

    def free(self) -> None:
        free = [one for one in self.live if not self.hits or one in self.idle()]
        if free:
            one = self.random.choice(free)
            self.live.remove(one)
            self.manager.free(one.request)

    def forward(self) -> None:
        for command in self.manager.take_commands():
            self.worker.obey(command)
        for one in self.live:
            for group in range(self.num_groups):
                table = self.worker.tables[one.slot, group]
                for position in range(one.request.num_computed_tokens, one.scheduled):
                    block = table[position // SIZE]
                    self.worker.cells[block][position % SIZE] = self.prefix(one, position)
        for one in self.live:
            one.request.num_computed_tokens = one.scheduled
            self.verify(one)

    def verify(self, one: Live) -> None:
        computed = one.request.num_computed_tokens
        for group, table in enumerate(self.tables(one)):
            first = 0 if group == 0 else max(0, computed - WINDOW + 1)
            for position in range(first, computed):
                cell = self.worker.cells[table[position // SIZE]][position % SIZE]
                assert cell == self.prefix(one, position), (one.request, group, position)

    @staticmethod
    def prefix(one: Live, position: int) -> Cell:
        return tuple(one.request.all_token_ids[: position + 1].tolist())


@pytest.mark.parametrize("shape", [FULL, HYBRID], ids=lambda shape: shape.name)
@pytest.mark.seeds(9)
def test_no_call_changes_another_requests_bytes(seed: int, shape: Shape) -> None:
    walk = Walk(seed, shape)
    operations = {walk.start: 2, walk.append: 6, walk.fork: 3, walk.free: 2, walk.forward: 5}
    random_walk(f"seed {seed}", walk.random, operations, NUM_STEPS, walk.check)
    assert walk.worker.num_copies > 0
    walk.forward()
    while walk.live:
        walk.free()
    walk.audits.make()
    core = walk.manager.statistics().core
    assert core.num_free_blocks == core.num_blocks
    assert sum(core.references.values()) == 0
