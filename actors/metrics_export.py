"""Samples to Ray's metrics, which every node's agent serves to Prometheus.

    collect() ──samples──▶ RayExporter ──▶ ray.util.metrics ──▶ agent of the node ──▶ Prometheus
       └─ every few seconds, in a thread of its own: no step waits for it

Adding to a counter takes 3 us, so only its increase is added. Ray's histograms take single values,
but these are counted already; their parts become gauges under the names that Prometheus expects:
`_bucket` with `le`, `_sum`, `_count`. Errors of the export never end a process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ray.util import metrics as ray_metrics

from kvcache.base.logs import get_logger
from kvcache.metrics import AnySample, CounterGrowth, HistogramSample, Kind, Metric, Sample

logger = get_logger(__name__)

STOP_TIMEOUT_S = 2.0


class RayExporter:
    """The metrics of one process in Ray. Not thread-safe."""

    def __init__(self) -> None:
        """Declare nothing yet; a metric is declared with its first sample."""
        self._known: dict[str, Any] = {}
        self._growth = CounterGrowth()

    def export(self, samples: Sequence[AnySample]) -> None:
        """Set Ray's metrics to these samples."""
        for sample in samples:
            if isinstance(sample, HistogramSample):
                self._export_histogram(sample)
            elif sample.metric.kind is Kind.COUNTER:
                growth = self._growth.since_last(sample)
                if growth:
                    self._counter(sample.metric).inc(growth, _tags(sample))
                else:
                    self._counter(sample.metric)
            else:
                self._gauge(sample.metric.name, sample.metric).set(sample.value, _tags(sample))

    def _export_histogram(self, sample: HistogramSample) -> None:
        metric, tags = sample.metric, _tags(sample)
        buckets = self._gauge(f"{metric.name}_bucket", metric, "le")
        for bound, count in zip((*sample.bounds, float("inf")), sample.counts, strict=True):
            le = "+Inf" if bound == float("inf") else f"{bound:g}"
            buckets.set(float(count), {**tags, "le": le})
        self._gauge(f"{metric.name}_sum", metric).set(sample.sum, tags)
        self._gauge(f"{metric.name}_count", metric).set(float(sample.count), tags)

    def _gauge(self, name: str, metric: Metric, *more_labels: str) -> Any:
        gauge = self._known.get(name)
        if gauge is None:
            labels = (*metric.labels, *more_labels)
            gauge = self._known[name] = ray_metrics.Gauge(name, metric.help, tag_keys=labels)
        return gauge

    def _counter(self, metric: Metric) -> Any:
        counter = self._known.get(metric.name)
        if counter is None:
            counter = ray_metrics.Counter(metric.name, metric.help, tag_keys=metric.labels)
            self._known[metric.name] = counter
        return counter


class MetricsReporter:
    """Exports the samples of `collect` periodically until stopped."""

    def __init__(
        self, name: str, collect: Callable[[], Sequence[AnySample]], interval_s: float
    ) -> None:
        """Start the thread. Errors of `collect` are logged, and it tries again."""
        self._collect = collect
        self._interval_s = interval_s
        self._exporter = RayExporter()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Repeatable."""
        self._is_over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        while not self._is_over.wait(self._interval_s):
            try:
                self._exporter.export(self._collect())
            except Exception as error:  # serving does not depend on statistics
                logger.debug("no metrics this time: %r", error)


def _tags(sample: Sample | HistogramSample) -> dict[str, str]:
    return dict(zip(sample.metric.labels, sample.labels, strict=True))
