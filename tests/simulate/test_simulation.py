"""Simulations: one rule for all ways to count, the same results with any number of processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import ConfigurationError, ExhaustedError, OutOfBlocksError
from kvcache.simulate.block_trace import BlockTrace
from kvcache.simulate.opening import open_block_trace
from kvcache.simulate.simulated_cache import OPTIMUM, SimulatedCache, window_groups
from kvcache.simulate.simulation import simulate
from kvcache.simulate.simulation_processes import SimulationTask, run_simulations
from tests.simulate.traces import CONVERSATION, block_trace, random_requests
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def trace(tmp_path: Path) -> BlockTrace:
    return block_trace(tmp_path / "trace.jsonl", random_requests(random.Random(1), 200))


def run(trace: BlockTrace, *caches: SimulatedCache) -> list[int]:
    return [simulate(trace, cache, VirtualClock()).num_hits for cache in caches]


def test_tiers_add_what_the_device_has_lost(trace: BlockTrace) -> None:
    result = simulate(trace, SimulatedCache("lru", 40, 40, 60), VirtualClock())
    alone, unlimited = run(trace, SimulatedCache("lru", 40), SimulatedCache("lru", None))
    assert result.num_device_hits == alone
    assert result.num_host_hits > 0 and result.num_disk_hits > 0
    assert alone < result.num_hits < unlimited
    statistics = result.to_dict()
    assert (statistics["policy"], statistics["host_blocks"], statistics["hit_rate_of"]) == (
        "lru",
        40,
        "blocks",
    )
    assert statistics["hit_rate"] == result.num_hits / trace.num_references


def test_the_optimum_of_tiers_is_that_of_one_pool_as_large(trace: BlockTrace) -> None:
    tiers, pool, below = run(
        trace,
        SimulatedCache(OPTIMUM, 40, 30, 10),
        SimulatedCache(OPTIMUM, 80),
        SimulatedCache("lru", 40, 30, 10),
    )
    assert tiers == pool > below


def test_a_window_shares_the_blocks_and_is_counted_in_tokens(trace: BlockTrace) -> None:
    groups = window_groups(trace.block_size, 6)
    hybrid = simulate(trace, SimulatedCache("lru", 80, groups=groups), VirtualClock())
    full = simulate(trace, SimulatedCache("lru", 80), VirtualClock())
    roomy = simulate(trace, SimulatedCache("lru", None, groups=groups), VirtualClock())
    assert 0 < hybrid.num_hit_tokens < full.num_hit_tokens
    assert hybrid.num_hit_tokens < roomy.num_hit_tokens
    assert hybrid.hit_rate == hybrid.num_hit_tokens / trace.num_input_tokens
    assert hybrid.to_dict()["hit_rate_of"] == "tokens"


def test_a_capacity_below_the_longest_request_is_refused_with_its_line(trace: BlockTrace) -> None:
    least = trace.most_blocks
    place = trace.place_of(trace.longest)
    with pytest.raises(ConfigurationError) as caught:
        simulate(trace, SimulatedCache("lru", least - 1), VirtualClock())
    assert str(caught.value) == (
        f"{place}: the request needs {least} blocks of 4 tokens, more than the {least - 1} of the "
        f"device: simulate at least {least}"
    )
    groups = window_groups(trace.block_size, 6)
    with pytest.raises(
        OutOfBlocksError, match=r"^trace.jsonl, line \d+: the request of .* simulate more$"
    ):
        simulate(trace, SimulatedCache("lru", least, groups=groups), VirtualClock())


@pytest.mark.parametrize("window_tokens", [None, 6])
def test_a_cache_of_any_size_takes_no_more_memory_than_the_trace_is_worth(
    trace: BlockTrace, window_tokens: int | None
) -> None:
    groups = () if window_tokens is None else window_groups(trace.block_size, window_tokens)
    many = 10**15
    for sizes in ((None,), (many,), (many, many, many)):
        result = simulate(trace, SimulatedCache("lru", *sizes, groups=groups), VirtualClock())
        unlimited = SimulatedCache("lru", None, groups=groups)
        expected = simulate(trace, unlimited, VirtualClock())
        assert result.num_device_hit_tokens == expected.num_hit_tokens > 0
        assert result.cache.num_blocks == sizes[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SimulatedCache("lra", 10),
            "unknown eviction policy 'lra': choose one of adapt",
        ),
        (lambda: SimulatedCache("lru", 0), "a cache of 0 blocks cannot serve anything"),
        (lambda: SimulatedCache("lru", 9, -1), "tiers of -1 and 0 blocks: give at least 0"),
        (lambda: SimulatedCache("lru", 9, 0, 5), "5 blocks on disk, none in host memory: what"),
        (lambda: SimulatedCache("lru", None, 5), "a device without a limit needs no tiers"),
    ],
)
def test_what_cannot_be_meant_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert str(caught.value).startswith(message)


def tasks_of(num_traces: int) -> list[SimulationTask]:
    return [
        SimulationTask(i, SimulatedCache(policy, num_blocks))
        for i in range(num_traces)
        for policy in ("lru", "arc", OPTIMUM)
        for num_blocks in (60, 90, None)
    ]


@pytest.mark.long
def test_results_do_not_depend_on_the_number_of_processes(
    trace: BlockTrace, tmp_path: Path
) -> None:
    other = block_trace(tmp_path / "other.jsonl", random_requests(random.Random(2), 150))
    tasks = tasks_of(2)
    seen: dict[int, int] = {}
    one, two = (run_simulations([trace, other], tasks, count, seen.__setitem__) for count in (1, 2))
    assert [r.trace for r in one] == ["trace.jsonl"] * 9 + ["other.jsonl"] * 9
    for first, second in zip(one, two, strict=True):
        statistics = [{**r.to_dict(), "wall_time_s": 0} for r in (first, second)]
        assert statistics[0] == statistics[1]
    assert seen == {i: 200 if i < 9 else 150 for i in range(18)}


def test_nothing_begins_where_a_request_does_not_fit(trace: BlockTrace) -> None:
    tasks = [*tasks_of(1), SimulationTask(0, SimulatedCache("lru", 1))]
    played: list[int] = []
    with pytest.raises(ConfigurationError, match="simulate at least"):
        run_simulations([trace], tasks, 2, lambda index, num: played.append(index))
    assert played == []
    with pytest.raises(ConfigurationError, match="0 processes: give at least 1"):
        run_simulations([trace], tasks_of(1), 0)


def test_an_error_in_a_process_is_raised_here(trace: BlockTrace) -> None:
    groups = window_groups(trace.block_size, 6)
    tasks = [SimulationTask(0, SimulatedCache("lru", n, groups=groups)) for n in (400, 3)]
    with pytest.raises(OutOfBlocksError, match="does not fit into 3 blocks"):
        run_simulations([trace], tasks, 2)


def test_a_process_that_is_killed_is_no_bug_of_ours(trace: BlockTrace) -> None:
    def kill_all(_: int, __: int) -> None:
        for process in multiprocessing.active_children():
            process.kill()

    tasks = [SimulationTask(0, SimulatedCache("lru", number)) for number in range(400, 410)]
    with pytest.raises(ExhaustedError, match="short of memory, so try fewer processes"):
        run_simulations([trace], tasks, 2, kill_all)


_LONG_RUN = """
import signal
from kvcache.simulate.opening import open_block_trace
from kvcache.simulate.simulation import SimulatedCache
from kvcache.simulate.simulation_processes import SimulationTask, run_simulations

