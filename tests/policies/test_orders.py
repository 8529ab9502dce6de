"""The differences between policies, on a few entries."""

from __future__ import annotations

from tests.policies.tables import evict, make_policy, use


def test_lru2_evicts_by_the_last_use_but_one() -> None:
    policy, _ = make_policy("lru2")
    policy.insert([1, 2, 3])
    use(policy, 2, 1, 2)
    assert policy.order() == [3, 1, 2]
    use(policy, 3, 1)
    assert policy.order() == [3, 2, 1]


def test_s3fifo_lets_most_new_contents_go_soon() -> None:
    policy, table = make_policy("s3fifo")
    policy.insert(range(10))
    use(policy, 0, 0, 1, 2, 2, 2)
    # 0 and 2 were used twice and more; 1 once, which does not count yet.
    assert evict(policy, 4) == [1, 3, 4, 5]
    table.hold(20, 1)
    policy.insert([20])  # it comes back: to the main queue
    use(policy, 0)
    assert policy.order() == [6, 7, 8, 2, 20, 0, 9]


def test_arc_gives_room_to_the_side_whose_evicted_contents_come_back() -> None:
    policy, table = make_policy("arc")
    policy.insert(range(10))
    use(policy, *range(5))
    assert evict(policy, 3) == [5, 6, 7]
    for entry, content in ((20, 5), (21, 6), (22, 7)):
        table.hold(entry, content)
        policy.insert([entry])
    policy.insert([30, 31])
    # Three contents that were used once came back: that many of such may stay now.
    assert policy.order()[:2] == [8, 0]


def test_arc_gives_the_shorter_memory_more_weight() -> None:
    policy, table = make_policy("arc")
    policy.insert(range(20))
    use(policy, *range(19))
    assert evict(policy, 1) == [19]
    policy.insert([20])
    assert evict(policy, 7) == [20, 0, 1, 2, 3, 4, 5]
    policy.insert([21, 22, 23, 24, 25])
    table.hold(30, 19)  # of two that were used once, while six that were used again are remembered
    policy.insert([30])
    assert policy.order()[:3] == [21, 22, 6]
