"""The common guarantees of all policies."""

from __future__ import annotations

import random

import pytest

from kvcache.policies import EVICTION_POLICIES, EntryInfo
from tests.core.footprint import footprint_bytes
from tests.policies.tables import evict, make_policy, name_of, use

NAMES = sorted(EVICTION_POLICIES)
READING = [name for name in NAMES if make_policy(name)[0].reads_contents]


def test_some_policies_read_contents_from_infos() -> None:
    assert set(READING) == {"arc", "lru2", "s3fifo"}


@pytest.mark.parametrize("name", NAMES)
def test_the_order_equals_choosing_one_by_one(name: str) -> None:
    policy, _ = make_policy(name)
    policy.insert(range(20))
    use(policy, 3, 5, 3, 3, 11, 12, 5)
    order = policy.order()
    assert policy.order() == order
    assert [evict(policy, 1) for _ in range(20)] == [[entry] for entry in order]
    assert evict(policy, 1) == []


@pytest.mark.parametrize("name", NAMES)
def test_entries_that_are_put_back_keep_their_places(name: str) -> None:
    policy, _ = make_policy(name)
    policy.insert(range(20))
    use(policy, 3, 5, 3, 3, 11, 12, 5)
    order = policy.order()
    chosen = [*evict(policy, 7), *evict(policy, 3)]
    assert (len(policy), chosen[0] in policy, order[10] in policy) == (10, False, True)
    policy.put_back(chosen)
    assert (len(policy), policy.order()) == (20, order)
    policy.remove([chosen[1]])
    policy.discard([chosen[2]])
    assert policy.order() == [order[0], *order[3:]]


@pytest.mark.parametrize("name", ["adaptive", "arc", "lru2"])
def test_to_look_at_the_next_victims_costs_them_nothing(name: str) -> None:
    looked_at, _ = make_policy(name)
    other, _ = make_policy(name)
    for policy in (looked_at, other):
        policy.insert(range(10))
        use(policy, 3, 4)
    looked_at.put_back(evict(looked_at, 9))
    for policy in (looked_at, other):
        policy.insert([20, 21])
        use(policy, 20, 3)
    assert looked_at.order() == other.order()


@pytest.mark.parametrize("name", READING)
def test_a_parent_waits_for_its_children_and_goes_behind_the_last(name: str) -> None:
    policy, table = make_policy(name)
    table.infos[1] = EntryInfo(content=name_of(1), num_children=2)
    table.infos[7] = EntryInfo(content=name_of(7), parent=1)
    table.infos[8] = EntryInfo(content=name_of(8), parent=1)
    policy.insert([1])  # no owner does that, but a parent's rank can come to be the lowest
    policy.insert([7, 9])
    policy.insert([8, 10])
    assert policy.order() == [7, 9, 8, 1, 10]
    assert evict(policy, 1) == [7]
    table.infos[1] = EntryInfo(content=name_of(1), num_children=1)
    assert evict(policy, 1) == [9]
    policy.discard([8])
    table.infos[1] = EntryInfo(content=name_of(1))
    assert policy.order() == [1, 10]


@pytest.mark.parametrize("name", READING)
def test_a_parent_whose_children_stay_goes_when_nothing_else_is_left(name: str) -> None:
    policy, table = make_policy(name)
    table.infos[1] = EntryInfo(content=name_of(1), num_children=1)
    policy.insert([1, 2])
    assert evict(policy, 9) == [2, 1]
    policy.put_back([1])
    assert policy.order() == [1]


@pytest.mark.parametrize("name", READING)
def test_a_content_is_known_although_its_entry_was_given_to_another_meanwhile(name: str) -> None:
    policy, table = make_policy(name)
    same, _ = make_policy(name)
    for each in (policy, same):
        each.insert([1, 2, 3])
        each.remove([1, 2])
    table.hold(1, 2)  # the content of 2 comes back as 1, another one as 2
    table.hold(2, 50)
    policy.insert([1, 2])
    same.insert([2, 50])
    assert [{1: 2, 2: 50}.get(entry, entry) for entry in policy.order()] == same.order()


class Churn:
    """New contents; some are used, dropped while in use, or come back."""

    def __init__(self, name: str, capacity: int) -> None:
        self.policy, self.table = make_policy(name, capacity)
        self.rng = random.Random(1)
        self.free = list(range(capacity))
        self.num_served = 0

    def serve(self, count: int) -> None:
        rng, policy = self.rng, self.policy
        for number in range(self.num_served, self.num_served + count):
            if not self.free:
                self.free += evict(policy, 2)
            entry = self.free.pop()
            self.table.hold(entry, number if rng.random() < 0.7 else rng.randrange(number + 1))
            policy.insert([entry])
            use(policy, *rng.sample(policy.order(), min(3, len(policy))))
            if number % 5 == 0:
                forgotten = policy.order()[-1]
                policy.remove([forgotten])
                self.free.append(forgotten)
            policy.put_back(evict(policy, 3))
        self.num_served += count

    def footprint_bytes(self) -> int:
        """Return the policy's memory, without names, which the table holds too."""
        return footprint_bytes((self.policy, self.table)) - footprint_bytes(self.table)


@pytest.mark.parametrize("name", NAMES)
def test_memory_stays_in_proportion_to_the_entries(name: str) -> None:
    churn = Churn(name, 20)
    churn.serve(2_000)  # more than is remembered
    before = churn.footprint_bytes()
    churn.serve(2_000)
    assert churn.footprint_bytes() <= 1.3 * before
