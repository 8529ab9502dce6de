"""Random walks of several tenants, compared with the rule of shares, block by block."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from kvcache.base.errors import PinLimitError, RequestError
from kvcache.config.tenants import TenantConfig, TenantsConfig
from kvcache.manager import KVCacheManager
from kvcache.manager.pins import Pin
from kvcache.requests.request import Request
from tests.audits import Audits
from tests.manager.managers_under_test import FULL, HYBRID, STATES_HYBRID, Shape, make_manager
from tests.tenants.share_model import Holding, after_taking, has_room, holdings_of

NAMES = ("alice", "bob", "carol", "", "dave")
TENANTS = TenantsConfig(
    named={
        "alice": TenantConfig(guaranteed=0.3, limit=0.6, max_pinned=4),
        "bob": TenantConfig(guaranteed=10, weight=3.0),
        "carol": TenantConfig(weight=0.5, limit=20),
    },
    default=TenantConfig(limit=0.8),
)
POOL = 60
OTHERS = Holding(guaranteed=0, limit=48, weight=1.0, blocks=0, unheld=0)


@dataclass
class Walk:
    """One manager, with its running requests and pins.

    Every request ends with a token of its own, so that no content is ever computed twice.
    """

    manager: KVCacheManager
    rng: random.Random
    running: dict[str, tuple[str, Request]] = field(default_factory=dict)
    pins: list[tuple[Pin, set[int]]] = field(default_factory=list)
    num_requests: int = 0
    num_refused: int = 0
    num_evicting: int = 0
    last_token: int = 100

    def step(self) -> None:
        rng = self.rng
        kind = rng.choices(["admit", "grow", "free", "pin", "unpin", "evict"], [7, 4, 5, 1, 1, 1])
        name = rng.choice(list(self.running)) if self.running else None
        if kind == ["admit"] or name is None:
            if len(self.running) < 8:
                self.admit()
        elif kind == ["grow"]:
            self.grow(name)
        elif kind == ["free"]:
            self.manager.free(self.running.pop(name)[1])
        elif kind == ["pin"]:
            self.pin()
        elif kind == ["unpin"] and self.pins:
            pin, _ = self.pins.pop(rng.randrange(len(self.pins)))
            assert self.manager.unpin_prefix(pin)
        elif kind == ["evict"] and rng.random() < 0.5:
            self.manager.evict_blocks([rng.randrange(1, POOL + 1)])

    def own_token(self) -> int:
        self.last_token += 1
        return self.last_token

    def prefix(self) -> list[int]:
        return [self.rng.choice([1, 2, 3])] * self.rng.randint(1, 44)

    def admit(self) -> None:
        tenant = self.rng.choice(NAMES)
        self.num_requests += 1
        tokens = [*self.prefix(), self.own_token()]
        request = Request(f"r{self.num_requests}", tokens, tenant=tenant or None)
        hit, num_hit = self.manager.get_computed_blocks(request)
        ids = [block_id for table in hit.get_block_ids() for block_id in table if block_id]
        num_adopted = len(set(ids) - self.held_blocks())
        before = self.holdings(tenant)
        num_new = -(-request.num_tokens // 4) - num_hit // 4
        try:
            got = self.manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, hit)
        except RequestError as error:
            assert "more than all that this tenant may have" in str(error)
            got = None
        if got is not None:
            self.running[request.request_id] = (tenant, request)
            request.num_computed_tokens = request.num_tokens
        self.compare(tenant, before, num_adopted, num_new, has_got=got is not None)

    def grow(self, name: str) -> None:
        tenant, request = self.running[name]
        before, num_blocks = self.holdings(tenant), -(-request.num_tokens // 4)
        if request.num_tokens > 70:
            return
        request.append_output_token_ids([self.own_token() for _ in range(4)])
        try:
            got = self.manager.allocate_slots(request, 4)
        except RequestError as error:
            assert "more than all that this tenant may have" in str(error)
            got = None
        request.num_computed_tokens = request.num_tokens
        num_new = -(-request.num_tokens // 4) - num_blocks
        if got is None:
            del self.running[name]
        self.compare(tenant, before, 0, num_new, has_got=got is not None)
        if got is None:
            self.manager.free(request)

    def pin(self) -> None:
        tokens, tenant = self.prefix(), self.rng.choice(NAMES)
        probe = Request("probe", [*tokens, 0], tenant=tenant or None)
        ids = self.manager.get_computed_blocks(probe)[0].get_block_ids()
        try:
            pin = self.manager.pin_prefix(tokens, 1e6, tenant=tenant or None)
        except PinLimitError:
            return
        self.pins.append((pin, {block_id for table in ids for block_id in table if block_id}))

    def held_blocks(self) -> set[int]:
        held = {block_id for _, ids in self.pins for block_id in ids}
        for name in self.running:
            held.update(b for ids in self.manager.get_block_ids(name) for b in ids if b)
        return held

    def holdings(self, *names: str) -> dict[str, Holding]:
        """Return the tenants' counts, in the order of their first requests."""
        known = holdings_of(self.manager)
        return {name: known.get(name, OTHERS) for name in NAMES if name in {*known, *names}}

    def compare(
        self,
        tenant: str,
        before: dict[str, Holding],
        num_adopted: int,
        num_new: int,
        *,
        has_got: bool,
    ) -> None:
        """Compare all counts with the rule; exact if blocks go one by one."""
        after = self.holdings(*before)
        is_simple = len(self.manager.get_block_ids("")) == 1
        if not is_simple:
            return
        assert has_got == has_room(before, tenant, num_adopted + num_new, POOL)
        if not has_got:
            self.num_refused += 1
            assert after == before
            return
        num_fresh = POOL - sum(has.blocks for has in before.values())
        self.num_evicting += num_new > num_fresh
        mine = before[tenant]
        before[tenant] = replace(mine, unheld=mine.unheld - num_adopted)
        assert after == after_taking(before, tenant, num_new, num_fresh)


def promises_are_kept(holdings: Sequence[Holding]) -> bool:
    """No tenant is beyond its limit, and unused guarantees are free."""
    is_within = all(has.blocks <= has.limit for has in holdings)
    return is_within and sum(max(has.in_use, has.guaranteed) for has in holdings) <= POOL


@pytest.mark.parametrize("shape", [FULL, HYBRID, STATES_HYBRID], ids=lambda shape: shape.name)
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_every_step_keeps_the_promises(shape: Shape, policy: str) -> None:
    rng = random.Random(f"{shape.name} {policy}")
    manager = make_manager(
        shape, POOL + 1, tenants=TENANTS, eviction_policy=policy, has_workers=False
    )
    walk = Walk(manager, rng)
    audits = Audits(f"{shape.name} {policy}", manager.check)
    for _ in range(300):
        walk.step()
        audits.perhaps()
        assert promises_are_kept(list(walk.holdings().values()))
    audits.make()
    statistics = manager.statistics()
    evicted = sum(tenant.num_evicted_blocks for tenant in statistics.tenants)
    assert evicted == statistics.core.num_evictions > 0
    assert sum(tenant.num_refusals for tenant in statistics.tenants) > 0
    if shape is FULL:
        assert walk.num_refused > 3
        assert walk.num_evicting > 20
