"""A real coordinator with a meter around it, message by message, on a clock that tests move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvcache.base.clock import VirtualClock
from kvcache.metrics import (
    AgeMeter,
    CoordinatorMeters,
    CounterGrowth,
    Histogram,
    Kind,
    MeteredCoordinator,
    Metric,
    Sample,
    StepMeter,
    StepTimes,
    coordinator_samples,
)
from kvcache.metrics import declarations as known
from kvcache.metrics.step_meter import STRIDE
from kvcache.protocol.messages import Ack, Acknowledge, Detach
from kvcache.protocol.step import StepRequest
from tests.protocol.test_coordinator import Bench, new

BOUNDS_S = (0.001, 0.1, 1.0)
AGES = AgeMeter(BOUNDS_S)
TIME = Metric("kvcache_time_seconds", Kind.HISTOGRAM, "Times.")


def counts(histogram: Histogram) -> tuple[int, ...]:
    return histogram.sample(TIME).counts


class MeteredBench(Bench):
    """A running coordinator whose client speaks through a meter."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.times: list[StepTimes] = []
        self.meter = StepMeter(BOUNDS_S, self.times.append)
        self.now = VirtualClock(100.0)
        self.run()
        self.metered = MeteredCoordinator(self.coordinator, self.meter, AGES, self.now.now)

    def ask(self, number: int, **fields: Any) -> None:
        request = StepRequest("c", number, self.coordinator.epoch, **fields)
        self.metered.on_client_message(request)

    def rank_applied(self, rank: int, seq: int) -> None:
        message = Ack("n", self.processes[rank], rank, self.coordinator.epoch, seq)
        self.metered.on_worker_message(rank, message)


def test_a_step_is_followed_from_its_arrival_until_every_rank_has_applied_it() -> None:
    bench = MeteredBench()
    bench.ask(1, new=(new("a"),))
    assert counts(bench.meter.decision) == (1, 1, 1, 1)
    assert counts(bench.meter.queue) == (1, 1, 1, 1)
    bench.now.advance(0.05)
    bench.rank_applied(0, 2)
    assert counts(bench.meter.applied) == (0, 0, 0, 0)
    bench.now.advance(0.25)
    bench.rank_applied(1, 2)
    assert counts(bench.meter.applied) == (0, 0, 1, 1)
    (times,) = bench.times
    assert times == StepTimes("c", 1, bench.coordinator.epoch, 2, 100.0, 100.0, 100.0, 100.3)


def test_a_step_that_waits_for_ranks_has_waited_in_the_queue() -> None:
    bench = MeteredBench(max_unacknowledged=1)
    bench.ask(1)
    bench.ask(2)
    bench.now.advance(0.5)
    bench.ask(2)  # repeated: it counts from its first arrival
    bench.rank_applied(0, 2)
    bench.rank_applied(1, 2)
    assert counts(bench.meter.queue) == (1, 1, 2, 2)
    bench.ask(2)  # a stored answer is not a step
    assert counts(bench.meter.decision)[-1] == 2


def test_without_spans_one_step_in_a_few_is_followed_and_nothing_stays_open() -> None:
    bench = MeteredBench()
    meter = StepMeter(BOUNDS_S)
    bench.metered = MeteredCoordinator(bench.coordinator, meter, AGES, bench.now.now)
    for step in range(1, 3 * STRIDE + 1):
        bench.ask(step, completed_step=step - 1 or -1)
        assert meter.num_open == (step % STRIDE == 0)
        for rank in (0, 1):
            bench.rank_applied(rank, step + 1)
        bench.coordinator.on_client_message(Acknowledge("c", bench.coordinator.epoch, step))
        assert bench.metered.settle == bench.coordinator.settle
    assert meter.num_open == 0
    for histogram in (meter.queue, meter.decision, meter.applied):
        assert counts(histogram)[-1] == 3


def test_a_client_that_goes_or_falls_silent_leaves_nothing_open() -> None:
    bench = MeteredBench(max_unacknowledged=1)
    bench.ask(1)
    bench.ask(2)
    assert bench.meter.num_open == 2
    bench.now.advance(60.0)
    bench.metered.on_tick()
    assert bench.meter.num_open == 2
    bench.now.advance(61.0)
    bench.metered.on_tick()
    assert bench.meter.num_open == 0
    bench.ask(3)
    assert bench.meter.num_open == 1
    bench.metered.on_client_message(Detach("c", bench.coordinator.epoch))
    assert bench.meter.num_open == 0


def test_a_client_that_is_sent_away_leaves_nothing() -> None:
    bench = MeteredBench(max_unacknowledged=1)
    bench.ask(1)
    bench.ask(2)
    out = bench.coordinator.on_worker_lost(0, "p", "killed")
    bench.meter.left(out, 100.0, 100.0)
    bench.ask(1)
    assert counts(bench.meter.applied)[-1] == 0
    assert bench.times == []
    assert bench.meter.num_open == 0


def test_statistics_become_samples_with_the_labels_that_were_declared() -> None:
    bench = MeteredBench()
    bench.ask(1, new=(new("a"),))
    bench.ask(1_000_000)
    meters = CoordinatorMeters(bench.meter, AgeMeter(BOUNDS_S))
    statistics = replace(bench.coordinator.statistics(), num_no_room=5)
    samples = coordinator_samples("x", statistics, meters, {"malformed": 3})
    values = {
        (sample.metric, sample.labels): sample.value
        for sample in samples
        if isinstance(sample, Sample)
    }
    assert all(len(s.labels) == len(s.metric.labels) and s.labels[0] == "x" for s in samples)
    assert {s.metric for s in samples} <= set(known.COORDINATOR_METRICS)
    manager = bench.coordinator.statistics().manager
    assert manager is not None
    assert values[known.STEPS, ("x", "executed")] == 1
    assert values[known.NO_ROOM, ("x",)] == 5
    assert values[known.BLOCKS, ("x", "in_use")] == 2
    assert values[known.BLOCKS, ("x", "free")] == 21
    assert values[known.USAGE, ("x",)] == 2 / 23
    assert values[known.ERRORS, ("x", "malformed")] == 3
    assert values[known.REQUESTS, ("x", "running")] == 1
    assert values[known.IS_RUNNING, ("x",)] == 1


def test_growth_of_a_count_that_was_reset_is_its_value() -> None:
    growth = CounterGrowth()
    steps = [Sample(known.RESENT, value, ("x",)) for value in (3.0, 3.0, 7.0, 2.0)]
    assert [growth.since_last(sample) for sample in steps] == [3.0, 0.0, 4.0, 2.0]
    other = Sample(known.RESENT, 1.0, ("y",))
    assert growth.since_last(other) == 1.0
