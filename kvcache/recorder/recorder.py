"""FileStepRecorder: writes down all that happens to a coordinator's managers, to be replayed.

The coordinator tells it of every operation; it packs a record, and puts it into a buffer that goes
to disk when it is full, or at a tick. Refuses to be in the way: when the disk does, it stops, says
so once, counts what is lost, and begins again with the next epoch.

    executed, released, ... ──▶ record ──▶ buffer ──full, or a tick──▶ segment
                                             └── any failure ──▶ stopped until the next epoch
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcache.base.clock import Clock
from kvcache.base.logs import get_logger
from kvcache.coordinator.step_recorder import LabelSource, RecorderStatistics
from kvcache.coordinator.tier_calls import TierCall, WantedLoad
from kvcache.manager import KVCacheManager
from kvcache.manager.loads import PrefixLoad
from kvcache.protocol.commands import Command
from kvcache.protocol.step import NewRequest, StepRequest
from kvcache.protocol.step_delivery import StepAnswer, StepMessage
from kvcache.protocol.wire import encode
from kvcache.recorder.frames import frame
from kvcache.recorder.manager_config import ManagerConfig
from kvcache.recorder.operation_clock import RememberingClock
from kvcache.recorder.outcomes import (
    digests_of_commands,
    digests_of_state,
    outcome_of,
    outcome_of_error,
)
from kvcache.recorder.records import (
    EpochBegun,
    Executed,
    Held,
    LetGo,
    LoadBegun,
    LoadFinished,
    LoadReleased,
    Record,
    Released,
    SegmentHead,
    StateReached,
    Withdrawn,
    pack_head,
    pack_record,
)
from kvcache.recorder.segments import OpenFile, SegmentLimits, SegmentWriter, create_file
from kvcache.recorder.tier_codec import digests_of_load, message_of

logger = get_logger(__name__)

MAX_BUFFER_BYTES = 1 << 20
"""What waits for a tick at most; one record more may be added before it goes to disk."""


@dataclass(frozen=True)
class RecorderLimits:
    """Where and how much is written. `flush_s`: how long a record waits at most for a tick to write
    it. `is_synced`: every write waits until the disk has it."""

    segments: SegmentLimits
    flush_s: float = 1.0
    is_synced: bool = False


@dataclass(frozen=True)
class RecordingOrigin:
    """Whose managers are recorded; see `SegmentHead`."""

    recording_id: str
    fingerprint: str
    configuration: str
    manager_config: ManagerConfig
    has_tiers: bool = False


class FileStepRecorder:
    """A `StepRecorder` that writes segments. Owned by the coordinator's thread.

    `clock` is for the managers that are recorded: what it tells them is in the records.
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

    # --- what happens

    def begin_epoch(
        self,
        epoch: int,
        manager: KVCacheManager,
        labels: LabelSource | None = None,
        commands: Sequence[Command] = (),
    ) -> None:
        """Begin a segment for a new manager, even if recording had to stop before."""
        self.end_epoch()
        self._take_meanwhile()
        self._epoch, self._manager, self._problem = epoch, manager, ""

        def begin() -> None:
            record = EpochBegun(
                self._next_number,
                epoch,
                manager.model_epoch,
                () if labels is None else tuple(labels()),
                digests_of_commands(commands),
            )
            self._writer.end_epoch()
            self._append(record)
            self._flush()

        self._guarded(begin)

    def executed(
        self, message: StepMessage, answer: StepAnswer, commands: Sequence[Command]
    ) -> None:
        """Record a step or call with the digests of its outcome."""
        meanwhile = self._take_meanwhile()
        self._record(
            lambda number: Executed(
                number, encode(message, sys.maxsize), outcome_of(answer, commands), *meanwhile
            )
        )

    def refused(self, message: StepMessage, error: Exception) -> None:
        """Record a step or call with the error it ended with."""
        meanwhile = self._take_meanwhile()
        self._record(
            lambda number: Executed(
                number, encode(message, sys.maxsize), outcome_of_error(error), *meanwhile
            )
        )

    def released(self, client_id: str) -> None:
        """Record that a client's requests were freed."""
        meanwhile = self._take_meanwhile()
        self._record(lambda number: Released(number, client_id, *meanwhile))

    def held(self, client_id: str, requests: Sequence[NewRequest], num_tokens: int) -> None:
        """Record that what is cached of requests is held."""
        step = StepRequest(client_id, new=tuple(requests))
        self._record(lambda number: Held(number, encode(step, sys.maxsize), num_tokens))

    def let_go(self, client_id: str) -> None:
        """Record that nothing is held for a client any more."""
        self._record(lambda number: LetGo(number, client_id))

    def withdrawn(self, block_ids: Sequence[int], commands: Sequence[Command]) -> None:
        """Record that blocks were forgotten, and commands taken, outside steps."""
        self._record(
            lambda number: Withdrawn(
                number, tuple(map(int, block_ids)), digests_of_commands(commands)
            )
        )

    def tiers_called(self, call: TierCall) -> None:
        """Keep it for the record of the operation that it is part of."""
        self._calls.append(call)

    def load_begun(self, wanted: WantedLoad, load: PrefixLoad | None) -> None:
        """Record what tiers asked blocks for, and what they got."""

        def make(number: int) -> LoadBegun:
            request, manager = wanted.request, self._manager
            name = request.request_id
            is_known = manager is not None and manager.control.request(name) is request
            return LoadBegun(
                number,
                name,
                b"" if is_known else message_of(request),
                request.namespace.model_epoch,
                wanted.num_tokens,
                wanted.num_spare_blocks,
                wanted.has_tail,
                digests_of_load(load),
            )

        self._record(make)

    def load_finished(self, load_id: int) -> None:
        """Record that what was loaded is cached."""
        self._record(lambda number: LoadFinished(number, load_id))

    def load_released(self, load_id: int) -> None:
        """Record that a load has ended."""
        self._record(lambda number: LoadReleased(number, load_id))

    def end_epoch(self) -> None:
        """Write what waits, and let go of the manager."""
        self._guarded(self._flush)
        self._manager = None
        self._problem = self._problem or "no epoch runs"

    def on_tick(self) -> None:
        """Write what has waited for long enough."""
        if self._buffer and self._real_clock.now() - self._flushed_s >= self._limits.flush_s:
            self._guarded(self._flush)

    def close(self) -> None:
        """Record digests of the manager's books, if one is left, and close the segment."""
        manager = self._manager
        if manager is not None:
            self._record(lambda number: StateReached(number, digests_of_state(manager)))
        self.end_epoch()
        self._guarded(self._writer.close, even_when_stopped=True)

    def statistics(self) -> RecorderStatistics:
        """Return frozen statistics."""
        return RecorderStatistics(
            directory=str(self._limits.segments.directory),
            problem=self._problem,
            num_records=self._num_written,
            num_lost_records=self._num_lost,
            num_segments=self._writer.num_segments,
            written_bytes=self._writer.written_bytes,
            num_failures=self._num_failures,
        )

    # --- writing

    def _take_meanwhile(self) -> tuple[tuple[float, ...], tuple[TierCall, ...]]:
        """Return what the manager was told of time, and called of tiers, since the last time."""
        calls, self._calls = tuple(self._calls), []
        return tuple(self.clock.take()), calls

    def _record(self, make: Callable[[int], Record]) -> None:
        number = self._next_number
        if self._problem:
            self._next_number += 1
            self._num_lost += 1
            return
        self._guarded(lambda: self._append(make(number)))
        if self._next_number == number:  # it could not be made
            self._next_number += 1
            self._num_lost += 1

    def _append(self, record: Record) -> None:
        """Put a record into the buffer; write the buffer when it is full."""
        data = frame(pack_record(record))
        self._buffer += data
        self._num_in_buffer += 1
        self._next_number += 1
        if len(self._buffer) >= min(MAX_BUFFER_BYTES, self._limits.segments.segment_bytes):
            self._flush()

    def _flush(self) -> None:
        """Write the buffer, into the next segment where this one is full."""
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
        """Do it unless recording has stopped. Whatever goes wrong, the coordinator goes on."""
        if self._problem and not even_when_stopped:
            return
        try:
            work()
        except Exception as error:  # a full disk, or our own mistake: neither may stop service
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
