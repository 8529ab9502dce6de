"""Numbers, windows and acknowledgements, against lost, repeated and reordered messages.

    coordinator  CommandWindow ──StepCommands seq──▶ CommandReceiver  worker, one per process
                               ◀─Ack/Nack─────────

The sender numbers messages, keeps those without acknowledgement (a bounded number), and repeats
them by the clock. The receiver passes on every number exactly once and in order, answers a repeat
with its earlier answer, and requests missing numbers. These classes only keep the state: time is
passed in, and nothing is sent, decoded or applied here. A message counts only for its own rank,
process, epoch and coordinator. Clients' steps follow the same rules: step_delivery.py.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvcache.base.errors import (
    BacklogFullError,
    ClusterError,
    MalformedMessageError,
    StaleEpochError,
)
from kvcache.protocol.message_headers import NO_ITEMS, MessageHeader
from kvcache.protocol.messages import (
    INT64_MAX,
    MAX_NAME_CHARS,
    Ack,
    Grant,
    Granted,
    Heartbeat,
    Hello,
    Nack,
    Refused,
    StepCommands,
)
from kvcache.protocol.wire import encode

NO_EPOCH = 0
"""A worker's epoch before its first grant; real epochs start at 1."""

MAX_EPOCH = 2**53
"""Highest epoch: a number from outside cannot use up our own."""

MAX_RESENT = 16
"""Messages repeated at a time to one receiver, which acknowledges before it needs more."""


class PlainStep(NamedTuple):
    """A message without commands: its number, and the step that it belongs to."""

    seq: int
    client_id: str
    client_step: int


@dataclass(frozen=True)
class ReceivedCommands:
    """Messages to apply now, in this order, and the answers to send."""

    ready: tuple[StepCommands, ...] = ()
    replies: tuple[Ack | Nack, ...] = ()


@dataclass(frozen=True)
class _Headers:
    """The first bytes of the present epoch's messages, and of their answers."""

    commands: MessageHeader
    applied: MessageHeader


@dataclass(frozen=True)
class ReceiverStatistics:
    """Counts of messages since the process started."""

    num_delivered: int = 0
    num_duplicates: int = 0
    num_early: int = 0
    num_overflowed: int = 0
    num_foreign: int = 0
    num_stale: int = 0
    num_grants: int = 0
    num_refused_grants: int = 0


