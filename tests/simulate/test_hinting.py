"""Hints of generated sessions: what they bring, and that false ones cost nothing."""

from __future__ import annotations

import random
from math import isinf
from pathlib import Path

import pytest

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import ConfigurationError
from kvcache.requests.hints import CacheHint
from kvcache.simulate.block_trace import BlockTrace, CompactTrace, read_block_trace
from kvcache.simulate.counting import CountingOptions, count_prefill_hits
from kvcache.simulate.generators import generate
from kvcache.simulate.hinting import hints_of
from kvcache.simulate.simulated_cache import OPTIMUM, SimulatedCache
from kvcache.simulate.simulation import simulate
from tests.simulate.traces import block_trace, random_requests

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
    count = count_prefill_hits(played, CountingOptions(num_blocks), VirtualClock())
    assert count.hit_rate >= rate(trace, SimulatedCache("lru", num_blocks)) - 0.005


def test_hints_of_a_session_are_known_to_a_factor_of_two() -> None:
    trace = generated("agents")
    for i, [hint] in enumerate(hints_of(trace, "session", 2)):
        session = trace.sessions[i]
        wait_s = (session.returns_ms - float(trace.arrivals_ms[i])) / 1000
        if isinf(wait_s):
            assert hint.is_over
            assert hint.start == session.num_common_tokens // trace.block_size * 2
        else:
            assert hint.returns_in_s is not None
            assert wait_s / 2.001 <= hint.returns_in_s <= max(0.001, wait_s * 2.001)


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
