"""Eviction policies by name, and their common guarantees."""

from __future__ import annotations

import random

import pytest

from kvcache.base.errors import ConfigurationError
from kvcache.policies import (
    EVICTION_POLICIES,
    LRUPolicy,
    make_eviction_policy,
    require_eviction_policy,
)
from kvcache.policies.registry import SUCCESSORS
from tests.manager.managers_under_test import FULL, make_manager
from tests.policies.tables import WrittenTable, evict

NUM_ENTRIES = 200


def test_an_unknown_policy_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(ConfigurationError) as error:
        make_eviction_policy("random", 10, WrittenTable())
    assert str(error.value) == (
        "unknown eviction policy 'random': choose one of adaptive, arc, lru, lru2, s3fifo"
    )


@pytest.mark.parametrize("name", sorted(SUCCESSORS))
def test_a_removed_policy_is_replaced_with_a_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        manager = make_manager(FULL, 20, eviction_policy=name)
    assert f"the eviction policy {name} was removed, and adaptive takes its place" in caplog.text
    assert manager.usage == 0
    own = {**EVICTION_POLICIES, name: LRUPolicy}
    assert require_eviction_policy(name, own) == name


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
@pytest.mark.seeds(1, long=3)
def test_a_policy_gives_out_as_many_entries_as_are_wanted(name: str, seed: int) -> None:
    choose = random.Random(seed)
    policy = make_eviction_policy(name, NUM_ENTRIES, WrittenTable())
    inserted: set[int] = set()
    for _ in range(150):
        outside = sorted(set(range(NUM_ENTRIES)) - inserted)
        new = choose.sample(outside, min(len(outside), choose.randrange(30)))
        policy.insert(new)
        inserted.update(new)
        gone = choose.sample(sorted(inserted), min(len(inserted), choose.randrange(8)))
        choose.choice([policy.remove, policy.discard])(gone)
        inserted.difference_update(gone)
        order = policy.order()
        assert sorted(order) == sorted(inserted)
        count = min(choose.randrange(1, 40), len(order))
        entries = evict(policy, count)
        assert entries == order[:count]
        assert policy.order() == order[count:]
        kept = entries[choose.randrange(len(entries) + 1) :]
        policy.put_back(kept)
        inserted.difference_update(entries[: len(entries) - len(kept)])
        assert policy.order() == kept + order[count:]
