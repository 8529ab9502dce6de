"""Tenants' hits in tiers: counted for each, and shown to no other."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count
from typing import Any

import pytest

from kvcache.base.arrays import int32_array
from kvcache.base.clock import VirtualClock
from kvcache.config.tenants import TenantConfig, TenantsConfig
from kvcache.coordinator.job_table import JobTable
from kvcache.coordinator.offloading import Offloading
from kvcache.coordinator.parts import OffloadParts
from kvcache.coordinator.settings import OffloadSettings
from kvcache.coordinator.tier_hits import TierHitFinder
from kvcache.offload.hierarchy import Place, TierHierarchy
from kvcache.offload.keys import make_offload_keys
from kvcache.offload.options import TierOptions
from kvcache.offload.registry import make_tier
from kvcache.offload.specs import FILE_MEDIUM, HOST_MEDIUM
from kvcache.protocol.messages import JobReport
from kvcache.protocol.step import NO_SLOT, NewRequest, StepRequest, StepResult
from kvcache.requests.request import Request
from tests.manager.managers_under_test import FULL, HYBRID, Shape, make_config, make_manager

SIZE = 4
SALTS = TenantsConfig(
    by="salt", named={name: TenantConfig(guaranteed=0.4, limit=0.4) for name in ("alice", "bob")}
)


class Site:
    """A manager and tiers at work, with one rank that does everything at once."""

    def __init__(self, shape: Shape, tenants: TenantsConfig, sizes: tuple[int, int, int]) -> None:
        device, host, disk = sizes
        self.manager = make_manager(shape, device + 1, tenants=tenants, log_stats=True)
        self._jobs = JobTable(1)
        tiers = [
            TierOptions(medium, num_slots, tenants=tenants)
            for medium, num_slots in ((HOST_MEDIUM, host), (FILE_MEDIUM, disk))
        ]
        parts = OffloadParts(
            OffloadSettings(),
            TierHitFinder(make_config(shape, device + 1), SIZE),
            lambda new_job_id: TierHierarchy(*map(make_tier, tiers), new_job_id),
        )
        self.offloading = Offloading(parts, self.manager, self._jobs, VirtualClock())
        self._steps = count(1)

    def step(self, **parts: Any) -> StepResult:
        """Take a step, with all its consequences."""
        number = next(self._steps)
        step = StepRequest("c", number, 0, completed_step=number - 1, **parts)
        result = self.manager.step(step)
        assert not result.error
        told = self.offloading.commands(self.manager.take_commands(), step, result)
        while told or self.offloading.has_work:
            for command in told:
                job_id = getattr(command, "job_id", None)
                ended = None if job_id is None else self._jobs.report(0, JobReport(job_id, True))
                if ended is not None:
                    assert self.offloading.on_ended(ended)
            told = self.offloading.commands([])
        return result

    def serve(self, new: NewRequest) -> list[tuple[int, int, bool]]:
        """Send the request until it is admitted, and end it; return its tenant's answers."""
        told = []
        while True:
            result = self.step(new=(new,))
            waits = result.waiting_for_load == (new.request_id,)
            slot = int(result.admitted_slots[0])
            told.append((int(result.num_hit_tokens[0]), len(result.patches.block_ids), waits))
            if slot != NO_SLOT:
                self.step(finished=(new.request_id,))
                self.manager.check()
                self.offloading.check()
                return told
            assert waits, result

    def statistics(self, name: str) -> dict[str, tuple[int, int]]:
        """Return a tenant's queried tokens and hits, by tier."""
        tiers = self.offloading.tiers.statistics()
        everything = (*self.manager.statistics().tenants, *tiers.host.tenants, *tiers.disk.tenants)
        return {
            each.tier: (each.num_asked_tokens, each.num_hit_tokens)
            for each in everything
            if each.name == name
        }

    def where(self, new: NewRequest) -> Counter[str]:
        """Return the hittable tokens of a request by place, from the state itself."""
        request = Request("probe", new.token_ids, tenant=new.tenant, cache_salt=new.cache_salt)
        num_on_device = self.manager.tiers.loads.num_device_tokens(request)
        last = (request.num_tokens - 1) // SIZE
        keys = make_offload_keys(request.block_hashes, 0, request.namespace)
        found = Counter(device=num_on_device)
        for place in self.offloading.tiers.locate(keys[num_on_device // SIZE : last]).tolist():
            if place not in (Place.HOST, Place.DISK):
                break
            found["host" if place == Place.HOST else "disk"] += SIZE
        return found


@pytest.mark.seeds(2)
def test_each_tenants_hits_are_counted_in_each_tier(seed: int) -> None:
    rng = random.Random(seed)
    names = ("a", "b", "c")
    site = Site(
        FULL, TenantsConfig(named={"a": TenantConfig(weight=2)}), (30, 80, 120)
    )  # there is always room to fetch
    asked: Counter[tuple[str, str]] = Counter()
    hit: Counter[tuple[str, str]] = Counter()
    for number in range(90):
        tenant = rng.choice(names)
        prefix = [rng.randrange(4)] * rng.randrange(0, 60)
        tokens = int32_array([*prefix, 1000 + number])
        new = NewRequest(f"r{number}", tokens, len(tokens), tenant=tenant)
        found = site.where(new)
        site.serve(new)
        asked[tenant, "device"] += len(tokens)
        hit[tenant, "device"] += found.total()
        rest = len(tokens) - found["device"]
        for tier in ("host", "disk"):
            asked[tenant, tier] += rest
            hit[tenant, tier] += found[tier]
            rest -= found[tier]
    for name in names:
        wanted = {tier: (asked[name, tier], hit[name, tier]) for tier in ("device", "host", "disk")}
        assert site.statistics(name) == wanted
    assert all(sum(hit[name, tier] for name in names) for tier in ("host", "disk"))


def conversation(salt: str, number: int) -> NewRequest:
    """The same tokens from every tenant: four prompts, repeatedly."""
    tokens = int32_array([number % 4] * 33)
    return NewRequest(f"{salt} {number}", tokens, len(tokens), cache_salt=salt)


@pytest.mark.parametrize("shape", [FULL, HYBRID], ids=lambda shape: shape.name)
def test_what_tiers_have_of_another_salt_changes_no_answer(shape: Shape) -> None:
    """Equal tokens, another salt: the device has room for one prompt of each, tiers for all."""
    sizes = 50 * len(shape.groups), 100 * len(shape.groups), 200 * len(shape.groups)
    alone, shared = (Site(shape, SALTS, sizes) for _ in range(2))
    for number in range(12):
        told = alone.serve(conversation("alice", number))
        shared.serve(conversation("bob", number))
        assert shared.serve(conversation("alice", number)) == told
        shared.serve(conversation("bob", number))
    shown = {each.name for each in shared.manager.statistics().tenants}
    assert not {"alice", "bob"} & shown
    for name in shown:
        if any(each for each in alone.statistics(name).values() if each[0]):
            assert shared.statistics(name) == alone.statistics(name)
            assert alone.statistics(name)["host"][1] + alone.statistics(name)["disk"][1] > 0


def test_a_prompt_that_only_another_salt_has_in_tiers_is_not_waited_for() -> None:
    site = Site(FULL, SALTS, (60, 100, 200))
    for number in range(8):
        site.serve(conversation("alice", number))
    mine = site.where(conversation("alice", 0))
    assert mine["host"] + mine["disk"] > 0
    assert site.where(conversation("bob", 0)).total() == 0
    assert site.serve(conversation("bob", 0))[0][0::2] == (0, False)
