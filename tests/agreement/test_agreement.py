"""Random walks over two cores with the same operations: what they do must be the same."""

from __future__ import annotations

import pytest

from tests.agreement.configurations import (
    CONFIGURATIONS,
    DENSE,
    Configuration,
    Family,
    configuration_named,
)
from tests.agreement.walk import replay

SHORT = {
    Family.EXACT: (1, 30),
    Family.EXACT_PRESSURE: (1, 70),
    Family.DUPLICATES: (1, 40),
    Family.DUPLICATES_PRESSURE: (1, 50),
}
"""Seeds and operations of each family in every run."""

LONG_SEEDS, LONG_OPERATIONS = 4, 150

EVERY_WALK = [(c, family) for c in CONFIGURATIONS for family in c.families]
IDS = [f"{c.name}-{family.value}" for c, family in EVERY_WALK]

DENSE_SEEDS, DENSE_OPERATIONS = 2, 110

DENSE_WALKS = [(c, family) for c in DENSE for family in c.families if family is not Family.EXACT]
DENSE_IDS = [f"{c.name}-{family.value}" for c, family in DENSE_WALKS]


@pytest.mark.parametrize(("configuration", "family"), EVERY_WALK, ids=IDS)
def test_two_cores_agree(configuration: Configuration, family: Family) -> None:
    num_seeds, num_operations = SHORT[family]
    for seed in range(num_seeds):
        replay(configuration, family, seed, num_operations)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("forks: full, states", Family.EXACT_PRESSURE),
        ("forks: full, window", Family.DUPLICATES),
        ("losses: full", Family.EXACT_PRESSURE),
        ("losses: full, chunked", Family.DUPLICATES),
    ],
)
def test_two_cores_agree_where_forks_and_losses_are_frequent(name: str, family: Family) -> None:
    replay(configuration_named(name), family, 0, DENSE_OPERATIONS)


@pytest.mark.long
@pytest.mark.parametrize(("configuration", "family"), DENSE_WALKS, ids=DENSE_IDS)
def test_two_cores_agree_where_forks_and_losses_are_frequent_for_long(
    configuration: Configuration, family: Family
) -> None:
    for seed in range(DENSE_SEEDS):
        replay(configuration, family, seed, DENSE_OPERATIONS)


@pytest.mark.long
@pytest.mark.parametrize(("configuration", "family"), EVERY_WALK, ids=IDS)
def test_two_cores_agree_for_long(configuration: Configuration, family: Family) -> None:
    for seed in range(100, 100 + LONG_SEEDS):
        replay(configuration, family, seed, LONG_OPERATIONS)
