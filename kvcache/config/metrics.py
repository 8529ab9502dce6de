"""Metrics of a cluster: whether to report them, how often, in which buckets.

One section of `ClusterConfig`. Refuses bounds that do not rise.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from kvcache.base.errors import ConfigurationError
from kvcache.config.sections import List, Seconds, SecondsOrNever, Section

MAX_BOUNDS = 64


def require_bounds(value: tuple[float, ...]) -> tuple[float, ...]:
    """Return `value`; raises ConfigurationError unless it rises from above 0."""
    if list(value) != sorted(set(value)) or value[0] <= 0:
        raise ConfigurationError(
            f"{list(value)} are no bounds of buckets: write seconds above 0, each above the one "
            "before"
        )
    return value


Bounds = Annotated[
    tuple[Seconds, ...],
    Field(min_length=1, max_length=MAX_BOUNDS),
    List,
    AfterValidator(require_bounds),
]


class MetricsConfig(Section):
    """Statistics for Prometheus through Ray's metrics, lines in the log, spans.

    All metrics are collected every `interval_s`, between steps. `latency_bounds_s` and
    `age_bounds_s` are the upper bounds of the histograms' buckets. At most `max_tenants` tenants
    have a label of their own; the others are "other" together. A summary line is written to the
    coordinator's log once per `log_interval_s` in which steps ran (0: never). `spans`: each step is
    an OpenTelemetry span (extra `otel`).
    """

    enabled: bool = True
    interval_s: Seconds = 5.0
    latency_bounds_s: Bounds = (
        *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
        *(1.0, 2.5, 10.0),
    )
    age_bounds_s: Bounds = (
        *(0.01, 0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0),
    )
    max_tenants: Annotated[int, Field(ge=0, le=1000)] = 32
    log_interval_s: SecondsOrNever = 60.0
    spans: bool = False
