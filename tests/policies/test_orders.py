"""The differences between policies, on a few entries."""

from __future__ import annotations

from tests.policies.books import evict, make_policy, use


def test_fifo_does_not_care_for_uses() -> None:
    policy, _ = make_policy("fifo")
    policy.insert([3, 1, 2])
    use(policy, 3, 3, 1)
    assert policy.order() == [3, 1, 2]


def test_lfu_evicts_what_was_used_least_and_of_equals_the_least_recent() -> None:
    policy, _ = make_policy("lfu")
    policy.insert([1, 2, 3, 4])
    use(policy, 1, 1, 3, 2)
    assert policy.order() == [4, 3, 2, 1]


def test_lfu_remembers_the_uses_of_what_it_evicted() -> None:
    policy, book = make_policy("lfu")
    policy.insert([1, 2, 3, 4])
    use(policy, 1, 1, 2, 3, 4)
    policy.discard([1])
    use(policy, 2, 3, 3, 4, 4)
    assert evict(policy, 1) == [2]
    book.hold(5, 2)
    book.hold(6, 1)
    policy.insert([5, 6])  # the first comes back for a fourth use, the second was forgotten
    assert policy.order() == [6, 3, 4, 5]


def test_lfu_with_ageing_lets_go_of_what_was_popular_once() -> None:
    policy, _ = make_policy("lfu_da")
    policy.insert([1])
    use(policy, 1, 1, 1)
    victims = []
    for entry in range(2, 7):
        policy.insert([entry])
        victims += evict(policy, 1)
    # Each victim raises the value of new ones, until the first one's four uses are no more than
    # that.
    assert victims == [2, 3, 4, 1, 5]


def test_lru2_evicts_by_the_last_use_but_one() -> None:
    policy, _ = make_policy("lru2")
    policy.insert([1, 2, 3])
    use(policy, 2, 1, 2)
    assert policy.order() == [3, 1, 2]
    use(policy, 3, 1)
    assert policy.order() == [3, 2, 1]


def test_slru_protects_what_was_used_again_up_to_a_limit() -> None:
    policy, _ = make_policy("slru")
    policy.insert(range(10))
    use(policy, *range(8))
    assert policy.order() == [8, 9, *range(8)]
    use(policy, 9)  # a ninth one: the first of the protected is on probation again
    assert policy.order() == [8, 0, *range(1, 8), 9]
    policy.insert([10])
    assert policy.order() == [8, 0, 10, *range(1, 8), 9]


def test_2q_keeps_what_comes_back_after_it_was_evicted() -> None:
    policy, book = make_policy("twoq")
    policy.insert(range(8))
    use(policy, 0, 0)  # in the first queue that changes nothing
    assert evict(policy, 2) == [0, 1]
    book.hold(9, 0)
    policy.insert([9, 10])
    assert policy.order() == [2, 3, 4, 5, 6, 9, 7, 10]
    use(policy, 9)
    assert evict(policy, 6) == [2, 3, 4, 5, 6, 9]


def test_s3fifo_lets_most_new_contents_go_soon() -> None:
    policy, book = make_policy("s3fifo")
    policy.insert(range(10))
    use(policy, 0, 0, 1, 2, 2, 2)
    # 0 and 2 were used twice and more; 1 once, which does not count yet.
    assert evict(policy, 4) == [1, 3, 4, 5]
    book.hold(20, 1)
    policy.insert([20])  # it comes back: to the main queue
    use(policy, 0)
    assert policy.order() == [6, 7, 8, 2, 20, 0, 9]


def test_arc_gives_room_to_the_side_whose_evicted_contents_come_back() -> None:
    policy, book = make_policy("arc")
    policy.insert(range(10))
    use(policy, *range(5))
    assert evict(policy, 3) == [5, 6, 7]
    for entry, content in ((20, 5), (21, 6), (22, 7)):
        book.hold(entry, content)
        policy.insert([entry])
    policy.insert([30, 31])
    # Three contents that were used once came back: that many of such may stay now.
    assert policy.order()[:2] == [8, 0]


def test_arc_gives_the_shorter_memory_more_weight() -> None:
    policy, book = make_policy("arc")
    policy.insert(range(20))
    use(policy, *range(19))
    assert evict(policy, 1) == [19]
    policy.insert([20])
    assert evict(policy, 7) == [20, 0, 1, 2, 3, 4, 5]
    policy.insert([21, 22, 23, 24, 25])
    book.hold(30, 19)  # of two that were used once, while six that were used again are remembered
    policy.insert([30])
    assert policy.order()[:3] == [21, 22, 6]
