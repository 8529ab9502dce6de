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
        if entry in ranks:
            queue.remove(entry)
            del ranks[entry]
        elif rng.random() < 0.7:
            ranks[entry] = float(rng.randrange(5)), number if rng.random() < 0.5 else entry
            queue.add(entry, ranks[entry])
        elif ranks:
            lowest = min(ranks, key=lambda entry: (ranks[entry], entry))
            twin = copy(queue)
            assert queue.pop() == twin.pop() == lowest
            assert lowest not in queue
            del ranks[lowest]
        assert len(queue) == len(ranks)
        assert all(entry in queue for entry in ranks)


def test_ghosts_are_remembered_from_their_last_eviction_on() -> None:
    ghosts = GhostList()
    for name in (b"a", b"b", b"c"):
        ghosts.add(name, 1)
    ghosts.add(b"a", 5)
    ghosts.add(None, 7)
    ghosts.trim(2)
    assert ghosts.names() == [b"c", b"a"]
    assert (ghosts.take(b"a"), ghosts.take(b"b"), ghosts.take(None)) == (5, None, None)
    assert (len(ghosts), b"a" in ghosts, b"c" in ghosts) == (1, False, True)
    ghosts.trim(-1)
    assert len(ghosts) == 0
