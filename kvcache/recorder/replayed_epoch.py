"""ReplayedEpoch: one recorded epoch's manager, made again, and told everything once more.

Below the replay, which reads the records. Operations go through the coordinator's own `StepServer`,
which tells of what came of each as it told the recorder. Refuses what this release cannot make
sense of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcache.base.errors import (
    InvariantError,
    KVCacheError,
    ProtocolError,
    RecordingError,
    RequestError,
)
from kvcache.coordinator.client_ledger import ClientLedger
from kvcache.coordinator.job_table import JobTable
from kvcache.coordinator.serving import StepServer
from kvcache.coordinator.settings import CoordinatorSettings
from kvcache.coordinator.step_recorder import NullStepRecorder
from kvcache.manager import KVCacheManager
from kvcache.manager.step_plan import make_request
from kvcache.protocol.commands import Command
from kvcache.protocol.messages import Call, Message
from kvcache.protocol.step import NewRequest, StepRequest
from kvcache.protocol.step_delivery import StepAnswer, StepMessage
from kvcache.protocol.wire import decode
from kvcache.recorder.operation_clock import RepeatingClock
from kvcache.recorder.outcomes import (
    Outcome,
    digests_of_commands,
    digests_of_state,
    outcome_of,
    outcome_of_error,
)
from kvcache.recorder.recording import PlacedRecord
from kvcache.recorder.records import (
    EpochBegun,
    Executed,
    Held,
    LetGo,
    LoadBegun,
    LoadFinished,
    LoadReleased,
    Released,
    SegmentHead,
    StateReached,
    Withdrawn,
)
from kvcache.recorder.repeating_tiers import RepeatingTiers
from kvcache.recorder.tier_codec import digests_of_load
from kvcache.requests.request import Request


class ReplayedEpoch:
    """One epoch's manager, made again. Methods return what came out otherwise, empty if nothing.

    `client_id` and `step` say whose record was replayed last.
    """

    def __init__(self, head: SegmentHead, number: int) -> None:
        """Make no manager yet."""
        self.number = number
        self.manager: KVCacheManager | None = None
        self.client_id, self.step, self.is_call = "", 0, False
        self._head = head
        self._clock = RepeatingClock()
        self._seen = _Seen()
        self._tiers: RepeatingTiers | None = None
        self._server: StepServer | None = None
        self._nobody = ClientLedger("", 1, 1, 0.0)

    def begin(self, record: EpochBegun, placed: PlacedRecord) -> str:
        """Make the manager, and restore it if it was."""
        try:
            manager = self._head.manager_config.make(self._clock, record.model_epoch)
            if self._head.has_tiers:
                self._tiers = RepeatingTiers(manager.tiers.loads)
                manager.tiers.connect(self._tiers, self._tiers)
            if record.label_sets:
                manager.restore(record.label_sets)
        except KVCacheError as error:
            raise _unreadable(placed, f"its manager cannot be made: {error}") from error
        settings = CoordinatorSettings(num_ranks=1, fingerprint=self._head.fingerprint or "none")
        self.manager = manager
        self._server = StepServer(settings, manager, JobTable(1), self._seen)
        commands = digests_of_commands(manager.take_commands())
        return Outcome(commands=record.commands).difference(Outcome(commands=commands))

    def execute(self, record: Executed, placed: PlacedRecord) -> str:
        """Execute a step or call."""
        message = _decoded(record.message, placed)
        if not isinstance(message, StepRequest | Call):
            raise _unreadable(placed, f"it holds a {type(message).__name__}, no step or call")
        self.client_id, self.step = message.client_id, message.step
        self.is_call = isinstance(message, Call)
        server, seen = self._running(), self._seen
        seen.outcome = None
        self._expect(record)
        try:
            server.serve(self._nobody, message)
        except Exception:
            if seen.outcome is None:  # it has not reached the manager: a mistake of the replay
                raise
        what = record.outcome.difference(seen.outcome or Outcome())
        return self._tier_difference() or what or self._clock_difference(record.readings_s)

    def release(self, record: Released) -> str:
        """Free what a client had."""
        self.client_id, self.step = record.client_id, 0
        self._expect(record)
        self._running().release(record.client_id)
        return self._tier_difference() or self._clock_difference(record.readings_s)

    def hold(self, record: Held, placed: PlacedRecord) -> str:
        """Hold what is cached of requests."""
        message = _decoded(record.message, placed)
        if not isinstance(message, StepRequest):
            raise _unreadable(placed, f"it holds a {type(message).__name__}, no requests")
        self.client_id, self.step = message.client_id, 0
        self._running().hold(message.client_id, message.new)
        if self._seen.num_held_tokens != record.num_tokens:
            return f"{self._seen.num_held_tokens} tokens are held, recorded: {record.num_tokens}"
        return ""

    def let_go(self, record: LetGo) -> str:
        """Hold nothing for a client any more."""
        self.client_id, self.step = record.client_id, 0
        self._running().let_go(record.client_id)
        return ""

    def withdraw(self, record: Withdrawn) -> str:
        """Have blocks forgotten, and take the commands that wait."""
        self.client_id, self.step = "", 0
        commands = digests_of_commands(self._running().withdraw(record.block_ids))
        return Outcome(commands=record.commands).difference(Outcome(commands=commands))

    def begin_load(self, record: LoadBegun, placed: PlacedRecord) -> str:
        """Take blocks for a load again."""
        self.client_id, self.step = "", 0
        manager = self._running().manager
        request: Request | None = manager.control.request(record.request_id)
        if record.message:
            request = _request_of(record, placed)
        if request is None:
            return f"request {record.request_id}, for which tiers load, is not known"
        try:
            load = manager.tiers.loads.begin(
                request, record.num_tokens, record.num_spare_blocks, has_tail=record.has_tail
            )
        except RequestError as error:
            return f"the load of {record.request_id} is refused: {error}"
        if bool(record.load) != (load is not None):
            given = "no blocks" if load is None else f"{load.num_blocks} blocks"
            then = "some" if record.load else "none"
            return f"the load of {record.request_id} gets {given}, recorded: {then}"
        names = Outcome(record.load).changed_parts(Outcome(digests_of_load(load)))
        what = " and another ".join(names)
        return f"the load of {record.request_id} has another {what}" if names else ""

    def finish_load(self, record: LoadFinished) -> str:
        """Cache what was loaded."""
        self.client_id, self.step = "", 0
        return _refusal(self._running().manager.tiers.loads.finish, record.load_id)

    def release_load(self, record: LoadReleased) -> str:
        """Let a load's blocks go."""
        self.client_id, self.step = "", 0
        return _refusal(self._running().manager.tiers.loads.release, record.load_id)

    def compare_state(self, record: StateReached) -> str:
        """Compare the manager's books part by part."""
        self.client_id, self.step = "", 0
        mine = digests_of_state(self._running().manager)
        names = mine | dict(record.digests)
        parts = sorted(name for name in names if mine.get(name) != record.digests.get(name))
        return f"the manager's books differ in {', '.join(parts)}" if parts else ""

    def _running(self) -> StepServer:
        if self._server is None:
            raise InvariantError("a record is replayed before its epoch has begun")
        self._server.manager.take_events()
        return self._server

    def _expect(self, record: Executed | Released) -> None:
        """Have clock and tiers say what they said then."""
        self._clock.expect(record.readings_s)
        if self._tiers is not None:
            self._tiers.expect(record.calls)

    def _tier_difference(self) -> str:
        return "" if self._tiers is None else self._tiers.difference

    def _clock_difference(self, readings_s: Sequence[float]) -> str:
        invented, left = self._clock.num_invented, self._clock.num_left
        if not invented and not left:
            return ""
        num_asked = len(readings_s) + invented - left
        return f"the time was asked for {num_asked} times, recorded: {len(readings_s)}"


