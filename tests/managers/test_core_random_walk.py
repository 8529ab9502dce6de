"""The reference core against the slow model: the same hits, blocks, evictions and counts."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from kvcache.blocks.references import KINDS_APART
from kvcache.commands import BlockTablePatch
from kvcache.core import CacheHit, ReferenceKind, Reservation, RowBatch
from kvcache.request import Request
from tests.managers.core_builders import full, make_core, make_request, window
from tests.managers.core_model import ModelBlock, ModelGroup, ModelRequest, SlowModel

PLANS = {
    "full": [ModelGroup(2)],
    "window": [ModelGroup(2, 5)],
    "window of one": [ModelGroup(2, 1)],
    "full and window": [ModelGroup(2), ModelGroup(2, 4)],
    "full and two windows": [ModelGroup(2), ModelGroup(2, 3), ModelGroup(2, 8)],
    "two equal windows": [ModelGroup(2, 6), ModelGroup(2), ModelGroup(2, 6)],
    "coarse full": [ModelGroup(4), ModelGroup(2, 5)],
    "coarse window": [ModelGroup(2), ModelGroup(6, 9), ModelGroup(4)],
}
WALKS_PER_PLAN = 18
OPERATIONS = 60


class Walk:
    """One random walk; every operation is done to core and model, and both are compared."""

    def __init__(self, seed: int, groups: list[ModelGroup], use_eagle: bool) -> None:
        self.random = random.Random(seed)
        num_blocks = self.random.randint(6, 30)
        specs = [
            full(g.block_size) if g.window is None else window(g.window, g.block_size)
            for g in groups
        ]
        self.core = make_core(num_blocks, *specs, use_eagle=use_eagle, has_workers=False)
        self.model = SlowModel(num_blocks, groups, use_eagle)
        self.streams = [[self.random.randint(1, 2) for _ in range(40)] for _ in range(2)]
        self.requests: dict[str, Request] = {}
        self.keys: dict[tuple[str, int, bytes], object] = {}
        self.pins: list[tuple[CacheHit, list[ModelBlock]]] = []
        self.lent: list[tuple[ModelBlock, ReferenceKind]] = []
        self.slots: dict[str, int] = {}
        self.steps = {"a": 0, "b": 0}
        self.settled = {"a": 0, "b": 0}
        self.count = 0

    def go(self, num_operations: int) -> None:
        operations: list[tuple[float, Callable[[], None]]] = [
            (6, self.admit),
            (3, self.extend),
            (4, self.extend_rows),
            (4, self.finish),
            (4, self.open_step),
            (2, self.close_step),
            (2, self.complete),
            (1, self.fail),
            (1, self.pin),
            (1, self.unpin),
            (1, self.evict),
            (1, self.lend),
            (1, self.end_loan),
            (0.5, self.quarantine),
            (0.5, self.release_quarantine),
            (0.2, self.drain),
            (0.5, self.reset),
        ]
        weights, actions = zip(*operations, strict=True)
        for _ in range(num_operations):
            self.random.choices(actions, weights)[0]()
            self.compare()
        for name in list(self.requests):
            self.finish(name)
        while self.pins:
            self.unpin()
        while self.lent:
            self.end_loan()
        while self.model.quarantined:
            self.release_quarantine()
        self.compare()
        assert self.core.num_free_blocks() == self.model.num_blocks
        assert self.core.reset() == 0
        self.core.check()
        assert self.core.statistics().num_cached_blocks == 0

    # --- operations ---

    def admit(self) -> None:
        self.count += 1
        name, salt = f"r{self.count}", self.random.choice([None, None, "salt"])
        tokens = self.random.choice(self.streams)[: self.random.randint(1, 40)]
        if self.random.random() < 0.2:
            tokens = [*tokens, 3]
        request = make_request(name, tokens, self.core.hash_block_size, cache_salt=salt)
        shadow = ModelRequest(
            name,
            str(salt),
            list(tokens),
            [[] for _ in self.model.groups],
            [0 for _ in self.model.groups],
        )
        hit, expected = self.core.look_up(request), self.model.look_up(shadow)
        assert [list(ids) for ids in hit.block_ids] == [
            [0 if block is None else block.id for block in table] for table in expected
        ]
        external = self.random.choice([0, 0, 0, self.random.randint(0, 20)])
        computed = min(hit.num_tokens + external, len(tokens) - 1)
        end = self.random.randint(computed + 1, len(tokens))
        cached = end if self.random.random() < 0.8 else 0
        adopted = self.random.random() < 0.9
        if not adopted:
            computed = 0
        self.reserve(
            request,
            shadow,
            (computed, end + self.random.randint(0, 3), cached),
            (hit, expected) if adopted else None,
        )

    def extend(self) -> None:
        if not self.requests:
            return
        name = self.random.choice(list(self.requests))
        request, shadow = self.requests[name], self.model.requests[name]
        self.reserve(request, shadow, self.more(request, shadow), None)

    def more(self, request: Request, shadow: ModelRequest) -> tuple[int, int, int]:
        """Append some tokens; return what to ask for: computed, slot and cached tokens."""
        computed = min(request.num_tokens, self.random.randint(0, 60))
        new = [self.random.randint(1, 2) for _ in range(self.random.randint(0, 6))]
        request.append_output_token_ids(new)
        shadow.tokens += new
        held = min(
            len(table) * group.block_size
            for table, group in zip(shadow.tables, self.model.groups, strict=True)
        )
        slots = max(held, request.num_tokens) if self.random.random() < 0.8 else held
        return computed, slots, self.random.choice([0, min(request.num_tokens, slots)])

    def extend_rows(self) -> None:
        """Several rows in one call, mostly by one token: what all skip is freed first."""
        chosen = self.random.sample(list(self.requests), self.random.randint(0, len(self.requests)))
        figures = []
        for name in chosen:
            request, shadow = self.requests[name], self.model.requests[name]
            figures.append(self.more(request, shadow))
            free_slots = set(range(len(self.slots) + 1)) - set(self.slots.values())
            self.slots.setdefault(name, min(free_slots))
        columns = np.array(figures, dtype=np.int32).reshape(-1, 3).T
        slots = np.array([self.slots[name] for name in chosen], dtype=np.int32)
        batch = RowBatch([self.requests[name] for name in chosen], slots, *columns)
        result = self.core.reserve_rows(batch)
        for name, (computed, _, _) in zip(chosen, figures, strict=True):
            self.model.skip(self.model.requests[name], computed)
        expected = [
            self.model.reserve(self.model.requests[name], *counts, None)
            for name, counts in zip(chosen, figures, strict=True)
        ]
        assert result.is_reserved.tolist() == expected
        for name in chosen:
            self.learn_ids(name)
        self.compare_patch(chosen, result.patches)

    def reserve(
        self,
        request: Request,
        shadow: ModelRequest,
        figures: tuple[int, int, int],
        hits: tuple[CacheHit, list[list[ModelBlock | None]]] | None,
    ) -> None:
        changes = self.core.reserve(request, Reservation(*figures), hits[0] if hits else None)
        assert self.model.reserve(shadow, *figures, hits[1] if hits else None) == (
            changes is not None
        )
        if changes is None:
            return
        name = request.request_id
        self.requests[name] = request
        tables = self.core.block_ids(name)
        for change in changes:
            assert tables[change.group][change.first_index :] == list(change.block_ids)
        self.learn_ids(name)

    def learn_ids(self, name: str) -> None:
        """Take over what the core calls the blocks that are new in a request's tables."""
        request, shadow = self.requests[name], self.model.requests[name]
        tables = self.core.block_ids(name)
        for number, table in enumerate(shadow.tables):
            assert len(tables[number]) == len(table)
            for block_id, block in zip(tables[number], table, strict=True):
                if block is not None and block.id < 0:
                    block.id = block_id
            size = self.model.groups[number].block_size
            ratio = size // self.core.hash_block_size
            for index in range(len(shadow.tokens) // size):
                digest = request.block_hashes[(index + 1) * ratio - 1]
                key = (shadow.namespace, number, tuple(shadow.tokens[: (index + 1) * size]))
                assert self.keys.setdefault((shadow.namespace, number, digest), key) == key

    def finish(self, name: str | None = None) -> None:
        if not self.requests:
            return
        name = name or self.random.choice(list(self.requests))
        self.core.free(self.requests.pop(name))
        self.slots.pop(name, None)
        self.model.free(name)

    def open_step(self) -> None:
        client = self.random.choice("ab")
        self.steps[client] += 1
        self.core.open_step(client, self.steps[client])
        self.model.client, self.model.step = client, self.steps[client]

    def close_step(self) -> None:
        self.core.close_step()
        self.model.client = None

    def complete(self) -> None:
        client = self.random.choice("ab")
        step = self.random.randint(self.settled[client], self.steps[client])
        if client == self.model.client and step == self.model.step:
            self.close_step()
        self.settled[client] = step
        self.core.complete_steps(client, step)
        self.model.complete(client, step)

    def fail(self) -> None:
        client = self.random.choice("ab")
        step = self.random.randint(self.settled[client] + 1, self.steps[client] + 1)
        self.core.fail_steps(client, step)
        self.model.fail(client, step)

    def pin(self) -> None:
        tokens = self.random.choice(self.streams)
        hit = self.core.look_up(make_request("pin", tokens, self.core.hash_block_size))
        shadow = ModelRequest("pin", "None", tokens, [], [])
        blocks = self.model.tail_first(self.model.look_up(shadow))
        self.core.pin(hit)
        for block in blocks:
            self.model.hold(block, "pin")
        self.pins.append((hit, blocks))

    def unpin(self) -> None:
        if self.pins:
            hit, blocks = self.pins.pop(self.random.randrange(len(self.pins)))
            self.core.unpin(hit)
            self.model.release(blocks, "pin")

    def evict(self) -> None:
        chosen = self.random.sample(self.model.cached, min(1, len(self.model.cached)))
        self.core.evict([block.id for block in chosen])
        self.model.forget(chosen, in_windows=True)

    def lend(self) -> None:
        if self.model.cached:
            block = self.random.choice(self.model.cached)
            kind = self.random.choice([ReferenceKind.TRANSFER, ReferenceKind.FORK])
            self.core.pool.touch([block.id], kind)
            self.model.hold(block, kind.value)
            self.lent.append((block, kind))

    def end_loan(self) -> None:
        if self.lent:
            block, kind = self.lent.pop(self.random.randrange(len(self.lent)))
            self.core.pool.free_blocks([block.id], kind)
            self.model.release([block], kind.value)

    def quarantine(self) -> None:
        candidates = [b for b in (*self.model.held, *self.model.unused) if not b.is_quarantined]
        if candidates:
            block = self.random.choice(candidates)
            self.core.pool.quarantine([block.id])
            self.model.quarantine(block)

    def release_quarantine(self) -> None:
        if self.model.quarantined:
            block = self.model.quarantined.pop()
            block.is_quarantined = False
            self.core.pool.release_quarantine([block.id])

    def drain(self) -> None:
        self.core.stop_hits()
        self.model.is_draining = True

    def reset(self) -> None:
        assert (self.core.reset() == 0) == self.model.reset()

    # --- comparison ---

    def compare_patch(self, names: list[str], patch: BlockTablePatch) -> None:
        """Every changed column is as the table has it."""
        by_slot = {self.slots[name]: self.core.block_ids(name) for name in names}
        runs = zip(patch.slots, patch.groups, patch.first_indices, patch.counts, strict=True)
        start = 0
        for slot, group, first, count in runs:
            new = patch.block_ids[start : start + count].tolist()
            assert by_slot[slot][group][first : first + count] == new
            start += count
        assert start == len(patch.block_ids)

    def compare(self) -> None:
        core, model = self.core, self.model
        core.check()
        pool = core.pool
        assert core.num_free_blocks() == model.num_free
        free = pool.get_all_free_blocks()
        assert free[pool.num_empty_blocks() :] == [block.id for block in model.unused]
        expected = sorted((block.id, block.key) for block in model.cached)
        actual = sorted(
            (block_id, self.keys[str(table.namespace.salt), table.group, pool.digest(block_id)])
            for block_id in range(pool.num_blocks)
            if (table := pool.contents.table_of(block_id)) is not None
        )
        assert actual == expected
        unsealed = {block.id for block in model.cached if block.client is not None}
        assert set(pool.contents.unsealed) == unsealed
        for kind in (ReferenceKind.REQUEST, *KINDS_APART):
            for block in model.held:
                assert pool.num_references(block.id, kind) == block.references[kind.value]
        for name, shadow in model.requests.items():
            assert core.block_ids(name) == tuple(
                [0 if block is None else block.id for block in table] for table in shadow.tables
            )


@pytest.mark.parametrize("use_eagle", [False, True], ids=["plain", "eagle"])
@pytest.mark.parametrize("groups", PLANS.values(), ids=PLANS.keys())
def test_a_core_does_what_the_slow_model_does(groups: list[ModelGroup], use_eagle: bool) -> None:
    for seed in range(WALKS_PER_PLAN):
        print(f"seed {seed}")
        Walk(seed, groups, use_eagle).go(OPERATIONS)
