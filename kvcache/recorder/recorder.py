"""FileStepRecorder: records all operations on a coordinator's managers, for a replay.

It makes a record of each event of the coordinator and puts it into a buffer, which goes to disk
when it is full, or at a tick. When the disk fails, the recorder stops, logs that once, counts what
is lost, and begins again with the next epoch. Service continues.

    executed, released, ... ──▶ record ──▶ buffer ──full, or a tick──▶ segment
                                             └── any failure ──▶ stopped until the next epoch
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvcache.base.clock import Clock
from kvcache.base.logs import get_logger
from kvcache.coordinator.step_recorder import (
    EpochBegun,
    EpochEnded,
    Event,
    Executed,
    Gone,
    Held,
    LetGo,
    LoadBegun,
    LoadFinished,
    LoadReleased,
    LookedUp,
    RecorderStatistics,
    Released,
    StepRecorder,
    SwappedOut,
    TierCall,
    Withdrawn,
)
from kvcache.manager import KVCacheManager
from kvcache.protocol.step import StepRequest
from kvcache.protocol.wire import encode
from kvcache.recorder import records
from kvcache.recorder.frames import frame
from kvcache.recorder.manager_config import ManagerConfig
from kvcache.recorder.outcomes import (
    digests_of_commands,
    digests_of_load,
    digests_of_state,
    outcome_of,
)
from kvcache.recorder.records import Record, SegmentHead, message_of, pack_head, pack_record
from kvcache.recorder.segments import OpenFile, SegmentLimits, SegmentWriter, create_file

logger = get_logger(__name__)

MAX_BUFFER_BYTES = 1 << 20
"""Size of the buffer. One more record may exceed it before the buffer goes to disk."""


@dataclass(frozen=True)
class RecorderLimits:
    """The limits of a recorder. A tick writes records that have waited for `flush_s`.
    `is_synced`: every write waits until the disk has it."""

    segments: SegmentLimits
    flush_s: float = 1.0
    is_synced: bool = False


@dataclass(frozen=True)
class RecordingOrigin:
    """The origin of a recording; see `SegmentHead`."""

    recording_id: str
    fingerprint: str
    configuration: str
    manager_config: ManagerConfig
    has_tiers: bool = False


class RememberingClock:
    """The clock of a recorded manager. Pins and hints expire by it, so its readings are recorded.

    It keeps readings until the next record takes them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._readings: list[float] = []

    def now(self) -> float:
        """Return the time in seconds, and remember it."""
        now_s = self._clock.now()
        self._readings.append(now_s)
        return now_s

    def take(self) -> list[float]:
        """Return the readings since the last call."""
        readings, self._readings = self._readings, []
        return readings


