"""Hints of generated sessions: what they bring, and that false ones cost nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import ConfigurationError
from kvcache.requests.hints import CacheHint, blocks_in
from kvcache.simulate.block_trace import BlockTrace, CompactTrace, read_block_trace
from kvcache.simulate.counting import CountingOptions, count_prefill_hits
from kvcache.simulate.generators import GENERATORS, generate
from kvcache.simulate.hinting import hints_of
from kvcache.simulate.mooncake import MooncakeTrace
from kvcache.simulate.simulated_cache import OPTIMUM, SimulatedCache, window_groups
from kvcache.simulate.simulation import simulate
from kvcache.simulate.trace_writing import write_trace
from kvcache.specs import KVCacheGroupSpec
from tests.simulate.traces import block_trace, random_requests, trace_line, write_lines

Groups: TypeAlias = "tuple[KVCacheGroupSpec, ...]"

SIZES = {"chat": 200, "agents": 500}


def generated(name: str) -> BlockTrace:
    return read_block_trace(generate(name, seed=3, num_requests=800))


def rate(trace: BlockTrace, cache: SimulatedCache) -> float:
    return simulate(trace, cache, VirtualClock()).hit_rate


@pytest.mark.parametrize(("name", "num_blocks"), SIZES.items())
def test_session_hints_go_half_of_the_way_to_the_optimum(name: str, num_blocks: int) -> None:
    trace = generated(name)
    lru, best = [rate(trace, SimulatedCache(policy, num_blocks)) for policy in ("lru", OPTIMUM)]
    hinted = rate(trace, SimulatedCache("lru", num_blocks, hints="session"))
    assert hinted >= lru + 0.5 * (best - lru)


@pytest.mark.parametrize(("name", "num_blocks"), [("chat", 400), ("chat", 800), ("agents", 800)])
def test_session_hints_gain_hits_where_half_of_the_layers_have_windows(
    name: str, num_blocks: int
) -> None:
    trace = generated(name)
    cache = SimulatedCache("lru", num_blocks, groups=window_groups(512, 4096))
    assert rate(trace, replace(cache, hints="session")) >= rate(trace, cache) + 0.1


@pytest.mark.parametrize(("name", "num_blocks"), SIZES.items())
def test_random_hints_cost_nothing(name: str, num_blocks: int) -> None:
    trace, rng = generated(name), random.Random(1)
    hints = [
        (CacheHint(is_over=True),)
        if rng.random() < 0.5
        else (CacheHint(returns_in_s=10 ** rng.uniform(0, 3)),)
        for _ in range(trace.num_requests)
    ]
    played = CompactTrace(trace, hints)
    count = count_prefill_hits(
        played, CountingOptions(num_blocks, follows_hints=True), VirtualClock()
    )
    assert count.hit_rate >= rate(trace, SimulatedCache("lru", num_blocks)) - 0.005


@pytest.mark.parametrize("share", [0.1, pytest.param(0.5, marks=pytest.mark.long), 1.0])
@pytest.mark.parametrize("lowest", [0, 51])
@pytest.mark.parametrize(("name", "num_blocks"), SIZES.items())
def test_random_priorities_cost_nothing_in_a_small_cache(
    name: str, num_blocks: int, lowest: int, share: float
) -> None:
    trace, rng = generated(name), random.Random(1)
    hints = [
        (CacheHint(priority=rng.randint(lowest, 100)),) if rng.random() < share else ()
        for _ in range(trace.num_requests)
    ]
    options = CountingOptions(num_blocks, follows_hints=True)
    count = count_prefill_hits(CompactTrace(trace, hints), options, VirtualClock())
    assert count.hit_rate >= rate(trace, SimulatedCache("lru", num_blocks)) - 0.005


def test_a_plain_count_does_not_follow_the_hints_of_a_load() -> None:
    load = generate("chat", seed=3, num_requests=300)
    assert any(request.hints for request in load)
    plain, hinted = (
        count_prefill_hits(load, CountingOptions(200, follows_hints=follows), VirtualClock())
        for follows in (False, True)
    )
    assert plain.hit_rate == rate(read_block_trace(load), SimulatedCache("lru", 200))
    assert hinted.hit_rate > plain.hit_rate


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_a_request_is_hinted_when_it_is_continued_to_a_factor_of_two(name: str) -> None:
    requests = list(generate(name, seed=3, num_requests=2_000).script())
    num_continued = num_ended = 0
    for i, request in enumerate(requests):
        [hint] = request.hints
        [same] = request.to_workload_request().hints
        assert same is hint
        following = [r.arrival_s for r in requests[i + 1 :] if r.after == request.request_id]
        if following:
            num_continued += 1
            wait_s = following[0] - request.arrival_s
            assert hint.returns_in_s is not None and not hint.is_over
            assert wait_s / 2 - 0.001 <= hint.returns_in_s <= wait_s * 2 + 0.001
        elif hint.is_over:
            num_ended += 1
            common = request.passages[: request.num_common]
            assert hint.start == sum(passage.num_tokens for passage in common) > 0
        else:  # goes on after the last request
            assert hint.returns_in_s is not None
            assert request.arrival_s + 2 * hint.returns_in_s >= requests[-1].arrival_s - 0.001
    assert min(num_continued, num_ended) > 100


@pytest.mark.parametrize("groups", [(), window_groups(512, 4096)])
def test_a_written_trace_has_the_hints(tmp_path: Path, groups: Groups) -> None:
    trace, path = generated("chat"), tmp_path / "chat.jsonl"
    write_trace(path, trace.to_lines())
    read = read_block_trace(MooncakeTrace(path))
    assert read.hints == trace.hints and len(trace.hints) == 800
    cache = SimulatedCache("lru", 400, groups=groups, hints="session")
    assert rate(trace, cache) == rate(read, cache) != rate(read, replace(cache, hints="none"))
    assert [request.hints for request in MooncakeTrace(path)] == list(trace.hints)


@pytest.mark.parametrize("size", [3, 8])
def test_hints_are_for_the_same_blocks_in_any_size(tmp_path: Path, size: int) -> None:
    """A block is hinted if its last token is in the range."""
    hints = [(a, b) for a in range(14) for b in (None, *range(a + 1, 16))]
    plain = [{"start": a, "priority": 9} | ({} if b is None else {"end": b}) for a, b in hints]
    lines = [trace_line(16, [0, 1, 2, 3], hints=[each]) for each in plain]
    path = write_lines(tmp_path / "trace.jsonl", *lines)
    trace = read_block_trace(MooncakeTrace(path, block_size=4))
    for (start, end), found in zip(hints, hints_of(trace, "session", size), strict=True):
        lasts = [(i, 4 * i + 3) for i in range(4)]
        expected = [i for i, last in lasts if start <= last and (end is None or last < end)]
        ranges = [blocks_in(hint, size, 4) for hint in found]
        assert [i for first, after in ranges for i in range(first, after)] == expected
        assert all(hint.priority == 9 for hint in found)


def test_an_oracle_knows_the_next_use_of_the_last_full_block(tmp_path: Path) -> None:
    trace = block_trace(tmp_path / "trace.jsonl", random_requests(random.Random(2), 60))
    for i, [hint] in enumerate(hints_of(trace, "oracle", 2)):
        num_full = int(trace.input_lengths[i]) // trace.block_size
        last = trace.blocks_of(i)[num_full - 1] if num_full else -1
        later = [k for k in range(i + 1, trace.num_requests) if last in trace.blocks_of(k)]
        assert hint.is_over == (not later)
        if later:
            wait_s = float(trace.arrivals_ms[later[0]] - trace.arrivals_ms[i]) / 1000
            assert hint.returns_in_s == pytest.approx(max(0.001, wait_s))


def test_what_hints_cannot_do_is_refused(tmp_path: Path) -> None:
    trace = block_trace(tmp_path / "trace.jsonl", random_requests(random.Random(2), 20))
    with pytest.raises(ConfigurationError, match="does not say when its sessions go on"):
        rate(trace, SimulatedCache("lru", 100, hints="session"))
    with pytest.raises(ConfigurationError, match="hints 'some' are unknown: choose one of none"):
        SimulatedCache("lru", 100, hints="some")
    with pytest.raises(ConfigurationError, match="on the device alone"):
        SimulatedCache("lru", 100, 50, hints="oracle")