class CommandReceiver:
    """A worker process's end of the command stream.

    Obeys one coordinator (`nonce`) in one epoch, which it has granted, and nothing before that.
    `applied_seq <= delivered seq < every buffered seq`; the buffer is empty between grants.
    """

    def __init__(
        self, rank: int, incarnation: str, fingerprint: str, max_buffered: int = 256
    ) -> None:
        """Make the receiver of process `incarnation`. `max_buffered` messages wait for a gap."""
        self.rank = rank
        self.incarnation = incarnation
        self._fingerprint = fingerprint
        self._max_buffered = max_buffered
        self._epoch = NO_EPOCH
        self._nonce = ""
        self._applied_seq = 0
        self._delivered_seq = 0
        self._buffered: dict[int, StepCommands] = {}
        self._pending_grant: Grant | None = None
        self._headers: _Headers | None = None  # None without a granted epoch
        self._counts: Counter[str] = Counter()

    @property
    def epoch(self) -> int:
        """The granted epoch, `NO_EPOCH` before the first grant."""
        return self._epoch

    @property
    def nonce(self) -> str:
        """The coordinator that it obeys, empty before the first grant."""
        return self._nonce

    @property
    def applied_seq(self) -> int:
        """Every number of the present epoch up to this one is applied."""
        return self._applied_seq

    @property
    def pending_grant(self) -> Grant | None:
        """A deferred grant, while a forward of the old epoch runs. Commands and forwards of the old
        epoch must not begin any more; pass it to `on_grant` again when the forward has ended."""
        return self._pending_grant

    @property
    def highest_epoch(self) -> int:
        """The highest epoch granted or deferred."""
        return self._epoch if self._pending_grant is None else self._pending_grant.epoch

    def hello(self) -> Hello:
        """Return this process's introduction."""
        return Hello(self.incarnation, self.rank, self.highest_epoch, self._fingerprint)

    def heartbeat(self) -> Heartbeat:
        """Return a heartbeat with the last applied number."""
        return Heartbeat(self._nonce, self.incarnation, self.rank, self._epoch, self._applied_seq)

    def on_grant(self, grant: Grant, is_busy: bool) -> Granted | Refused | None:
        """Obey the coordinator of `grant`, or refuse; None if there is no answer (yet).

        `is_busy`: a forward or copy of the old epoch still runs. Then the grant is deferred (see
        `pending_grant`) and the old epoch is fenced at once. The same grant again gets the same
        answer. A grant to another process, or an older one of the same coordinator, is ignored.
        An epoch that is not higher than all earlier ones, or another plan, is refused.
        """
        if grant.incarnation != self.incarnation:
            self._count(num_foreign=1)
            return None
        if grant.fingerprint != self._fingerprint:
            return self._refuse(
                grant, f"plan {grant.fingerprint}, this worker has {self._fingerprint}"
            )
        if grant.epoch > MAX_EPOCH:
            return self._refuse(grant, f"epoch {grant.epoch} is above {MAX_EPOCH}, the last one")
        if grant.epoch > NO_EPOCH and (grant.nonce, grant.epoch) == (self._nonce, self._epoch):
            # A repeat of the present grant; if a newer one waits, this one is outdated.
            return self._granted() if self._pending_grant is None else None
        pending = self._pending_grant
        if grant != pending and grant.epoch <= self.highest_epoch:
            holder = self._nonce if pending is None else pending.nonce
            if grant.nonce == holder and grant.epoch < self.highest_epoch:
                self._count(num_stale=1)
                return None
            return self._refuse(grant, f"epoch {grant.epoch} is not above {self.highest_epoch}")
        if is_busy:
            self._pending_grant, self._headers = grant, None
            return None
        self._epoch, self._nonce = grant.epoch, grant.nonce
        self._applied_seq = self._delivered_seq = 0
        self._buffered.clear()
        self._pending_grant = None
        self._headers = _Headers(
            MessageHeader(StepCommands, grant.nonce, self._fingerprint, grant.epoch),
            MessageHeader(Ack, grant.nonce, self.incarnation, self.rank, grant.epoch),
        )
        self._count(num_grants=1)
        return self._granted()

    def refusal_of(self, nonce: str, epoch: int) -> Refused | None:
        """Return the message that tells another coordinator that it was superseded; None if
        `nonce` is obeyed or its `epoch` is above the present one."""
        if nonce == self._nonce or self._pending_grant is not None:
            return None
        if self._epoch == NO_EPOCH or epoch > self._epoch:
            return None
        reason = f"epoch {self._epoch} of another coordinator is obeyed"
        return Refused(nonce, self.incarnation, self.rank, self._epoch, reason)

    def on_commands(self, message: StepCommands) -> ReceivedCommands:
        """Take one message; return messages that can be applied now, and answers.

        Call `confirm_applied` for each ready message, in order, once it is applied. A repeat is
        answered with the last applied number. A message of another coordinator, epoch or plan, or
        while a grant is pending, is counted and dropped.
        """
        if message.nonce != self._nonce or message.fingerprint != self._fingerprint:
            self._count(num_foreign=1)
            return ReceivedCommands()
        if (
            self._epoch == NO_EPOCH
            or message.epoch != self._epoch
            or self._pending_grant is not None
        ):
            self._count(num_stale=1)
            return ReceivedCommands()
        if message.seq <= self._delivered_seq:
            self._count(num_duplicates=1)
            is_applied = message.seq <= self._applied_seq
            return ReceivedCommands(replies=(self._ack(),) if is_applied else ())
        if message.seq == self._delivered_seq + 1:
            return self._deliver(message)
        return self._keep_early(message)

    def take_plain(self, payload: bytes) -> PlainStep | None:
        """Take a message without commands, without decoding all of it; None if not possible.

        Takes only messages that `on_commands` would return at once and alone. There is nothing to
        apply, so they count as applied. The answer to all of them is `applied_payload`.
        """
        headers = self._headers
        if headers is None or self._buffered or not payload.endswith(NO_ITEMS):
            return None
        rest = headers.commands.rest(payload)
        if rest is None:
            return None
        seq, client_id, client_step, commands = rest
        is_next = type(seq) is int and seq == self._applied_seq + 1 == self._delivered_seq + 1
        is_plain = commands == [] and type(client_id) is str and type(client_step) is int
        if not (is_next and is_plain and len(client_id) <= MAX_NAME_CHARS):
            return None
        if not 0 <= client_step <= INT64_MAX:
            return None
        self._applied_seq = self._delivered_seq = seq
        self._counts["num_delivered"] += 1
        return PlainStep(seq, client_id, client_step)

    def applied_payload(self) -> bytes:
        """Return the encoded `Ack` of `applied_seq`."""
        if self._headers is None:
            return encode(self._ack())
        return self._headers.applied.with_number(self._applied_seq)

    def confirm_applied(self, seq: int) -> Ack:
        """Record that `seq`, the next in order, is applied; return the answer, which is kept."""
        if not seq == self._applied_seq + 1 <= self._delivered_seq:
            raise MalformedMessageError(
                f"rank {self.rank}: {seq} confirmed as applied after {self._applied_seq} "
                f"(handed out up to {self._delivered_seq}): confirm in order"
            )
        self._applied_seq = seq
        return self._ack()

    def statistics(self) -> ReceiverStatistics:
        """Return the counters, frozen."""
        return ReceiverStatistics(**self._counts)

    def _deliver(self, message: StepCommands) -> ReceivedCommands:
        if not self._buffered:
            self._delivered_seq = message.seq
            self._counts["num_delivered"] += 1
            return ReceivedCommands((message,))
        ready = [message]
        while (following := self._buffered.pop(ready[-1].seq + 1, None)) is not None:
            ready.append(following)
        self._delivered_seq = ready[-1].seq
        self._count(num_delivered=len(ready))
        return ReceivedCommands(tuple(ready), (self._nack(),) if self._buffered else ())

    def _keep_early(self, message: StepCommands) -> ReceivedCommands:
        """Keep a message that came too early. Request the gap once, and again after repeats."""
        is_known_gap = bool(self._buffered) and message.seq not in self._buffered
        if message.seq <= self._delivered_seq + 1 + self._max_buffered:
            self._buffered[message.seq] = message
            self._count(num_early=1)
        else:
            self._count(num_overflowed=1)
        return ReceivedCommands(replies=() if is_known_gap else (self._nack(),))

    def _ack(self) -> Ack:
        return Ack(self._nonce, self.incarnation, self.rank, self._epoch, self._applied_seq)

    def _nack(self) -> Nack:
        return Nack(self._nonce, self.incarnation, self.rank, self._epoch, self._delivered_seq + 1)

    def _granted(self) -> Granted:
        return Granted(self._nonce, self.incarnation, self.rank, self._epoch)

    def _refuse(self, grant: Grant, reason: str) -> Refused:
        self._count(num_refused_grants=1)
        return Refused(grant.nonce, self.incarnation, self.rank, self.highest_epoch, reason)

    def _count(self, **more: int) -> None:
        for name, number in more.items():
            self._counts[name] += number


