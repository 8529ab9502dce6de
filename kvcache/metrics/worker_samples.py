"""From a rank's frozen figures to samples. Called at an interval; refuses to count.

Knows the shape of a worker's figures only, so that no process loads torch for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache.metrics import declarations as known
from kvcache.metrics.metric import Metric, Sample

if TYPE_CHECKING:
    from kvcache.worker.settings import WorkerStatistics


@dataclass(frozen=True)
class RankTraffic:
    """Messages of a rank's process, those that were none or had no receiver, and errors that
    messages or connections caused."""

    num_sent: int
    num_received: int
    num_malformed: int
    num_undeliverable: int
    num_faults: int = 0


def worker_samples(cluster: str, figures: WorkerStatistics, traffic: RankTraffic) -> list[Sample]:
    """Return all that is to be told of one rank of `cluster`."""
    return [
        Sample(metric, float(value), (cluster, str(figures.rank), *labels))
        for metric, value, labels in (*_rank(figures), *_copies(figures), *_messages(traffic))
    ] + [
        Sample(known.WORKER_ERRORS, float(count), (cluster, str(figures.rank), kind))
        for kind, count in {
            "failed_job": figures.num_failed_jobs,
            "invalid": figures.num_invalid_messages,
            "foreign": figures.num_foreign_messages,
            "malformed": traffic.num_malformed,
            "undeliverable": traffic.num_undeliverable,
            "refused_report": figures.num_refused_reports,
            "fault": traffic.num_faults,
        }.items()
    ]


_Row = tuple[Metric, float, tuple[str, ...]]


def _rank(figures: WorkerStatistics) -> Iterator[_Row]:
    yield known.WORKER_APPLIED, figures.applied_seq, ()
    yield known.WORKER_FORWARDS, figures.num_forwards, ()
    yield known.WORKER_LABELS, figures.num_labels, ()
    yield known.WORKER_POOL, figures.pool_bytes, ("device",)
    yield known.WORKER_POOL, figures.host_bytes, ("host",)
    if figures.transfers.files is not None:
        yield known.WORKER_POOL, figures.transfers.files.used_bytes, ("disk",)
    yield known.WORKER_BLOCKS, figures.num_blocks_copied, ("copied",)
    yield known.WORKER_BLOCKS, figures.num_blocks_zeroed, ("zeroed",)


def _copies(figures: WorkerStatistics) -> Iterator[_Row]:
    for kind, counts in figures.transfers.jobs.items():
        yield known.COPIED_BYTES, counts.num_bytes, (kind,)
        yield known.COPY_SECONDS, counts.seconds, (kind,)
        yield known.COPY_JOBS, counts.num_good, (kind, "good")
        yield known.COPY_JOBS, counts.num_failed, (kind, "failed")


def _messages(traffic: RankTraffic) -> Iterator[_Row]:
    yield known.WORKER_MESSAGES, traffic.num_sent, ("sent",)
    yield known.WORKER_MESSAGES, traffic.num_received, ("received",)
