"""Random operations on a core and on the slow model beside it, compared after every one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvcache.blocks.references import KINDS_APART
from kvcache.commands import BlockTablePatch
from kvcache.core import (
    CacheHit,
    NewestState,
    ReferenceKind,
    Reservation,
    RowBatch,
    RowStates,
)
from kvcache.request import Request
from kvcache.specs import KVCacheSpec
from tests.managers.core_builders import (
    chunked,
    cross,
    full,
    make_core,
    make_request,
    mamba,
    mla,
    row_batch,
    window,
)
from tests.managers.core_model import ModelBlock, ModelGroup, ModelRequest, SlowModel


def spec_of(group: ModelGroup) -> KVCacheSpec:
    if group.window is not None:
        return window(group.window, group.block_size)
    if group.chunk is not None:
        return chunked(group.chunk, group.block_size)
    if group.states is not None:
        return mamba(group.states, group.block_size, group.num_drafts)
    if group.is_cross:
        return cross(block_size=group.block_size)
    return mla(group.block_size) if group.is_latent else full(group.block_size)


@dataclass
class Ends:
    """Where a request's last forward ended, how many drafts followed, and the step it ran in."""

    num_own: int
    num_drafts: int
    ran_in: set[tuple[str, int]]


class Walk:
    """One random walk; every operation is done to core and model, and both are compared."""

    def __init__(self, seed: int, groups: list[ModelGroup], use_eagle: bool) -> None:
        self.random = random.Random(seed)
        num_blocks = self.random.randint(6, 30)
        specs = [spec_of(group) for group in groups]
        self.core = make_core(num_blocks, *specs, use_eagle=use_eagle, has_workers=False)
        self.keeps_states = any(group.states for group in groups)
        self.max_drafts = min((g.num_drafts for g in groups if g.states), default=0)
        self.ends: dict[str, Ends] = {}
        self.num_hits = self.num_jumps = 0
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
            (1, self.commit),
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
        self.num_hits += adopted and hit.num_tokens > 0
        num_drafts = self.random.randint(0, self.max_drafts)
        wanted = Reservation(
            computed,
            end + num_drafts + self.random.randint(0, 3),
            cached,
            num_own_tokens=end,
            num_encoder_tokens=self.random.choice([0, 1, 7, 8, 9]),
        )
        if self.reserve(request, shadow, wanted, (hit, expected) if adopted else None):
            self.ends[name] = Ends(end, num_drafts, self.open_steps())

    def open_steps(self) -> set[tuple[str, int]]:
        return set() if self.model.client is None else {(self.model.client, self.model.step)}

    def extend(self) -> None:
        if not self.requests:
            return
        name = self.random.choice(list(self.requests))
        request, shadow = self.requests[name], self.model.requests[name]
        wanted, num_drafts = self.more(request, shadow, delays=self.random.random() < 0.2)
        if self.reserve(request, shadow, wanted, None):
            self.note_ends(name, wanted, num_drafts)

    def note_ends(self, name: str, wanted: Reservation, num_drafts: int) -> None:
        """A forward that ends with new tokens of its own is to run."""
        ends = self.ends[name]
        if wanted.own_end > ends.num_own:
            ends.num_own, ends.num_drafts = wanted.own_end, num_drafts
            ends.ran_in |= self.open_steps()

    def more(
        self, request: Request, shadow: ModelRequest, *, delays: bool
    ) -> tuple[Reservation, int]:
        """Append some tokens; return what to ask for, and the drafts among it."""
        if self.keeps_states:
            return self.more_states(request, shadow, delays=delays)
        computed = min(request.num_tokens, self.random.randint(0, 60))
        new = [self.random.randint(1, 2) for _ in range(self.random.randint(0, 6))]
        request.append_output_token_ids(new)
        shadow.tokens += new
        held = min(
            len(table) * group.block_size
            for table, group in zip(shadow.tables, self.model.groups, strict=True)
        )
        slots = max(held, request.num_tokens) if self.random.random() < 0.8 else held
        cached = self.random.choice([0, min(request.num_tokens, slots)])
        return Reservation(computed, slots, cached, num_own_tokens=slots), 0

    def more_states(
        self, request: Request, shadow: ModelRequest, *, delays: bool
    ) -> tuple[Reservation, int]:
        """Settle the last forward's drafts, then schedule some tokens, or none."""
        ends = self.ends[request.request_id]
        accepted = self.random.randint(0, ends.num_drafts)
        settled = ends.num_own + accepted
        num_new = max(0, settled - request.num_tokens) + self.random.choice([0, 1, 1, 2, 9])
        new = [self.random.randint(1, 2) for _ in range(num_new)]
        request.append_output_token_ids(new)
        shadow.tokens += new
        own, cached, num_drafts = ends.num_own, settled, 0
        slots = settled
        if request.num_tokens > settled and self.random.random() < 0.9:
            own = cached = self.random.randint(settled + 1, request.num_tokens)
            num_drafts = self.random.randint(0, self.max_drafts)
            slots = own + num_drafts + self.random.choice([0, 0, 0, 4])
        confirmed = settled - self.random.choice([0, 0, 0, min(settled, 3)])
        newest = NewestState(ends.num_own, accepted)
        wanted = Reservation(confirmed, slots, 0 if delays else cached, 0, own, newest)
        return wanted, num_drafts

    def commit(self) -> None:
        """Make hittable what was delayed."""
        if self.requests:
            name = self.random.choice(list(self.requests))
            request, shadow = self.requests[name], self.model.requests[name]
            num_tokens = self.random.randint(0, min(self.ends[name].num_own, request.num_tokens))
            self.core.commit(request, num_tokens)
            self.model.cache(shadow, num_tokens)

    def extend_rows(self) -> None:
        """Several rows in one call, mostly by one token: what all skip is freed first."""
        chosen = self.random.sample(list(self.requests), self.random.randint(0, len(self.requests)))
        rows = []
        for name in chosen:
            request, shadow = self.requests[name], self.model.requests[name]
            rows.append(self.more(request, shadow, delays=False))
            free_slots = set(range(len(self.slots) + 1)) - set(self.slots.values())
            self.slots.setdefault(name, min(free_slots))
        result = self.core.reserve_rows(self.batch(chosen, [wanted for wanted, _ in rows]))
        for name, (wanted, _) in zip(chosen, rows, strict=True):
            self.model.skip(self.model.requests[name], wanted.num_computed_tokens)
        is_reserved = dict.fromkeys(chosen, False)
        for i in self.order(chosen, [wanted for wanted, _ in rows]):
            name, (wanted, num_drafts) = chosen[i], rows[i]
            if self.model.reserve(self.model.requests[name], wanted, None):
                is_reserved[name] = True
                self.note_ends(name, wanted, num_drafts)
        assert result.is_reserved.tolist() == list(is_reserved.values())
        for name in chosen:
            self.learn_ids(name)
        self.compare_patch(chosen, result.patches)

    def batch(self, names: list[str], rows: list[Reservation]) -> RowBatch:
        def column(values: list[int]) -> np.ndarray:
            return np.array(values, dtype=np.int32)

        newest = [row.newest_state or NewestState(0, 0) for row in rows]
        states = RowStates(
            column([row.own_end for row in rows]),
            column([state.num_own_tokens for state in newest]),
            column([state.num_accepted_drafts for state in newest]),
        )
        return row_batch(
            [self.requests[name] for name in names],
            [self.slots[name] for name in names],
            [row.num_computed_tokens for row in rows],
            [row.num_slot_tokens for row in rows],
            [row.num_cached_tokens for row in rows],
            states=states if self.keeps_states else None,
        )

    def order(self, names: list[str], rows: list[Reservation]) -> list[int]:
        """Where there is room for all, rows whose tables jump come last."""
        requests = [self.model.requests[name] for name in names]
        wanted = sum(map(self.model.num_wanted, requests, rows))
        jumps = [self.model.jumps(r, row) for r, row in zip(requests, rows, strict=True)]
        self.num_jumps += sum(jumps)
        indices = range(len(names))
        has_room = wanted <= self.model.num_free
        return sorted(indices, key=lambda i: jumps[i]) if has_room else list(indices)

    def reserve(
        self,
        request: Request,
        shadow: ModelRequest,
        wanted: Reservation,
        hits: tuple[CacheHit, list[list[ModelBlock | None]]] | None,
    ) -> bool:
        changes = self.core.reserve(request, wanted, hits[0] if hits else None)
        has_room = self.model.reserve(shadow, wanted, hits[1] if hits else None)
        assert has_room == (changes is not None)
        if changes is None:
            return False
        name = request.request_id
        self.requests[name] = request
        tables = self.core.block_ids(name)
        for change in changes:
            assert tables[change.group][change.first_index :] == list(change.block_ids)
        self.learn_ids(name)
        return True

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
        del self.ends[name]
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
        if self.keeps_states:
            for name, ends in list(self.ends.items()):
                if any(ran[0] == client and ran[1] >= step for ran in ends.ran_in):
                    self.finish(name)

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
        cached = list(self.model.cached)
        self.model.forget(chosen, in_windows=True)
        lost = {id(block) for block in cached if block.key is None}
        for request in self.model.requests.values():
            if any(id(block) in lost for table in request.tables for block in table):
                request.is_mute = True

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
