"""Concurrent requests, against a slow model."""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import ConfigurationError, OutOfBlocksError
from kvcache.simulate.block_trace import BlockTrace
from kvcache.simulate.counting import CountingOptions, PrefillCount
from kvcache.simulate.opening import open_block_trace
from kvcache.simulate.running_counting import Pace, RunningCounter
from kvcache.simulate.simulated_cache import OPTIMUM, SimulatedCache, window_groups
from kvcache.simulate.simulation import SimulationResult, simulate
from kvcache.simulate.tier_traffic import TierSizes
from tests.simulate.traces import SIZE, random_requests, trace_line, write_lines

PACE = Pace(prefill_tokens_per_s=8.0, decode_tokens_per_s=2.0)


def timed_trace(path: Path, seed: int, pause_s: float) -> BlockTrace:
    rng = random.Random(seed)
    now_ms = 0
    lines = []
    for length, ids in random_requests(rng, 150):
        now_ms += round(1000 * rng.expovariate(1 / pause_s))
        answer = rng.randrange(0, 9)
        line = trace_line(length, ids, timestamp=now_ms, block_size=SIZE)
        lines.append({**line, "output_length": answer})
    return open_block_trace(str(write_lines(path, *lines)))


class SlowModel:
    """A plain LRU list of unused blocks, and use counts of the others."""

    def __init__(self, capacity: int) -> None:
        self.free = capacity
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.users: Counter[int] = Counter()
        self.running: list[tuple[float, int, list[int], int]] = []
        self.num_hits = 0
        self.waited_s = 0.0

    def play(self, trace: BlockTrace) -> None:
        now_s = 0.0
        for i in range(trace.num_requests):
            arrival_s = float(trace.arrivals_ms[i]) / 1000
            now_s = max(now_s, arrival_s)
            self.end(now_s)
            while not self.admit(trace, i, now_s):
                now_s = self.running[0][0]
                self.end(now_s)
            self.waited_s += now_s - arrival_s

    def admit(self, trace: BlockTrace, i: int, now_s: float) -> bool:
        blocks = trace.blocks_of(i).tolist()
        length, answer = int(trace.input_lengths[i]), int(trace.output_lengths[i])
        num_full = length // SIZE
        hits = 0
        while hits < trace.most_hits_of(i) and self.is_there(blocks[hits]):
            hits += 1
        needed = -(-(length + answer) // SIZE) - hits
        others = [block for block in self.cached if block not in blocks[:hits]]
        if self.free + len(others) < needed:
            return False
        for block in blocks[:hits]:
            self.cached.pop(block, None)
            self.users[block] += 1
        while self.free < needed:
            self.free += 1
            self.cached.popitem(last=False)
        self.free -= needed
        mine = [block for block in blocks[hits:num_full] if not self.is_there(block)]
        for block in mine:
            self.users[block] += 1
        end_s = now_s + (length - hits * SIZE) / 8.0 + answer / 2.0
        heapq.heappush(self.running, (end_s, i, blocks[:hits] + mine, needed - len(mine)))
        self.num_hits += hits
        return True

    def is_there(self, block: int) -> bool:
        return block in self.cached or self.users[block] > 0

    def end(self, now_s: float) -> None:
        while self.running and self.running[0][0] <= now_s:
            _, _, held, unnamed = heapq.heappop(self.running)
            self.free += unnamed
            for block in reversed(held):
                self.users[block] -= 1
                if not self.users[block]:
                    self.cached[block] = None


def play(trace: BlockTrace, num_blocks: int, pace: Pace | None = PACE) -> SimulationResult:
    return simulate(trace, SimulatedCache("lru", num_blocks, pace=pace), VirtualClock())


@pytest.mark.parametrize("pause_s", [0.5, 5.0])
@pytest.mark.seeds(4)
def test_hits_and_waits_are_about_those_of_a_slow_model(
    tmp_path: Path, seed: int, pause_s: float
) -> None:
    """A recomputed copy of a cached block replaces that one or is freed: which of them, and when it
    was last used, the model does not know."""
    trace = timed_trace(tmp_path / "trace.jsonl", seed, pause_s)
    model = SlowModel(60)
    model.play(trace)
    result = play(trace, 60)
    assert result.waits is not None
    assert result.num_hits == pytest.approx(model.num_hits, rel=0.03)
    assert result.waits.mean_wait_s * trace.num_requests == pytest.approx(
        model.waited_s, rel=0.05, abs=5.0
    )
    assert (result.waits.num_waited > 0) == (model.waited_s > 0)


def test_requests_far_apart_hit_as_one_after_another(tmp_path: Path) -> None:
    trace = timed_trace(tmp_path / "trace.jsonl", 5, pause_s=1e6)
    apart, serial = play(trace, 400), play(trace, 400, None)
    assert apart.num_hits == serial.num_hits
    assert apart.num_hit_tokens == serial.num_hit_tokens
    assert apart.waits is not None and serial.waits is None
    assert (apart.waits.num_waited, apart.waits.most_running) == (0, 1)


def test_the_busier_the_fewer_hits_and_the_longer_waits(tmp_path: Path) -> None:
    calm = play(timed_trace(tmp_path / "calm.jsonl", 6, 20.0), 60)
    busy = play(timed_trace(tmp_path / "busy.jsonl", 6, 0.2), 60)
    assert calm.waits is not None and busy.waits is not None
    assert busy.num_hits < calm.num_hits
    assert busy.waits.mean_wait_s > calm.waits.mean_wait_s
    assert busy.waits.most_running > 1
    assert busy.to_dict()["most_running"] == busy.waits.most_running


def test_a_window_runs_side_by_side_too(tmp_path: Path) -> None:
    trace = timed_trace(tmp_path / "trace.jsonl", 7, 5.0)
    groups = window_groups(SIZE, 6)
    cache = SimulatedCache("lru", 120, groups=groups, pace=PACE)
    result = simulate(trace, cache, VirtualClock())
    assert 0 < result.num_hit_tokens < play(trace, 120).num_hit_tokens


@pytest.mark.parametrize("window_tokens", [None, 6])
@pytest.mark.parametrize("pause_s", [0.5, 5.0])
@pytest.mark.seeds(2)
def test_with_room_below_everything_ever_seen_is_a_hit(
    tmp_path: Path, seed: int, pause_s: float, window_tokens: int | None
) -> None:
    """However many run: blocks evicted from the device were stored when they were computed."""
    trace = timed_trace(tmp_path / "trace.jsonl", seed, pause_s)
    groups = () if window_tokens is None else window_groups(SIZE, window_tokens)
    num_blocks = 120 if groups else 60
    cache = SimulatedCache("lru", num_blocks, num_blocks, 20_000, groups=groups, pace=PACE)
    result = simulate(trace, cache, VirtualClock())
    unlimited = simulate(trace, SimulatedCache("lru", None, groups=groups), VirtualClock())
    alone = simulate(trace, replace(cache, host_blocks=0, disk_blocks=0), VirtualClock())
    assert result.num_hit_tokens == unlimited.num_hit_tokens > alone.num_hit_tokens
    assert result.num_device_hits > 0 and result.num_host_hits + result.num_disk_hits > 0
    assert result.waits is not None and alone.waits is not None
    assert result.waits.mean_wait_s <= alone.waits.mean_wait_s


def test_requests_far_apart_find_in_tiers_what_they_find_one_after_another(
    tmp_path: Path,
) -> None:
    trace = timed_trace(tmp_path / "trace.jsonl", 8, pause_s=1e6)
    for groups in ((), window_groups(SIZE, 6)):
        num_blocks = 100 if groups else 50
        serial = SimulatedCache("lru", num_blocks, 2 * num_blocks, num_blocks, groups=groups)
        results = [
            simulate(trace, cache, VirtualClock()) for cache in (serial, replace(serial, pace=PACE))
        ]
        one, two = [
            (each.num_device_hits, each.num_host_hit_tokens, each.num_disk_hit_tokens)
            for each in results
        ]
        # Room for answers is taken from cached blocks.
        assert one == pytest.approx(two, rel=0.1)
        assert min(two) > 0


def test_state_is_consistent_while_requests_run_above_tiers(tmp_path: Path) -> None:
    trace = timed_trace(tmp_path / "trace.jsonl", 9, pause_s=2.0)
    counter = RunningCounter(
        trace,
        CountingOptions(120, groups=window_groups(SIZE, 6)),
        PACE,
        VirtualClock(),
        TierSizes(60, 90),
    )

    def check(count: PrefillCount) -> None:
        counter.manager.check()
        counter.traffic.check()

    count = counter.count(check)
    assert 0 < counter.brought.num_tokens < count.num_hit_tokens


def test_an_answer_that_does_not_fit_is_named_with_its_line(tmp_path: Path) -> None:
    line = {**trace_line(8, [1, 2], block_size=SIZE), "output_length": 5}
    trace = open_block_trace(str(write_lines(tmp_path / "trace.jsonl", line)))
    assert play(trace, 4).num_requests == 1
    with pytest.raises(OutOfBlocksError) as caught:
        play(trace, 3)
    assert str(caught.value) == (
        "trace.jsonl, line 1: the request does not fit into 3 blocks with its answer of 5 tokens: "
        "simulate at least 4"
    )


def test_what_cannot_be_simulated_side_by_side_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the optimum of requests that run side by side"):
        SimulatedCache(OPTIMUM, 10, pace=PACE)
    with pytest.raises(ConfigurationError, match="without a limit of blocks: give their number"):
        SimulatedCache("lru", None, pace=PACE)
    with pytest.raises(ConfigurationError, match="a pace of 0 tokens of prompts and 1 of answers"):
        Pace(0.0, 1.0)