class _Seen(NullStepRecorder):
    """Keeps what came of the operation that a `StepServer` did last."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.num_held_tokens = 0

    def executed(
        self, message: StepMessage, answer: StepAnswer, commands: Sequence[Command]
    ) -> None:
        """Keep the digests of its outcome."""
        self.outcome = outcome_of(answer, commands)

    def refused(self, message: StepMessage, error: Exception) -> None:
        """Keep the error."""
        self.outcome = outcome_of_error(error)

    def held(self, client_id: str, requests: Sequence[NewRequest], num_tokens: int) -> None:
        """Keep how many tokens are held."""
        self.num_held_tokens = num_tokens


def _decoded(data: bytes, placed: PlacedRecord) -> Message:
    try:
        return decode(data, max_bytes=len(data))
    except ProtocolError as error:
        raise _unreadable(placed, f"its message cannot be read: {error}") from error


def _request_of(record: LoadBegun, placed: PlacedRecord) -> Request:
    """Return a request of the content that tiers loaded for."""
    message = _decoded(record.message, placed)
    if not isinstance(message, StepRequest) or len(message.new) != 1:
        raise _unreadable(placed, f"it holds a {type(message).__name__}, no request")
    try:
        return make_request(message.new[0], record.model_epoch)
    except RequestError as error:
        raise _unreadable(placed, f"its request cannot be made: {error}") from error


def _refusal(act: Callable[[int], None], load_id: int) -> str:
    """Do something to a load; say why that is refused, if it is."""
    try:
        act(load_id)
    except RequestError as error:
        return str(error)
    return ""


def _unreadable(placed: PlacedRecord, reason: str) -> RecordingError:
    return RecordingError(
        f"{placed.segment.path}: record {placed.record.number} at byte {placed.offset}: {reason}: "
        "replay it with the release that recorded it"
    )
