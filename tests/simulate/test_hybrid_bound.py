"""The bound of hybrids: against every choice of victims, and against all policies."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import OutOfBlocksError
from kvcache.simulate.block_trace import BlockTrace
from kvcache.simulate.hybrid_bound import bound_hybrid_hits
from kvcache.simulate.optimum import count_optimal_hits
from kvcache.simulate.simulated_cache import OPTIMUM, SimulatedCache, all_policies, window_groups
from kvcache.simulate.simulation import simulate
from kvcache.specs import CrossAttentionSpec, KVCacheGroupSpec, ceil_div
from tests.simulate.models import MODELS, full, groups_of
from tests.simulate.traces import SIZE, block_trace, random_requests


def column_names(trace: BlockTrace, tokens: int) -> list[list[tuple[int, int]]]:
    """Return the full columns of each request, named by the block in which they end."""
    return [
        [
            (int(trace.blocks_of(i)[((k + 1) * tokens - 1) // trace.block_size]), k)
            for k in range(int(trace.input_lengths[i]) // tokens)
        ]
        for i in range(trace.num_requests)
    ]


def most_hits_of_columns(trace: BlockTrace, tokens: int, rooms: list[int]) -> int:
    """Try all victims in the bound's problem: columns, and room that changes."""
    requests = column_names(trace, tokens)

    @cache
    def best_from(index: int, cached: frozenset[tuple[int, int]]) -> int:
        if index == len(requests):
            return 0
        columns = requests[index]
        most = (int(trace.input_lengths[index]) - 1) // tokens
        hits = 0
        while hits < most and columns[hits] in cached:
            hits += 1
        others = cached - set(columns)
        num_victims = max(0, len(others) + len(columns) - rooms[index])
        return hits + max(
            best_from(index + 1, (others - set(victims)) | set(columns))
            for victims in combinations(sorted(others), num_victims)
        )

    return best_from(0, frozenset())


def rooms_for_columns(trace: BlockTrace, capacity: int, window_tokens: int) -> list[int]:
    """Room of a full group and a window of blocks of SIZE, minus the request's own needs."""
    seen: set[tuple[int, int]] = set()
    rooms = []
    for i, columns in enumerate(column_names(trace, SIZE)):
        num_tokens = int(trace.input_lengths[i])
        num_seen = 0
        while num_seen < (num_tokens - 1) // SIZE and columns[num_seen] in seen:
            num_seen += 1
        seen |= set(columns)
        in_window = ceil_div(num_tokens, SIZE) - max(0, num_seen * SIZE - window_tokens + 1) // SIZE
        rooms.append(capacity - in_window - (num_tokens % SIZE != 0))
    return rooms


@pytest.mark.seeds(40)
def test_no_choice_of_columns_has_more_hits(tmp_path: Path, seed: int) -> None:
    trace = block_trace(tmp_path / "trace.jsonl", random_requests(random.Random(seed), 12, 2))
    least = _least_blocks(trace, MODELS["window"])
    for capacity in range(least, least + 4):
        best = most_hits_of_columns(trace, SIZE, rooms_for_columns(trace, capacity, 6))
        found = bound_hybrid_hits(trace, MODELS["window"], capacity)
        assert found.num_hit_tokens == best * SIZE, capacity


def best_of_hybrid(trace: BlockTrace, capacity: int, window_tokens: int) -> int:
    """Try every choice of victims in a full group and a window, block by block."""
    in_window = ceil_div(window_tokens - 1, SIZE)

    @cache
    def best_from(index: int, cached: frozenset[tuple[int, int]]) -> int:
        if index == trace.num_requests:
            return 0
        blocks = trace.blocks_of(index).tolist()
        num_tokens = int(trace.input_lengths[index])
        most_full = 0
        while most_full < (num_tokens - 1) // SIZE and (0, blocks[most_full]) in cached:
            most_full += 1
        hits = next(
            h
            for h in range(most_full, -1, -1)
            if all((1, block) in cached for block in blocks[max(0, h - in_window) : h])
        )
        first = max(0, hits - in_window)
        read = {(0, block) for block in blocks[:hits]} | {(1, b) for b in blocks[first:hits]}
        others = cached - read
        num_new = 2 * (len(blocks) - hits)
        num_victims = max(0, len(others) + len(read) + num_new - capacity)
        if num_victims > len(others):
            return -(10**6)  # does not fit
        num_full = num_tokens // SIZE
        made = {(g, block) for g in (0, 1) for block in blocks[hits:num_full]}
        return hits + max(
            best_from(index + 1, (others - set(victims)) | read | made)
            for victims in combinations(sorted(others), num_victims)
        )

    return best_from(0, frozenset())


