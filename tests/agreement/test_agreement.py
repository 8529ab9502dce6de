"""Random walks over the flat core and the slow one with the same operations: nothing may differ."""

from __future__ import annotations

import pytest

from kvcache.policies import hinted
from tests.agreement.configurations import (
    CONFIGURATIONS,
    DENSE,
    Configuration,
    Family,
    configuration_named,
)
from tests.agreement.walk import replay

SHORT_OPERATIONS = {Family.ROOM: 50, Family.PRESSURE: 70}
LONG_OPERATIONS = 150
DENSE_OPERATIONS = 110

EVERY_WALK = [(c, family) for c in CONFIGURATIONS for family in Family]
IDS = [f"{c.name}-{family.value}" for c, family in EVERY_WALK]
DENSE_WALKS = [(c, family) for c in DENSE for family in Family]
DENSE_IDS = [f"{c.name}-{family.value}" for c, family in DENSE_WALKS]


@pytest.fixture(autouse=True)
def _few_claims_earn_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hinted, "_FEW_CLAIMS", 1)


@pytest.mark.seeds(2)
@pytest.mark.parametrize(("configuration", "family"), EVERY_WALK, ids=IDS)
def test_the_flat_core_does_what_the_slow_one_does(
    configuration: Configuration, family: Family, seeds: range
) -> None:
    num_hit = 0
    for seed in seeds:
        num_hit += replay(configuration, family, seed, SHORT_OPERATIONS[family]).num_hit_tokens
    assert (num_hit > 0) == configuration.can_hit


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("forks: full, states", Family.PRESSURE),
        ("forks: full, window", Family.ROOM),
        ("losses: full", Family.PRESSURE),
        ("losses: full, chunked", Family.ROOM),
    ],
)
def test_it_does_so_where_forks_and_losses_are_frequent(name: str, family: Family) -> None:
    replay(configuration_named(name), family, 0, DENSE_OPERATIONS)


@pytest.mark.long
@pytest.mark.seeds(2)
@pytest.mark.parametrize(("configuration", "family"), DENSE_WALKS, ids=DENSE_IDS)
def test_it_does_so_where_forks_and_losses_are_frequent_for_long(
    configuration: Configuration, family: Family, seeds: range
) -> None:
    for seed in seeds:
        replay(configuration, family, seed, DENSE_OPERATIONS)


@pytest.mark.long
@pytest.mark.seeds(100, 104)
@pytest.mark.parametrize(("configuration", "family"), EVERY_WALK, ids=IDS)
def test_it_does_so_for_long(configuration: Configuration, family: Family, seeds: range) -> None:
    for seed in seeds:
        replay(configuration, family, seed, LONG_OPERATIONS)
