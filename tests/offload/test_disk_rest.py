"""A disk that fails: its contents are kept, and it rests for a while."""

from __future__ import annotations

import pytest

from kvcache.offload import HierarchyOptions, OffloadKey, Place, TierHierarchy
from kvcache.offload.disk_use import FIRST_REST_S, LONGEST_REST_S
from tests.offload.test_hierarchy import NOW_S, make_hierarchy, make_keys, places, spill, store


def on_disk(num_keys: int) -> tuple[TierHierarchy, list[OffloadKey]]:
    """A hierarchy that has these keys in files only."""
    tiers, keys = make_hierarchy(options=HierarchyOptions("on_store", 0.0)), make_keys(num_keys)
    store(tiers, keys)
    spill(tiers)
    tiers.host.forget(keys)
    return tiers, keys


def test_unread_files_are_kept_and_only_lost_ones_are_dropped() -> None:
    tiers, keys = on_disk(3)
    fetch = tiers.plan_fetch(keys, NOW_S)
    lost = int(fetch.addresses[1])
    assert not len(tiers.end(fetch.job_id, ok=False, lost=[lost]))
    assert places(tiers, keys) == [Place.DISK, Place.NOWHERE, Place.DISK]
    assert tiers.discards.take().keys == (keys[1],)
    tiers.check()


def test_what_arrived_is_not_forgotten_by_a_report_that_names_it_lost() -> None:
    tiers, keys = on_disk(2)
    fetch = tiers.plan_fetch(keys, NOW_S)
    first, second = fetch.addresses.tolist()
    tiers.end(fetch.job_id, ok=False, failed=[first], lost=[first, second, 99])
    assert places(tiers, keys) == [Place.NOWHERE, Place.HOST]
    assert tiers.discards.take().keys == (keys[0],)


def test_a_disk_that_rests_is_not_asked_and_is_asked_again_afterwards() -> None:
    tiers, keys = on_disk(2)
    tiers.disk_use.rest("it does not answer", NOW_S)
    assert places(tiers, keys) == [Place.NOWHERE] * 2
    assert tiers.plan_fetch(keys, NOW_S) is None
    statistics = tiers.statistics()
    assert (statistics.num_disk_rests, statistics.disk_problem) == (1, "it does not answer")
    tiers.expire(NOW_S + 0.9 * FIRST_REST_S)
    assert places(tiers, keys) == [Place.NOWHERE] * 2
    tiers.expire(NOW_S + FIRST_REST_S)
    assert places(tiers, keys) == [Place.DISK] * 2
    assert tiers.statistics().disk_problem == ""


def rests(tiers: TierHierarchy, now_s: float) -> float:
    """Let the disk rest, and return for how long."""
    tiers.disk_use.rest("it does not answer", now_s)
    for quarters in range(1, 1000):
        tiers.expire(now_s + quarters * 0.25)
        if tiers.is_disk_in_use:
            return quarters * 0.25
    raise AssertionError("it never ends its rest")


def test_rests_grow_up_to_a_bound_until_the_disk_serves() -> None:
    tiers, keys = on_disk(1)
    lengths = [rests(tiers, NOW_S) for _ in range(9)]
    assert lengths == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_REST_S, LONGEST_REST_S]
    fetch = tiers.plan_fetch(keys, NOW_S)
    tiers.end(fetch.job_id, ok=True)
    assert rests(tiers, NOW_S) == FIRST_REST_S


@pytest.mark.parametrize(("num_lost", "does_serve"), [(1, True), (0, False)])
def test_a_disk_that_reports_the_problem_of_a_file_serves(num_lost: int, does_serve: bool) -> None:
    tiers, keys = on_disk(2)
    assert rests(tiers, NOW_S) == FIRST_REST_S
    fetch = tiers.plan_fetch(keys, NOW_S)
    bad = fetch.addresses[:1].tolist()
    tiers.end(fetch.job_id, ok=False, failed=bad, lost=bad[:num_lost])
    assert rests(tiers, NOW_S) == (FIRST_REST_S if does_serve else 2 * FIRST_REST_S)


def test_failures_of_jobs_that_were_under_way_make_no_rest_longer() -> None:
    tiers, _ = on_disk(1)
    for _ in range(5):
        tiers.disk_use.rest("it does not answer", NOW_S)
    assert tiers.statistics().num_disk_rests == 1
    tiers.expire(NOW_S + FIRST_REST_S)
    assert tiers.is_disk_in_use


def test_a_disk_that_a_rank_cannot_use_is_left_for_good() -> None:
    tiers, keys = on_disk(2)
    tiers.disk_use.leave("rank 1 has none")
    tiers.expire(NOW_S + 1e6)
    assert not tiers.is_disk_in_use
    assert places(tiers, keys) == [Place.NOWHERE] * 2
    assert tiers.statistics().disk_problem == "rank 1 has none"


@pytest.mark.parametrize("num_keys", [6, 9])
def test_host_memory_goes_on_without_the_disk(num_keys: int) -> None:
    tiers = make_hierarchy(num_host=4)
    tiers.disk_use.leave("rank 1 has none")
    keys = make_keys(num_keys)
    for key in keys:
        assert store(tiers, [key]) == [key]
    assert spill(tiers) == []
    assert places(tiers, keys)[-4:] == [Place.HOST] * 4
