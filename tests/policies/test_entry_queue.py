"""The queue under free lists and orders, against a plain list."""

from __future__ import annotations

import random

import pytest

from kvcache.policies.entry_queue import EntryQueue


@pytest.mark.seeds(8)
def test_a_queue_does_what_a_list_does(seed: int) -> None:
    rng = random.Random(seed)
    num_entries, most = rng.choice([(40, 6), (300, 150)])
    queue, model = EntryQueue(num_entries), []
    for _ in range(400):
        outside = [entry for entry in range(num_entries) if entry not in model]
        some = rng.sample(outside, rng.randint(0, min(most, len(outside))))
        match rng.randrange(5):
            case 0:
                queue.append_many(some)
                model += some
            case 1:
                queue.prepend_many(some)
                model[:0] = some
            case 2:
                count = rng.randint(0, most - 1)
                assert queue.pop_many(count).tolist() == model[:count]
                del model[:count]
            case 3:
                assert queue.pop_many(1).tolist() == model[:1]
                del model[:1]
            case _:
                gone = rng.sample(model, rng.randint(0, len(model)))
                queue.remove_many(gone)
                model = [entry for entry in model if entry not in gone]
        queue.check()
        assert queue.to_list() == model
        assert len(queue) == len(model)
