"""What a worker's process does for metrics: its statistics, reported at an interval.

Nothing is measured that a rank does not count anyway. Refuses to load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.metrics_export import MetricsReporter
from kvcache.metrics import RankTraffic, Sample, worker_samples

if TYPE_CHECKING:
    from actors.embedding import EmbeddedWorker


def report_worker(embedded: EmbeddedWorker) -> None:
    """Report the statistics of a rank until it closes, if its configuration wants that. Once;
    called again it has no effect."""
    settings, name = embedded.config.metrics, embedded.config.name
    if not settings.enabled or isinstance(embedded.on_close, _Stop):
        return

    def collect() -> list[Sample]:
        host = embedded.statistics()
        carried = host.transport
        traffic = RankTraffic(
            carried.sent,
            carried.received,
            host.malformed + host.misdirected + carried.oversized + carried.foreign,
            carried.undeliverable,
            host.faults,
        )
        return worker_samples(name, embedded.worker.statistics(), traffic)

    embedded.on_close = _Stop(MetricsReporter("kvcache-metrics", collect, settings.interval_s))


class _Stop:
    """Ends a reporter."""

    def __init__(self, reporter: MetricsReporter) -> None:
        self._reporter = reporter

    def __call__(self) -> None:
        self._reporter.stop()
