"""One client's steps in an epoch: their answers, and how far they have got.

Steps come in through the `StepReceiver`, are executed in order, and are followed here until they
are applied and finished on every rank. Executes nothing.

    received ──▶ executed, answered ──▶ applied by all ranks ──▶ forward finished on all ranks
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvcache.base.errors import InvariantError, RequestError
from kvcache.coordinator.job_table import EndedJob
from kvcache.protocol.messages import Call, FailedForward, Progress
from kvcache.protocol.step import NO_STEP
from kvcache.protocol.step_delivery import StepMessage, StepReceiver

MAX_FAILURES = 32
"""Failed forwards that are reported to a client; later ones only count."""


@dataclass
class _Executed:
    """A step in flight: the message that carries its commands, and its forward, if any."""

    step: int
    seq: int
    is_finished: bool


class ClientLedger:
    """The steps of one client in one epoch.

    `is_leaving`: it is no longer served. `fence_seq`: number of the message that fences it, or 0.
    `lost_s`: when its connection ended, None while it has one. `has_acknowledged`: after it
    attached, it has said that it has no step to send now. Invariant: `acknowledged_step,
    finished_step <= applied_step < receiver.next_step`, and the steps in flight are those above
    `finished_step` that were executed.
    """

    def __init__(self, client_id: str, max_stored: int, next_step: int, now_s: float) -> None:
        """Expect `next_step` first; keep at most `max_stored` answers."""
        self.client_id = client_id
        self.receiver = StepReceiver(client_id, max_stored, next_step)
        self.heard_s = now_s
        self.lost_s: float | None = None
        self.progress_sent_s = now_s
        self.is_leaving = False
        self.has_acknowledged = False
        self.fence_seq = 0
        self._first_step = next_step
        self._under_way: deque[_Executed] = deque()
        self._applied_step = next_step - 1
        self._finished_step = next_step - 1
        self._acknowledged_step = next_step - 1
        self._bytes_checked = 0
        self._failures: list[FailedForward] = []

    @property
    def is_untouched(self) -> bool:
        """Whether no step was executed yet."""
        return self.receiver.next_step == self._first_step

    @property
    def finished_step(self) -> int:
        """Every step up to this one is over on every rank."""
        return self._finished_step

    def on_heard(self, now_s: float) -> None:
        """Record a message of the client: it is alive and has a connection."""
        self.heard_s = now_s
        self.lost_s = None

    def start_at(self, next_step: int) -> None:
        """Expect `next_step` first instead. Only while untouched."""
        self.receiver.skip_to(next_step)
        self._first_step = next_step
        self._applied_step = self._finished_step = self._acknowledged_step = next_step - 1

    def require_over(self, request: StepMessage) -> None:
        """Raise `RequestError` unless the steps that it calls complete or failed have ended on all
        ranks. A block must not be sealed or reused while a rank may still write it.
        """
        finished = self._finished_step
        if request.completed_step > finished:
            raise RequestError(
                f"step {request.step} of {self.client_id}: completed_step "
                f"{request.completed_step}, but only steps up to {finished} have finished on every "
                "rank: wait for them"
            )
        last_step = request.step - 1
        if isinstance(request, Call):
            return
        if request.failed_step != NO_STEP and finished < last_step:
            raise RequestError(
                f"step {request.step} of {self.client_id}: failed_step {request.failed_step}, but "
                f"step {finished + 1} may still run on a rank: wait until step {last_step} is over"
            )

    def add_executed(self, step: int, seq: int, has_forward: bool) -> None:
        """Follow a step whose commands are in message `seq`, 0 if it has none."""
        self._under_way.append(_Executed(step, seq, not has_forward))

    def on_applied(self, applied_by_all: int) -> bool:
        """Record how far every rank has applied; return whether to tell the client."""
        before = (self._applied_step, self._finished_step)
        for executed in self._under_way:
            if executed.seq > applied_by_all:
                break
            self._applied_step = max(self._applied_step, executed.step)
        self._settle()
        return before != (self._applied_step, self._finished_step)

    def on_job_ended(self, job: EndedJob) -> bool:
        """Record the end of a forward; return whether to tell the client."""
        before = self._finished_step
        self._bytes_checked += job.num_bytes
        self._failures.extend(job.failures[: MAX_FAILURES - len(self._failures)])
        for executed in self._under_way:
            if executed.step == job.step:
                executed.is_finished = True
        self._settle()
        return self._finished_step != before

    def on_acknowledge(self, step: int) -> None:
        """Record that the client knows everything about its steps up to `step`."""
        self.has_acknowledged = True
        self.receiver.on_acknowledge(step)
        self._acknowledged_step = max(self._acknowledged_step, min(step, self._finished_step))

    def has_news(self) -> bool:
        """Return whether the client may not know how far its steps have got."""
        return self._acknowledged_step < max(self._finished_step, self._applied_step)

    def progress(self, epoch: int, now_s: float) -> Progress:
        """Return how far the steps have got."""
        self.progress_sent_s = now_s
        return Progress(
            self.client_id,
            epoch,
            self._applied_step,
            self._finished_step,
            self._bytes_checked,
            tuple(self._failures),
        )

    def check(self) -> None:
        """Raise `InvariantError` if the steps are not in order."""
        steps = [executed.step for executed in self._under_way]
        if steps != sorted(set(steps)) or (steps and steps[0] <= self._finished_step):
            raise InvariantError(
                f"client {self.client_id} has steps {steps} under way after {self._finished_step}"
            )
        if not self._finished_step <= self._applied_step < self.receiver.next_step:
            raise InvariantError(
                f"client {self.client_id}: finished {self._finished_step}, applied "
                f"{self._applied_step}, next {self.receiver.next_step}"
            )

    def _settle(self) -> None:
        """Move `finished_step` past steps that are applied and whose forward has ended."""
        while self._under_way:
            first = self._under_way[0]
            if not first.is_finished or first.step > self._applied_step:
                return
            self._finished_step = first.step
            self._under_way.popleft()
