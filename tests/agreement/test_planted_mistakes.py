"""Tests of the suite itself: it finds broken cores."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from kvcache.base.errors import KVCacheError
from tests.agreement.configurations import Family, configuration_named
from tests.agreement.mistakes import MISTAKES, VARIANT, Planted, with_variant
from tests.agreement.walk import Walk, differences

MOST_SEEDS = 12


def first_failure(planted: Planted, cores: Sequence[str]) -> str | None:
    """Walk until a difference is found; return its message."""
    for seed in range(MOST_SEEDS):
        for name in planted.configurations:
            configuration = configuration_named(name)
            factories = with_variant(planted.make)
            walk = Walk(configuration, Family.PRESSURE, seed, cores, factories)
            try:
                walk.go()
            except (AssertionError, KVCacheError) as error:
                return str(error)
    return None


@pytest.mark.parametrize("planted", MISTAKES, ids=lambda planted: planted.name)
def test_a_broken_core_does_not_agree(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, wrong in planted.patches:
        monkeypatch.setattr(owner, name, wrong)
    found = first_failure(planted, (VARIANT, "slow"))
    assert found is not None
    assert re.search(planted.message, found, re.DOTALL), found


@pytest.mark.parametrize(
    "planted",
    [m for m in MISTAKES if m.name in ("mixes tenants", "forgets copies", "forgets to unlabel")],
    ids=lambda planted: planted.name,
)
def test_a_core_that_walks_alone_is_caught_by_the_truth(planted: Planted) -> None:
    found = first_failure(planted, (VARIANT,))
    assert found is not None
    assert re.search("tokens demand|labelled", found), found


def test_how_often_a_walk_audits_does_not_change_what_it_does() -> None:
    configuration = configuration_named("full, window")
    walks = [
        Walk(configuration, Family.ROOM, 5, ("flat",), audit_one_in=number) for number in (1, 8)
    ]
    for walk in walks:
        walk.go(40)
    often, seldom = walks
    assert often.log == seldom.log
    assert often.audits.num_made > 4 * seldom.audits.num_made > 0


def test_whatever_differs_is_told() -> None:
    assert differences({"a": 1, "b": 2}, {"a": 1, "b": 2}) == []
    assert differences({"a": 1, "b": 2}, {"a": 1, "b": 3}) == ["b:\n    2 and 3"]
    assert differences({"a": 1}, {"b": 1}) == ["facts ['a', 'b'] on one side only"]
