"""Samples of a rank, from its frozen statistics. Called at an interval.

Uses only the shape of a worker's statistics, so that no process loads torch for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache.metrics import declarations as known
from kvcache.metrics.metric import Metric, Sample

if TYPE_CHECKING:
    from kvcache.worker.statistics import WorkerStatistics


@dataclass(frozen=True)
class RankTraffic:
    """Messages of a rank's process, undecodable and undeliverable ones, and errors that messages or
    connections caused."""

    num_sent: int
    num_received: int
    num_malformed: int
    num_undeliverable: int
    num_faults: int = 0


def worker_samples(
    cluster: str, statistics: WorkerStatistics, traffic: RankTraffic
) -> list[Sample]:
    """Return all samples of one rank of `cluster`."""
    return [
        Sample(metric, float(value), (cluster, str(statistics.rank), *labels))
        for metric, value, labels in (*_rank(statistics), *_copies(statistics), *_messages(traffic))
    ] + [
        Sample(known.WORKER_ERRORS, float(count), (cluster, str(statistics.rank), kind))
        for kind, count in {
            "failed_job": statistics.num_failed_jobs,
            "invalid": statistics.num_invalid_messages,
            "foreign": statistics.num_foreign_messages,
            "malformed": traffic.num_malformed,
            "undeliverable": traffic.num_undeliverable,
            "refused_report": statistics.num_refused_reports,
            "fault": traffic.num_faults,
        }.items()
    ]


_Row = tuple[Metric, float, tuple[str, ...]]


def _rank(statistics: WorkerStatistics) -> Iterator[_Row]:
    yield known.WORKER_APPLIED, statistics.applied_seq, ()
    yield known.WORKER_FORWARDS, statistics.num_forwards, ()
    yield known.WORKER_LABELS, statistics.num_labels, ()
    yield known.WORKER_POOL, statistics.pool_bytes, ("device",)
    yield known.WORKER_POOL, statistics.host_bytes, ("host",)
    if statistics.transfers.files is not None:
        yield known.WORKER_POOL, statistics.transfers.files.used_bytes, ("disk",)
    yield known.WORKER_BLOCKS, statistics.num_blocks_copied, ("copied",)
    yield known.WORKER_BLOCKS, statistics.num_blocks_zeroed, ("zeroed",)


def _copies(statistics: WorkerStatistics) -> Iterator[_Row]:
    for kind, counts in statistics.transfers.jobs.items():
        yield known.COPIED_BYTES, counts.num_bytes, (kind,)
        yield known.COPY_SECONDS, counts.seconds, (kind,)
        yield known.COPY_JOBS, counts.num_good, (kind, "good")
        yield known.COPY_JOBS, counts.num_failed, (kind, "failed")


def _messages(traffic: RankTraffic) -> Iterator[_Row]:
    yield known.WORKER_MESSAGES, traffic.num_sent, ("sent",)
    yield known.WORKER_MESSAGES, traffic.num_received, ("received",)
