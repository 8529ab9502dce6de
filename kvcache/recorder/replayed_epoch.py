"""ReplayedEpoch: repeats the operations of one recorded epoch on a new manager.

The replay reads the records and passes them here. Operations go through the coordinator's own
`StepServer`, which records their outcomes as it did then. Clock and tiers repeat their recorded
answers. Records that this release cannot read raise errors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvcache.base.errors import (
    InvariantError,
    KVCacheError,
    ProtocolError,
    RecordingError,
    RequestError,
)
from kvcache.coordinator import step_recorder as events
from kvcache.coordinator.clients import ClientLedger
from kvcache.coordinator.job_table import JobTable
from kvcache.coordinator.serving import StepServer
from kvcache.coordinator.settings import CoordinatorSettings
from kvcache.coordinator.step_recorder import Gone, LookedUp, StepRecorder, SwappedOut, TierCall
from kvcache.core import OffloadAnswer, OffloadHit
from kvcache.manager import KVCacheManager
from kvcache.manager.loads import PrefixLoads
from kvcache.manager.step_plan import make_request
from kvcache.protocol.messages import Call, Message
from kvcache.protocol.step import StepRequest
from kvcache.protocol.wire import decode
from kvcache.recorder.outcomes import (
    Outcome,
    digests_of_commands,
    digests_of_load,
    digests_of_state,
    outcome_of,
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
from kvcache.requests.request import Request

MISS = OffloadHit(OffloadAnswer.MISS)


class ReplayedEpoch:
    """One epoch's manager, made again. `replay` returns the difference, empty if there is none.

    `client_id` and `step` are those of the last replayed record.
    """

    def __init__(self, head: SegmentHead, number: int) -> None:
        self.number = number
        self.manager: KVCacheManager | None = None
        self.client_id, self.step, self.is_call = "", 0, False
        self._head = head
        self._clock = RepeatingClock()
        self._seen = _Seen()
        self._tiers: RepeatingTiers | None = None
        self._server: StepServer | None = None
        self._no_client = ClientLedger("", 1, 1, 0.0)

    def _begin(self, record: EpochBegun, placed: PlacedRecord) -> str:
        """Make the manager, and restore it if the recorded one was restored."""
        try:
            manager = self._head.manager_config.make(self._clock, record.model_epoch)
            if self._head.has_tiers:
                self._tiers = RepeatingTiers(manager.tiers.loads)
                manager.tiers.connect(self._tiers, self._tiers)
                manager.tiers.on_prefetch = self._tiers.look_up
            if record.label_sets:
                manager.restore(record.label_sets)
        except KVCacheError as error:
            raise _unreadable(placed, f"its manager cannot be made: {error}") from error
        settings = CoordinatorSettings(num_ranks=1, fingerprint=self._head.fingerprint or "none")
        self.manager = manager
        self._server = StepServer(settings, manager, JobTable(1), self._seen)
        commands = digests_of_commands(manager.take_commands())
        return Outcome(commands=record.commands).difference(Outcome(commands=commands))

    def replay(self, placed: PlacedRecord) -> str:
        """Repeat the operation of a record."""
        record = placed.record
        self.client_id, self.step = "", 0
        match record:
            case Executed() | Released():
                return self._operate(record, placed)
            case EpochBegun():
                return self._begin(record, placed)
            case StateReached():
                return self._compare_state(record)
            case _:
                self._clock.expect(record.readings_s)
                what = self._repeat(record, placed)
                return what or self._clock_difference(record.readings_s)

    def _operate(self, record: Executed | Released, placed: PlacedRecord) -> str:
        """Repeat a step, a call, or the end of a client."""
        self._clock.expect(record.readings_s)
        if self._tiers is not None:
            self._tiers.expect(record.calls)
        if isinstance(record, Executed):
            what = self._execute(record, placed)
        else:
            self.client_id, what = record.client_id, ""
            self._running().release(record.client_id)
        return self._tier_difference() or what or self._clock_difference(record.readings_s)

    def _repeat(
        self,
        record: Held | LetGo | Withdrawn | LoadBegun | LoadFinished | LoadReleased,
        placed: PlacedRecord,
    ) -> str:
        """Repeat what happened outside operations."""
        match record:
            case Held():
                return self._hold(record, placed)
            case LetGo():
                self.client_id = record.client_id
                self._running().let_go(record.client_id)
                return ""
            case Withdrawn():
                commands = digests_of_commands(self._running().withdraw(record.block_ids))
                return Outcome(commands=record.commands).difference(Outcome(commands=commands))
            case LoadBegun():
                return self._begin_load(record, placed)
            case LoadFinished():
                return _refusal(self._running().manager.tiers.loads.finish, record.load_id)
            case LoadReleased():
                return _refusal(self._running().manager.tiers.loads.release, record.load_id)

    def _execute(self, record: Executed, placed: PlacedRecord) -> str:
        message = _decoded(record.message, placed)
        if not isinstance(message, StepRequest | Call):
            raise _unreadable(placed, f"it holds a {type(message).__name__}, no step or call")
        self.client_id, self.step = message.client_id, message.step
        self.is_call = isinstance(message, Call)
        server, seen = self._running(), self._seen
        seen.outcome = None
        try:
            server.serve(self._no_client, message)
        except Exception:
            if seen.outcome is None:  # the step never reached the manager: a bug of the replay
                raise
        return record.outcome.difference(seen.outcome or Outcome())

    def _hold(self, record: Held, placed: PlacedRecord) -> str:
        """Hold the cached prefixes of requests."""
        message = _decoded(record.message, placed)
        if not isinstance(message, StepRequest):
            raise _unreadable(placed, f"it holds a {type(message).__name__}, no requests")
        self.client_id = message.client_id
        self._running().hold(message.client_id, message.new)
        if self._seen.num_held_tokens != record.num_tokens:
            return f"{self._seen.num_held_tokens} tokens are held, recorded: {record.num_tokens}"
        return ""

    def _begin_load(self, record: LoadBegun, placed: PlacedRecord) -> str:
        """Take blocks for a load again."""
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

    def _compare_state(self, record: StateReached) -> str:
        """Compare the manager's state part by part."""
        mine = digests_of_state(self._running().manager)
        names = mine | dict(record.digests)
        parts = sorted(name for name in names if mine.get(name) != record.digests.get(name))
        return f"the manager's state differs in {', '.join(parts)}" if parts else ""

    def _running(self) -> StepServer:
        if self._server is None:
            raise InvariantError("a record is replayed before its epoch has begun")
        self._server.manager.take_events()
        return self._server

    def _tier_difference(self) -> str:
        return "" if self._tiers is None else self._tiers.difference

    def _clock_difference(self, readings_s: Sequence[float]) -> str:
        invented, left = self._clock.num_invented, self._clock.num_left
        if not invented and not left:
            return ""
        num_asked = len(readings_s) + invented - left
        return f"the time was asked for {num_asked} times, recorded: {len(readings_s)}"


