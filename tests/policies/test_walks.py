"""Every policy in the core: random walks of whole managers, and hit rates on a real trace.

After every operation the walks check that the state is consistent, that no cached block has lost
its parent, and that blocks hold what their tokens demand; at the end, that no block was lost.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvcache.base.clock import VirtualClock
from kvcache.core import CoreSettings
from kvcache.core.flat_core import FlatCore
from kvcache.policies import EVICTION_POLICIES, hinted
from kvcache.requests.hints import CacheHint
from kvcache.requests.request import Request
from kvcache.simulate import MooncakeTrace
from kvcache.simulate.counting import CountingOptions, count_prefill_hits
from kvcache.simulate.workload import LimitedWorkload
from tests.agreement.configurations import Family, configuration_named
from tests.agreement.walk import Walk

NAMES = sorted(set(EVICTION_POLICIES) - {"lru"})  # the agreement suite walks under LRU
WALKED = ("full", "full, window", "two full", "full, window, states", "window")
NUM_OPERATIONS = 60
NUM_LONG_OPERATIONS = 120

TRACE = Path(__file__).resolve().parents[3] / "shared/traces/mooncake_conversation.jsonl.gz"
NUM_LINES = 800


def walk(policy: str, configuration: str, seed: int, num_operations: int) -> Walk:
    def make(settings: CoreSettings) -> FlatCore:
        return FlatCore(replace(settings, eviction_policy=policy))

    one = Walk(
        configuration_named(configuration),
        Family.PRESSURE,
        seed,
        ["walked"],
        {"walked": make},
    )
    one.go(num_operations)
    return one


@pytest.mark.parametrize("policy", NAMES)
def test_a_core_stays_consistent_under_every_policy(policy: str) -> None:
    for seed, configuration in enumerate(WALKED[:3]):
        walk(policy, configuration, seed, NUM_OPERATIONS)


class HintedCore(FlatCore):
    """A core whose requests end with hints, drawn at random."""

    def __init__(self, settings: CoreSettings) -> None:
        super().__init__(replace(settings, clock=VirtualClock()))
        self.rng = random.Random(5)

    def free(self, request: Request) -> None:
        path = self.path_of(request)
        super().free(request)
        start = self.rng.choice([0, 5])
        hints = [
            CacheHint(start, is_over=True),
            CacheHint(start, returns_in_s=self.rng.choice([1.0, 5.0])),
            CacheHint(start, priority=self.rng.choice([0, 80]), duration_s=3.0),
        ]
        self.cache.hint(path, [self.rng.choice(hints)])
        self.cache.order._clock.advance(0.5)  # type: ignore[union-attr,attr-defined]


@pytest.mark.parametrize("configuration", WALKED)
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_core_stays_consistent_under_hints(
    policy: str, configuration: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hinted, "_FEW_CLAIMS", 1)

    def make(settings: CoreSettings) -> FlatCore:
        return HintedCore(replace(settings, eviction_policy=policy))

    one = Walk(configuration_named(configuration), Family.PRESSURE, 3, ["walked"], {"walked": make})
    one.go(NUM_OPERATIONS)


@pytest.mark.long
@pytest.mark.seeds(10, 12)
@pytest.mark.parametrize("policy", NAMES)
def test_a_core_stays_consistent_under_every_policy_for_long(policy: str, seeds: range) -> None:
    for seed in seeds:
        for configuration in WALKED:
            walk(policy, configuration, seed, NUM_LONG_OPERATIONS)


@pytest.mark.skipif(not TRACE.exists(), reason=f"the conversation trace is not at {TRACE}")
@pytest.mark.parametrize(("policy", "hit_rate"), [("lru2", 0.0563), ("arc", 0.0441)])
def test_hit_rates_on_the_opening_of_the_conversation_trace(policy: str, hit_rate: float) -> None:
    options = CountingOptions(1_500, eviction_policy=policy, hash_algorithm="xxh3_128")
    opening = LimitedWorkload(MooncakeTrace(TRACE), NUM_LINES)
    count = count_prefill_hits(opening, options, VirtualClock())
    assert count.hit_rate == pytest.approx(hit_rate, abs=0.002)
