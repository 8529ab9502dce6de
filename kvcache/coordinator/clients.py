"""The coordinator's clients in one epoch: attached, leaving and gone.

A client that leaves is kept until every rank has applied its fence. Its name is never used again,
because its messages may arrive late. Refuses more clients than configured.

    attach ──▶ attached ──Detach, silence, or a connection that ended and did not come back──▶
    leaving ──fence applied everywhere──▶ forgotten
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from kvcache.base.errors import InvariantError, RequestError
from kvcache.coordinator.job_table import Job
from kvcache.coordinator.settings import CoordinatorSettings
from kvcache.protocol.messages import Attach, Call, FailedForward, Progress
from kvcache.protocol.step import NO_STEP
from kvcache.protocol.step_delivery import ReceivedMessage, StepMessage, StepReceiver

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

    def on_job_ended(self, job: Job) -> bool:
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
        """Return whether the client may not know the progress of its steps."""
        return self._acknowledged_step < max(self._finished_step, self._applied_step)

    def progress(self, epoch: int, now_s: float) -> Progress:
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


MAX_CLIENT_ID_CHARS = 256
MAX_STEP = 2**53
"""Highest step number: a client cannot begin close to the end of the numbers."""

_MAX_GONE = 1024


class Clients:
    """The ledgers of all clients, the one served last at the end."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        """Start without clients. The limits are in `settings`."""
        self._settings = settings
        self._ledgers: dict[str, ClientLedger] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._num_leaving = 0

    def __len__(self) -> int:
        return len(self._ledgers)

    def get(self, client_id: str) -> ClientLedger | None:
        """Return the ledger of a client, also of a leaving one, or None."""
        return self._ledgers.get(client_id)

    def has_gone(self, client_id: str) -> bool:
        """Return whether a client was detached or given up: its id is not used again."""
        ledger = self._ledgers.get(client_id)
        return client_id in self._gone or (ledger is not None and ledger.is_leaving)

    def attached(self) -> list[ClientLedger]:
        """Return the ledgers of the clients that are served."""
        return [ledger for ledger in self._ledgers.values() if not ledger.is_leaving]

    @property
    def has_leaving(self) -> bool:
        return self._num_leaving > 0

    def leaving(self) -> list[ClientLedger]:
        """Return the ledgers of the clients that can be forgotten."""
        return [ledger for ledger in self._ledgers.values() if ledger.is_leaving]

    def attach(self, message: Attach, now_s: float) -> str:
        """Attach a client, for the first time or again; return the refusal, empty if done.

        Unexecuted numbers below its next one are void. A client that believes to be attached
        nowhere, after steps of it were executed, considers them void: it is released. An
        introduction with a lower number is an old one that arrives late.
        """
        client_id, next_step = message.client_id, message.next_step
        if not 0 < len(client_id) <= MAX_CLIENT_ID_CHARS or not 0 < next_step <= MAX_STEP:
            return f"client id or step {next_step} is invalid"
        ledger = self._ledgers.get(client_id)
        if self.has_gone(client_id):
            return f"client {client_id} was detached or given up: use a new client id"
        if ledger is None:
            if len(self._ledgers) >= self._settings.max_clients:
                return (
                    f"{len(self._ledgers)} clients are attached, no more can attach: detach one or "
                    "raise transport.max_clients"
                )
            max_stored = self._settings.max_client_steps
            self._ledgers[client_id] = ClientLedger(client_id, max_stored, next_step, now_s)
        elif ledger.is_untouched and ledger.receiver.next_step < next_step:
            ledger.start_at(next_step)
        elif not (ledger.is_untouched or message.nonce or next_step < ledger.receiver.next_step):
            self.let_go(client_id)
            return f"client {client_id} gave its steps up, they are freed: use a new client id"
        return ""

    def take_ready(self) -> tuple[ClientLedger, ReceivedMessage] | None:
        """Return the next step of the client that has waited longest; None if none is ready. This
        client is served last afterwards."""
        for ledger in self._ledgers.values():
            message = None if ledger.is_leaving else ledger.receiver.take_ready()
            if message is not None:
                self._ledgers[ledger.client_id] = self._ledgers.pop(ledger.client_id)
                return ledger, message
        return None

    def let_go(self, client_id: str) -> None:
        """Stop serving the client; it is forgotten later."""
        ledger = self._ledgers[client_id]
        self._num_leaving += not ledger.is_leaving
        ledger.is_leaving = True

    def detach(self, client_id: str) -> bool:
        """Stop serving the client; return whether it is known.

        The name of an unknown client is reserved: its `Attach` may arrive later.
        """
        if client_id in self._ledgers:
            self.let_go(client_id)
            return True
        if len(client_id) <= MAX_CLIENT_ID_CHARS:
            self._take_name(client_id)
        return False

    def forget(self, client_id: str) -> None:
        """Forget a client; its name stays taken."""
        self._num_leaving -= self._ledgers.pop(client_id).is_leaving
        self._take_name(client_id)

    def clear(self) -> list[str]:
        """Forget all clients, because their epoch has ended; return the attached ones."""
        attached = [ledger.client_id for ledger in self.attached()]
        for ledger in self.leaving():
            self.forget(ledger.client_id)
        self._ledgers.clear()
        self._num_leaving = 0
        return attached

    def _take_name(self, client_id: str) -> None:
        """Reserve the name of a client that has gone. The oldest names become free again."""
        self._gone[client_id] = None
        while len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)

    def check(self) -> None:
        """Raise `InvariantError` if the table or the steps of a client are inconsistent."""
        for ledger in self._ledgers.values():
            ledger.check()
        if self._num_leaving != len(self.leaving()):
            raise InvariantError(f"{len(self.leaving())} clients leave, not {self._num_leaving}")
