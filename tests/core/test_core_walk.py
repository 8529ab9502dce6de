"""The flat core against the slow one: the same hits, blocks, evictions, events and counts."""

from __future__ import annotations

import pytest

from tests.core.core_walk import Walk
from tests.core.model_group import ModelGroup

PLANS = {
    "full": [ModelGroup(2)],
    "window": [ModelGroup(2, 5)],
    "window of one": [ModelGroup(2, 1)],
    "full and window": [ModelGroup(2), ModelGroup(2, 4)],
    "full and two windows": [ModelGroup(2), ModelGroup(2, 3), ModelGroup(2, 8)],
    "two equal windows": [ModelGroup(2, 6), ModelGroup(2), ModelGroup(2, 6)],
    "coarse full": [ModelGroup(4), ModelGroup(2, 5)],
    "coarse window": [ModelGroup(2), ModelGroup(6, 9), ModelGroup(4)],
}
OPERATIONS = 60

# Kinds that EAGLE cannot be used with, or that never hit: alone, and in hybrids of up to three.
MORE_PLANS = {
    "latent": [ModelGroup(2, is_latent=True)],
    "chunked": [ModelGroup(2, chunk=6)],
    "states": [ModelGroup(2, states="align")],
    "states and drafts": [ModelGroup(4, states="align", num_drafts=2)],
    "more drafts than a block": [ModelGroup(2, states="align", num_drafts=3)],
    "one state": [ModelGroup(2, states="none", num_drafts=1)],
    "encoder and full": [ModelGroup(2), ModelGroup(4, is_cross=True)],
    "full, window, chunked": [ModelGroup(4), ModelGroup(2, 5), ModelGroup(4, chunk=8)],
    "differing chunks": [ModelGroup(2), ModelGroup(6, chunk=12), ModelGroup(2, chunk=8)],
    "full and states": [ModelGroup(2), ModelGroup(4, states="align")],
    "full, window, states": [
        ModelGroup(2),
        ModelGroup(2, 5),
        ModelGroup(4, states="align", num_drafts=1),
    ],
    "window, chunked, states": [
        ModelGroup(4, 3),
        ModelGroup(2, chunk=4),
        ModelGroup(2, states="align"),
    ],
    "encoder, full, one state": [
        ModelGroup(2),
        ModelGroup(2, states="none", num_drafts=2),
        ModelGroup(4, is_cross=True),
    ],
}


@pytest.mark.seeds(7, long=28)
@pytest.mark.parametrize("use_eagle", [False, True], ids=["plain", "eagle"])
@pytest.mark.parametrize("groups", PLANS.values(), ids=PLANS.keys())
def test_the_flat_core_does_what_the_slow_one_does(
    groups: list[ModelGroup], use_eagle: bool, seeds: range
) -> None:
    for seed in seeds:
        Walk(seed, groups, use_eagle=use_eagle).go(OPERATIONS)


@pytest.mark.seeds(10)
@pytest.mark.parametrize("groups", MORE_PLANS.values(), ids=MORE_PLANS.keys())
def test_with_groups_of_any_kinds_it_does_so(groups: list[ModelGroup], seeds: range) -> None:
    walks = [Walk(seed, groups, use_eagle=False) for seed in seeds]
    for walk in walks:
        walk.go(OPERATIONS)
    assert any(walk.num_hits for walk in walks) == all(group.can_be_hit for group in groups)


@pytest.mark.seeds(100, 105, long=120)
@pytest.mark.parametrize("groups", PLANS.values(), ids=PLANS.keys())
def test_where_duplicates_are_merged_it_does_so(groups: list[ModelGroup], seeds: range) -> None:
    for seed in seeds:
        Walk(seed, groups, use_eagle=False, merges=True).go(OPERATIONS)


def test_walks_come_to_forks_merges_and_hits() -> None:
    walks = [Walk(seed, [ModelGroup(2)], use_eagle=False, merges=True) for seed in range(20)]
    for walk in walks:
        walk.go(OPERATIONS)
    assert sum(walk.num_merges for walk in walks) > 3
    assert sum(walk.num_forks for walk in walks) > 10
    assert sum(walk.num_hits for walk in walks) > 10
