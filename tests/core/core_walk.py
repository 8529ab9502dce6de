"""Random operations on the flat core and on the slow one, compared after every one.

Closer to the core than the walks of `tests/agreement`: steps open, end and fail in any order, pools
are tiny, there are two tokens, and contents of blocks and their eviction order are compared, too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcache.core import CacheHit, NewestState, Reservation
from kvcache.core.flat_core import FlatCore
from kvcache.protocol.commands import BlockTablePatch, Label, Unlabel
from kvcache.requests.hashing import get_hash_fn
from kvcache.requests.request import Request
from tests.agreement.content import Chains
from tests.agreement.event_stream import EventStream
from tests.agreement.labels import Labels
from tests.core.builders import (
    NONE_HASH,
    EventLog,
    eviction_order,
    make_flat_core,
    make_request,
    run,
)
from tests.core.model_group import ModelGroup, spec_of
from tests.core.slow_core import SlowCore
from tests.walks import Operation, random_walk

HASH_FN = get_hash_fn("sha256")


@dataclass
class Ends:
    """The end of a request's last forward, the number of drafts after it, and the steps it ran in.
    `num_accepted` of the drafts are accepted, once that is known."""

    num_own: int
    num_drafts: int
    ran_in: set[tuple[str, int]]
    num_accepted: int | None = None


class Listener(EventLog):
    """The output of one core: events, and labels as a worker has them."""

    def __init__(self, groups: Sequence[ModelGroup], num_blocks: int) -> None:
        super().__init__()
        specs = [spec_of(group) for group in groups]
        self.stream = EventStream(specs)
        self.labels = Labels(specs, num_blocks, Chains())

    def hear(self, core: FlatCore | SlowCore) -> tuple[object, ...]:
        """Take the core's output since the last call."""
        for command in core.take_commands():
            if isinstance(command, Label):
                self.labels.apply(command)
            elif isinstance(command, Unlabel):
                self.labels.withdraw(command.block_ids.tolist())
        return self.stream.take(self.take()), self.labels.counts


@dataclass
class Twins:
    """Which block of the slow core corresponds to which of the flat one, as far as visible."""

    there: dict[int, int] = field(default_factory=lambda: {0: 0})
    back: dict[int, int] = field(default_factory=lambda: {0: 0})

    def pair(self, flat: Sequence[int], slow: Sequence[int]) -> None:
        """Check that the blocks of corresponding places correspond."""
        assert len(flat) == len(slow), (flat, slow)
        for one, two in zip(flat, slow, strict=True):
            assert self.there.setdefault(one, two) == two, (flat, slow)
            assert self.back.setdefault(two, one) == one, (flat, slow)