@pytest.mark.seeds(20)
def test_no_choice_of_blocks_in_both_groups_has_more_hits(tmp_path: Path, seed: int) -> None:
    trace = block_trace(tmp_path / "trace.jsonl", random_requests(random.Random(seed), 8, 2))
    capacity = 2 * trace.most_blocks
    for more in range(3):
        best = best_of_hybrid(trace, capacity + more, 5)
        bound = bound_hybrid_hits(trace, window_groups(SIZE, 5), capacity + more)
        assert bound.num_hit_tokens >= max(0, best) * SIZE


def _least_blocks(trace: BlockTrace, groups: tuple[KVCacheGroupSpec, ...]) -> int:
    """Return a number of blocks with which every request fits, whatever it hits."""
    sizes = [group.kv_cache_spec.block_size for group in groups]
    longest = int(trace.input_lengths.max())
    return sum(ceil_div(longest, size) for size in sizes)


@pytest.mark.parametrize("model", MODELS)
def test_no_policy_has_more_hits_on_the_manager_that_serves(tmp_path: Path, model: str) -> None:
    trace = block_trace(tmp_path / "trace.jsonl", random_requests(random.Random(7), 60))
    groups = MODELS[model]
    least = _least_blocks(trace, groups) + 2
    num_hits = num_lost = 0
    for num_blocks in (least, 2 * least):
        caches = [SimulatedCache(policy, num_blocks, groups=groups) for policy in all_policies()]
        caches.append(SimulatedCache("lru", num_blocks, least // 2, least // 2, groups=groups))
        bounds: dict[int, int] = {}  # by number of blocks: it does not depend on the policy
        for played in caches:
            room = num_blocks + played.host_blocks + played.disk_blocks
            if room not in bounds:
                bound = replace(played, policy=OPTIMUM)
                bounds[room] = simulate(trace, bound, VirtualClock()).num_hit_tokens
            best = bounds[room]
            hits = simulate(trace, played, VirtualClock()).num_hit_tokens
            assert hits <= best, played
            num_hits += hits
            num_lost += best - hits
    assert num_hits > 0 and num_lost > 0


def test_with_room_for_all_the_bound_is_what_the_manager_hits(tmp_path: Path) -> None:
    trace = block_trace(tmp_path / "trace.jsonl", random_requests(random.Random(3), 100))
    for name in ("window", "window of other blocks", "larger blocks", "two of full", "chunks"):
        hits, bound, plenty = (
            simulate(
                trace, SimulatedCache(policy, blocks, groups=MODELS[name]), VirtualClock()
            ).num_hit_tokens
            for policy, blocks in (("lru", None), (OPTIMUM, None), (OPTIMUM, 10**6))
        )
        assert hits == bound == plenty > 0, name


def test_of_full_attention_alone_it_is_about_the_optimum(tmp_path: Path) -> None:
    """A recomputed block takes no second one here: so the bound may be a little higher."""
    trace = block_trace(tmp_path / "trace.jsonl", random_requests(random.Random(4), 100))
    for capacity in (trace.most_blocks, 2 * trace.most_blocks, 4 * trace.most_blocks):
        best = count_optimal_hits(trace, capacity).num_hit_blocks * SIZE
        bound = bound_hybrid_hits(trace, groups_of(full()), capacity).num_hit_tokens
        finer = bound_hybrid_hits(trace, groups_of(full(1)), SIZE * capacity).num_hit_tokens
        assert best <= bound <= 1.05 * best
        assert bound <= finer


def test_a_group_that_cannot_hit_leaves_nothing(tmp_path: Path) -> None:
    trace = block_trace(tmp_path / "trace.jsonl", [(9, [0, 1, 2]), (9, [0, 1, 2])])
    cross = CrossAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=1, max_encoder_tokens=8)
    assert bound_hybrid_hits(trace, groups_of(full()), None).num_hit_tokens == 8
    assert bound_hybrid_hits(trace, groups_of(full(), cross), None).num_hit_tokens == 0


def test_a_request_that_cannot_fit_is_named_with_its_line(tmp_path: Path) -> None:
    trace = block_trace(tmp_path / "trace.jsonl", [(SIZE, [0]), (3 * SIZE, [1, 2, 3])])
    with pytest.raises(OutOfBlocksError) as caught:
        bound_hybrid_hits(trace, MODELS["window"], 5)
    assert str(caught.value) == (
        "trace.jsonl, line 2: the request of 12 tokens needs at least 6 blocks of all groups, more "
        "than 5: simulate more"
    )
    reported: list[int] = []
    assert bound_hybrid_hits(trace, MODELS["window"], 6, reported.append).num_hit_tokens == 0
    assert reported[-1] == 2