@dataclass
class _RankProgress:
    """A rank's last applied number, and when it was last sent a message that it has not applied."""

    incarnation: str
    applied_seq: int = 0
    waiting_since_s: float = 0.0
    asked_seq: int = 0
    rejected_seq: int = 0
    num_resent: int = 0


class CommandWindow:
    """The coordinator's end of the command stream, for one epoch and all its ranks.

    Keeps every message until each rank has applied it. An answer counts only for the rank and
    process that gave it, however often it comes.
    """

    def __init__(
        self, epoch: int, incarnations: Mapping[int, str], max_unacknowledged: int, resend_s: float
    ) -> None:
        """Make an empty window. `incarnations[rank]` is the process that granted `epoch`."""
        self.epoch = epoch
        self._resend_s = resend_s
        self._max_unacknowledged = max_unacknowledged
        self._ranks = {rank: _RankProgress(name) for rank, name in incarnations.items()}
        self._messages: OrderedDict[int, StepCommands] = OrderedDict()
        self._last_seq = 0
        self._applied_by_all = 0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def next_seq(self) -> int:
        """The number that the next message must have."""
        return self._last_seq + 1

    @property
    def is_full(self) -> bool:
        """Whether `append` would raise."""
        return len(self._messages) >= self._max_unacknowledged

    @property
    def applied_by_all(self) -> int:
        """Every rank has applied everything up to this number."""
        return self._applied_by_all

    @property
    def num_resent(self) -> int:
        """How many messages have been sent again, over all ranks."""
        return sum(progress.num_resent for progress in self._ranks.values())

    def applied_by(self, rank: int) -> int:
        """Return the last number that `rank` has applied."""
        return self._ranks[rank].applied_seq

    def append(self, message: StepCommands, now_s: float) -> None:
        """Keep `message`, which the caller sends to every rank.

        Raises:
            BacklogFullError: too many messages are unacknowledged; nothing is kept.
            MalformedMessageError: not the next number of this epoch.
        """
        if self.is_full:
            raise BacklogFullError(
                f"{len(self._messages)} command messages of epoch {self.epoch} are not "
                f"acknowledged by every rank, the window holds {self._max_unacknowledged}: wait"
            )
        if (message.epoch, message.seq) != (self.epoch, self.next_seq):
            raise MalformedMessageError(
                f"message {message.epoch}:{message.seq} appended to a window that expects "
                f"{self.epoch}:{self.next_seq}"
            )
        for progress in self._ranks.values():
            if progress.applied_seq == self._last_seq:
                progress.waiting_since_s = now_s
        self._messages[message.seq] = message
        self._last_seq = message.seq

    def on_applied(self, rank: int, incarnation: str, epoch: int, seq: int, now_s: float) -> bool:
        """Record that `rank` has applied everything up to `seq`; return whether that is new.

        Raises:
            StaleEpochError: another epoch or another process of that rank.
            MalformedMessageError: no such rank, or a number never sent.
        """
        progress = self._progress(rank, incarnation, epoch)
        if seq > self._last_seq:
            raise MalformedMessageError(
                f"rank {rank} acknowledges {seq}, only {self._last_seq} were sent"
            )
        if seq <= progress.applied_seq:
            return False
        was_last = progress.applied_seq == self._applied_by_all
        progress.applied_seq = seq
        progress.waiting_since_s = now_s
        if not was_last:
            return True
        self._applied_by_all = min([p.applied_seq for p in self._ranks.values()])
        while self._messages and next(iter(self._messages)) <= self._applied_by_all:
            self._messages.popitem(last=False)
        return True

    def on_missing(
        self, rank: int, incarnation: str, epoch: int, from_seq: int, now_s: float
    ) -> list[StepCommands]:
        """Return the messages to send again to `rank`; a repeated request waits for the clock.

        Raises the errors of `on_applied`.
        """
        progress = self._progress(rank, incarnation, epoch)
        if from_seq > self._last_seq or from_seq <= progress.asked_seq:
            return []
        progress.asked_seq = from_seq
        return self._resend(progress, from_seq, now_s)

    def on_rejected(
        self, rank: int, incarnation: str, epoch: int, seq: int, reason: str
    ) -> list[StepCommands]:
        """Return the message that `rank` could not read or obey, to be sent once more: it may have
        been damaged.

        Raises the errors of `on_applied`, and ClusterError if the rank refuses it again: no later
        message could ever be applied.
        """
        progress = self._progress(rank, incarnation, epoch)
        message = self._messages.get(seq)
        if message is None or seq <= progress.applied_seq:
            return []
        if seq == progress.rejected_seq:
            raise ClusterError(f"rank {rank} cannot obey message {epoch}:{seq}: {reason}")
        progress.rejected_seq = seq
        progress.num_resent += 1
        return [message]

    def due_for_resend(self, now_s: float) -> dict[int, list[StepCommands]]:
        """Return the messages to repeat, per rank that has not acknowledged for too long."""
        due: dict[int, list[StepCommands]] = {}
        for rank, progress in self._ranks.items():
            is_waiting = progress.applied_seq < self._last_seq
            if is_waiting and now_s - progress.waiting_since_s >= self._resend_s:
                due[rank] = self._resend(progress, progress.applied_seq + 1, now_s)
        return due

    def _resend(self, progress: _RankProgress, from_seq: int, now_s: float) -> list[StepCommands]:
        progress.waiting_since_s = now_s
        last = min(self._last_seq, from_seq + MAX_RESENT - 1)
        again = [self._messages[s] for s in range(from_seq, last + 1) if s in self._messages]
        progress.num_resent += len(again)
        return again

    def _progress(self, rank: int, incarnation: str, epoch: int) -> _RankProgress:
        progress = self._ranks.get(rank)
        if progress is None:
            raise MalformedMessageError(
                f"an answer of rank {rank}, the ranks are {sorted(self._ranks)}"
            )
        if epoch != self.epoch or incarnation != progress.incarnation:
            raise StaleEpochError(
                f"an answer of rank {rank} process {incarnation} in epoch {epoch}; present are "
                f"process {progress.incarnation} and epoch {self.epoch}"
            )
        return progress
