"""The optimum, against all possible choices, and on the real trace."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import OutOfBlocksError
from kvcache.simulate.block_trace import BlockTrace, read_block_trace
from kvcache.simulate.mooncake import MooncakeTrace
from kvcache.simulate.optimum import count_optimal_hits
from kvcache.simulate.simulated_cache import SimulatedCache, all_policies
from kvcache.simulate.simulation import simulate
from tests.simulate.traces import CONVERSATION, SIZE, block_trace, random_requests


def best_hits(trace: BlockTrace, capacity: int) -> int:
    """Try all choices of victims, also of blocks with children, and return the most hits.

    A recomputed copy of a cached block takes a block of its own, and one of the two is freed when
    the request ends.
    """
    requests = [
        (
            tuple(trace.blocks_of(i).tolist()),
            int(trace.input_lengths[i]) // trace.block_size,
            trace.most_hits_of(i),
        )
        for i in range(trace.num_requests)
    ]

    @cache
    def best_from(index: int, cached: frozenset[int]) -> int:
        if index == len(requests):
            return 0
        blocks, num_full, most = requests[index]
        hits = 0
        while hits < most and blocks[hits] in cached:
            hits += 1
        others = cached - set(blocks[:hits])
        num_victims = max(0, len(others) + len(blocks) - capacity)
        return hits + max(
            best_from(index + 1, (others - set(victims)) | set(blocks[:num_full]))
            for victims in combinations(sorted(others), num_victims)
        )

    return best_from(0, frozenset())


@pytest.mark.seeds(60)
def test_no_choice_of_victims_has_more_hits(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    trace = block_trace(tmp_path / "trace.jsonl", random_requests(rng, 9, most_new=2))
    for capacity in range(trace.most_blocks, trace.most_blocks + 4):
        assert count_optimal_hits(trace, capacity).num_hit_blocks == best_hits(trace, capacity)


@pytest.mark.seeds(2, long=8)
def test_no_policy_has_more_hits(tmp_path: Path, seed: int) -> None:
    trace = block_trace(tmp_path / "trace.jsonl", random_requests(random.Random(seed), 120))
    num_lost = 0
    for capacity in (trace.most_blocks, 2 * trace.most_blocks, 4 * trace.most_blocks):
        best = count_optimal_hits(trace, capacity).num_hit_blocks
        for policy in all_policies():
            hits = simulate(trace, SimulatedCache(policy, capacity), VirtualClock()).num_hits
            assert hits <= best, (policy, capacity)
            num_lost += best - hits
    assert num_lost > 0


def test_without_a_limit_every_block_that_comes_back_is_hit(tmp_path: Path) -> None:
    requests = [(8, [0, 1]), (12, [0, 1, 2]), (8, [0, 1]), (3, [7])]
    count = count_optimal_hits(block_trace(tmp_path / "trace.jsonl", requests), None)
    assert (count.num_hit_blocks, count.num_evictions) == (0 + 2 + 1 + 0, 0)


def test_blocks_that_are_never_needed_again_go_first(tmp_path: Path) -> None:
    """Of two blocks, the reused one stays, whatever passes through the other."""
    requests = [(5, [0, 1]), (4, [2]), (4, [3]), (4, [4]), (5, [0, 5])]
    trace = block_trace(tmp_path / "trace.jsonl", requests)
    count = count_optimal_hits(trace, 2)
    assert (count.num_hit_blocks, count.num_evictions) == (1, 3)


def test_a_request_that_does_not_fit_is_named_with_its_line(tmp_path: Path) -> None:
    trace = block_trace(tmp_path / "trace.jsonl", [(SIZE, [0]), (3 * SIZE, [0, 1, 2])])
    with pytest.raises(OutOfBlocksError) as caught:
        count_optimal_hits(trace, 2)
    assert str(caught.value) == (
        "trace.jsonl, line 2: the request needs 3 blocks of 4 tokens, the cache has 2: count with "
        "more blocks"
    )


@pytest.mark.long
@pytest.mark.skipif(not CONVERSATION.exists(), reason=f"no conversation trace at {CONVERSATION}")
def test_the_optimum_of_the_conversation_trace_is_the_published_one() -> None:
    trace = read_block_trace(MooncakeTrace(CONVERSATION))
    rates = [
        count_optimal_hits(trace, num_blocks).num_hit_blocks / trace.num_references
        for num_blocks in (1_000, 10_000, None)
    ]
    assert rates == pytest.approx([0.1791, 0.3660, 0.3660], abs=0.0005)
