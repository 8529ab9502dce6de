"""Steps as OpenTelemetry spans: from a step's arrival until every rank has applied it.

Off unless the configuration asks for it; needs the extra `otel`. Where spans go is up to the
process: an embedded coordinator's engine installs a tracer provider, a Ray cluster its tracing
start-up hook. Refuses to configure OpenTelemetry.
"""

from __future__ import annotations

import time
from typing import Any

from kvcache.base.errors import ConfigurationError
from kvcache.metrics.step_meter import OnApplied, StepTimes


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