class _Seen(StepRecorder):
    """Keeps the outcome of the last operation of a `StepServer`."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.num_held_tokens = 0

    def record(self, event: events.Event) -> None:
        """Keep the digests of an outcome, or the number of held tokens."""
        match event:
            case events.Executed():
                self.outcome = outcome_of(event.outcome, event.commands)
            case events.Held():
                self.num_held_tokens = event.num_tokens


class RepeatingClock:
    """A clock that repeats recorded readings. `num_invented` counts readings beyond those."""

    def __init__(self) -> None:
        self._readings: deque[float] = deque()
        self._last_s = 0.0
        self.num_invented = 0

    def now(self) -> float:
        """Return the next reading; without one, count that and repeat the last."""
        if self._readings:
            self._last_s = self._readings.popleft()
        else:
            self.num_invented += 1
        return self._last_s

    def expect(self, readings: Sequence[float]) -> None:
        """Repeat these readings next; drop unused earlier ones."""
        self._readings = deque(readings)
        self.num_invented = 0

    @property
    def num_left(self) -> int:
        """Recorded readings that were not used."""
        return len(self._readings)


class RepeatingTiers:
    """Both hooks of a replayed manager, which repeat the recorded answers and actions of tiers.

    Call `expect` with the calls of an operation before it, and read `difference` afterwards. A
    call that was not recorded is a difference; an unrecorded look-up is a miss.
    """

    def __init__(self, loads: PrefixLoads) -> None:
        """Begin without calls; `loads` are the manager's."""
        self._loads = loads
        self._expected: deque[TierCall] = deque()
        self._difference = ""

    def expect(self, calls: Sequence[TierCall]) -> None:
        """Expect these calls next; drop unused earlier ones."""
        self._expected = deque(calls)
        self._difference = ""

    @property
    def difference(self) -> str:
        """How the calls since `expect` differ from the recorded ones; empty if they do not."""
        if not self._difference and self._expected:
            return f"the tiers were not called, recorded: {_told(self._expected[0])}"
        return self._difference

    def look_up(self, request: Request, num_device_tokens: int) -> OffloadHit:
        """Return the recorded answer."""
        call = self._next(LookedUp(request.request_id, num_device_tokens, MISS))
        return call.answer if isinstance(call, LookedUp) else MISS

    def on_swap_out(
        self,
        request: Request,
        num_tokens: int,
        num_cached_tokens: int,
        block_ids: tuple[list[int], ...],
    ) -> None:
        """Check the call only: other records have the loads of swapped-out content."""
        self._next(SwappedOut(request.request_id, num_tokens, num_cached_tokens))

    def on_request_finished(self, request_id: str) -> None:
        """Release the loads that were released then."""
        call = self._next(Gone(request_id))
        for load_id in call.released_loads if isinstance(call, Gone) else ():
            try:
                self._loads.release(load_id)
            except RequestError as error:
                self._difference = self._difference or str(error)

    def _next(self, call: TierCall) -> TierCall | None:
        """Return the recorded call in the place of this one; None if they differ."""
        recorded = self._expected.popleft() if self._expected else None
        if recorded is not None and _question(recorded) == _question(call):
            return recorded
        then = "nothing" if recorded is None else _told(recorded)
        self._difference = self._difference or f"the tiers were {_told(call)}, recorded: {then}"
        return None