def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trace = open_block_trace("agents", limit=600)
    tasks = [SimulationTask(0, SimulatedCache("lru", n)) for n in range(5_000, 5_040)]
    run_simulations([trace], tasks, 2, lambda index, num: print(index, num, flush=True))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "ending", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_processes_end_with_the_one_that_started_them(tmp_path: Path, ending: int) -> None:
    program = tmp_path / "long_run.py"
    program.write_text(_LONG_RUN, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout.readline()  # they have begun
        process.send_signal(ending)
        assert process.wait(60) != 0
    wait_until(lambda: not _is_group_alive(process.pid), "processes are left")


def _is_group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.long
@pytest.mark.skipif(not CONVERSATION.exists(), reason=f"no conversation trace at {CONVERSATION}")
def test_lru_has_the_published_hit_rates_on_the_conversation_trace() -> None:
    trace = open_block_trace(str(CONVERSATION))
    assert (trace.num_requests, trace.num_references) == (12_031, 288_500)
    assert trace.num_distinct_blocks == 182_790
    tasks = [SimulationTask(0, SimulatedCache("lru", n)) for n in (1_000, 10_000, 30_000, None)]
    rates = [result.hit_rate for result in run_simulations([trace], tasks)]
    assert rates == pytest.approx([0.0450, 0.2149, 0.3305, 0.3660], abs=0.0005)
