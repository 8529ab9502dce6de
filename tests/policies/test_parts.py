"""The queues and memories that policies are made of."""

from __future__ import annotations

import random
from copy import copy

from kvcache.policies.ranked_policies import GhostList
from kvcache.policies.ranked_queue import RankedQueue


def test_a_queue_gives_out_the_lowest_rank_however_often_entries_moved() -> None:
    rng = random.Random(3)
    queue, ranks = RankedQueue(), dict[int, tuple[float, int]]()
    for number in range(2_000):
        entry = rng.randrange(40)
        in_order = sorted(ranks, key=lambda entry: (ranks[entry], entry))
        if number % 7 == 0:
            assert queue.first(5) == copy(queue).first(5) == in_order[:5]
        if entry in ranks:
            queue.remove(entry, ranks.pop(entry))
        elif rng.random() < 0.7:
            ranks[entry] = float(rng.randrange(5)), number if rng.random() < 0.5 else entry
            queue.add(entry, ranks[entry])
        elif ranks:
            twin = copy(queue)
            assert queue.pop() == twin.pop() == in_order[0]
            del ranks[in_order[0]]
        assert len(queue) == len(ranks)


def test_ghosts_are_remembered_from_their_last_eviction_on() -> None:
    ghosts = GhostList()
    for name in (b"a", b"b", b"c"):
        ghosts.add(name, 1)
    ghosts.add(b"a", 5)
    ghosts.add(None, 7)
    ghosts.trim(2)
    popped = ghosts.pop(b"a", None), ghosts.pop(b"b", None), ghosts.pop(None, None)
    assert popped == (5, None, None)
    assert len(ghosts) == 1
    ghosts.trim(-1)
    assert len(ghosts) == 0
