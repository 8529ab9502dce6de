"""The statistics of one worker process, gathered from its parts.

`worker.py` locks around it. Changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.protocol.delivery import CommandReceiver
from kvcache.worker.executor import CommandExecutor
from kvcache.worker.reports import ReportQueue
from kvcache.worker.settings import WorkerStatistics


@dataclass
class RefusedMessages:
    """Messages that were not obeyed, and why the last invalid one was not; and reports of this
    rank that could not be sent or read."""

    num_invalid: int = 0
    last_invalid: str = ""
    num_foreign: int = 0
    num_reports: int = 0


def worker_statistics(
    rank: int,
    receiver: CommandReceiver,
    executor: CommandExecutor,
    reports: ReportQueue,
    refused: RefusedMessages,
) -> WorkerStatistics:
    """Return frozen statistics."""
    return WorkerStatistics(
        rank=rank,
        epoch=receiver.epoch,
        applied_seq=receiver.applied_seq,
        model_epoch=executor.model_epoch,
        num_labels=len(executor.labels),
        num_forwards=executor.gate.num_forwards,
        num_deferred=len(executor.deferred),
        num_running_jobs=executor.transfers.num_running,
        num_unacknowledged_reports=len(reports),
        num_failed_jobs=reports.num_failed,
        num_bytes_compared=executor.num_bytes_compared,
        num_blocks_copied=executor.deferred.num_blocks_copied,
        num_blocks_zeroed=executor.deferred.num_blocks_zeroed,
        num_invalid_messages=refused.num_invalid,
        last_invalid_reason=refused.last_invalid,
        num_foreign_messages=refused.num_foreign,
        num_refused_reports=refused.num_reports,
        pool_bytes=executor.pool.layout.size_bytes,
        host_bytes=executor.host_bytes,
        receiver=receiver.statistics(),
        transfers=executor.transfers.statistics(),
    )
