"""A quiet tenant next to a noisy one: the quiet one keeps its guarantee."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from kvcache.base.errors import PinLimitError, RequestError
from kvcache.config.tenants import TenantConfig, TenantsConfig
from kvcache.manager import KVCacheManager
from kvcache.policies import EVICTION_POLICIES
from kvcache.requests.request import Request
from kvcache.tenants import TenantStatistics
from tests.manager.managers_under_test import FULL, HYBRID, WINDOW, Shape, make_manager
from tests.manager.steps import Engine, new, row
from tests.tenants.tenant_traffic import TenantTraffic, count_tenants

GUARANTEED = 24


def statistics(manager: KVCacheManager, name: str) -> TenantStatistics:
    return next(each for each in manager.statistics().tenants if each.name == name)


def make(shape: Shape = FULL, num_blocks: int = 81, **named: TenantConfig) -> KVCacheManager:
    return make_manager(
        shape,
        num_blocks,
        tenants=TenantsConfig(named=named),
        has_workers=False,
        log_stats=True,
    )


def quiet_hits(manager: KVCacheManager, *, has_noise: bool) -> list[int]:
    """Let a quiet tenant repeat a few prompts, optionally next to a scan; return its hits."""
    traffic = [TenantTraffic("quiet", num_prompts=4, prompt_tokens=20, num_requests=60)]
    if has_noise:
        traffic.append(TenantTraffic("noisy", num_prompts=0, prompt_tokens=40, num_requests=300))
    return count_tenants(manager, traffic, seed=7)["quiet"].hit_tokens


@pytest.mark.parametrize("shape", [FULL, HYBRID], ids=lambda shape: shape.name)
def test_the_quiet_one_hits_what_it_hits_alone_in_a_pool_of_its_guarantee(shape: Shape) -> None:
    guaranteed = GUARANTEED * len(shape.groups)
    alone = quiet_hits(make(shape, guaranteed + 1), has_noise=False)
    share = TenantConfig(guaranteed=guaranteed)
    shared = quiet_hits(make(shape, guaranteed + 57, quiet=share), has_noise=True)
    lawless = make_manager(shape, guaranteed + 57, has_workers=False)
    without = quiet_hits(lawless, has_noise=True)
    assert sum(alone) > 0
    assert sum(shared) >= sum(alone)
    assert sum(without) < sum(alone)


@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
def test_guaranteed_shares_hold_under_every_policy(policy: str) -> None:
    manager = make_manager(
        FULL,
        81,
        tenants=TenantsConfig(named={"quiet": TenantConfig(guaranteed=GUARANTEED)}),
        eviction_policy=policy,
        has_workers=False,
    )
    hits = quiet_hits(manager, has_noise=True)
    # Its four prompts of 5 full blocks fit its guarantee: from the second time on they hit.
    assert all(hit == 20 for hit in hits[20:])
    assert statistics(manager, "noisy").num_evicted_blocks > 500
    manager.check()


def test_running_requests_leave_the_room_that_others_are_guaranteed() -> None:
    manager = make(num_blocks=21, quiet=TenantConfig(guaranteed=8))
    noisy = [Request(f"n{i}", [i] * 16, tenant="noisy") for i in range(4)]
    assert all(manager.allocate_slots(request, 16) for request in noisy[:3])
    assert manager.allocate_slots(noisy[3], 16) is None
    assert statistics(manager, "noisy").last_refusal == (
        "4 blocks more are wanted, 8 are free, 8 of them guaranteed to others: finish or preempt "
        "requests, or guarantee less"
    )
    quiet = Request("q", list(range(32)), tenant="quiet")
    assert manager.allocate_slots(quiet, 32) is not None
    manager.check()


def test_a_step_in_which_windows_move_leaves_the_room_that_others_are_guaranteed() -> None:
    manager = make(WINDOW, num_blocks=21, quiet=TenantConfig(guaranteed=8))
    engine = Engine(manager)
    engine.step(
        new=(
            new("quiet", list(range(1, 33)), 32, tenant="quiet"),
            new("noisy", list(range(100, 160)), 16, tenant="noisy"),
        )
    )
    rows = row(0, [7]), row(1, [], num_new=44)
    assert engine.step(*rows, completed_step=1).running_scheduled.tolist() == [1, 0]
    more = new("more", list(range(300, 320)), 20, tenant="quiet")
    result = engine.step(completed_step=2, new=(more,))
    assert result.admitted_slots.tolist() == [2]
    manager.check()


def test_a_tenant_at_its_limit_gives_its_own_blocks_though_others_are_free() -> None:
    manager = make(greedy=TenantConfig(limit=8))
    for number in range(6):
        request = Request(f"r{number}", [number] * 16, tenant="greedy")
        assert manager.allocate_slots(request, 16) is not None
        manager.free(request)
        manager.check()
    assert statistics(manager, "greedy").num_held_blocks == 8
    assert statistics(manager, "greedy").num_evicted_blocks == 16
    running = [Request(f"s{i}", [50 + i] * 16, tenant="greedy") for i in range(3)]
    assert [manager.allocate_slots(each, 16) is not None for each in running] == [True, True, False]
    assert "8 of at most 8 are in use" in statistics(manager, "greedy").last_refusal
    with pytest.raises(RequestError) as raised:
        manager.allocate_slots(Request("huge", list(range(40)), tenant="greedy"), 40)
    assert str(raised.value) == (
        "request huge: 10 blocks are wanted by one request, which is more than all that this "
        "tenant may have (8): shorten it, or raise the tenant's limit"
    )
    other = Request("other", list(range(40)), tenant="other")
    assert manager.allocate_slots(other, 40) is not None


def test_a_running_request_that_outgrows_its_tenants_limit_is_told_so() -> None:
    manager = make(greedy=TenantConfig(limit=4))
    small = Request("small", [7] * 4, tenant="greedy")
    growing = Request("growing", list(range(12)), tenant="greedy")
    assert manager.allocate_slots(small, 4) is not None
    assert manager.allocate_slots(growing, 12) is not None
    growing.num_computed_tokens = 12
    growing.append_output_token_ids([1, 2, 3, 4, 5])
    assert manager.allocate_slots(growing, 1) is None  # until the other one is done
    manager.free(small)
    assert manager.allocate_slots(growing, 4) is not None
    growing.num_computed_tokens = 16
    before, num_refusals = manager.dump_state(), statistics(manager, "greedy").num_refusals
    with pytest.raises(RequestError) as raised:
        manager.allocate_slots(growing, 1)
    reason = (
        "17 tokens need at least 5 blocks, which is more than all that this tenant may have (4): "
        "shorten the request, or raise the tenant's limit"
    )
    assert str(raised.value) == f"request growing: {reason}"
    assert statistics(manager, "greedy").last_refusal == reason
    assert statistics(manager, "greedy").num_refusals == num_refusals + 1
    assert manager.dump_state() == before
    manager.free(growing)
    manager.check()


def test_weights_share_the_blocks_without_a_guarantee() -> None:
    manager = make(heavy=TenantConfig(weight=3.0), light=TenantConfig(weight=1.0))
    traffic = [TenantTraffic(name, 0, 16, 200) for name in ("heavy", "light")]
    count_tenants(manager, traffic, seed=1)
    heavy, light = statistics(manager, "heavy"), statistics(manager, "light")
    # A request of each frees its last, partly filled block.
    assert heavy.num_held_blocks + light.num_held_blocks >= 78
    assert abs(heavy.num_held_blocks - 60) <= 4


def test_pin_limits_name_the_pinned_blocks_and_the_remedy() -> None:
    manager = make(alice=TenantConfig(max_pinned=5, limit=12))
    for first in (1, 2):
        request = Request(f"r{first}", [first] * 16, tenant="alice")
        assert manager.allocate_slots(request, 16) is not None
        manager.free(request)
    pin = manager.pin_prefix([1] * 16, 10.0, tenant="alice")
    before = manager.dump_state()
    with pytest.raises(PinLimitError) as raised:
        manager.pin_prefix([2] * 16, 10.0, tenant="alice")
    assert str(raised.value) == (
        "pinning 16 tokens needs 4 more blocks, 4 of at most 5 of this tenant are pinned, and it "
        "may use 8 more: unpin a prefix, wait until one runs out, or raise the tenant's max_pinned "
        "or limit"
    )
    assert manager.dump_state() == before
    assert statistics(manager, "alice").num_pinned_blocks == 4
    manager.unpin_prefix(pin)
    assert statistics(manager, "alice").num_pinned_blocks == 0
    manager.pin_prefix([2] * 16, 10.0, tenant="alice")
    manager.check()


def test_a_drain_and_a_reset_leave_nothing_to_anybody() -> None:
    manager = make(alice=TenantConfig(guaranteed=10))
    running = Request("r", [1] * 16, tenant="alice")
    manager.allocate_slots(running, 16)
    cached = Request("c", [2] * 16, tenant="bob")
    manager.allocate_slots(cached, 16)
    manager.free(cached)
    manager.pin_prefix([2] * 16, 10.0, tenant="bob")
    assert not manager.reset_prefix_cache(drain=True)
    manager.check()
    manager.free(running)
    assert manager.reset_prefix_cache(drain=False)
    manager.check()
    assert all(each.num_held_blocks == 0 for each in manager.statistics().tenants)
    assert all(each.num_pinned_blocks == 0 for each in manager.statistics().tenants)


def test_tenants_that_are_not_named_are_forgotten_when_they_have_nothing() -> None:
    manager = make(alice=TenantConfig(guaranteed=10))
    for number in range(3000):
        request = Request(f"r{number}", [1] * 8, tenant=f"tenant {number}")
        assert manager.allocate_slots(request, 8) is not None
        manager.free(request)
    manager.check()
    known = [asdict(each) for each in manager.statistics().tenants]
    assert len(known) < 700
