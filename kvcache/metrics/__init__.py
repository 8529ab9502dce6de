"""The metrics of a cluster: declared once, measured cheaply, collected at intervals.

    meters (histograms) ──┐
    frozen statistics() ──┴──▶ samples ──▶ an exporter (actors/metrics_export.py: Ray)

Steps are not involved: meters wrap the coordinator and the eviction policies.
Those meters are imported on first use, so that a rank does not load the core's kernels.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvcache.metrics.declarations import COORDINATOR_METRICS, METRICS, WORKER_METRICS
from kvcache.metrics.metric import (
    AnySample,
    CounterGrowth,
    Histogram,
    HistogramSample,
    Kind,
    Metric,
    Sample,
)
from kvcache.metrics.samples import (
    CoordinatorMeters,
    RankTraffic,
    coordinator_samples,
    log_line,
    worker_samples,
)
from kvcache.metrics.step_meter import StepMeter, StepTimes

if TYPE_CHECKING:
    from kvcache.metrics.ages import AgeMeter
    from kvcache.metrics.metered_coordinator import MeteredCoordinator

__all__ = [
    "COORDINATOR_METRICS",
    "METRICS",
    "WORKER_METRICS",
    "AgeMeter",
    "AnySample",
    "CoordinatorMeters",
    "CounterGrowth",
    "Histogram",
    "HistogramSample",
    "Kind",
    "MeteredCoordinator",
    "Metric",
    "RankTraffic",
    "Sample",
    "StepMeter",
    "StepTimes",
    "coordinator_samples",
    "log_line",
    "worker_samples",
]

_HOMES = {
    "AgeMeter": "kvcache.metrics.ages",
    "MeteredCoordinator": "kvcache.metrics.metered_coordinator",
}


def __getattr__(name: str) -> Any:
    """Import the module of `name` on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvcache.metrics' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