class Walk:
    """One random walk; every operation is done to both cores."""

    def __init__(
        self, seed: int, groups: list[ModelGroup], *, use_eagle: bool, merges: bool = False
    ) -> None:
        self.title = f"seed {seed}"
        self.random = random.Random(seed)
        num_blocks = self.random.randint(6, 30)
        self.groups = groups
        self.listeners = Listener(groups, num_blocks), Listener(groups, num_blocks)
        options = {"use_eagle": use_eagle, "merge_duplicates": merges}
        specs = [spec_of(group) for group in groups]
        flat_ear, slow_ear = self.listeners
        self.flat = make_flat_core(num_blocks, *specs, events=flat_ear, **options)
        made: dict[str, Any] = {"none_hash": NONE_HASH, "hash_fn": HASH_FN, "events": slow_ear}
        made["block_bytes"] = max(spec.page_size_bytes for spec in specs)
        self.slow = SlowCore(num_blocks, groups, **made, **options)
        self.cores = self.flat, self.slow
        self.unit = self.flat.hash_block_size
        self.twins = Twins()
        self.keeps_states = any(group.states for group in groups)
        self.max_drafts = min((g.num_drafts for g in groups if g.states), default=0)
        self.ends: dict[str, Ends] = {}
        self.num_hits = self.num_forks = self.num_merges = 0
        self.streams = [[self.random.randint(1, 2) for _ in range(40)] for _ in range(2)]
        self.requests: dict[str, Request] = {}
        self.pins: list[tuple[CacheHit, CacheHit]] = []
        self.slots: dict[str, int] = {}
        self.step: tuple[str, int] | None = None
        self.steps = {"a": 0, "b": 0}
        self.settled = {"a": 0, "b": 0}
        self.count = 0

    def go(self, num_operations: int) -> None:
        operations: dict[Operation, float] = {
            self.admit: 6,
            self.extend: 3,
            self.extend_rows: 4,
            self.finish: 4,
            self.open_step: 4,
            self.close_step: 2,
            self.complete: 2,
            self.fail: 1,
            self.commit: 1,
            self.fork: 1,
            self.pin: 1,
            self.unpin: 1,
            self.evict: 1,
            self.forget_hashes: 0.2,
            self.drain: 0.2,
            self.reset: 0.5,
        }
        random_walk(self.title, self.random, operations, num_operations, self.compare)
        for name in list(self.requests):
            self.finish(name)
        while self.pins:
            self.unpin()
        self.compare()
        for core in self.cores:
            assert core.cache.num_free_blocks() == core.statistics().num_blocks
            assert core.cache.reset() == 0
            core.check()
            assert core.statistics().num_cached_blocks == 0

    # --- operations ---

    def name(self) -> str:
        self.count += 1
        return f"r{self.count}"

    def admit(self) -> None:
        salt = self.random.choice([None, None, "salt"])
        tokens = self.random.choice(self.streams)[: self.random.randint(1, 40)]
        if self.random.random() < 0.2:
            tokens = [*tokens, 3]
        request = make_request(self.name(), tokens, self.unit, cache_salt=salt)
        hits = self.look_up(request)
        num_hit = hits[0].num_tokens
        external = self.random.choice([0, 0, 0, self.random.randint(0, 20)])
        computed = min(num_hit + external, len(tokens) - 1)
        end = self.random.randint(computed + 1, len(tokens))
        cached = end if self.random.random() < 0.8 else 0
        adopts = self.random.random() < (0.4 if self.slow.merges else 0.9)
        if not adopts:
            computed = 0
        self.num_hits += adopts and num_hit > 0
        num_drafts = self.random.randint(0, self.max_drafts)
        wanted = Reservation(
            computed,
            end + num_drafts + self.random.randint(0, 3),
            cached,
            num_own_tokens=end,
            num_encoder_tokens=self.random.choice([0, 1, 7, 8, 9]),
        )
        if self.reserve(request, wanted, hits if adopts else (None, None)):
            self.ends[request.request_id] = Ends(end, num_drafts, self.open_steps())

    def look_up(self, request: Request) -> tuple[CacheHit, CacheHit]:
        flat, slow = self.flat.cache.look_up(request), self.slow.cache.look_up(request)
        assert flat.num_tokens == slow.num_tokens
        for one, two in zip(flat.block_ids, slow.block_ids, strict=True):
            self.twins.pair(one.tolist(), two.tolist())
        return flat, slow

    def open_steps(self) -> set[tuple[str, int]]:
        return set() if self.step is None else {self.step}

    def extend(self) -> None:
        if not self.requests:
            return
        request = self.requests[self.random.choice(list(self.requests))]
        wanted, num_drafts = self.more(request, delays=self.random.random() < 0.2)
        if self.reserve(request, wanted, (None, None)):
            self.note_ends(request.request_id, wanted, num_drafts)

    def note_ends(self, name: str, wanted: Reservation, num_drafts: int) -> None:
        """Prepare a forward that ends with new tokens of its own."""
        ends = self.ends[name]
        if wanted.own_end > ends.num_own:
            ends.num_own, ends.num_drafts, ends.num_accepted = wanted.own_end, num_drafts, None
            ends.ran_in |= self.open_steps()

    def more(self, request: Request, *, delays: bool) -> tuple[Reservation, int]:
        """Append some tokens; return the number to reserve, and the drafts among them."""
        if self.keeps_states:
            return self.more_states(request, delays=delays)
        computed = min(request.num_tokens, self.random.randint(0, 60))
        self.append(request, self.random.randint(0, 6))
        held = self.num_slots(request)
        slots = max(held, request.num_tokens) if self.random.random() < 0.8 else held
        cached = self.random.choice([0, min(request.num_tokens, slots)])
        return Reservation(computed, slots, cached, num_own_tokens=slots), 0

    def num_slots(self, request: Request) -> int:
        tables = self.slow.block_ids(request.request_id)
        return min(
            len(table) * group.block_size for table, group in zip(tables, self.groups, strict=True)
        )

    def append(self, request: Request, count: int) -> None:
        request.append_output_token_ids([self.random.randint(1, 2) for _ in range(count)])

    def settle(self, request: Request) -> tuple[int, int]:
        """Return how many drafts of the last forward are accepted, and how many tokens that
        makes."""
        ends = self.ends[request.request_id]
        if ends.num_accepted is None:
            ends.num_accepted = self.random.randint(0, ends.num_drafts)
        settled = ends.num_own + ends.num_accepted
        self.append(request, max(0, settled - request.num_tokens))
        return ends.num_accepted, settled

    def more_states(self, request: Request, *, delays: bool) -> tuple[Reservation, int]:
        """Settle the last forward's drafts, then schedule some tokens, or none."""
        ends = self.ends[request.request_id]
        accepted, settled = self.settle(request)
        self.append(request, self.random.choice([0, 1, 1, 2, 9]))
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
        """Make delayed blocks hittable."""
        if self.requests:
            request = self.requests[self.random.choice(list(self.requests))]
            most = min(self.ends[request.request_id].num_own, request.num_tokens)
            num_tokens = self.random.randint(0, most)
            for core in self.cores:
                core.commit(request, num_tokens)

    def fork(self) -> None:
        """Fork a request at some computed length, or at all of it if states are kept."""
        if not self.requests:
            return
        parent = self.requests[self.random.choice(list(self.requests))]
        accepted, num_tokens = self.settle(parent)
        if not self.keeps_states:
            num_tokens = min(num_tokens, self.num_slots(parent))
        name, ends = self.name(), self.ends[parent.request_id]
        tokens = [*parent.all_token_ids[:num_tokens], self.random.randint(1, 2)]
        salt = parent.namespace.salt
        child = make_request(name, tokens, self.unit, cache_salt=salt)
        origin = num_tokens, NewestState(ends.num_own, accepted)
        for core in self.cores:
            changes = core.fork(parent, child, *origin)
            for change in changes:
                table = core.block_ids(name)[change.group]
                assert table[change.first_index :] == change.block_ids.tolist()
        self.requests[name] = child
        self.ends[name] = Ends(num_tokens, 0, set(ends.ran_in), 0)
        self.num_forks += 1

    def extend_rows(self) -> None:
        """Extend several rows in one call, mostly by one token: skipped blocks are freed first."""
        chosen = self.random.sample(list(self.requests), self.random.randint(0, len(self.requests)))
        rows = []
        for name in chosen:
            rows.append(self.more(self.requests[name], delays=False))
            free_slots = set(range(len(self.slots) + 1)) - set(self.slots.values())
            self.slots.setdefault(name, min(free_slots))
        slots, requests = (
            [names[name] for name in chosen] for names in (self.slots, self.requests)
        )
        wanted = [each for each, _ in rows]
        results = [run(core, slots, requests, wanted) for core in self.cores]
        flat, slow = [is_reserved.tolist() for is_reserved, _ in results]
        assert flat == slow
        for core, (_, patch) in zip(self.cores, results, strict=True):
            self.compare_patch(core, chosen, patch)
        for name, (wanted, num_drafts), is_reserved in zip(chosen, rows, flat, strict=True):
            if is_reserved:
                self.note_ends(name, wanted, num_drafts)

    def reserve(
        self, request: Request, wanted: Reservation, hits: tuple[CacheHit | None, CacheHit | None]
    ) -> bool:
        answers = []
        for core, hit in zip(self.cores, hits, strict=True):
            changes = core.reserve(request, wanted, hit)
            answers.append(changes is not None)
            tables = core.block_ids(request.request_id)
            for change in changes or ():
                ids = change.block_ids.tolist()
                first = change.first_index
                assert tables[change.group][first : first + len(ids)] == ids
        assert answers[0] == answers[1]
        if answers[0]:
            self.requests[request.request_id] = request
        return answers[0]

    def finish(self, name: str | None = None) -> None:
        if self.requests:
            name = name or self.random.choice(list(self.requests))
            request = self.requests.pop(name)
            for core in self.cores:
                core.free(request)
            self.slots.pop(name, None)
            del self.ends[name]

    def open_step(self) -> None:
        client = self.random.choice("ab")
        self.steps[client] += 1
        self.step = client, self.steps[client]
        for core in self.cores:
            core.open_step(*self.step)

    def close_step(self) -> None:
        self.step = None
        for core in self.cores:
            core.close_step()

    def complete(self) -> None:
        client = self.random.choice("ab")
        step = self.random.randint(self.settled[client], self.steps[client])
        self.settled[client] = step
        for core in self.cores:
            tables = {name: core.block_ids(name) for name in self.requests}
            core.complete_steps(client, step)
            for name, change in core.take_merges():
                ids, first = change.block_ids.tolist(), change.first_index
                tables[name][change.group][first : first + len(ids)] = ids
                self.num_merges += 1
            assert tables == {name: core.block_ids(name) for name in self.requests}

    def fail(self) -> None:
        client = self.random.choice("ab")
        step = self.random.randint(self.settled[client] + 1, self.steps[client] + 1)
        for core in self.cores:
            core.fail_steps(client, step)
        if self.keeps_states:
            for name, ends in list(self.ends.items()):
                if any(ran[0] == client and ran[1] >= step for ran in ends.ran_in):
                    self.finish(name)

    def pin(self) -> None:
        tokens = self.random.choice(self.streams)
        hits = self.look_up(make_request("pin", tokens, self.unit))
        for core, hit in zip(self.cores, hits, strict=True):
            core.cache.pin(hit)
        self.pins.append(hits)

    def unpin(self) -> None:
        if self.pins:
            hits = self.pins.pop(self.random.randrange(len(self.pins)))
            for core, hit in zip(self.cores, hits, strict=True):
                core.cache.unpin(hit)

    def evict(self) -> None:
        cached = sorted(block for _, _, block, _ in self.flat.store.contents())
        chosen = self.random.sample(cached, min(self.random.randint(1, 2), len(cached)))
        self.slow.cache.evict([self.twins.there[block] for block in chosen])
        self.flat.cache.evict(chosen)

    def forget_hashes(self) -> None:
        if self.requests:
            request = self.requests[self.random.choice(list(self.requests))]
            for core in self.cores:
                core.forget_hashes(request)

    def drain(self) -> None:
        for core in self.cores:
            core.cache.stop_hits()

    def reset(self) -> None:
        assert self.flat.cache.reset() == self.slow.cache.reset()

    # --- comparison ---

    def compare_patch(
        self, core: FlatCore | SlowCore, names: list[str], patch: BlockTablePatch
    ) -> None:
        """Check every changed column against the table, unless it was dropped since."""
        by_slot = {self.slots[name]: core.block_ids(name) for name in names}
        runs = zip(patch.slots, patch.groups, patch.first_indices, patch.counts, strict=True)
        start = 0
        for slot, group, first, count in runs:
            new = patch.block_ids[start : start + count].tolist()
            assert by_slot[slot][group][first : first + count] == new
            start += count
        assert start == len(patch.block_ids)

    def compare(self) -> None:
        """Check that nothing visible differs, except block ids."""
        flat, slow = self.cores
        flat.check()
        slow.check()
        told = [ear.hear(core) for ear, core in zip(self.listeners, self.cores, strict=True)]
        assert told[0] == told[1]
        assert flat.statistics() == slow.statistics()
        self.twins = twins = Twins()
        for name in self.requests:
            for one, two in zip(flat.block_ids(name), slow.block_ids(name), strict=True):
                twins.pair(one, two)
            num_running = len(self.requests)
            counts = [core.common_prefix_blocks(name, num_running) for core in self.cores]
            assert counts[0] == counts[1]
        twins.pair(eviction_order(flat), [block.id for block in slow.unheld])
        contents = flat_contents(flat)
        assert contents.keys() == {
            (place.namespace, g, slow.digest(place), block.waits_for is None)
            for block in slow.cached
            for g, place in [slow.content(block)]
        }
        for block in slow.cached:
            g, place = slow.content(block)
            key = place.namespace, g, slow.digest(place), block.waits_for is None
            twins.pair([contents[key]], [block.id])
        held = {one: int(flat.store.columns.block[one, 0]) for one in twins.there if one}
        assert held == {one: slow.blocks[two].references for one, two in twins.there.items() if one}


def flat_contents(core: FlatCore) -> dict[tuple[object, ...], int]:
    """Return the block of every content: namespace, group, digest, whether it is sealed."""
    found = [*core.store.contents()]
    core.cache.digester.make(np.array([n for n, *_ in found], np.int32))
    digests = core.store.columns.digest
    return {
        (core.cache.namespaces[core.store.root_of(n)], g, digests[n].tobytes(), is_sealed): block
        for n, g, block, is_sealed in found
    }
