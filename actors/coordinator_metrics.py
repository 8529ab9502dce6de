"""Metrics of a coordinator's process: meters around the coordinator, and the reporting thread.

The coordinator actor and an embedded coordinator both use it. If metrics are off, nothing is
wrapped. It serves one coordinator only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from actors.metrics_export import MetricsReporter
from actors.service import Decider, ServiceStatistics
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
from kvcache.metrics.samples import TenantLabels
from kvcache.metrics.step_meter import OnApplied, StepTimes

LOG_NAME = "kvcache.stats"
"""The logger of readable lines."""

Call = Callable[[Callable[[], Any]], Any]
"""Runs a function while the coordinator does nothing else."""


class CoordinatorMetrics:
    """The meters of one coordinator and the thread that reports them."""

    def __init__(self, config: ClusterConfig) -> None:
        """Set up without measuring. Raises ConfigurationError for spans without OpenTelemetry."""
        self._config = config
        self._reporter: MetricsReporter | None = None
        self._meters: CoordinatorMeters | None = None
        self.core_factory: CoreFactory = FlatCore
        """Makes the cores of the coordinator's managers."""
        settings = config.metrics
        if settings.enabled:
            on_applied = span_maker(config.name) if settings.spans else None
            ages = AgeMeter(settings.age_bounds_s)
            steps = StepMeter(settings.latency_bounds_s, on_applied)
            labels = TenantLabels(settings.max_tenants)
            self._meters = CoordinatorMeters(steps, ages, labels)
            self.core_factory = ages.watching()

    def around(self, coordinator: Coordinator) -> Decider:
        """Return the decider for the message loop: the coordinator, metered if metrics are on."""
        if self._meters is None:
            return coordinator
        return MeteredCoordinator(coordinator, self._meters.steps, self._meters.ages)

    def report(
        self, coordinator: Coordinator, loop_statistics: Callable[[], ServiceStatistics], call: Call
    ) -> None:
        """Start to report, if metrics are on. `call` runs the function that reads the
        statistics."""
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
        """The meter of idle times; None if metrics are off."""
        return None if self._meters is None else self._meters.ages

    def stop(self) -> None:
        """Stop reporting. Repeatable."""
        if self._reporter is not None:
            self._reporter.stop()


class _LogLines:
    """Logs a summary now and then."""

    def __init__(self, name: str, interval_s: float) -> None:
        self._name = name
        self._interval_s = interval_s
        self._last = CoordinatorStatistics()
        self._last_s = time.monotonic()
        self._logger = logging.getLogger(LOG_NAME)

    def look(self, statistics: CoordinatorStatistics) -> None:
        """Log a line if it is due and something has happened."""
        now_s = time.monotonic()
        seconds = now_s - self._last_s
        if not self._interval_s or seconds < self._interval_s:
            return
        line = log_line(self._name, self._last, statistics, seconds)
        if line:
            self._logger.info(line)
        self._last, self._last_s = statistics, now_s


def loop_errors(loop: ServiceStatistics) -> dict[str, int]:
    """Return a message loop's errors, by kind."""
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
    """Return a function that makes a span of each step; `tracer` default: the process's provider's.

    Raises ConfigurationError if OpenTelemetry is not installed.
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
    start_ns = time.time_ns() - time.monotonic_ns()  # start of the monotonic clock

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
