"""Host memory above a disk: which blocks move, and when."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from kvcache.base.arrays import int32_array
from kvcache.base.errors import ConfigurationError, InvalidInputError
from kvcache.config.tenants import TenantConfig, TenantsConfig
from kvcache.offload import (
    Deadlines,
    HierarchyOptions,
    JobKind,
    LabelShape,
    OffloadKey,
    Place,
    TierHierarchy,
    TierManager,
    TierOptions,
    label_keys,
    make_offload_key,
    make_tier,
)
from kvcache.offload.slots import NOTHING, READY
from kvcache.policies import hinted
from kvcache.policies.hinted import HintedPolicy
from kvcache.protocol.commands import Label
from kvcache.protocol.label_agreement import NO_LABELS
from kvcache.protocol.labels import label_rows
from kvcache.requests.hints import CacheHint
from kvcache.requests.request_content import Namespace
from tests.offload.label_chains import SIZE, chain_label

NOW_S = 100.0


def make_hierarchy(
    num_host: int = 4,
    num_disk: int = 16,
    options: HierarchyOptions | None = None,
    labels: LabelShape | None = None,
    store_after: int = 1,
) -> TierHierarchy:
    return TierHierarchy(
        make_tier(TierOptions("host", num_host, labels=labels, store_after=store_after)),
        make_tier(TierOptions("file", num_disk, labels=labels)) if num_disk else None,
        itertools.count(1).__next__,
        HierarchyOptions(spare_share=0.0) if options is None else options,
    )


def make_keys(num_keys: int, first: int = 0) -> list[OffloadKey]:
    return [make_offload_key(bytes([first + i]) * 8, 0) for i in range(num_keys)]


def store(
    tiers: TierHierarchy, keys: list[OffloadKey], labels: Label | None = None
) -> list[OffloadKey]:
    """Store and return the stored keys."""
    job = tiers.plan_store(keys, NOW_S, labels=labels)
    if job is None:
        return []
    assert tiers.end(job.job_id, ok=True).tolist() == job.addresses.tolist()
    return list(job.keys)


def spill(tiers: TierHierarchy) -> list[OffloadKey]:
    """Start due spills and return them."""
    spilled: list[OffloadKey] = []
    while (job := tiers.plan_spills(NOW_S)) is not None:
        tiers.end(job.job_id, ok=True)
        spilled += job.keys
    return spilled


def fetch(tiers: TierHierarchy, keys: list[OffloadKey]) -> list[OffloadKey]:
    """Fetch keys from files; return those that were."""
    job = tiers.plan_fetch(keys, NOW_S)
    tiers.end(job.job_id, ok=True)
    return list(job.keys)


def touch(tiers: TierHierarchy, keys: list[OffloadKey]) -> None:
    for tier in tiers:
        tier.touch(keys)


def hint(
    tiers: TierHierarchy,
    keys: list[OffloadKey],
    columns: tuple[int, int],
    what: CacheHint,
    now_s: float = NOW_S,
) -> None:
    for tier in tiers:
        tier.eviction.hint(keys, *columns, what, now_s)


def places(tiers: TierHierarchy, keys: list[OffloadKey]) -> list[Place]:
    return [Place(place) for place in tiers.locate(keys).tolist()]


def test_a_request_finds_what_was_stored_and_loads_it() -> None:
    tiers, keys = make_hierarchy(), make_keys(3)
    assert places(tiers, keys) == [Place.NOWHERE] * 3
    job = tiers.plan_store(keys[:2], NOW_S)
    assert job is not None
    assert places(tiers, keys) == [Place.HOST_PENDING, Place.HOST_PENDING, Place.NOWHERE]
    assert tiers.plan_load(keys, NOW_S) is None
    tiers.end(job.job_id, ok=True)
    assert places(tiers, keys) == [Place.HOST, Place.HOST, Place.NOWHERE]
    load = tiers.plan_load(keys, NOW_S)
    assert load.keys == tuple(keys[:2])
    assert load.addresses.tolist() == job.addresses.tolist()
    tiers.end(load.job_id, ok=True)
    tiers.check()
    assert len(tiers.transfers) == 0


ALL = (0, 100)


def evict(tiers: TierHierarchy, num_keys: int, first: int = 200) -> list[OffloadKey]:
    """Store other keys; return which keys of host memory they replace."""
    before = set(tiers.host.slots.present_keys())
    store(tiers, make_keys(num_keys, first))
    gone = before - set(tiers.host.slots.present_keys())
    return [key for key in make_keys(100) if key in gone]


def test_a_tier_follows_priorities_while_they_last() -> None:
    tiers, (a, b, c, d) = make_hierarchy(num_disk=0), make_keys(4)
    for key in (a, b, c, d):
        store(tiers, [key])
    hint(tiers, [a], ALL, CacheHint(priority=90, duration_s=5.0))
    hint(tiers, [c], ALL, CacheHint(priority=10))
    assert evict(tiers, 1, 201) == [c]
    assert evict(tiers, 1, 202) == [b]
    tiers.expire(NOW_S + 6.0)
    touch(tiers, [d])
    assert evict(tiers, 3, 203) == [a]
    tiers.check()


def test_files_follow_hints_too() -> None:
    tiers, keys = make_hierarchy(2, 3), make_keys(5)
    for key in keys[:3]:
        store(tiers, [key])
        spill(tiers)
    store(tiers, keys[3:])
    spill(tiers)
    store(tiers, make_keys(2, 50))
    spill(tiers)
    assert tiers.disk is not None
    held = [key for key in keys if tiers.disk.states_of([key])[0] == READY]
    hint(tiers, [held[0]], ALL, CacheHint(priority=100))
    store(tiers, make_keys(2, 60))
    spill(tiers)
    store(tiers, make_keys(2, 70))
    spill(tiers)
    assert tiers.disk.states_of(held).tolist() == [READY] + [NOTHING] * (len(held) - 1)
    tiers.check()


def files(tiers: TierHierarchy) -> list[OffloadKey]:
    """Return the keys on disk, the next victim first."""
    slots = tiers.disk.slots
    return [
        slots.keys_at(slots.addresses_in(np.array([s])))[0] for s in tiers.disk.eviction.order()
    ]


def test_of_a_prefix_that_was_spilled_the_end_is_evicted_first() -> None:
    tiers, keys = make_hierarchy(4), make_keys(4)
    store(tiers, keys)
    store(tiers, make_keys(4, 50))  # refused, until the others have been written
    assert spill(tiers) == keys
    assert files(tiers) == keys[::-1]


def test_priorities_go_down_to_files_and_come_back_until_their_time_is_over() -> None:
    tiers, keys = make_hierarchy(4), make_keys(4)
    store(tiers, keys)
    hint(tiers, keys, (0, 1), CacheHint(priority=0, duration_s=10.0))
    hint(tiers, keys, (3, 4), CacheHint(priority=90))
    store(tiers, make_keys(4, 50))
    assert sorted(spill(tiers)) == keys
    assert files(tiers) == [keys[0], keys[2], keys[1], keys[3]]
    assert store(tiers, make_keys(4, 50)) == make_keys(4, 50)
    tiers.expire(NOW_S + 4.0)
    assert tiers.plan_fetch(keys, NOW_S) is None  # no room yet
    spill(tiers)
    for key in (keys[3], keys[0]):
        assert fetch(tiers, [key]) == [key]
    order = tiers.host.slots.slots_of(tiers.host.slots.addresses_of([keys[0], keys[3]])).tolist()
    found = tiers.host.eviction.order()
    assert (found[0], found[-1]) == tuple(order)
    tiers.expire(NOW_S + 11.0)
    store(tiers, make_keys(2, 60))
    assert places(tiers, [keys[0]]) == [Place.HOST], "its low priority is over"
    tiers.check()


def test_returns_go_down_to_files_with_the_time_at_which_they_were_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hinted, "_FEW_CLAIMS", 1)
    tiers, (a, b, c, d) = make_hierarchy(4), make_keys(4)
    store(tiers, [a, b, c, d])
    hint(tiers, [a], ALL, CacheHint(returns_in_s=1.0))
    tiers.expire(NOW_S + 1.0)
    touch(tiers, [a])  # as hinted: hints are trusted in host memory
    hint(tiers, [b], ALL, CacheHint(returns_in_s=4.0), NOW_S + 1.0)
    store(tiers, make_keys(4, 50))
    assert sorted(spill(tiers)) == [a, b, c, d]
    policy = tiers.disk.eviction._policy
    assert isinstance(policy, HintedPolicy)
    tiers.expire(NOW_S + 4.5)
    touch(tiers, [b])
    assert (policy.trust.num_right, policy.trust.num_wrong) == (1, 0)
    store(tiers, [a], None)
    tiers.check()


def num_right(tier: TierManager) -> float:
    """Return how many claims about returns have proved right in a tier."""
    policy = tier.eviction._policy
    assert isinstance(policy, HintedPolicy)
    return policy.trust.num_right


def test_equal_hints_of_two_sessions_are_two_claims_in_each_tier() -> None:
    tiers, keys = make_hierarchy(2), make_keys(2)
    assert tiers.disk is not None
    job = tiers.plan_store(keys, NOW_S)
    assert job is not None
    for key in keys:
        hint(tiers, [key], ALL, CacheHint(returns_in_s=4.0))
    tiers.end(job.job_id, ok=True)  # both go into order at once
    store(tiers, make_keys(2, 50))
    assert sorted(spill(tiers)) == keys  # in one job
    tiers.expire(NOW_S + 4.0)
    touch(tiers, keys)
    assert [num_right(tier) for tier in tiers] == [2, 2]
    tiers.check()


def test_blocks_that_are_being_stored_follow_a_hint_afterwards() -> None:
    tiers, keys = make_hierarchy(num_disk=0), make_keys(4)
    job = tiers.plan_store(keys, NOW_S)
    assert job is not None
    hint(tiers, keys, (3, 4), CacheHint(priority=90))
    hint(tiers, make_keys(3, 90), ALL, CacheHint(priority=0))  # they are not here
    tiers.end(job.job_id, ok=True)
    assert evict(tiers, 2) == keys[1:3]  # of a chain, the last goes first
    assert places(tiers, keys[3:]) == [Place.HOST]
    tiers.check()


def test_a_failed_store_leaves_no_hint_behind() -> None:
    tiers, keys = make_hierarchy(num_disk=0), make_keys(4)
    job = tiers.plan_store(keys, NOW_S)
    assert job is not None
    hint(tiers, keys, (1, 3), CacheHint(priority=0))
    tiers.end(job.job_id, ok=False)
    for key in keys:
        store(tiers, [key])
    order = [tiers.host.slots.keys[slot] for slot in tiers.host.eviction.order()]
    assert order == keys  # as without hints
    tiers.check()


def test_what_sessions_share_in_a_tier_does_not_end_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hinted, "_FEW_CLAIMS", 1)
    tiers, shared = make_hierarchy(8, 0), make_keys(2)
    first, second = [*shared, *make_keys(2, 10)], [*shared, *make_keys(2, 20)]
    store(tiers, first)
    hint(tiers, first, ALL, CacheHint(returns_in_s=1.0))
    tiers.expire(NOW_S + 1.0)
    touch(tiers, first)  # as hinted: hints are trusted from now on
    store(tiers, second)
    soon, late = CacheHint(returns_in_s=1.0), CacheHint(returns_in_s=1000.0)
    hint(tiers, first, ALL, soon, NOW_S + 1.0)
    hint(tiers, second, ALL, late, NOW_S + 1.0)
    order = [tiers.host.slots.keys[slot] for slot in tiers.host.eviction.order()]
    assert order == [*second[:1:-1], *first[:1:-1], *shared[::-1]]
    tiers.check()


def test_hints_do_not_move_what_a_tenant_has_guaranteed() -> None:
    tenants = TenantsConfig(named={"a": TenantConfig(guaranteed=0.5)})
    tiers = TierHierarchy(
        make_tier(TierOptions("host", 4, tenants=tenants)),
        None,
        itertools.count(1).__next__,
        HierarchyOptions(spare_share=0.0),
    )
    keys = make_keys(6)
    for chosen, tenant in ((keys[:2], "a"), (keys[2:4], "b"), (keys[4:], "b")):
        job = tiers.plan_store(chosen, NOW_S, namespace=Namespace(0, None, None, tenant))
        tiers.end(job.job_id, ok=True)
        hint(tiers, keys[:2], ALL, CacheHint(priority=0))
        hint(tiers, chosen if tenant == "b" else [], ALL, CacheHint(priority=100))
    assert places(tiers, keys[:2]) == [Place.HOST] * 2
    tiers.check()


def test_nothing_is_asked_and_nothing_comes_of_it() -> None:
    tiers = make_hierarchy()
    tiers.host.sightings.see([])
    touch(tiers, [])
    tiers.forget([])
    assert tiers.locate([]).tolist() == []
    assert tiers.plan_store([], NOW_S) is None
    assert tiers.plan_fetch([], NOW_S) is None
    assert tiers.plan_load([], NOW_S) is None
    assert tiers.plan_spills(NOW_S) is None
    assert not tiers.discards.take()
    assert tiers.expire(NOW_S) == ()
    tiers.check()


def test_what_no_file_has_is_spilled_before_it_is_evicted() -> None:
    tiers = make_hierarchy()
    old, new = make_keys(4), make_keys(3, first=10)
    store(tiers, old)
    assert spill(tiers) == []
    assert tiers.plan_store(new, NOW_S) is None
    assert places(tiers, new) == [Place.NOWHERE] * 3
    job = tiers.plan_spills(NOW_S)
    # The tail of a chain goes first, as much as the store lacked, in the order of the chain.
    assert list(job.keys) == old[1:]
    assert tiers.plan_store(new, NOW_S) is None
    tiers.end(job.job_id, ok=True)
    assert store(tiers, new) == new
    assert places(tiers, old) == [Place.HOST] + [Place.DISK] * 3


def test_a_share_of_the_slots_is_kept_clean_ahead_of_time() -> None:
    tiers = make_hierarchy(num_host=8, options=HierarchyOptions(spare_share=0.25))
    keys = make_keys(8)
    store(tiers, keys[:6])
    assert spill(tiers) == []
    store(tiers, keys[6:])
    assert spill(tiers) == [keys[4], keys[5]]
    assert places(tiers, keys) == [Place.HOST] * 8


def test_with_write_through_all_that_is_stored_is_spilled() -> None:
    tiers = make_hierarchy(options=HierarchyOptions(disk_write="on_store", spare_share=0.0))
    keys = make_keys(3)
    store(tiers, keys)
    assert spill(tiers) == keys
    assert spill(tiers) == []
    tiers.host.forget(keys)
    assert places(tiers, keys) == [Place.DISK] * 3


def test_no_more_is_spilled_or_fetched_at_once_than_allowed() -> None:
    options = HierarchyOptions("on_store", 0.0, max_spilling_blocks=2, max_fetching_blocks=1)
    tiers, keys = make_hierarchy(options=options), make_keys(3)
    store(tiers, keys)
    first = tiers.plan_spills(NOW_S)
    assert len(first.keys) == 2
    assert tiers.plan_spills(NOW_S) is None
    tiers.end(first.job_id, ok=True)
    assert spill(tiers) == [keys[2]]
    tiers.host.forget(keys)
    fetch = tiers.plan_fetch(keys, NOW_S)
    assert fetch.keys == (keys[0],)
    assert tiers.plan_fetch(keys, NOW_S) is None


def test_whether_there_is_something_to_spill_is_known_without_a_step() -> None:
    options = HierarchyOptions("on_store", 0.0, max_spilling_blocks=2)
    tiers, keys = make_hierarchy(num_host=8, options=options), make_keys(5)
    assert not tiers.has_spills
    store(tiers, keys)
    spilled: list[OffloadKey] = []
    while tiers.has_spills:
        job = tiers.plan_spills(NOW_S)
        assert job is not None
        assert not tiers.has_spills  # no room for more, or nothing more to spill
        tiers.end(job.job_id, ok=True)
        spilled += job.keys
    assert spilled == keys
    assert tiers.plan_spills(NOW_S) is None


def test_fetched_content_is_clean_and_still_on_disk() -> None:
    tiers, keys = make_hierarchy(options=HierarchyOptions("on_store", 0.0)), make_keys(2)
    store(tiers, keys)
    spill(tiers)
    tiers.host.forget(keys)
    assert places(tiers, keys) == [Place.DISK] * 2
    fetch = tiers.plan_fetch(keys, NOW_S)
    assert fetch is not None
    assert places(tiers, keys) == [Place.HOST_PENDING] * 2
    assert tiers.end(fetch.job_id, ok=True).tolist() == fetch.addresses.tolist()
    assert places(tiers, keys) == [Place.HOST] * 2
    assert tiers._spills.owed(keys) == []
    assert spill(tiers) == []


def test_a_damaged_file_is_forgotten_and_the_others_are_not() -> None:
    tiers, keys = make_hierarchy(options=HierarchyOptions("on_store", 0.0)), make_keys(3)
    store(tiers, keys)
    spill(tiers)
    tiers.host.forget(keys)
    fetch = tiers.plan_fetch(keys, NOW_S)
    bad = int(fetch.addresses[1])
    sealed = tiers.end(fetch.job_id, ok=False, failed=[bad])
    assert sealed.tolist() == [a for a in fetch.addresses.tolist() if a != bad]
    assert places(tiers, keys) == [Place.HOST, Place.NOWHERE, Place.HOST]
    discards = tiers.discards.take()
    assert discards.keys == (keys[1],)
    assert not tiers.discards.take()


def test_a_failure_that_names_nothing_is_a_failure_of_all() -> None:
    tiers, keys = make_hierarchy(num_disk=0), make_keys(3)
    store(tiers, keys)
    load = tiers.plan_load(keys, NOW_S)
    tiers.end(load.job_id, ok=False)
    assert places(tiers, keys) == [Place.NOWHERE] * 3
    assert tiers.discards.take().addresses.tolist() == load.addresses.tolist()
    assert tiers.statistics().num_failed_jobs == 1


def test_a_spill_that_fails_is_not_tried_again() -> None:
    tiers, keys = make_hierarchy(), make_keys(4)
    store(tiers, keys)
    assert tiers.plan_store(make_keys(4, first=10), NOW_S) is None
    job = tiers.plan_spills(NOW_S)
    tiers.end(job.job_id, ok=False, failed=[int(job.addresses[0])])
    assert tiers.discards.take().keys == (job.keys[0],)
    assert places(tiers, keys) == [Place.HOST] * 4
    assert len(store(tiers, make_keys(4, first=10))) == 4
    assert sorted(places(tiers, keys)) == [Place.NOWHERE] + [Place.DISK] * 3


def test_a_file_of_content_that_turned_out_damaged_is_not_believed() -> None:
    tiers, keys = make_hierarchy(options=HierarchyOptions("on_store", 0.0)), make_keys(1)
    store(tiers, keys)
    load, written = tiers.plan_load(keys, NOW_S), tiers.plan_spills(NOW_S)
    assert written is not None
    tiers.end(load.job_id, ok=False)
    assert not tiers.discards.take()
    tiers.end(written.job_id, ok=True)
    assert places(tiers, keys) == [Place.NOWHERE]
    discards = tiers.discards.take()
    assert (discards.addresses.tolist(), discards.keys) == (load.addresses.tolist(), tuple(keys))


def test_a_file_that_is_written_again_is_not_discarded() -> None:
    options = HierarchyOptions("on_store", 0.0)
    tiers, keys = make_hierarchy(num_disk=1, options=options), make_keys(2)
    store(tiers, keys[:1])
    assert spill(tiers) == keys[:1]
    store(tiers, keys[1:])
    assert spill(tiers) == keys[1:]
    tiers.host.forget(keys[:1])
    store(tiers, keys[:1])
    assert spill(tiers) == keys[:1]
    assert places(tiers, keys) == [Place.HOST] * 2
    assert tiers.discards.take().keys == (keys[1],)


def test_late_stores_are_in_quarantine_until_they_are_reported() -> None:
    options = HierarchyOptions(deadlines=Deadlines(store_s=10.0))
    tiers, keys = make_hierarchy(num_host=2, num_disk=0, options=options), make_keys(2)
    job = tiers.plan_store(keys, NOW_S)
    assert job is not None
    assert tiers.expire(NOW_S + 9.9) == ()
    (late,) = tiers.expire(NOW_S + 10.0)
    assert (late.job_id, late.kind, late.keys) == (job.job_id, JobKind.STORE, job.keys)
    assert tiers.expire(NOW_S + 20.0) == ()
    assert places(tiers, keys) == [Place.NOWHERE] * 2
    assert tiers.plan_store(make_keys(2, first=5), NOW_S) is None
    assert tiers.statistics().host.num_quarantined_slots == 2
    assert len(tiers.end(job.job_id, ok=True)) == 0
    assert len(store(tiers, make_keys(2, first=5))) == 2


def test_a_disk_that_does_not_answer_is_left_alone() -> None:
    tiers, keys = make_hierarchy(num_host=2), make_keys(2)
    store(tiers, keys)
    tiers.plan_store(make_keys(1, first=5), NOW_S)
    job = tiers.plan_spills(NOW_S)
    assert job is not None
    tiers.expire(NOW_S + 1e6)
    assert places(tiers, keys) == [Place.HOST] * 2
    # The other slot is dirty, but will never be spilled.
    assert store(tiers, make_keys(2, first=5)) == make_keys(1, first=5)
    assert tiers.plan_spills(NOW_S) is None
    tiers.end(job.job_id, ok=True)
    assert tiers.is_disk_in_use
    assert tiers.discards.take().keys == job.keys
    tiers.check()


def test_rare_content_is_stored_when_it_was_seen_often_enough() -> None:
    tiers, keys = make_hierarchy(store_after=2), make_keys(3)
    tiers.host.sightings.see(keys)
    assert store(tiers, keys) == []
    tiers.host.sightings.see(keys[:2])
    assert store(tiers, keys) == keys[:2]
    assert tiers.statistics().host.num_skipped == 3 + 1


def test_swapped_content_is_stored_at_once_and_never_spilled() -> None:
    tiers, keys = make_hierarchy(num_host=2, store_after=2), make_keys(2)
    job = tiers.plan_store(keys, NOW_S, is_private=True)
    assert len(tiers.end(job.job_id, ok=True)) == 0
    assert spill(tiers) == []
    tiers.forget(keys)
    assert tiers.host.statistics().num_free_slots == 2


def test_swapped_content_that_does_not_fit_as_a_whole_evicts_nothing() -> None:
    tiers, keys = make_hierarchy(num_host=4, num_disk=0), make_keys(8)
    store(tiers, keys[:4])
    held = tiers.plan_load(keys[:3], NOW_S)
    assert held is not None
    assert tiers.plan_store(keys[4:6], NOW_S, is_private=True) is None
    assert places(tiers, keys[:4]) == [Place.HOST] * 4
    assert tiers.plan_store(keys[4:5], NOW_S, is_private=True) is not None


def test_labels_move_with_content_and_are_told_by_tier() -> None:
    options = HierarchyOptions("on_store", 0.0)
    tiers = make_hierarchy(options=options, labels=LabelShape(32, SIZE))
    label = chain_label(2)
    keys = label_keys(label)
    store(tiers, keys, label)
    spill(tiers)
    tiers.host.forget(keys)
    fetch = tiers.plan_fetch(keys, NOW_S)
    tiers.end(fetch.job_id, ok=True)
    told = [(event.medium, event.removed, event.keys) for event in tiers.take_events()]
    both = tuple(keys)
    assert told == [
        ("host", False, both),
        ("host", True, both),
        ("host", False, both),
        ("file", False, both),
    ]
    found = tiers.host.contents.labels_at(tiers.host.slots.addresses_of(keys))
    assert (found.digests, found.parent_digests) == (label.digests, label.parent_digests)
    assert found.token_ids.tolist() == label.token_ids.tolist()


def test_a_restarted_hierarchy_takes_what_the_ranks_agree_on() -> None:
    tiers = make_hierarchy(num_host=4, labels=LabelShape(32, SIZE))
    label = chain_label(5)
    keys = label_keys(label)
    tiers.begin_adoption()
    assert places(tiers, keys) == [Place.UNKNOWN] * 5
    assert tiers.plan_store(keys, NOW_S, labels=label) is None
    # Address 3 has what address 0 has, and address 9 does not exist.
    in_host = label_rows(label, np.array([0, 1, 0, 2]))
    tiers.adopt_host(replace(in_host, block_ids=int32_array([0, 2, 3, 9])))
    assert tiers.discards.take().addresses.tolist() == [3]
    assert places(tiers, keys) == [Place.HOST] * 2 + [Place.UNKNOWN] * 3
    tiers.adopt_disk(label_rows(label, np.array([1, 2, 3])))
    assert places(tiers, keys) == [Place.HOST] * 2 + [Place.DISK] * 2 + [Place.NOWHERE]
    assert tiers._spills.owed(keys) == [keys[0]]
    assert tiers.host.slots.addresses_of(keys[:2]).tolist() == [0, 2]
    assert [event.medium for event in tiers.take_events()] == ["host", "file"]
    tiers.check()


def test_files_beyond_the_quota_are_discarded_the_oldest_first() -> None:
    tiers, label = make_hierarchy(num_disk=2), chain_label(3)
    keys = label_keys(label)
    tiers.adopt_disk(label)
    assert places(tiers, keys) == [Place.NOWHERE, Place.DISK, Place.DISK]
    assert tiers.discards.take().keys == (keys[0],)


def test_only_empty_tiers_adopt() -> None:
    tiers, keys = make_hierarchy(), make_keys(1)
    store(tiers, keys)
    with pytest.raises(InvalidInputError) as caught:
        tiers.adopt_host(NO_LABELS)
    assert str(caught.value) == "tier 'host' holds 1 keys: adopt into a new one"
    with pytest.raises(ConfigurationError, match="files cannot be adopted without a file tier"):
        make_hierarchy(num_disk=0).adopt_disk(NO_LABELS)


def test_a_job_ends_once() -> None:
    tiers, keys = make_hierarchy(), make_keys(1)
    job = tiers.plan_store(keys, NOW_S)
    tiers.end(job.job_id, ok=True)
    with pytest.raises(InvalidInputError, match=f"job {job.job_id} is not open"):
        tiers.end(job.job_id, ok=True)


def test_imported_keys_are_ready_and_clean_and_failed_ones_are_gone() -> None:
    tiers, keys = make_hierarchy(num_host=4), make_keys(6)
    store(tiers, keys[:1])
    job = tiers.plan_import(keys[:4], NOW_S)
    assert job is not None and job.keys == tuple(keys[1:4])
    assert places(tiers, keys[:4]) == [Place.HOST, *[Place.HOST_PENDING] * 3]
    tiers.check()
    assert tiers.plan_import(keys[:4], NOW_S) is None
    failed = job.addresses.tolist()[1]
    sealed = tiers.end(job.job_id, ok=False, failed=[failed])
    assert sealed.tolist() == [slot for slot in job.addresses.tolist() if slot != failed]
    assert places(tiers, keys[:4]) == [Place.HOST, Place.HOST, Place.NOWHERE, Place.HOST]
    tiers.check()
    store(tiers, keys[4:5])
    assert spill(tiers) == []  # nothing dirty was in the way
    assert len(store(tiers, make_keys(2, first=50))) == 2  # imported keys were evicted
    assert places(tiers, keys[1:4]) == [Place.NOWHERE] * 3
    tiers.check()


def test_what_another_node_has_is_evicted_first_until_it_is_used_again() -> None:
    tiers, own, copied = make_hierarchy(num_host=4, num_disk=0), make_keys(2), make_keys(2, 50)
    store(tiers, own)
    job = tiers.plan_import(copied, NOW_S)
    tiers.end(job.job_id, ok=True)
    for keys in (copied, copied[1:]):  # for its request; then for another one
        load = tiers.plan_load(keys, NOW_S)
        tiers.end(load.job_id, ok=True)
    store(tiers, make_keys(1, first=60))
    assert places(tiers, [*own, *copied]) == [Place.HOST, Place.HOST, Place.NOWHERE, Place.HOST]
    store(tiers, make_keys(2, first=70))
    assert places(tiers, [*own, *copied]) == [*[Place.NOWHERE] * 2, Place.NOWHERE, Place.HOST]
    tiers.check()


def test_what_another_node_keeps_is_evicted_first_and_written_when_it_is_the_last_one() -> None:
    tiers, keys = make_hierarchy(num_host=4), make_keys(4)
    store(tiers, keys)
    tiers.mark_copies([*keys[2:], *make_keys(1, first=90)], are_copies=True)
    assert tiers.statistics().host.num_copies == 2
    tiers.mark_copies(keys[2:3], are_copies=False)
    tiers.check()
    new = make_keys(1, first=50)
    assert store(tiers, new) == new  # nothing has to be written before
    assert places(tiers, keys) == [*[Place.HOST] * 3, Place.NOWHERE]
    tiers.mark_copies(keys[:3], are_copies=True)
    assert store(tiers, new := make_keys(2, first=60)) == new  # in the order of the marks
    assert places(tiers, keys[:3]) == [Place.NOWHERE, Place.NOWHERE, Place.HOST]
    tiers.mark_copies(keys[2:3], are_copies=False)
    tiers.check()
    assert store(tiers, make_keys(4, first=70)) == []
    assert set(keys[2:3]) < set(spill(tiers))
    assert len(store(tiers, make_keys(4, first=70))) == 4
    assert places(tiers, keys[2:3]) == [Place.DISK]


def test_what_is_loaded_here_keeps_its_place_even_if_another_node_keeps_it() -> None:
    tiers, keys = make_hierarchy(num_host=3, num_disk=0), make_keys(3)
    store(tiers, keys)
    tiers.mark_copies(keys, are_copies=True)
    load = tiers.plan_load(keys[:1], NOW_S)
    tiers.end(load.job_id, ok=True)
    for are_copies in (False, True):  # said again
        tiers.mark_copies(keys[:1], are_copies=are_copies)
    store(tiers, make_keys(2, first=50))
    assert places(tiers, keys) == [Place.HOST, *[Place.NOWHERE] * 2]
    tiers.check()


def test_with_write_through_the_last_one_goes_to_disk_at_once() -> None:
    options = HierarchyOptions(disk_write="on_store", spare_share=0.0)
    tiers, keys = make_hierarchy(options=options), make_keys(2)
    job = tiers.plan_import(keys, NOW_S)
    tiers.end(job.job_id, ok=True)
    assert spill(tiers) == []
    tiers.mark_copies(keys, are_copies=False)
    assert spill(tiers) == keys


def test_a_hint_makes_a_copy_follow_the_policy() -> None:
    tiers, own, copied = make_hierarchy(num_host=8, num_disk=0), make_keys(6), make_keys(2, 50)
    store(tiers, own)
    job = tiers.plan_import(copied, NOW_S)
    assert job is not None
    hint(tiers, copied, (0, 1), CacheHint(priority=100))  # while it is written
    tiers.end(job.job_id, ok=True)
    hint(tiers, copied, (1, 2), CacheHint(priority=100))
    tiers.check()
    store(tiers, make_keys(2, first=60))
    assert places(tiers, [*own, *copied]) == [
        *[Place.HOST] * 4,
        *[Place.NOWHERE] * 2,
        *[Place.HOST] * 2,
    ]
    tiers.check()


def test_an_import_leaves_alone_what_its_request_needs() -> None:
    tiers, keys = make_hierarchy(num_host=3, num_disk=0), make_keys(5)
    store(tiers, keys[:2])
    job = tiers.plan_import(keys[2:], NOW_S, spares=keys)
    assert job is not None and job.keys == (keys[2],)
    assert tiers.plan_import(keys[3:], NOW_S, spares=keys) is None
    assert tiers.end(job.job_id, ok=False).tolist() == []
    assert places(tiers, keys) == [*[Place.HOST] * 2, *[Place.NOWHERE] * 3]


@pytest.mark.parametrize("ends", ["reset", "late"])
def test_an_import_that_is_no_longer_wanted_has_no_effect(ends: str) -> None:
    tiers, keys = make_hierarchy(), make_keys(2)
    job = tiers.plan_import(keys, NOW_S)
    assert job is not None
    if ends == "reset":
        tiers.reset()
    else:
        (late,) = tiers.expire(NOW_S + 1000)
        assert (late.job_id, late.kind) == (job.job_id, JobKind.IMPORT)
        assert tiers.is_disk_in_use
    assert places(tiers, keys) == [Place.NOWHERE] * 2
    assert tiers.end(job.job_id, ok=True).tolist() == []
    assert places(tiers, keys) == [Place.NOWHERE] * 2
    tiers.check()


def test_imports_have_the_limit_of_fetches() -> None:
    tiers, keys = make_hierarchy(options=HierarchyOptions(max_fetching_blocks=2)), make_keys(4)
    job = tiers.plan_import(keys, NOW_S)
    assert job is not None and len(job.keys) == 2
    assert tiers.plan_import(keys, NOW_S) is None