def _question(call: TierCall) -> tuple[object, ...]:
    """Return a call without the tiers' answers and actions."""
    match call:
        case LookedUp():
            return LookedUp, call.request_id, call.num_device_tokens
        case SwappedOut():
            return SwappedOut, call.request_id, call.num_tokens, call.num_cached_tokens
        case Gone():
            return Gone, call.request_id


def _told(call: TierCall) -> str:
    match call:
        case LookedUp():
            return f"asked for {call.request_id} behind {call.num_device_tokens} tokens"
        case SwappedOut():
            return (
                f"told that {call.request_id} is swapped out with {call.num_tokens} tokens, "
                f"{call.num_cached_tokens} of them cached"
            )
        case Gone():
            return f"told that {call.request_id} has gone"


def _decoded(data: bytes, placed: PlacedRecord) -> Message:
    try:
        return decode(data, max_bytes=len(data), is_recorded=True)
    except ProtocolError as error:
        raise _unreadable(placed, f"its message cannot be read: {error}") from error


def _request_of(record: LoadBegun, placed: PlacedRecord) -> Request:
    message = _decoded(record.message, placed)
    if not isinstance(message, StepRequest) or len(message.new) != 1:
        raise _unreadable(placed, f"it holds a {type(message).__name__}, no request")
    try:
        return make_request(message.new[0], record.model_epoch)
    except RequestError as error:
        raise _unreadable(placed, f"its request cannot be made: {error}") from error


def _refusal(act: Callable[[int], None], load_id: int) -> str:
    """Do something to a load; return why that is refused, or an empty text."""
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
