"""Hits and regret over time, against obvious models."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import ConfigurationError
from kvcache.simulate.block_trace import BlockTrace
from kvcache.simulate.optimum import count_optimal_hits
from kvcache.simulate.regret import best_in_hindsight, regret_over_time, require_parts
from kvcache.simulate.running_counting import Pace
from kvcache.simulate.simulated_cache import OPTIMUM, SimulatedCache, all_policies, window_groups
from kvcache.simulate.simulation import SimulationResult, part_starts, simulate
from tests.simulate.traces import SIZE, block_trace, random_requests


def play(trace: BlockTrace, cache: SimulatedCache, num_parts: int = 10) -> SimulationResult:
    return simulate(trace, cache, VirtualClock(), num_parts=num_parts)


def optimal_hits(trace: BlockTrace, capacity: int) -> list[int]:
    """Return the optimum's hits of each request: all cached blocks are looked through for the one
    whose next use is the furthest, the deepest of those."""
    requests = [
        (
            trace.blocks_of(i).tolist(),
            trace.most_hits_of(i),
            int(trace.input_lengths[i]) // trace.block_size,
        )
        for i in range(trace.num_requests)
    ]
    depths = {block: depth for blocks, _, _ in requests for depth, block in enumerate(blocks)}

    def next_use(block: int, now: int) -> int:
        for i, (blocks, most, num_full) in enumerate(requests[now:], start=now):
            if block in blocks[:most]:
                return i
            if block in blocks[most:num_full]:
                break  # computed again
        return len(requests)

    cached: set[int] = set()
    hits = []
    for now, (blocks, most, num_full) in enumerate(requests):
        num_hits = 0
        while num_hits < most and blocks[num_hits] in cached:
            num_hits += 1
        while len(cached) + len(blocks) - num_hits > capacity:
            idle = cached - set(blocks[:num_hits])
            cached.remove(max(idle, key=lambda block: (next_use(block, now), depths[block])))
        cached |= set(blocks[:num_full])
        hits.append(num_hits)
    return hits


@pytest.mark.seeds(8, long=60)
def test_the_optimum_hits_over_time_what_an_obvious_one_does(tmp_path: Path, seed: int) -> None:
    trace = block_trace(tmp_path / "trace.jsonl", random_requests(random.Random(seed), 50))
    for capacity in (trace.most_blocks, 2 * trace.most_blocks):
        expected = optimal_hits(trace, capacity)
        found = count_optimal_hits(trace, capacity).hit_totals
        assert list(found) == [sum(expected[: i + 1]) for i in range(50)]
        starts = [0, 8, 15, 22, 29, 36, 43, 50]
        parts = tuple(sum(expected[a:b]) for a, b in pairwise(starts))
        assert play(trace, SimulatedCache(OPTIMUM, capacity), 7).num_hits_over_time == parts


@pytest.mark.parametrize("policy", all_policies())
def test_a_part_has_the_hits_between_two_beginnings_of_the_trace(
    tmp_path: Path, policy: str
) -> None:
    requests = random_requests(random.Random(4), 60)
    trace = block_trace(tmp_path / "trace.jsonl", requests)
    cache = SimulatedCache(policy, trace.most_blocks + 9)
    found = play(trace, cache, 4)
    hits, references = [0], [0]
    for end in (15, 30, 45, 60):
        beginning = block_trace(tmp_path / "beginning.jsonl", requests[:end])
        hits.append(play(beginning, cache).num_hits)
        references.append(beginning.num_references)
    assert found.num_hits_over_time == tuple(b - a for a, b in pairwise(hits))
    assert found.num_references_over_time == tuple(b - a for a, b in pairwise(references))


def test_parts_have_together_the_hits_of_the_whole(tmp_path: Path) -> None:
    trace = block_trace(tmp_path / "trace.jsonl", random_requests(random.Random(5), 90))
    groups = window_groups(SIZE, 6)
    caches = [
        SimulatedCache(policy, *sizes, groups=groups_of, pace=pace)
        for policy in ("lru", OPTIMUM)
        for sizes in ((40,), (40, 30, 20))
        for groups_of in ((), groups)
        for pace in (None, Pace())
        if policy != OPTIMUM or pace is None
    ]
    assert len(caches) == 12
    for cache in caches:
        result = play(trace, cache, 7)
        assert sum(num_hits > 0 for num_hits in result.num_hits_over_time) > 3
        if cache.groups:
            assert sum(result.num_hits_over_time) == result.num_hit_tokens
            assert sum(result.num_references_over_time) == trace.num_input_tokens
        else:
            assert sum(result.num_hits_over_time) == result.num_hits
            assert sum(result.num_references_over_time) == trace.num_references


@pytest.mark.parametrize(("num_requests", "num_parts"), [(10, 10), (10, 1), (23, 7), (100, 9)])
def test_parts_are_equal_to_a_request(num_requests: int, num_parts: int) -> None:
    starts = part_starts(num_requests, num_parts)
    sizes = {end - start for start, end in pairwise(starts)}
    assert (starts[0], starts[-1], len(starts)) == (0, num_requests, num_parts + 1)
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


def test_the_best_in_hindsight_has_no_regret_and_others_have_some(tmp_path: Path) -> None:
    trace = block_trace(tmp_path / "trace.jsonl", random_requests(random.Random(6), 120))
    results = [play(trace, SimulatedCache(policy, 40), 6) for policy in (*all_policies(), OPTIMUM)]
    hinted = play(trace, SimulatedCache("lru", 40, hints="oracle"), 6)
    best = best_in_hindsight([*results, hinted])
    assert best.num_hits == max(result.num_hits for result in results[:-1])
    assert regret_over_time(best, best) == (0,) * 6
    assert hinted.num_hits > best.num_hits and best_in_hindsight([hinted, results[-1]]) is hinted
    for result in results:
        parts = zip(regret_over_time(result, best), result.num_references_over_time, strict=True)
        missed = sum(points * num_references for points, num_references in parts)
        assert missed == pytest.approx(best.num_hits - result.num_hits)
        assert missed >= -1e-9 or result.cache.policy == OPTIMUM


def test_parts_without_a_request_are_refused(tmp_path: Path) -> None:
    trace = block_trace(tmp_path / "trace.jsonl", random_requests(random.Random(6), 12))
    for num_parts in (0, -3, 13):
        with pytest.raises(ConfigurationError) as caught:
            require_parts(trace, num_parts)
        assert str(caught.value) == (
            f"{num_parts} parts of trace.jsonl, which has 12 requests: give 1 to 12"
        )
    require_parts(trace, 12)
