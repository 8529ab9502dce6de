"""The metrics of a cluster: declared once, measured cheaply, collected at intervals.

    meters (histograms) ──┐
    frozen statistics() ──┴──▶ samples ──▶ an exporter (actors/metrics_export.py: Ray)

Steps are not involved: meters wrap the coordinator and the eviction policies.
"""

from __future__ import annotations

from kvcache.metrics.ages import AgeMeter
from kvcache.metrics.declarations import COORDINATOR_METRICS, METRICS, WORKER_METRICS
from kvcache.metrics.metered_coordinator import MeteredCoordinator
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
