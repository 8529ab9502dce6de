"""Random requests on a hierarchy, whose jobs move bytes that are compared; `check()` after each."""

from __future__ import annotations

import itertools
import random
from itertools import takewhile

import numpy as np
import pytest

from kvcache.base.errors import InvalidInputError
from kvcache.config.tenants import TenantConfig, TenantsConfig, TierAmounts
from kvcache.offload import (
    Deadlines,
    HierarchyOptions,
    JobKind,
    OffloadKey,
    Place,
    TierHierarchy,
    TierOptions,
    make_offload_key,
    make_tier,
)
from kvcache.policies import EVICTION_POLICIES
from kvcache.requests.hints import CacheHint
from kvcache.requests.request_content import Namespace
from kvcache.tenants import TenantStatistics
from tests.offload.byte_world import ByteWorld
from tests.walks import Operation, random_walk

NUM_STEPS = 400
POLICIES = sorted(EVICTION_POLICIES)
NAMES = ("alice", "bob", "carol")
TENANTS = TenantsConfig(
    named={
        "alice": TenantConfig(guaranteed=0.4),
        "bob": TenantConfig(
            guaranteed=TierAmounts(host=0.2), limit=TierAmounts(host=0.5), weight=3.0
        ),
    },
    default=TenantConfig(limit=0.6),
)
DEADLINES = Deadlines(store_s=5.0, load_s=5.0, spill_s=8.0, fetch_s=8.0)


