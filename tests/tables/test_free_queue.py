"""The free queue against a list, and its refusals."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvcache import FreeKVCacheBlockQueue
from kvcache.base.errors import BlockError, OutOfBlocksError


def test_blocks_come_out_in_order_and_leave_from_anywhere() -> None:
    queue = FreeKVCacheBlockQueue(10, [1, 2, 3, 4])
    queue.remove(2)
    queue.append(7)
    queue.append_n([8, 9])
    queue.prepend_n([5, 6])
    assert queue.get_all_free_blocks() == [5, 6, 1, 3, 4, 7, 8, 9]
    assert queue.num_free_blocks == 8
    assert queue.popleft() == 5
    assert queue.popleft_n(3) == [6, 1, 3]
    assert queue.get_all_free_blocks() == [4, 7, 8, 9]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q: q.popleft_n(4), OutOfBlocksError, "4 blocks are wanted, 3 are in the free"),
        (lambda q: q.remove(5), BlockError, r"blocks \[5\] are not in the queue: add them first"),
        (lambda q: q.append(2), BlockError, r"blocks \[2\] are in the queue already"),
        (lambda q: q.append_n([5, 5]), BlockError, r"blocks \[5\] are given twice"),
        (lambda q: q.prepend_n([5, 6]), BlockError, r"blocks \[6\] do not exist: use ids below 6"),
        (lambda q: q.append(-1), BlockError, r"blocks \[-1\] do not exist"),
    ],
)
def test_a_refused_change_changes_nothing(
    change: Callable[[FreeKVCacheBlockQueue], object], error: type[Exception], message: str
) -> None:
    queue = FreeKVCacheBlockQueue(6, [1, 2, 3])
    with pytest.raises(error, match=message):
        change(queue)
    assert queue.get_all_free_blocks() == [1, 2, 3]
    queue.check()


@pytest.mark.seeds(10)
def test_a_queue_does_what_a_list_does(seed: int) -> None:
    chance = random.Random(seed)
    queue = FreeKVCacheBlockQueue(50, range(0, 50, 2))
    model = list(range(0, 50, 2))
    for _ in range(200):
        action = chance.randrange(4)
        outside = [i for i in range(50) if i not in model]
        some = chance.sample(outside, chance.randint(0, min(5, len(outside))))
        if action == 0:
            queue.append_n(some)
            model += some
        elif action == 1:
            queue.prepend_n(some)
            model[:0] = some
        elif action == 2:
            count = chance.randint(0, len(model))
            count = min(count, 6)
            assert queue.popleft_n(count) == model[:count]
            del model[:count]
        elif model:
            for gone in chance.sample(model, min(3, len(model))):
                queue.remove(gone)
                model.remove(gone)
        assert queue.get_all_free_blocks() == model
        assert queue.num_free_blocks == len(model)
        queue.check()
