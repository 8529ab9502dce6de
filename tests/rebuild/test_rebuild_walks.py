"""Random work, damaged labels, rebuilds: kept blocks and hits equal those of a slow model."""

from __future__ import annotations

import pytest

from tests.agreement.configurations import (
    CONFIGURATIONS,
    EVERYTHING,
    Configuration,
    Family,
    Operation,
)
from tests.core.builders import full, mamba, window
from tests.rebuild.walk import REST, RebuildWalk

NO_IMAGES = EVERYTHING - {Operation.IMAGES}

COARSE = (
    Configuration("coarse full", (full(8), window(9)), NO_IMAGES),
    Configuration("coarse full, images", (full(8), window(9))),
    Configuration("no block of one unit", (full(12), full(8)), NO_IMAGES),
    Configuration("coarse full, coarse window", (full(12), window(9, 8)), NO_IMAGES),
    Configuration("coarse full, states", (full(8), mamba(block_size=16), window(5)), NO_IMAGES),
    Configuration("two windows", (window(6), window(13))),
)
"""Plans without a prefix group whose blocks are one unit long."""

EVERY_WALK = [(c, family) for c in (*CONFIGURATIONS, *COARSE) for family in Family]
IDS = [f"{c.name}-{family.value}" for c, family in EVERY_WALK]

LONG_OPERATIONS = 6 * REST


@pytest.mark.seeds(6, 9)
@pytest.mark.parametrize(("configuration", "family"), EVERY_WALK, ids=IDS)
def test_a_rebuild_keeps_what_all_ranks_agree_on(
    configuration: Configuration, family: Family, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another seed is tried if a walk's cache was empty at every rebuild."""
    num_kept = 0
    for seed in seeds if configuration.can_hit else seeds[:1]:
        with monkeypatch.context() as patch:
            walk = RebuildWalk(configuration, family, seed, patch)
            walk.go(REST)
        num_kept += walk.num_kept
        if num_kept:
            break
    assert bool(num_kept) == configuration.can_hit


@pytest.mark.long
@pytest.mark.seeds(100, 103)
@pytest.mark.parametrize(("configuration", "family"), EVERY_WALK, ids=IDS)
def test_long_walks_are_rebuilt_again_and_again(
    configuration: Configuration, family: Family, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in seeds:
        with monkeypatch.context() as patch:
            RebuildWalk(configuration, family, seed, patch).go(LONG_OPERATIONS)
