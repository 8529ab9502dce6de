"""Delivery of steps between client and coordinator, by the rules of delivery.py.

    client  StepWindow ──StepRequest / Call, step──▶ StepReceiver  coordinator, one per client
                       ◀──answer / MissingSteps────

A step is executed once, however often it arrives; a repeat gets the stored answer. These classes
only keep the state: time is passed in, and nothing is sent or executed here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from kvcache.base.errors import BacklogFullError, MalformedMessageError
from kvcache.protocol.delivery import MAX_RESENT
from kvcache.protocol.messages import Call, CallResult
from kvcache.protocol.step import StepRequest, StepResult
from kvcache.protocol.wire import prose


@dataclass(frozen=True)
class UnreadableStep:
    """Stands in for a step or call that arrived but cannot be read, for `reason`. It takes the
    number, and is refused like any other invalid step. Never sent."""

    client_id: str
    step: int
    epoch: int
    is_call: bool
    reason: str


StepMessage: TypeAlias = StepRequest | Call
ReceivedMessage: TypeAlias = StepMessage | UnreadableStep
StepAnswer: TypeAlias = StepResult | CallResult

MessageT = TypeVar("MessageT", bound=StepRequest | StepResult | CallResult)


def error_answer(message: ReceivedMessage | StepAnswer, error_type: str, reason: str) -> StepAnswer:
    """Return an error as the answer to a step or call, or in place of another answer."""
    client_id, step, reason = message.client_id, message.step, prose(reason)
    is_call = isinstance(message, Call | CallResult) or (
        isinstance(message, UnreadableStep) and message.is_call
    )
    seq = message.seq if isinstance(message, StepResult | CallResult) else 0
    if is_call:
        return CallResult(client_id, step, message.epoch, seq, b"", error_type, reason)
    return StepResult(client_id, step, message.epoch, seq, error=prose(f"{error_type}: {reason}"))


def stamped(message: MessageT, **statistics: int | str) -> MessageT:
    """Return a copy of `message` with the numbers that only its sender knows.

    `dataclasses.replace` would run the constructor over all twenty fields in every step.
    """
    copy = object.__new__(type(message))
    copy.__dict__.update(message.__dict__, **statistics)
    return copy


@dataclass(frozen=True)
class ReceivedStep:
    """The reaction to a step that came in: a stored answer, or the number that is missing."""

    answer: StepAnswer | None = None
    missing_from: int | None = None


class StepReceiver:
    """The coordinator's end of one client's steps.

    Steps are taken one by one with `take_ready`, so that a busy coordinator leaves them here.
    `store_answer` answers a taken step, and the answer is kept until it is acknowledged.
    """

    def __init__(self, client_id: str, max_stored: int, next_step: int = 1) -> None:
        """Expect `next_step` next; keep at most `max_stored` answers and as many early steps."""
        self.client_id = client_id
        self._max_stored = max_stored
        self._next_step = next_step
        self._buffered: dict[int, ReceivedMessage] = {}
        self._answers: OrderedDict[int, StepAnswer] = OrderedDict()
        self.num_duplicates = 0
        self.num_overflowed = 0

    @property
    def next_step(self) -> int:
        """The number that is taken next."""
        return self._next_step

    def skip_to(self, next_step: int) -> None:
        """Expect `next_step` next; lower numbers that were not taken are void."""
        self._next_step = max(self._next_step, next_step)
        self._buffered = {n: m for n, m in self._buffered.items() if n >= self._next_step}

    def on_step(self, message: ReceivedMessage) -> ReceivedStep:
        """Keep a step for `take_ready`, or return its stored answer.

        A number that is too far ahead is dropped, and so is one whose answer the client has
        acknowledged.
        """
        step = message.step
        if step < self._next_step:
            self.num_duplicates += 1
            return ReceivedStep(answer=self._answers.get(step))
        if step in self._buffered:
            self.num_duplicates += 1
        elif step >= self._next_step + self._max_stored:
            self.num_overflowed += 1
        else:
            self._buffered[step] = message
        is_gap = self._next_step not in self._buffered
        return ReceivedStep(missing_from=self._next_step if is_gap else None)

    @property
    def ready_step(self) -> ReceivedMessage | None:
        """The step that `take_ready` would take if enough answers were acknowledged."""
        return self._buffered.get(self._next_step)

    def take_ready(self) -> ReceivedMessage | None:
        """Return the next step in order; None if it is not there, or too many answers are kept."""
        if len(self._answers) >= self._max_stored:
            return None
        message = self._buffered.pop(self._next_step, None)
        if message is not None:
            self._next_step += 1
        return message

    def store_answer(self, answer: StepAnswer) -> None:
        """Keep the answer of a step that was taken."""
        self._answers[answer.step] = answer

    def replace_answer(self, answer: StepAnswer) -> None:
        """Replace the answer of a step by one that can be sent."""
        if answer.step in self._answers:
            self._answers[answer.step] = answer

    def on_acknowledge(self, step: int) -> None:
        """Drop the answers up to `step`."""
        while self._answers and next(iter(self._answers)) <= step:
            self._answers.popitem(last=False)


class StepWindow:
    """The client's end: numbers its steps and keeps each until its answer arrives."""

    def __init__(self, max_pending: int, resend_s: float) -> None:
        """Make an empty window of at most `max_pending` unanswered steps."""
        self._max_pending = max_pending
        self._resend_s = resend_s
        self._next_step = 1
        self._pending: OrderedDict[int, StepMessage] = OrderedDict()
        self._waiting_since_s = 0.0
        self._asked_step = 0
        self.num_resent = 0

    @property
    def next_step(self) -> int:
        """The number the next step must have."""
        return self._next_step

    @property
    def is_full(self) -> bool:
        """Whether `append` would raise."""
        return len(self._pending) >= self._max_pending

    @property
    def answered_step(self) -> int:
        """Every step up to this one is answered."""
        return next(iter(self._pending), self._next_step) - 1

    def append(self, message: StepMessage, now_s: float) -> None:
        """Keep `message`, which the caller sends.

        Raises:
            BacklogFullError: too many steps have no answer yet; nothing is kept.
            MalformedMessageError: not the next number.
        """
        if self.is_full:
            raise BacklogFullError(
                f"{len(self._pending)} steps have no answer yet, the window holds "
                f"{self._max_pending}: take answers before sending more"
            )
        if message.step != self._next_step:
            raise MalformedMessageError(
                f"step {message.step} appended, the next one is {self._next_step}"
            )
        if not self._pending:
            self._waiting_since_s = now_s
        self._pending[message.step] = message
        self._next_step += 1

    def take_back(self, step: int) -> None:
        """Drop the step appended last, which was not sent; its number is the next one again.

        Raises MalformedMessageError for any other step.
        """
        if step != self._next_step - 1 or step not in self._pending:
            raise MalformedMessageError(
                f"step {step} taken back, the next one is {self._next_step}: only the last one can "
                "be, before it is answered"
            )
        del self._pending[step]
        self._next_step = step

    def on_answer(self, step: int, now_s: float) -> bool:
        """Record an answer; return whether it is the first one to that step."""
        if self._pending.pop(step, None) is None:
            return False
        self._waiting_since_s = now_s
        return True

    def on_missing(self, from_step: int, now_s: float) -> list[StepMessage]:
        """Return the steps to send again; a repeated request waits for the clock."""
        if from_step <= self._asked_step:
            return []
        self._asked_step = from_step
        return self._resend(from_step, now_s)

    def due_for_resend(self, now_s: float) -> list[StepMessage]:
        """Return the steps to repeat because no answer came for too long."""
        if not self._pending or now_s - self._waiting_since_s < self._resend_s:
            return []
        return self._resend(0, now_s)

    def drop_all(self, next_step: int) -> tuple[int, ...]:
        """Drop the pending steps, which are void; continue with `next_step`; return them."""
        void = tuple(self._pending)
        self._pending.clear()
        self._next_step = max(self._next_step, next_step)
        return void

    def _resend(self, from_step: int, now_s: float) -> list[StepMessage]:
        self._waiting_since_s = now_s
        again = [m for step, m in self._pending.items() if step >= from_step][:MAX_RESENT]
        self.num_resent += len(again)
        return again
