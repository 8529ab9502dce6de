"""Advice: affordable sizes, chosen shapes, and the value of a hit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import ConfigurationError
from kvcache.simulate.advice import (
    GIB,
    SHAPES,
    Candidate,
    HitCurve,
    MeasuredCandidate,
    Memory,
    Prices,
    Speeds,
    best_candidates,
    choose,
    choose_policy,
    measured,
)
from kvcache.simulate.opening import open_block_trace
from kvcache.simulate.simulated_cache import SimulatedCache
from kvcache.simulate.simulation import simulate

RISING = HitCurve([(10, 0.1), (100, 0.3), (1_000, 0.5), (10_000, 0.5)])
BYTES_PER_TOKEN = 128 * 2**10
TOKENS_PER_BLOCK = 512
BLOCK_BYTES = BYTES_PER_TOKEN * TOKENS_PER_BLOCK  # 16 blocks a GiB


def memory(budget: float, host: float | None = None, disk: float | None = None) -> Memory:
    return Memory(BLOCK_BYTES, Prices(16.0, host, disk), budget)  # a device block costs 1


def best(of: Memory, curve: HitCurve = RISING, least: int = 10) -> dict[str, SimulatedCache]:
    found = best_candidates({"lru": curve}, of, Speeds(), TOKENS_PER_BLOCK, least)
    assert all(candidate.cost <= of.budget + 1e-9 for candidate in found)
    return {candidate.shape: candidate.cache for candidate in found}


def test_a_curve_is_straight_over_the_logarithm_and_level_behind_its_end() -> None:
    assert RISING.rate(100) == 0.3
    assert RISING.rate(316) == pytest.approx(0.4, abs=0.001)
    assert RISING.rate(10**6) == 0.5
    assert (RISING.rate(5), RISING.rate(0)) == (0.05, 0.0)


def test_a_hit_is_worth_the_prefill_it_saves_less_its_transfer() -> None:
    speeds = Speeds(10_000.0, host_bytes_per_s=12.5 * GIB, disk_bytes_per_s=2.5 * GIB)
    device, host, disk = speeds.worth(BYTES_PER_TOKEN)
    transfer_s = BYTES_PER_TOKEN / (12.5 * GIB)
    assert device == 1.0
    assert host == pytest.approx(1 - transfer_s * 10_000)
    assert disk == pytest.approx(1 - 6 * transfer_s * 10_000)
    assert Speeds(10**9).worth(BYTES_PER_TOKEN) == (1.0, 0.0, 0.0)


def test_money_is_not_spent_on_useless_memory() -> None:
    cache = best(memory(5_000))["device"]
    assert cache.num_blocks is not None
    assert 950 <= cache.num_blocks <= 1_150  # the curve is level behind 1,000


@pytest.mark.parametrize("budget", [5_000, 10**6, 10**12])
def test_more_money_than_everything_costs_changes_nothing(budget: float) -> None:
    """1,000 blocks hit all that can be hit; money beyond that does not matter."""
    level = HitCurve([(10, 0.1), (100, 0.3), (1_000, 0.5)])
    assert best(memory(budget), level) == best(memory(1_000), level)
    tiers = best(memory(budget, host=1e-9, disk=1e-12), level)
    assert all(cache.host_blocks <= 1_000 for cache in tiers.values())


def test_a_trace_of_one_request_gets_what_it_needs() -> None:
    for least in range(1, 60):
        single = HitCurve([(least, 0.0)])
        costly = Memory(BLOCK_BYTES, Prices(0.07), 10**6)
        assert best(costly, single, least)["device"].num_blocks == least


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_speeds_that_cannot_be_meant_are_refused(speed: float) -> None:
    for speeds in ((speed, 1.0, 1.0), (1.0, speed, 1.0), (1.0, 1.0, speed)):
        with pytest.raises(ConfigurationError, match="a second: give numbers above 0"):
            Speeds(*speeds)


def test_cheap_tiers_are_used_where_they_are_worth_it() -> None:
    plain = best(memory(120))
    assert list(plain) == ["device"]
    with_host = best(memory(120, host=1.0))
    assert with_host[SHAPES[1]].host_blocks > 500
    assert list(best(memory(120, host=20.0))) == ["device"]
    steep = HitCurve([(10, 0.1), (100_000, 0.9)])
    with_disk = best(memory(120, host=1.0, disk=0.01), steep)
    assert with_disk[SHAPES[2]].disk_blocks > with_disk[SHAPES[1]].host_blocks
    assert best(memory(120, host=1.0), least=100)[SHAPES[1]].num_blocks == 100


def test_a_tier_that_is_too_slow_gets_nothing() -> None:
    slow = Speeds(10**9)
    curves = {"lru": RISING}
    found = best_candidates(curves, memory(120, host=1.0), slow, TOKENS_PER_BLOCK, 10)
    assert [candidate.shape for candidate in found] == ["device"]


def test_the_better_policy_is_chosen_at_the_size_that_is_paid() -> None:
    curves = {
        "early": HitCurve([(10, 0.2), (1_000, 0.3)]),
        "late": HitCurve([(10, 0.1), (1_000, 0.6)]),
    }
    curves = {"lru2": curves["early"], "arc": curves["late"]}
    for budget, policy in ((12.0, "lru2"), (1_000.0, "arc")):
        (found,) = best_candidates(curves, memory(budget), Speeds(), TOKENS_PER_BLOCK, 10)
        assert found.cache.policy == policy


def test_too_little_money_for_the_longest_request_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        best(memory(9.5), least=10)
    assert str(caught.value) == (
        "a budget of 9.5 buys 9 blocks of the device, the longest request needs 10: give at least "
        "10"
    )
    assert best(memory(10.0), least=10)["device"].num_blocks == 10


def test_the_advice_equals_the_simulation() -> None:
    trace = open_block_trace("agents", limit=150)
    size = trace.most_blocks
    caches = [SimulatedCache("lru", size), SimulatedCache("lru", size, 4 * size)]
    results = [simulate(trace, cache, VirtualClock()) for cache in caches]
    speeds, costly = Speeds(), memory(10**6, host=1.0)
    found = best_candidates({"lru": RISING}, costly, speeds, TOKENS_PER_BLOCK, 10)
    both = [
        measured(candidate, result, speeds, BYTES_PER_TOKEN)
        for candidate, result in zip([found[0], found[0]], results, strict=True)
    ]
    device, tiers = both
    assert device.saved == results[0].hit_rate
    assert device.saved < tiers.saved < results[1].hit_rate
    assert choose(both) is tiers
    assert choose([device]) is device


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ((0.0,), "--device-price is 0.0: give a price above 0"),
        ((1.0, -2.0), "--host-price is -2.0: give a price above 0"),
        ((1.0, None, 1.0), "--disk-price without --host-price: what goes to disk comes from host"),
    ],
)
def test_prices_that_cannot_be_meant_are_refused(prices: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Prices(*prices)
    assert str(caught.value).startswith(message)


def rival(policy: str, *hits: int, saved: float | None = None) -> MeasuredCandidate:
    """A policy that has these hits of 1,000 references in the parts of a trace."""
    cache = SimulatedCache(policy, 500)
    saved = sum(hits) / (1_000 * len(hits)) if saved is None else saved
    trace = open_block_trace("chat", limit=1)
    result = replace(
        simulate(trace, cache, VirtualClock()),
        num_hits_over_time=hits,
        num_references_over_time=(1_000,) * len(hits),
    )
    return MeasuredCandidate(Candidate("device", cache, 1.0, saved, saved), result, saved)


def test_a_policy_is_advised_if_it_wins_as_a_whole_and_does_not_lose_most_parts() -> None:
    usual = rival("lru", 300, 300, 300, 300)

    def advised(*rivals: MeasuredCandidate) -> str:
        return choose_policy(rivals, "lru").result.cache.policy

    assert advised(usual) == "lru"
    assert advised(rival("arc", 310, 310, 310, 310), usual) == "arc"
    assert advised(usual, rival("arc", 299, 299, 320, 320)) == "arc"  # behind in half of them
    assert advised(usual, rival("arc", 299, 299, 299, 900)) == "lru"  # won once
    assert advised(usual, rival("arc", 302, 302, 302, 302)) == "lru"  # no notable gain
    assert advised(usual, rival("arc", 200, 310, 310, 310)) == "lru"  # less as a whole
    assert advised(rival("lru", saved=0.3), rival("arc", saved=0.4)) == "lru"  # too short
    late, steady = rival("arc", 299, 299, 299, 900), rival("lru2", 305, 305, 305, 305)
    assert advised(late, usual, steady, rival("s3fifo", 304, 304, 304, 304)) == "lru2"


def test_a_trace_is_told_in_tenths(tmp_path: Path) -> None:
    trace = open_block_trace("chat", limit=205, seed=1)
    result = simulate(trace, SimulatedCache("lru", 500), VirtualClock())
    rates = result.hit_rates_over_time
    assert len(rates) == 10
    assert min(rates) < result.hit_rate < max(rates)
    tiers = simulate(trace, SimulatedCache("lru", 500, 500), VirtualClock())
    assert len(tiers.hit_rates_over_time) == 10
    few = simulate(open_block_trace("chat", limit=9), SimulatedCache("lru", 500), VirtualClock())
    assert few.hit_rates_over_time == ()
