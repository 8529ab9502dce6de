"""The client's side of steps: numbers and repeats them, and keeps their answers and progress.

A state machine below both the synchronous and the asyncio client: it takes messages or the time,
returns messages to send, and never waits. A step belongs to one epoch: when the coordinator begins
another one, all scheduled steps are void, and calls raise. Does not attach again by itself, because
only the engine knows what to schedule again.

    attach ──▶ ATTACHING ──Attached──▶ ATTACHED ──Unattached (epoch over)──▶ VOID ──attach──▶ ...
                    submit ──▶ result ──▶ is_applied ──▶ is_finished
    detach, in any of these states ──▶ DETACHING ──Detached──▶ CLOSED
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from kvcache.base.arguments import check_kind
from kvcache.base.clock import Clock
from kvcache.base.errors import (
    ConfigurationError,
    DeadlineError,
    MalformedMessageError,
    NotRunningError,
    RequestError,
    StaleEpochError,
)
from kvcache.protocol.messages import (
    Acknowledge,
    Attach,
    Attached,
    Call,
    CallResult,
    Detach,
    Detached,
    FailedForward,
    FromClient,
    MissingSteps,
    Progress,
    ToClient,
    Unattached,
)
from kvcache.protocol.step import (
    EMPTY_RUNNING,
    NO_STEP,
    StepRequest,
    StepResult,
    check_columns,
    checked_step,
)
from kvcache.protocol.step_delivery import (
    StepAnswer,
    StepMessage,
    StepWindow,
    error_answer,
    stamped,
)
from kvcache.protocol.wire import leading_fields

MAX_STORED_ANSWERS = 1024
"""Answers kept for `result`; older ones are dropped."""

_DOUBT_RESENDS = 6


class SessionState(Enum):
    """Whether steps can be submitted."""

    NEW = "new"
    ATTACHING = "attaching"
    ATTACHED = "attached"
    VOID = "void"
    DETACHING = "detaching"
    CLOSED = "closed"


@dataclass(frozen=True)
class SessionSettings:
    """`window`: steps without an answer, at most the coordinator's `max_client_steps`. Times in
    seconds: when to repeat, when to send a heartbeat, how long an answer may take, how long steps
    may be in flight without any progress."""

    window: int = 64
    resend_s: float = 0.5
    heartbeat_s: float = 1.0
    step_s: float = 30.0
    forward_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("window", "resend_s", "heartbeat_s", "step_s", "forward_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}: set it above 0")


@dataclass(frozen=True, eq=False)
class Submitted:
    """The number of a step, and the messages to send."""

    step: int
    messages: tuple[FromClient, ...]


class ClientSession:
    """One client and its steps. `on_message`, `on_tick` and the verbs return messages to send.

    Invariant: steps up to `_void_step` are void; above it, `_window` holds the unanswered ones.
    """

    def __init__(self, client_id: str, settings: SessionSettings, clock: Clock) -> None:
        """Start unattached. `client_id` must contain an incarnation: it is never used again."""
        self.client_id = client_id
        self.settings = settings
        self.reason = ""
        self._clock = clock
        self._state = SessionState.NEW
        self._attached: Attached | None = None
        self._epoch = 0
        self._window = StepWindow(settings.window, settings.resend_s)
        self._submitted_s: dict[int, float] = {}
        self._answers: OrderedDict[int, StepAnswer] = OrderedDict()
        self._void_step = 0
        self._progress = Progress(client_id, 0, 0, 0)
        self._acknowledged_step = 0
        self._attach_since_s = self._attach_sent_s = self._sent_s = self._news_s = clock.now()
        self._detach_since_s = self._attach_since_s
        self._doubt_since_s: float | None = None

    @property
    def state(self) -> SessionState:
        """Whether steps can be submitted."""
        return self._state

    @property
    def epoch(self) -> int:
        """The epoch of the last attachment, 0 before the first."""
        return self._epoch

    @property
    def next_step(self) -> int:
        return self._window.next_step

    @property
    def finished_step(self) -> int:
        """Every step up to this one has ended on every rank."""
        return self._progress.finished_step

    @property
    def failures(self) -> tuple[FailedForward, ...]:
        """The forwards that failed since the client attached; the coordinator bounds the list."""
        return self._progress.failures

    @property
    def bytes_checked(self) -> int:
        """Bytes compared on all ranks since the client attached."""
        return self._progress.bytes_checked

    @property
    def num_resent(self) -> int:
        """Steps that were sent again."""
        return self._window.num_resent

    @property
    def stalled_s(self) -> float:
        """How long steps in flight, an attach or a detach have made no progress. 0 if there are
        none."""
        if self._state is SessionState.ATTACHING:
            return self._clock.now() - self._attach_since_s
        if self._state is SessionState.DETACHING:
            return self._clock.now() - self._detach_since_s
        is_idle = self._known_step() >= self._window.next_step - 1
        if self._state is not SessionState.ATTACHED or is_idle:
            return 0.0
        return self._clock.now() - self._news_s

    # --- verbs

    def attach(self) -> list[FromClient]:
        """Begin to attach. Earlier steps are void. `on_tick` repeats it. Raises NotRunningError if
        the client is closed: the coordinator may have given it up."""
        self.require_open()
        if self._state in (SessionState.ATTACHED, SessionState.DETACHING):
            raise RequestError(f"client {self.client_id} is {self._state.value}: it cannot attach")
        self._void()
        self._state = SessionState.ATTACHING
        self._attach_since_s = self._clock.now()
        return [self._attach_message()]

    def submit(self, step: StepRequest) -> Submitted:
        """Number a step and send it; sets `client_id`, `step` and `epoch` of `step`.

        Raises:
            RequestError: a field of the step has another type.
            StaleEpochError: not attached.
            BacklogFullError: too many steps have no answer; nothing was submitted.
        """
        check_kind("step", step, StepRequest, RequestError)
        self._require_attached()
        number = self._window.next_step
        plain = checked_step(
            stamped(step, client_id=self.client_id, step=number, epoch=self._epoch)
        )
        if plain.running is not EMPTY_RUNNING:
            check_columns(f"step {number} of {self.client_id}", plain.running)
        return self._send(plain)

    def call(self, method: str, arguments: bytes, completed_step: int = NO_STEP) -> Submitted:
        """Number a per-request call and send it. Raises as `submit` does."""
        self._require_attached()
        number = self._window.next_step
        return self._send(
            Call(self.client_id, number, self._epoch, completed_step, method, arguments)
        )

    def take_back(self, step: int) -> None:
        """Drop the step or call submitted last, which cannot be sent and would be repeated forever.
        Raises MalformedMessageError for any other step."""
        self._window.take_back(step)
        self._submitted_s.pop(step, None)

    def detach(self) -> list[FromClient]:
        """Begin to detach permanently; running requests are freed. `on_tick` repeats it until it is
        confirmed: then the state is CLOSED.

        A client that never tried to attach is closed at once. A client that was attaching may be
        attached already, and a new epoch may wait for a client of the old one: both detach.
        """
        if self._state in (SessionState.DETACHING, SessionState.CLOSED):
            return []
        is_unknown = self._state is SessionState.NEW
        self._void()
        self.reason = "it was detached"
        if is_unknown:
            self._state = SessionState.CLOSED
            return []
        self._state = SessionState.DETACHING
        self._detach_since_s = self._clock.now()
        return [self._detach_message()]

    def give_up(self) -> None:
        """Close without a confirmation."""
        self._void()
        self._state = SessionState.CLOSED

    # --- results

    def has_answer(self, step: int) -> bool:
        """Return whether there is an answer to a step. Raises as `result`."""
        return self.result(step) is not None

    def result(self, step: int) -> StepResult | CallResult | None:
        """Return the answer to a step, None if there is none yet.

        Raises:
            StaleEpochError: the step is void because its epoch has ended.
            DeadlineError: no answer came in time; it may still have been executed.
            RequestError: never submitted, or dropped.
        """
        self._require_valid(step)
        answer = self._answers.get(step)
        if answer is not None:
            return answer
        submitted_s = self._submitted_s.get(step)
        if submitted_s is None:
            raise RequestError(f"the answer to step {step} is not kept any more: take it earlier")
        waited_s = self._clock.now() - submitted_s
        if waited_s > self.settings.step_s:
            raise DeadlineError(
                f"step {step} of {self.client_id} has no answer after {waited_s:.1f} s: it may or "
                "may not have been executed; `kvcache status` says whether the cluster still runs"
            )
        return None

    def is_applied(self, step: int) -> bool:
        """Whether every rank has applied the step's commands. Raises as `is_finished` does."""
        return self._has_reached(step, self._progress.applied_step)

    def is_finished(self, step: int) -> bool:
        """Whether the step's forward has ended on every rank; without content checking: applied.

        Raises:
            StaleEpochError: the step is void because its epoch has ended.
            DeadlineError: there was no progress for too long.
            RequestError: never submitted.
        """
        return self._has_reached(step, self._progress.finished_step)

    def require_open(self) -> None:
        """Raise NotRunningError if this client is closed."""
        if self._state is SessionState.CLOSED:
            reason = f" ({self.reason})" if self.reason else ""
            raise NotRunningError(f"client {self.client_id} is closed{reason}: make a new one")

    def not_attached(self, waited_s: float) -> DeadlineError:
        """Return the error of an attempt to attach that has lasted `waited_s`, with the
        coordinator's last answer."""
        return DeadlineError(
            f"client {self.client_id} is not attached after {waited_s:.1f} s: "
            f"{self.reason or 'no answer came'}"
        )

    # --- messages and time

    def on_message(self, message: ToClient) -> list[FromClient]:
        """Take a message of the coordinator. Ignores messages of other clients and epochs.

        An `Attach` that arrives after its `Detach` was confirmed makes the coordinator keep a
        client that has gone: its answer is answered with another `Detach`.
        """
        if message.client_id != self.client_id:
            return []
        if self._state is SessionState.CLOSED:
            is_late = isinstance(message, Attached)
            return [Detach(self.client_id, message.epoch)] if is_late else []
        if isinstance(message, Attached):
            return self._on_attached(message)
        if isinstance(message, Unattached):
            return self._on_unattached(message)
        if isinstance(message, Detached):
            if self._state is SessionState.DETACHING:
                self._state = SessionState.CLOSED
            return []
        if self._state is not SessionState.ATTACHED or message.epoch != self._epoch:
            return []
        match message:
            case Progress():
                return self._on_progress(message)
            case StepResult() | CallResult():
                return self._on_answer(message)
            case MissingSteps():
                return list(self._window.on_missing(message.from_step, self._clock.now()))

    def on_unreadable(self, payload: bytes, reason: str) -> list[FromClient]:
        """Take an undecodable payload; `reason` says why. If it answers a step, an error becomes
        that step's answer: the coordinator would send the same payload again."""
        leading = leading_fields(payload)
        if leading is None or leading.kind not in (StepResult, CallResult):
            return []
        client_id, step, epoch, seq = map(leading.fields.get, ("client_id", "step", "epoch", "seq"))
        is_ours = self._state is SessionState.ATTACHED and (client_id, epoch) == (
            self.client_id,
            self._epoch,
        )
        if not is_ours or step is None:
            return []
        answer: StepAnswer = StepResult(self.client_id, step, self._epoch, seq or 0)
        if leading.kind is CallResult:
            answer = CallResult(self.client_id, step, self._epoch, seq or 0, b"")
        text = f"the answer to step {step} cannot be read, it may have been executed: {reason}"
        return self._on_answer(error_answer(answer, MalformedMessageError.__name__, text))

    def on_tick(self) -> list[FromClient]:
        """Repeat messages without an answer, acknowledge, send heartbeats."""
        now_s = self._clock.now()
        is_attach_due = now_s - self._attach_sent_s >= self.settings.resend_s
        if self._state is SessionState.ATTACHING:
            return [self._attach_message()] if is_attach_due else []
        if self._state is SessionState.DETACHING:
            is_due = now_s - self._sent_s >= self.settings.resend_s
            return [self._detach_message()] if is_due else []
        if self._state is not SessionState.ATTACHED:
            return []
        out: list[FromClient] = list(self._window.due_for_resend(now_s))
        if self._doubt_since_s is not None and is_attach_due:
            out.append(self._attach_message())
        is_silent = now_s - self._sent_s >= self.settings.heartbeat_s
        # A step may have no answer because the coordinator keeps too many unacknowledged ones: the
        # acknowledgement may have been lost, like the step.
        if out or is_silent or self._known_step() > self._acknowledged_step:
            out.append(self._acknowledge())
        if out:
            self._sent_s = now_s
        return out

    def _on_attached(self, message: Attached) -> list[FromClient]:
        known = self._attached
        is_known = known is not None and message.nonce == known.nonce
        if is_known and message.epoch < self._epoch:
            return []
        if self._state is SessionState.ATTACHED and is_known and message.epoch == self._epoch:
            self._doubt_since_s = None
            return []
        # With a lower number, an earlier attach arrived first: the next one corrects it.
        if self._state is not SessionState.ATTACHING or message.next_step < self.next_step:
            return []
        if message.next_step > self.next_step:
            self.reason = "another client has used its id: take a new one"
            return []
        self._window.drop_all(message.next_step)
        self._void_step = message.next_step - 1
        self._acknowledged_step = self._void_step
        self._progress = Progress(self.client_id, message.epoch, self._void_step, self._void_step)
        self._epoch, self._attached = message.epoch, message
        self._state, self.reason = SessionState.ATTACHED, ""
        self._news_s = self._clock.now()
        return []

    def _on_unattached(self, message: Unattached) -> list[FromClient]:
        """Accept that the epoch has ended. It may be an old message, or from a coordinator that
        lost all state: then ask, and accept it when it is repeated."""
        if self._state is SessionState.ATTACHING:
            self.reason = message.reason
            if message.is_final:
                self.give_up()
            return []
        if self._state is not SessionState.ATTACHED:
            return []
        now_s = self._clock.now()
        if message.epoch <= self._epoch:
            if self._doubt_since_s is None:
                self._doubt_since_s = now_s
                return [self._attach_message()]
            if now_s - self._doubt_since_s < _DOUBT_RESENDS * self.settings.resend_s:
                return []
        self._void()
        self._state, self.reason = SessionState.VOID, message.reason
        return []

    def _on_answer(self, answer: StepAnswer) -> list[FromClient]:
        now_s = self._clock.now()
        if not self._window.on_answer(answer.step, now_s):
            return []
        self._news_s = now_s
        self._submitted_s.pop(answer.step, None)
        self._answers[answer.step] = answer
        while len(self._answers) > MAX_STORED_ANSWERS:
            self._answers.popitem(last=False)
        return self._acknowledge_soon()

    def _on_progress(self, progress: Progress) -> list[FromClient]:
        known = self._progress
        now = (progress.applied_step, progress.finished_step)
        if now <= (known.applied_step, known.finished_step):
            return []
        self._news_s = self._clock.now()
        # A late message may have one higher number and one lower one: each only rises.
        self._progress = Progress(
            progress.client_id,
            progress.epoch,
            max(progress.applied_step, known.applied_step),
            max(progress.finished_step, known.finished_step),
            max(progress.bytes_checked, known.bytes_checked),
            max(progress.failures, known.failures, key=len),
        )
        return self._acknowledge_soon()

    def _acknowledge_soon(self) -> list[FromClient]:
        """Acknowledge at once if the coordinator keeps many answers, else with the next tick."""
        if self._known_step() - self._acknowledged_step < max(1, self.settings.window // 4):
            return []
        return [self._acknowledge()]

    def _known_step(self) -> int:
        """The last step up to which all answers and ends are known here."""
        return min(self._window.answered_step, self._progress.finished_step)

    def _acknowledge(self) -> Acknowledge:
        self._acknowledged_step = max(self._acknowledged_step, self._known_step())
        return Acknowledge(self.client_id, self._epoch, self._acknowledged_step)

    def _send(self, message: StepMessage) -> Submitted:
        now_s = self._clock.now()
        self._window.append(message, now_s)
        self._submitted_s[message.step] = now_s
        if self._progress.finished_step == message.step - 1:
            self._news_s = now_s
        self._sent_s = now_s
        return Submitted(message.step, (message,))

    def _attach_message(self) -> Attach:
        self._attach_sent_s = self._sent_s = self._clock.now()
        # Not above pending steps: the coordinator treats lower numbers as void.
        attached = self._attached if self._state is SessionState.ATTACHED else None
        nonce = "" if attached is None else attached.nonce
        return Attach(self.client_id, self._window.answered_step + 1, nonce)

    def _detach_message(self) -> Detach:
        self._sent_s = self._clock.now()
        return Detach(self.client_id, self._epoch)

    def _void(self) -> None:
        """Make all submitted steps void."""
        self._void_step = self._window.next_step - 1
        self._window.drop_all(self._window.next_step)
        self._submitted_s.clear()
        self._answers.clear()
        self._doubt_since_s = None

    def _has_reached(self, step: int, reached: int) -> bool:
        if self._void_step < step <= reached:
            return True
        self._require_valid(step)
        silent_s = self._clock.now() - self._news_s
        if silent_s > self.settings.forward_s:
            raise DeadlineError(
                f"step {step} of {self.client_id}: nothing has moved for {silent_s:.1f} s (applied "
                f"{self._progress.applied_step}, finished {self._progress.finished_step}): a "
                "worker may hang; `kvcache status` says which"
            )
        return False

    def _require_attached(self) -> None:
        if self._state is not SessionState.ATTACHED:
            raise StaleEpochError(
                f"client {self.client_id} is {self._state.value}"
                f"{': ' + self.reason if self.reason else ''}: attach, and schedule the requests "
                "again"
            )

    def _require_valid(self, step: int) -> None:
        if step <= self._void_step:
            raise StaleEpochError(
                f"step {step} of {self.client_id} is void"
                f"{': ' + self.reason if self.reason else ''}: attach, and schedule the requests "
                "again"
            )
        if step >= self._window.next_step:
            raise RequestError(
                f"step {step} of {self.client_id} was not submitted, the next one is "
                f"{self._window.next_step}"
            )
