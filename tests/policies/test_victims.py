"""LRU over entries of different weights: which entries go, and how much of the last one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcache.arrays import IndexArray
from kvcache.policies import EVICTION_POLICIES, EntryInfo, EvictionPolicy, make_eviction_policy

NUM_ENTRIES = 600


class WeightedBook:
    """Every entry weighs as many blocks as it was given."""

    is_uniform = False

    def __init__(self, weights: IndexArray) -> None:
        self._weights = weights

    def weight(self, entry: int) -> int:
        return int(self._weights[entry])

    def weights(self, entries: IndexArray) -> IndexArray:
        chosen: IndexArray = self._weights[np.asarray(entries, dtype=np.intp)]
        return chosen

    def describe(self, entry: int) -> EntryInfo:
        return EntryInfo(weight_blocks=int(self._weights[entry]))


def make_policy(name: str, choose: random.Random) -> tuple[EvictionPolicy, IndexArray]:
    weights = np.array([choose.randrange(1, 40) for _ in range(NUM_ENTRIES)], dtype=np.intp)
    return make_eviction_policy(name, NUM_ENTRIES, WeightedBook(weights)), weights


def expected_victims(order: list[int], weights: IndexArray, num_blocks: int) -> tuple[int, int]:
    """Return how many entries of `order` go, and how many blocks of the last one."""
    missing = num_blocks
    for count, entry in enumerate(order, 1):
        if weights[entry] >= missing:
            return count, missing
        missing -= int(weights[entry])
    return len(order), int(weights[order[-1]]) if order else num_blocks


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 3))]
)
def test_a_policy_gives_out_as_many_blocks_as_are_wanted_and_no_entry_more(
    name: str, seed: int
) -> None:
    print(f"seed {seed}")
    choose = random.Random(seed)
    policy, weights = make_policy(name, choose)
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
        num_blocks = choose.randrange(1, 500)
        victims = policy.choose(num_blocks)
        entries = [int(entry) for entry in victims.entries]
        count, num_of_last = expected_victims(order, weights, num_blocks)
        assert entries == order[:count]
        if order:
            assert victims.num_blocks_of_last == num_of_last
        assert policy.order() == order[count:]
        kept = entries[choose.randrange(len(entries) + 1) :]
        policy.put_back(kept)
        inserted.difference_update(entries[: len(entries) - len(kept)])
        assert policy.order() == kept + order[count:]


def test_lru_keeps_the_order_of_entries_that_are_put_back() -> None:
    weights = np.array([1, 5, 5, 5], dtype=np.intp)
    policy = make_eviction_policy("lru", 4, WeightedBook(weights))
    policy.insert([3, 1, 2])
    victims = policy.choose(8)
    assert ([int(entry) for entry in victims.entries], victims.num_blocks_of_last) == ([3, 1], 3)
    policy.put_back([1])
    assert policy.order() == [1, 2]
    assert policy.choose(100).num_blocks_of_last == 5
