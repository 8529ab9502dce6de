"""Every policy against a slow one, over entries that are used, forgotten, evicted and kept."""

from __future__ import annotations

import random

import pytest

from kvcache.policies import EVICTION_POLICIES
from tests.policies import slow
from tests.policies.cache import Cache
from tests.policies.slow_adaptive import SlowAdaptive

SLOW_POLICIES = {**slow.SLOW_POLICIES, "adaptive": SlowAdaptive}


def make_cache(name: str, rng: random.Random, *, has_names: bool = True) -> Cache:
    return Cache(
        rng,
        EVICTION_POLICIES[name],
        SLOW_POLICIES[name],
        capacity=rng.choice([6, 15, 30]),
        has_names=has_names,
    )


def test_every_policy_has_a_slow_one() -> None:
    assert set(SLOW_POLICIES) == set(EVICTION_POLICIES)


@pytest.mark.seeds(1, long=6)
@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
def test_a_policy_does_what_its_slow_one_does(name: str, seed: int) -> None:
    make_cache(name, random.Random(seed)).walk(150)


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
def test_entries_without_names_are_known_by_their_numbers(name: str) -> None:
    make_cache(name, random.Random(7), has_names=False).walk(150)
