"""Requests above their tenant's limit: a step names them, and serves the others."""

from __future__ import annotations

from typing import Any

from kvcache import Refusal
from kvcache.base.arrays import int32_array
from kvcache.config.tenants import TenantConfig, TenantsConfig
from kvcache.manager import KVCacheManager
from kvcache.protocol.step import (
    NO_SLOT,
    NewRequest,
    ResumedRequest,
    RunningRequests,
    RunningRow,
    StepRequest,
    StepResult,
)
from kvcache.tenants import TenantStatistics
from tests.manager.managers_under_test import FULL, HYBRID, Shape, make_manager

SIZE = 4


def make(shape: Shape = FULL, by: Any = "tenant", **named: TenantConfig) -> KVCacheManager:
    config = TenantsConfig(by=by, named=named)
    return make_manager(shape, 81, tenants=config)


def new(name: str, num_tokens: int, max_new_tokens: int | None = None, **whose: str) -> NewRequest:
    tokens = int32_array([sum(name.encode()), *range(1, num_tokens)])
    return NewRequest(name, tokens, max_new_tokens or num_tokens, **whose)


def statistics(manager: KVCacheManager, name: str) -> TenantStatistics:
    return next(each for each in manager.statistics().tenants if each.name == name)


def row(slot: int, num_new_tokens: int, *token_ids: int) -> RunningRequests:
    return RunningRequests.from_rows([RunningRow(slot, num_new_tokens, token_ids)])


def step(manager: KVCacheManager, number: int, **parts: Any) -> StepResult:
    result = manager.step(StepRequest("c", number, 0, completed_step=number - 1, **parts))
    assert not result.error
    manager.check()
    return result


def test_a_request_larger_than_its_tenant_is_named_and_the_others_are_served() -> None:
    manager = make(small=TenantConfig(limit=8))
    result = step(
        manager,
        1,
        new=(
            new("before", 32, tenant="small"),
            new("huge", 33, tenant="small"),
            new("after", 40, tenant="large"),
        ),
    )
    assert [slot != NO_SLOT for slot in result.admitted_slots] == [True, False, True]
    assert result.no_room == ("huge",)
    reason = (
        "33 tokens need at least 9 blocks, which is more than all that this tenant may have (8): "
        "shorten the request, or raise the tenant's limit"
    )
    assert result.refused == (Refusal("huge", "small", 9, 8, reason),)
    assert statistics(manager, "small").last_refusal == reason
    assert statistics(manager, "small").num_refusals == 1
    # A request that fits but must wait for others of its tenant is only in `no_room`.
    result = step(manager, 2, new=(new("later", 8, tenant="small"),))
    assert (result.no_room, result.refused) == (("later",), ())


def test_it_is_told_before_a_piece_of_it_is_computed() -> None:
    manager = make(small=TenantConfig(limit=8))
    result = step(manager, 1, new=(new("huge", 60, max_new_tokens=4, tenant="small"),))
    assert [(each.request_id, each.num_blocks) for each in result.refused] == [("huge", 15)]
    assert statistics(manager, "small").num_held_blocks == 0


def test_an_answer_that_outgrows_the_limit_is_told_when_it_does() -> None:
    manager = make(small=TenantConfig(limit=8))
    result = step(manager, 1, new=(new("grows", 31, tenant="small"), new("other", 31)))
    slots = result.admitted_slots.tolist()
    result = step(manager, 2, running=row(slots[0], 1, 7))
    assert result.running_scheduled.tolist() == [1] and not result.refused
    both = RunningRequests.from_rows(
        [RunningRow(slots[0], 1, (8,)), RunningRow(slots[1], 2, (8, 9))]
    )
    result = step(manager, 3, running=both)
    assert result.running_scheduled.tolist() == [0, 1]
    assert [(each.request_id, each.tenant, each.num_blocks) for each in result.refused] == [
        ("grows", "small", 9)
    ]
    assert statistics(manager, "small").num_refusals == 1
    # Preempted and resumed, it is refused again, and nothing of it is loaded or computed.
    step(manager, 4, preempted_recompute=("grows",))
    result = step(manager, 5, resumed=(ResumedRequest("grows", 100),))
    assert [each.request_id for each in result.refused] == ["grows"]
    assert result.no_room == ("grows",)
    step(manager, 6, finished=("grows",))


def test_a_running_request_whose_neighbours_take_the_limit_may_hope() -> None:
    manager = make(small=TenantConfig(limit=8))
    result = step(manager, 1, new=(new("a", 16, tenant="small"), new("b", 16, tenant="small")))
    result = step(manager, 2, running=row(int(result.admitted_slots[0]), 1, 7))
    assert result.running_scheduled.tolist() == [0]
    assert result.refused == ()
    assert "8 of at most 8 are in use" in statistics(manager, "small").last_refusal


def test_of_a_hybrid_only_what_every_schedule_needs_is_hopeless() -> None:
    """All at once its window takes as many blocks as full attention; in pieces, a few."""
    manager = make(HYBRID, small=TenantConfig(limit=16))
    result = step(manager, 1, new=(new("long", 40, tenant="small"),))
    assert (result.no_room, result.refused) == (("long",), ())
    assert "20 blocks are wanted by one request" in statistics(manager, "small").last_refusal
    result = step(manager, 2, new=(new("long", 40, max_new_tokens=20, tenant="small"),))
    assert result.refused == () and result.admitted_slots[0] != NO_SLOT
    slot = int(result.admitted_slots[0])
    for number in (3, 4):
        result = step(manager, number, running=row(slot, 10))
        assert result.running_scheduled.tolist() == [1]


def test_a_tenant_by_salt_is_named_as_in_statistics() -> None:
    manager = make(by="salt", secret=TenantConfig(limit=2))
    result = step(manager, 1, new=(new("huge", 16, cache_salt="secret"),))
    (refusal,) = result.refused
    assert refusal.tenant.startswith("salt-")
    assert refusal.tenant in {each.name for each in manager.statistics().tenants}
    assert "secret" not in repr(result)


def test_a_refusal_names_the_blocks_that_the_watermark_keeps_and_only_real_remedies() -> None:
    tenants = TenantsConfig(named={"quiet": TenantConfig(guaranteed=20)})
    manager = make_manager(FULL, 81, tenants=tenants, watermark=0.25)  # it keeps 20 of 80 blocks
    step(manager, 1, new=(new("one", 60, tenant="noisy"), new("two", 60, tenant="noisy")))
    step(manager, 2, new=(new("waits", 60, tenant="noisy"),))
    assert statistics(manager, "noisy").last_refusal == (
        "15 blocks more are wanted, 50 are free, 20 of them kept by the watermark, 20 of them "
        "guaranteed to others: finish or preempt requests, or lower cache.watermark, or guarantee "
        "less"
    )
    full = make(other=TenantConfig(limit=80))
    step(full, 1, new=tuple(new(name, 60, tenant="other") for name in "abcde"))
    step(full, 2, new=(new("waits", 60, tenant="noisy"),))
    assert statistics(full, "noisy").last_refusal == (
        "15 blocks more are wanted, 5 are free: finish or preempt requests"
    )
