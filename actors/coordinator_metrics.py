"""What a coordinator's process does for metrics: meters around the coordinator, and who reports.

The coordinator actor and an embedded coordinator use it alike; where metrics are off there is
nothing around anything. Refuses to be asked by more than one coordinator.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from actors.metrics_export import MetricsReporter
from actors.service import ServiceStatistics
from actors.shared_service import EpochDecider
from kvcache.base.errors import ConfigurationError
from kvcache.config import ClusterConfig
from kvcache.coordinator import Coordinator
from kvcache.coordinator.settings import CoordinatorStatistics
from kvcache.core.flat_core import CoreFactory, FlatCore
from kvcache.metrics import (
    AgeMeter,
    AnySample,
    CoordinatorMeters,
    MeteredCoordinator,
    StepMeter,
    coordinator_samples,
    log_line,
)
from kvcache.metrics.coordinator_samples import TenantLabels
from kvcache.metrics.step_meter import OnApplied, StepTimes

LOG_NAME = "kvcache.stats"
"""The logger of the lines for people."""

Call = Callable[[Callable[[], Any]], Any]
"""Runs something while the coordinator does nothing else."""


class CoordinatorMetrics:
    """The meters of one coordinator and the thread that reports what they say."""

    def __init__(self, config: ClusterConfig) -> None:
        """Measure nothing yet. Raises ConfigurationError for spans without OpenTelemetry."""
        self._config = config
        self._reporter: MetricsReporter | None = None
        self._meters: CoordinatorMeters | None = None
        self.core_factory: CoreFactory = FlatCore
        """The cores for the coordinator's managers."""
        settings = config.metrics
        if settings.enabled:
            on_applied = span_maker(config.name) if settings.spans else None
            ages = AgeMeter(settings.age_bounds_s)
            steps = StepMeter(settings.latency_bounds_s, on_applied)
            labels = TenantLabels(settings.max_tenants)
            self._meters = CoordinatorMeters(steps, ages, labels)
            self.core_factory = ages.watching()

    def around(self, coordinator: Coordinator) -> EpochDecider:
        """Return what the message loop is to ask: the coordinator, metered if it is wanted."""
        if self._meters is None:
            return coordinator
        return MeteredCoordinator(coordinator, self._meters.steps, self._meters.ages)

    def report(
        self, coordinator: Coordinator, loop_statistics: Callable[[], ServiceStatistics], call: Call
    ) -> None:
        """Report from now on, if it is wanted. `call` runs what reads the books."""
        meters, settings = self._meters, self._config.metrics
        if meters is None or self._reporter is not None:
            return
        name = self._config.name
        lines = _LogLines(name, settings.log_interval_s)

        def collect() -> Sequence[AnySample]:
            samples: Sequence[AnySample] = call(read)
            return samples

        def read() -> Sequence[AnySample]:
            statistics = coordinator.statistics()
            lines.look(statistics)
            return coordinator_samples(name, statistics, meters, loop_errors(loop_statistics()))

        self._reporter = MetricsReporter("kvcache-metrics", collect, settings.interval_s)

    @property
    def ages(self) -> AgeMeter | None:
        """Who knows for how long contents are out of use; None where metrics are off."""
        return None if self._meters is None else self._meters.ages

    def stop(self) -> None:
        """Report no more. Repeatable."""
        if self._reporter is not None:
            self._reporter.stop()


class _LogLines:
    """Says now and then what has happened."""

    def __init__(self, name: str, interval_s: float) -> None:
        self._name = name
        self._interval_s = interval_s
        self._last = CoordinatorStatistics()
        self._last_s = time.monotonic()
        self._logger = logging.getLogger(LOG_NAME)

    def look(self, statistics: CoordinatorStatistics) -> None:
        """Log a line if it is time and something happened."""
        now_s = time.monotonic()
        seconds = now_s - self._last_s
        if not self._interval_s or seconds < self._interval_s:
            return
        line = log_line(self._name, self._last, statistics, seconds)
        if line:
            self._logger.info(line)
        self._last, self._last_s = statistics, now_s


def loop_errors(loop: ServiceStatistics) -> dict[str, int]:
    """Return what a message loop has refused, by kind."""
    transport = loop.transport
    return {
        "malformed": loop.malformed + transport.oversized,
        "impersonated": loop.impersonated,
        "refused_message": loop.refused,
        "unsendable": loop.unsendable,
        "early": loop.early,
        "fault": loop.faults + transport.faults,
        "foreign": transport.foreign,
        "undeliverable": transport.undeliverable,
        "refused_connection": transport.refused_connections,
        "disconnection": transport.disconnections,
    }


def span_maker(cluster: str, tracer: Any = None) -> OnApplied:
    """Return what makes a span of each step; `tracer` default: that of the process's provider.

    Raises ConfigurationError where OpenTelemetry is not installed.
    """
    if tracer is None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise ConfigurationError(
                "metrics.spans is true, but OpenTelemetry is not installed: pip install "
                "'kvcache[otel]', or set it to false"
            ) from error
        tracer = trace.get_tracer("kvcache")
    start_ns = time.time_ns() - time.monotonic_ns()  # of the monotonic clock

    def at(seconds: float) -> int:
        return start_ns + int(seconds * 1e9)

    def on_applied(times: StepTimes) -> None:
        span = tracer.start_span(
            "kvcache.protocol.step",
            start_time=at(times.arrived_s),
            attributes={
                "kvcache.cluster": cluster,
                "kvcache.client": times.client_id,
                "kvcache.protocol.step": times.step,
                "kvcache.epoch": times.epoch,
                "kvcache.seq": times.seq,
            },
        )
        span.add_event("begun", timestamp=at(times.begun_s))
        span.add_event("decided", timestamp=at(times.decided_s))
        span.end(end_time=at(times.applied_s))

    return on_applied
