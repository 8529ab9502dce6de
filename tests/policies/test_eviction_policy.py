"""Eviction policies by name, and what every one of them promises."""

from __future__ import annotations

import pytest

from kvcache.arrays import IndexArray, index_array
from kvcache.errors import ConfigurationError
from kvcache.policies import EVICTION_POLICIES, EntryInfo, make_eviction_policy


class Book:
    def __init__(self, weights: dict[int, int] | None = None) -> None:
        self._weights = weights or {}

    @property
    def is_uniform(self) -> bool:
        return not self._weights

    def weight(self, entry: int) -> int:
        return self._weights.get(entry, 1)

    def weights(self, entries: IndexArray) -> IndexArray:
        return index_array([self._weights.get(entry, 1) for entry in entries.tolist()])

    def describe(self, entry: int) -> EntryInfo:
        return EntryInfo(weight_blocks=self._weights.get(entry, 1))


def test_an_unknown_policy_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(ConfigurationError) as error:
        make_eviction_policy("random", 10, Book())
    assert str(error.value) == (
        "unknown eviction policy 'random': choose one of arc, fifo, hazard, lfu, lfu_da, lru, "
        "lru2, s3fifo, slru, twoq"
    )


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
def test_a_policy_gives_out_every_entry_once(name: str) -> None:
    policy = make_eviction_policy(name, 10, Book())
    policy.insert([1, 2, 3, 4, 5])
    policy.remove([2])
    policy.discard([4])
    assert len(policy) == 3
    assert (1 in policy, 2 in policy) == (True, False)
    order = policy.order()
    assert list(policy.choose(2).entries) == order[:2]
    policy.put_back(order[:2])
    assert policy.order() == order
    assert list(policy.choose(9).entries) == order
    assert len(policy) == 0


def test_lru_evicts_what_came_out_of_use_first() -> None:
    policy = make_eviction_policy("lru", 10, Book())
    policy.insert([3, 1])
    policy.insert([2])
    policy.remove([3])
    policy.insert([3])
    assert policy.order() == [1, 2, 3]


def test_of_a_run_only_the_tail_that_is_needed_goes() -> None:
    policy = make_eviction_policy("lru", 10, Book({1: 4, 2: 3}))
    policy.insert([1, 2])
    victims = policy.choose(6)
    assert (list(victims.entries), victims.num_blocks_of_last) == ([1, 2], 2)