class Walk:
    """A hierarchy and its simulated bytes."""

    def __init__(self, seed: int, tenants: TenantsConfig | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.tenants = tenants
        self.has_hints = seed % 2 == 1
        self.tenant_of: dict[OffloadKey, str] = {}
        self.world = ByteWorld(rng)
        self.now_s = 0.0
        has_disk, num_host = (
            rng.random() < 0.85,
            rng.choice([2, 5, 10, 16] if tenants is None else [12, 20]),
        )
        self.hierarchy = TierHierarchy(
            make_tier(
                TierOptions(
                    "host",
                    num_host,
                    blocks_per_slot=rng.choice([1, 1, 2, 3]),
                    policy=rng.choice(POLICIES),
                    store_after=rng.choice([1, 1, 1, 2]),
                    tenants=tenants,
                )
            ),
            make_tier(
                TierOptions(
                    "file",
                    rng.choice([3, 20, 40] if tenants is None else [20, 40]),
                    policy=rng.choice(POLICIES),
                    tenants=tenants,
                )
            )
            if has_disk
            else None,
            itertools.count(1).__next__,
            HierarchyOptions(
                disk_write=rng.choice(["on_evict", "on_store"]),
                spare_share=rng.choice([0.0, 0.25, 1.0]),
                max_spilling_blocks=rng.choice([1, 4, 1000]),
                max_fetching_blocks=rng.choice([2, 1000]),
                deadlines=DEADLINES,
            ),
        )
        self.private: set[OffloadKey] = set()
        self.overdue: set[int] = set()
        self.num_loaded = self.num_taken = 0
        self.discard_share = rng.choice([0.01, 0.5])
        self.chains: list[list[OffloadKey]] = [[]]
        for _ in range(8):
            base = rng.choice(self.chains)
            chain = base[: rng.randrange(len(base) + 1)]
            chain += [make_offload_key(rng.randbytes(8), 0) for _ in range(rng.randrange(1, 12))]
            tenant = self.tenant_of.get(chain[0]) or rng.choice(NAMES)
            self.tenant_of.update(dict.fromkeys(chain, tenant))
            self.chains.append(chain)
        self.every = sorted({key for chain in self.chains for key in chain})

    def go(self, title: str) -> None:
        operations: dict[Operation, float] = {
            self.store: 5,
            self.resume: 3,
            self.spill: 4,
            self.world.proceed: 6,
            self.end_job: 9,
            self.swap: 1,
            self.pass_time: 1,
            self.forget: 1,
            self.reset: 1,
            self.mistake: 1,
        }
        if self.has_hints:
            operations[self.hint] = 2
        if self.tenants is None:
            operations[self.mark_copies] = 2
        random_walk(title, self.rng, operations, NUM_STEPS, self.compare)
        self.finish()

    def request(self) -> list[OffloadKey]:
        chain = self.rng.choice(self.chains[1:])
        return chain[: self.rng.randrange(1, len(chain) + 1)]

    def hint(self) -> None:
        chain, start = self.rng.choice(self.chains[1:]), self.rng.choice([0, 2])
        hints = [
            CacheHint(is_over=True),
            CacheHint(returns_in_s=self.rng.choice([2.0, 9.0])),
            CacheHint(priority=self.rng.choice([0, 90]), duration_s=self.rng.choice([None, 5.0])),
        ]
        hint = self.rng.choice(hints)
        for tier in self.hierarchy:
            tier.eviction.hint(chain, start, len(chain), hint, self.now_s)

    def store(self) -> None:
        keys = self.request()
        self.hierarchy.host.sightings.see(keys)
        skipped = self.rng.randrange(len(keys))
        tenant = self.tenant_of[keys[0]]
        namespace = Namespace(0, None, None, tenant)
        before = self.slots_of_tenants("host")
        job = self.hierarchy.plan_store(keys[skipped:], self.now_s, namespace=namespace)
        self.compare_tenants("host", before, tenant)
        if job is not None:
            assert [keys[skipped:][i] for i in job.positions.tolist()] == list(job.keys)
            self.world.start(job)

    def swap(self) -> None:
        key = make_offload_key(self.rng.randbytes(9), 0)
        job = self.hierarchy.plan_store([key], self.now_s, is_private=True)
        if job is not None:
            self.private.add(key)
            self.world.start(job)

    def slots_of_tenants(self, tier: str) -> dict[str, TenantStatistics]:
        statistics = getattr(self.hierarchy.statistics(), tier)
        return {} if statistics is None else {each.name: each for each in statistics.tenants}

    def compare_tenants(self, tier: str, before: dict[str, TenantStatistics], tenant: str) -> None:
        """A tenant's stores took nothing of others' guarantees, and no more than its limit."""
        after = self.slots_of_tenants(tier)
        for name, had in before.items():
            now = after.get(name, had)
            assert now.num_held_blocks <= now.limit_blocks
            if name != tenant:
                lost = had.num_held_blocks - now.num_held_blocks
                assert lost <= max(0, had.num_held_blocks - had.guaranteed_blocks)
                self.num_taken += lost

    def resume(self) -> None:
        """Load the part of a request in host memory, fetch the rest."""
        keys = self.request()
        for tier in self.hierarchy:
            tier.touch(keys)
        places = self.hierarchy.locate(keys).tolist()
        num_ready, num_in_host = (
            len(list(takewhile(there.__contains__, places)))
            for there in ((Place.HOST, Place.DISK), (Place.HOST,))
        )
        fetch = self.hierarchy.plan_fetch(keys[:num_ready], self.now_s)
        if fetch is not None:
            self.world.start(fetch)
        load = self.hierarchy.plan_load(keys, self.now_s)
        if load is None:
            assert num_in_host == 0
        else:
            assert list(load.keys) == keys[:num_in_host]
            self.world.start(load)

    def spill(self) -> None:
        before = self.slots_of_tenants("disk")
        job = self.hierarchy.plan_spills(self.now_s)
        if job is not None:
            assert not self.private & set(job.keys)
            if self.tenants is not None:
                (tenant,) = {self.tenant_of[key] for key in job.keys}
                self.compare_tenants("disk", before, tenant)
            self.world.start(job)

    def end_job(self) -> None:
        if self.world.running:
            self.end(self.rng.choice(list(self.world.running)))

    def end(self, job_id: int) -> None:
        outcome = self.world.end(job_id)
        is_late = job_id in self.overdue
        sealed = self.hierarchy.end(job_id, outcome.ok, outcome.failed)
        assert not (len(sealed) and is_late)
        self.world.seal(sealed)
        if outcome.job.kind is JobKind.LOAD:
            self.num_loaded += len(outcome.job.keys)

    def pass_time(self) -> None:
        self.now_s += self.rng.random() * 2
        for late in self.hierarchy.expire(self.now_s):
            assert late.job_id in self.world.running
            assert late.job_id not in self.overdue
            self.overdue.add(late.job_id)

    def forget(self) -> None:
        keys = self.rng.sample(self.every, 2)
        self.hierarchy.forget(keys)
        assert self.hierarchy.locate(keys).tolist() == [Place.NOWHERE] * 2

    def mark_copies(self) -> None:
        self.hierarchy.mark_copies(self.request(), are_copies=self.rng.random() < 0.5)

    def reset(self) -> None:
        if self.rng.random() < 0.1:
            self.hierarchy.reset()
            assert (self.hierarchy.locate(self.every) == Place.NOWHERE).all()

    def mistake(self) -> None:
        with pytest.raises(InvalidInputError, match="report the end of each job once"):
            self.hierarchy.end(10**9, True)

    def compare(self) -> None:
        hierarchy, world = self.hierarchy, self.world
        hierarchy.check()
        every = [*self.every, *self.private]
        places = hierarchy.locate(every)
        in_host = [every[i] for i in np.flatnonzero(places == Place.HOST).tolist()]
        for key, address in zip(
            in_host, hierarchy.host.slots.addresses_of(in_host).tolist(), strict=True
        ):
            assert world.host[address] == key
            assert key in self.private or world.sealed[address] == key
        for key in (every[i] for i in np.flatnonzero(places == Place.DISK).tolist()):
            assert world.files[key] == key
        for address, key in world.sealed.items():
            assert world.host[address] == key
        if self.rng.random() < self.discard_share:
            world.discard(hierarchy.discards.take())

    def finish(self) -> None:
        """End every job: no hold, no pending key, no file without an entry is left."""
        for job_id in list(self.world.running):
            self.end(job_id)
            self.compare()
        self.world.discard(self.hierarchy.discards.take())
        statistics = self.hierarchy.statistics()
        assert len(self.hierarchy.transfers) == statistics.num_overdue == 0
        for tier in (statistics.host, statistics.disk):
            if tier is not None:
                assert tier.num_pending == tier.num_held == tier.num_quarantined_slots == 0
        if self.hierarchy.disk is not None:
            assert set(self.world.files) == set(self.hierarchy.disk.slots.present_keys())
        self.hierarchy.reset()
        self.hierarchy.check()
        self.world.discard(self.hierarchy.discards.take())
        assert not self.world.files
        assert self.hierarchy.statistics().host.num_free_slots == statistics.host.num_slots


@pytest.mark.seeds(8, long=32)
def test_every_byte_is_where_the_hierarchy_says(seed: int) -> None:
    walk = Walk(seed)
    walk.go(f"seed {seed}")
    # With few slots, it may be that no block stayed until it was needed.
    assert walk.num_loaded > 0 or walk.hierarchy.host.options.num_slots <= 5


@pytest.mark.seeds(6, long=24)
def test_tenants_keep_what_they_are_guaranteed_in_every_tier(seed: int) -> None:
    walk = Walk(seed, TENANTS)
    walk.go(f"seed {seed}")
    assert walk.num_loaded > 0
    assert walk.hierarchy.statistics().host.num_evicted > 0
