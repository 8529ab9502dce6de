"""The suite itself: it sees broken cores, and allows what is allowed, no more."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from tests.agreement.allowances import differences
from tests.agreement.configurations import Family, configuration_named
from tests.agreement.mistakes import (
    MISTAKES,
    VARIANT,
    GivesCopiesBackEmpty,
    Planted,
    made_from,
    with_variant,
)
from tests.agreement.walk import Walk

MOST_SEEDS = 12


def first_failure(planted: Planted, family: Family, cores: Sequence[str]) -> str | None:
    """Walk until something is found; say what."""
    for seed in range(MOST_SEEDS):
        for name in planted.configurations:
            configuration = configuration_named(name)
            walk = Walk(configuration, family, seed, cores, with_variant(planted.factory))
            try:
                walk.go()
            except AssertionError as error:
                return str(error)
    return None


@pytest.mark.parametrize("planted", MISTAKES, ids=lambda planted: planted.name)
def test_a_broken_core_does_not_agree(planted: Planted) -> None:
    found = first_failure(planted, Family.EXACT_PRESSURE, ("blocks", VARIANT))
    assert found is not None
    assert re.search(planted.message, found, re.DOTALL), found


@pytest.mark.parametrize(
    "planted",
    [m for m in MISTAKES if m.name in ("mixes tenants", "forgets copies", "forgets to unlabel")],
    ids=lambda planted: planted.name,
)
def test_a_core_that_walks_alone_is_caught_by_the_truth(planted: Planted) -> None:
    found = first_failure(planted, Family.DUPLICATES_PRESSURE, (VARIANT,))
    assert found is not None
    assert re.search("tokens demand|labelled", found), found


def test_how_often_a_walk_audits_does_not_change_what_it_does() -> None:
    walks = [
        Walk(configuration_named("full, window"), Family.DUPLICATES, 5, ("flat",), audit_one_in=n)
        for n in (1, 8)
    ]
    for walk in walks:
        walk.go(40)
    often, seldom = walks
    assert often.log == seldom.log
    assert often.audits.num_made > 4 * seldom.audits.num_made > 0


@pytest.mark.parametrize("family", [Family.EXACT_PRESSURE, Family.DUPLICATES])
@pytest.mark.parametrize("name", ["full", "full, window", "full, states"])
def test_a_core_that_keeps_one_block_per_content_agrees(name: str, family: Family) -> None:
    factories = with_variant(made_from(GivesCopiesBackEmpty))
    Walk(configuration_named(name), family, 1, ("blocks", VARIANT), factories).go(60)


def test_duplicates_excuse_fewer_cached_blocks_and_no_more_than_there_are() -> None:
    one, two = {"core.num_cached_blocks": 9}, {"core.num_cached_blocks": 7}
    assert differences(Family.DUPLICATES, one, two, surplus=2) == []
    assert differences(Family.DUPLICATES, one, two, surplus=1) != []
    assert differences(Family.DUPLICATES, two, one, surplus=2) != []
    assert differences(Family.EXACT_PRESSURE, one, two, surplus=2) == [
        "core.num_cached_blocks:\n    9 and 7"
    ]


def test_duplicates_excuse_no_other_hits_and_no_other_events() -> None:
    for name, value in (("hit tokens", 8), ("events", {"stored": 1}), ("table shapes", [1])):
        assert differences(Family.DUPLICATES, {name: 0}, {name: value}, surplus=99) != []


def test_duplicates_excuse_states_that_moved_on_and_no_others() -> None:
    one, two = {"state tables": {"a": [[True, True]]}}, {"state tables": {"a": [[False, True]]}}
    longer = {"state tables": {"a": [[True, True, True]]}}
    assert differences(Family.DUPLICATES, one, two, surplus=0) == []
    assert differences(Family.DUPLICATES, two, one, surplus=99) != []
    assert differences(Family.DUPLICATES, one, longer, surplus=99) != []
    assert differences(Family.EXACT, one, two, surplus=99) != []
