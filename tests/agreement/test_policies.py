"""Under any policy, requests that a step admits together fare like those that it admits one by one.

The slow core has LRU alone, so two flat cores are compared: one refuses to admit requests together,
so Python asks the policy for each; in the other, compiled code does, in the middle of a step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcache.core import CoreSettings
from kvcache.core.flat_core import CoreFactory, FlatCore
from kvcache.policies import EVICTION_POLICIES
from tests.agreement.configurations import Family, configuration_named
from tests.agreement.walk import Walk

POLICIES = [policy for policy in EVICTION_POLICIES if policy != "lru"]
NAMES = ("full", "full, window", "full, states", "hints: full, window")


class OneByOne(FlatCore):
    """Admits no requests together."""

    def admit_rows(self, *_: Any) -> None:
        return None


def with_policy(core_class: type[FlatCore], policy: str) -> CoreFactory:
    def make(settings: CoreSettings) -> FlatCore:
        return core_class(replace(settings, eviction_policy=policy))

    return make


@pytest.mark.seeds(1, long=6)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", POLICIES)
def test_requests_admitted_together_fare_like_single_ones(
    policy: str, name: str, seeds: range
) -> None:
    cores = {
        "together": with_policy(FlatCore, policy),
        "single": with_policy(OneByOne, policy),
    }
    for seed in seeds:
        Walk(configuration_named(name), Family.PRESSURE, seed, tuple(cores), cores).go()
