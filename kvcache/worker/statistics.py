"""Statistics of a worker and its tiers: frozen records.

Counts are since the process started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvcache.protocol.delivery import ReceiverStatistics
from kvcache.worker.files.store import FileTierStatistics
from kvcache.worker.host_memory.labels import SlotState
from kvcache.worker.host_memory.segment import HostSegment


@dataclass(frozen=True)
class HostStatistics:
    """The host slots. `origin` says where their memory is from. `num_damaged_rows`: labels of an
    earlier process that were invalid. `num_without_room`: labels that were too long."""

    origin: str
    model_epoch: int
    num_slots: int
    num_writing: int
    num_written: int
    num_sealed: int
    num_damaged_rows: int
    num_without_room: int
    num_seals_refused: int

    @classmethod
    def of(cls, segment: HostSegment) -> HostStatistics:
        labels = segment.labels
        return cls(
            origin=segment.origin,
            model_epoch=segment.model_epoch,
            num_slots=labels.num_slots,
            num_writing=labels.num_in(SlotState.WRITING),
            num_written=labels.num_in(SlotState.WRITTEN),
            num_sealed=labels.num_in(SlotState.SEALED),
            num_damaged_rows=labels.num_damaged_rows,
            num_without_room=labels.num_without_room,
            num_seals_refused=labels.num_seals_refused,
        )


@dataclass(frozen=True)
class JobCounts:
    """Ended jobs of one kind, their bytes, and their total time from command to report, including
    waits."""

    num_good: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class TransferStatistics:
    """Jobs by kind (`store`, `load`, `spill`, `fetch`), and the tiers of the rank.

    `num_waits`: forwards and jobs that waited for a transfer of their blocks. `files_problem`: why
    a rank that should have files has none, else empty.
    """

    num_running: int = 0
    num_waits: int = 0
    jobs: Mapping[str, JobCounts] = field(default_factory=lambda: MappingProxyType({}))
    host: HostStatistics | None = None
    files: FileTierStatistics | None = None
    files_problem: str = ""


class JobTally:
    """Counts jobs by kind as they end."""

    def __init__(self) -> None:
        self._counts: dict[str, JobCounts] = {}

    def add(self, kind: str, num_bytes: int, seconds: float, *, ok: bool) -> None:
        old = self._counts.get(kind, JobCounts())
        self._counts[kind] = JobCounts(
            old.num_good + ok,
            old.num_failed + (not ok),
            old.num_bytes + num_bytes,
            old.seconds + seconds,
        )

    def counts(self) -> Mapping[str, JobCounts]:
        """Return the counts so far; a copy."""
        return MappingProxyType(dict(self._counts))


@dataclass(frozen=True)
class WorkerStatistics:
    """Counts of one worker process since its start.

    `num_blocks_copied` and `num_blocks_zeroed`: by commands, a block over all layers counted once.
    `num_refused_reports` could not be sent, or not be read.
    """

    rank: int
    epoch: int
    applied_seq: int
    model_epoch: int
    num_labels: int
    num_forwards: int
    num_deferred: int
    num_running_jobs: int
    num_unacknowledged_reports: int
    num_failed_jobs: int
    num_bytes_compared: int
    num_blocks_copied: int
    num_blocks_zeroed: int
    num_invalid_messages: int
    last_invalid_reason: str
    num_foreign_messages: int
    pool_bytes: int
    host_bytes: int
    receiver: ReceiverStatistics
    num_refused_reports: int = 0
    transfers: TransferStatistics = field(default_factory=TransferStatistics)