class FileStepRecorder(StepRecorder):
    """Writes segments. Owned by the coordinator's thread.

    The recorded managers must use `clock`: its readings are recorded.
    Invariant: a record has the next number whether it is written or lost.
    """

    def __init__(
        self,
        limits: RecorderLimits,
        origin: RecordingOrigin,
        clock: Clock,
        open_file: OpenFile = create_file,
    ) -> None:
        """Write nothing before the first epoch."""
        self.clock = RememberingClock(clock)
        self._limits = limits
        self._origin = origin
        self._real_clock = clock
        self._writer = SegmentWriter(limits.segments, origin.recording_id, open_file)
        self._calls: list[TierCall] = []
        self._buffer = bytearray()
        self._next_number = 1
        self._flushed_s = clock.now()
        self._epoch = 0
        self._manager: KVCacheManager | None = None
        self._problem = "no epoch has begun"
        self._num_lost = self._num_written = self._num_in_buffer = self._num_failures = 0

    def record(self, event: Event) -> None:
        """Record an event; calls of tiers become part of the record of their operation."""
        match event:
            case EpochBegun():
                self._begin_epoch(event)
            case EpochEnded():
                self._end_epoch()
            case LookedUp() | SwappedOut() | Gone():
                self._calls.append(event)
            case Executed() | Released():
                self._write(partial(_operation, event, *self._take_meanwhile()))
            case _:
                self._write(partial(self._made_of, event, tuple(self.clock.take())))

    def on_tick(self) -> None:
        """Write the buffer if it has waited for `flush_s`."""
        if self._buffer and self._real_clock.now() - self._flushed_s >= self._limits.flush_s:
            self._guarded(self._flush)

    def close(self) -> None:
        """Record digests of the manager's state, if there is a manager, and close the segment."""
        manager = self._manager
        if manager is not None:
            self._write(lambda number: records.StateReached(number, digests_of_state(manager)))
        self._end_epoch()
        self._guarded(self._writer.close, even_when_stopped=True)

    def statistics(self) -> RecorderStatistics:
        return RecorderStatistics(
            directory=str(self._limits.segments.directory),
            problem=self._problem,
            num_records=self._num_written,
            num_lost_records=self._num_lost,
            num_segments=self._writer.num_segments,
            written_bytes=self._writer.written_bytes,
            num_failures=self._num_failures,
        )

    # --- records

    def _begin_epoch(self, event: EpochBegun) -> None:
        """Begin a segment for a new manager, even if recording had to stop before."""
        self._end_epoch()
        self._take_meanwhile()
        self._epoch, self._manager, self._problem = event.epoch, event.manager, ""

        def begin() -> None:
            record = records.EpochBegun(
                self._next_number,
                event.epoch,
                event.manager.model_epoch,
                () if event.labels is None else tuple(event.labels()),
                digests_of_commands(event.commands),
            )
            self._writer.end_epoch()
            self._append(record)
            self._flush()

        self._guarded(begin)

    def _end_epoch(self) -> None:
        """Write the buffer, and drop the manager."""
        self._guarded(self._flush)
        self._manager = None
        self._problem = self._problem or "no epoch runs"

    def _made_of(
        self,
        event: Held | LetGo | Withdrawn | LoadBegun | LoadFinished | LoadReleased,
        readings_s: tuple[float, ...],
        number: int,
    ) -> Record:
        match event:
            case Held():
                step = StepRequest(event.client_id, new=tuple(event.requests))
                return records.Held(number, encode(step, sys.maxsize), event.num_tokens, readings_s)
            case LetGo():
                return records.LetGo(number, event.client_id, readings_s)
            case Withdrawn():
                block_ids = tuple(map(int, event.block_ids))
                commands = digests_of_commands(event.commands)
                return records.Withdrawn(number, block_ids, commands, readings_s)
            case LoadBegun():
                request, manager = event.request, self._manager
                name = request.request_id
                is_known = manager is not None and manager.control.request(name) is request
                return records.LoadBegun(
                    number,
                    name,
                    b"" if is_known else message_of(request),
                    request.namespace.model_epoch,
                    event.num_tokens,
                    event.num_spare_blocks,
                    event.has_tail,
                    digests_of_load(event.load),
                    readings_s,
                )
            case LoadFinished():
                return records.LoadFinished(number, event.load_id, readings_s)
            case LoadReleased():
                return records.LoadReleased(number, event.load_id, readings_s)

    # --- writing

    def _take_meanwhile(self) -> tuple[tuple[float, ...], tuple[TierCall, ...]]:
        """Return the clock readings and calls of tiers since the last call."""
        calls, self._calls = tuple(self._calls), []
        return tuple(self.clock.take()), calls

    def _write(self, make: Callable[[int], Record]) -> None:
        number = self._next_number
        if self._problem:
            self._next_number += 1
            self._num_lost += 1
            return
        self._guarded(partial(self._append_made, make, number))
        if self._next_number == number:  # making or adding it failed
            self._next_number += 1
            self._num_lost += 1

    def _append_made(self, make: Callable[[int], Record], number: int) -> None:
        self._append(make(number))

    def _append(self, record: Record) -> None:
        """Put a record into the buffer; write the buffer when it is full."""
        data = frame(pack_record(record))
        self._buffer += data
        self._num_in_buffer += 1
        self._next_number += 1
        if len(self._buffer) >= min(MAX_BUFFER_BYTES, self._limits.segments.segment_bytes):
            self._flush()

    def _flush(self) -> None:
        """Write the buffer, to a new segment if this one is full."""
        self._flushed_s = self._real_clock.now()
        if not self._buffer:
            return
        if not self._writer.has_room(len(self._buffer)):
            self._writer.open_next(self._head())
        self._writer.append(self._buffer)
        if self._limits.is_synced:
            self._writer.sync()
        self._num_written += self._num_in_buffer
        self._empty_buffer()

    def _head(self) -> bytes:
        origin = self._origin
        head = SegmentHead(
            origin.recording_id,
            self._writer.num_segments,
            self._next_number - self._num_in_buffer,
            self._epoch,
            origin.fingerprint,
            origin.configuration,
            origin.manager_config,
            origin.has_tiers,
        )
        return frame(pack_head(head))

    def _empty_buffer(self) -> None:
        self._buffer.clear()
        self._num_in_buffer = 0

    def _guarded(self, work: Callable[[], None], *, even_when_stopped: bool = False) -> None:
        """Do `work` unless recording has stopped. An error stops recording, but not service."""
        if self._problem and not even_when_stopped:
            return
        try:
            work()
        except Exception as error:  # neither a full disk nor a bug may stop service
            self._stop(f"{type(error).__name__}: {error}")

    def _stop(self, problem: str) -> None:
        self._num_failures += 1
        self._num_lost += self._num_in_buffer
        self._empty_buffer()
        if not self._problem:
            logger.error(
                "recording in %s stops until the next epoch: %s",
                self._limits.segments.directory,
                problem,
            )
        self._problem = problem
        try:
            self._writer.close()
        except OSError as error:
            logger.debug("closing a segment: %s", error)


def _operation(
    event: Executed | Released,
    readings_s: tuple[float, ...],
    calls: tuple[TierCall, ...],
    number: int,
) -> Record:
    if isinstance(event, Released):
        return records.Released(number, event.client_id, readings_s, calls)
    outcome = outcome_of(event.outcome, event.commands)
    return records.Executed(number, encode(event.message, sys.maxsize), readings_s, outcome, calls)
