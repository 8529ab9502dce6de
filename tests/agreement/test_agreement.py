"""Random walks over two cores with the same operations: what they do must be the same."""

from __future__ import annotations

import pytest

from tests.agreement.configurations import CONFIGURATIONS, Configuration, Family
from tests.agreement.walk import replay

SHORT = {
    Family.EXACT: (1, 45),
    Family.EXACT_PRESSURE: (1, 100),
    Family.DUPLICATES: (1, 45),
    Family.DUPLICATES_PRESSURE: (1, 80),
}
"""Seeds and operations of each family in every run."""

LONG_SEEDS, LONG_OPERATIONS = 4, 150

EVERY_WALK = [(c, family) for c in CONFIGURATIONS for family in c.families]
IDS = [f"{c.name}-{family.value}" for c, family in EVERY_WALK]


@pytest.mark.parametrize(("configuration", "family"), EVERY_WALK, ids=IDS)
def test_two_cores_agree(configuration: Configuration, family: Family) -> None:
    num_seeds, num_operations = SHORT[family]
    for seed in range(num_seeds):
        replay(configuration, family, seed, num_operations)


@pytest.mark.long
@pytest.mark.parametrize(("configuration", "family"), EVERY_WALK, ids=IDS)
def test_two_cores_agree_for_long(configuration: Configuration, family: Family) -> None:
    for seed in range(100, 100 + LONG_SEEDS):
        replay(configuration, family, seed, LONG_OPERATIONS)
