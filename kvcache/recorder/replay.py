"""RecordReplay: repeats all operations of a recorded manager on a new one.

The replay makes the recorded manager, executes each record through the coordinator's own
`StepServer`, and compares the outcome with the recorded one. It stops at the first difference,
because later records would differ too. A replay can only start where an epoch begins: it leaves out
records before the first epoch or behind a gap, and notes that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvcache.base.errors import RecordingError
from kvcache.manager import KVCacheManager
from kvcache.recorder.outcomes import digest_of_digests, digests_of_state
from kvcache.recorder.recording import PlacedRecord, Recording
from kvcache.recorder.records import EpochBegun, Executed, Record, StateReached
from kvcache.recorder.replayed_epoch import ReplayedEpoch

PROGRESS_INTERVAL = 64
"""Records between two reports of progress."""


@dataclass(frozen=True)
class ReplayDifference:
    """The first difference: its record, and the client and step of the operation.

    `client_id` is empty and `step` 0 if the record belongs to no client.
    """

    number: int
    path: str
    offset: int
    epoch: int
    client_id: str
    step: int
    what: str

    def __str__(self) -> str:
        whose = f", step {self.step} of {self.client_id}" if self.client_id else ""
        return (
            f"record {self.number} (epoch {self.epoch}{whose}; {self.path}, byte {self.offset}): "
            f"{self.what}"
        )


@dataclass(frozen=True)
class RecordReplayReport:
    """The results of a replay so far.

    `state_digest` is the digest of the manager's state at the end, empty before that;
    `recorded_state_digest` is the recorded one, empty if there is none. `num_skipped_records`
    records were left out because their manager cannot be made; `notes` say why.
    """

    bytes_read: int = 0
    num_records: int = 0
    num_epochs: int = 0
    num_steps: int = 0
    num_calls: int = 0
    num_refused: int = 0
    num_skipped_records: int = 0
    state_digest: str = ""
    recorded_state_digest: str = ""
    notes: tuple[str, ...] = ()
    difference: ReplayDifference | None = None

    @property
    def is_identical(self) -> bool:
        """Whether all replayed records had the recorded outcome."""
        return self.difference is None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"is_identical": self.is_identical, **asdict(self)}


OnProgress = Callable[[RecordReplayReport], None]


class RecordReplay:
    """One replay of one recording. `manager` is the current one, None before the first epoch."""

    def __init__(self, recording: Recording, on_progress: OnProgress | None = None) -> None:
        """Replay nothing yet. `on_progress` receives the report from time to time."""
        self.manager: KVCacheManager | None = None
        self._recording = recording
        self._on_progress = on_progress
        self._epoch: ReplayedEpoch | None = None
        self._recording_id = ""
        self._next_number = 0
        self._skipped: list[int] = []  # the first and last of a series
        self._report = RecordReplayReport()
        self._notes: list[str] = []

    def run(self) -> RecordReplayReport:
        """Replay the recording, or its records up to the first difference.

        Raises:
            RecordingError: the recording cannot be read, or holds no beginning of an epoch.
        """
        for placed in self._recording.records():
            difference = self._take(placed)
            self._report = replace(
                self._report, bytes_read=placed.bytes_read, difference=difference
            )
            if difference is not None:
                break
            if self._on_progress is not None and not placed.record.number % PROGRESS_INTERVAL:
                self._on_progress(self._report)
        self._tell_skipped()
        if self.manager is None:
            raise RecordingError(
                f"{self._recording.segments[0].path}: no epoch begins in this recording, and only "
                "there a replay can: give the directory with all of its segments"
            )
        digest = digest_of_digests(digests_of_state(self.manager))
        notes = (*self._recording.notes, *self._notes)
        self._report = replace(self._report, state_digest=digest, notes=notes)
        return self._report

    def _take(self, placed: PlacedRecord) -> ReplayDifference | None:
        """Replay one record, or leave it out; return the difference, if any."""
        record, head = placed.record, placed.segment.head
        self._follow(record, head.recording_id)
        if isinstance(record, EpochBegun):
            self._tell_skipped()
            epoch = self._epoch = ReplayedEpoch(head, record.epoch)
            what = epoch.replay(placed)
            self.manager = epoch.manager
            self._count(num_epochs=1)
            self._report = replace(self._report, recorded_state_digest="")
        elif self._epoch is None:
            self._skipped = [*self._skipped[:1], record.number]
            self._report = replace(
                self._report, num_skipped_records=self._report.num_skipped_records + 1
            )
            return None
        else:
            what = self._epoch.replay(placed)
            self._look_at(record, self._epoch)
        self._count(num_records=1)
        if not what or self._epoch is None:
            return None
        return ReplayDifference(
            record.number,
            str(placed.segment.path),
            placed.offset,
            self._epoch.number,
            self._epoch.client_id,
            self._epoch.step,
            what,
        )

    def _look_at(self, record: Record, epoch: ReplayedEpoch) -> None:
        """Count a step or call, and note the recorded state."""
        if isinstance(record, Executed):
            self._count(
                num_steps=not epoch.is_call,
                num_calls=epoch.is_call,
                num_refused=bool(record.outcome.error),
            )
        elif isinstance(record, StateReached):
            digest = digest_of_digests(record.digests)
            self._report = replace(self._report, recorded_state_digest=digest)

    def _follow(self, record: Record, recording_id: str) -> None:
        """Note a gap before `record`: the replay can only continue at the next epoch."""
        if recording_id != self._recording_id:
            self._tell_skipped()
            self._recording_id, self._epoch = recording_id, None
        elif record.number != self._next_number:
            self._tell_skipped()
            self._epoch = None
            self._notes.append(
                f"records {self._next_number} to {record.number - 1} are not there: they were lost "
                "while recording, or their segment was removed"
            )
        self._next_number = record.number + 1

    def _tell_skipped(self) -> None:
        if self._skipped:
            self._notes.append(
                f"records {self._skipped[0]} to {self._skipped[-1]} are left out: the beginning of "
                "their epoch, or what followed it, is not there"
            )
        self._skipped = []

    def _count(self, **more: int) -> None:
        counted = {name: getattr(self._report, name) + number for name, number in more.items()}
        self._report = replace(self._report, **counted)
