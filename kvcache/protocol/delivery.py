"""Numbers, windows and acknowledgements: how lost, repeated and reordered messages do no harm.

    coordinator  CommandWindow ──StepCommands seq──▶ CommandReceiver  worker, one per process
                               ◀─Ack/Nack─────────

The sender numbers, keeps what is not acknowledged (bounded) and repeats it by the clock; the
receiver hands on every number exactly once and in order, answers a repeat with what it answered
before, and asks for what it misses. All of it is bookkeeping: time is passed in, nothing is sent,
decoded or applied here, and no message counts for another rank, process, epoch or coordinator than
its own. Clients' steps travel by the same rules: step_delivery.py.
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
"""No epoch is above this: a number from outside cannot push ours to where it ends."""

MAX_RESENT = 16
"""Messages repeated at once to one receiver: it acknowledges before it needs more."""


class PlainStep(NamedTuple):
    """A message without commands: its number, and whose step it is."""

    seq: int
    client_id: str
    client_step: int


@dataclass(frozen=True)
class ReceivedCommands:
    """What to apply now, in this order, and what to answer."""

    ready: tuple[StepCommands, ...] = ()
    replies: tuple[Ack | Nack, ...] = ()


@dataclass(frozen=True)
class _Headers:
    """How the messages of the present epoch begin: those that are obeyed, and their answers."""

    commands: MessageHeader
    applied: MessageHeader


@dataclass(frozen=True)
class ReceiverStatistics:
    """Messages by what became of them, since the process started."""

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

    Obeys one coordinator (`nonce`) in one epoch, which it granted itself, and nothing before that.
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
        self._headers: _Headers | None = None  # None while nothing is obeyed
        self._counts: Counter[str] = Counter()

    @property
    def epoch(self) -> int:
        """The granted epoch, `NO_EPOCH` before the first grant."""
        return self._epoch

    @property
    def nonce(self) -> str:
        """The coordinator obeyed now, empty before the first grant."""
        return self._nonce

    @property
    def applied_seq(self) -> int:
        """Everything up to this number of the present epoch is applied."""
        return self._applied_seq

    @property
    def pending_grant(self) -> Grant | None:
        """A grant put off while a forward of the old epoch runs. Commands and forwards of the old
        epoch must not begin any more; pass it to `on_grant` again when the forward has ended."""
        return self._pending_grant

    @property
    def highest_epoch(self) -> int:
        """The highest epoch granted or put off."""
        return self._epoch if self._pending_grant is None else self._pending_grant.epoch

    def hello(self) -> Hello:
        """Return this process's introduction."""
        return Hello(self.incarnation, self.rank, self.highest_epoch, self._fingerprint)

    def heartbeat(self) -> Heartbeat:
        """Return a sign of life with the last applied number."""
        return Heartbeat(self._nonce, self.incarnation, self.rank, self._epoch, self._applied_seq)

    def on_grant(self, grant: Grant, is_busy: bool) -> Granted | Refused | None:
        """Take over for `grant`, or say why not; None when there is nothing to say (yet).

        `is_busy`: a forward or copy of the old epoch still runs. Then the grant is put off (see
        `pending_grant`) and the old epoch is fenced at once. The same grant again gets the same
        answer. A grant to another process, or an older one of the same coordinator, is ignored;
        an epoch that is not higher than every one before, or another plan, is refused.
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
            # A repeat of what holds already; if something newer waits, this one is history.
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
        """Return what tells another coordinator that it was superseded; None if `nonce` is obeyed
        or its `epoch` is above the present one."""
        if nonce == self._nonce or self._pending_grant is not None:
            return None
        if self._epoch == NO_EPOCH or epoch > self._epoch:
            return None
        reason = f"epoch {self._epoch} of another coordinator is obeyed"
        return Refused(nonce, self.incarnation, self.rank, self._epoch, reason)

    def on_commands(self, message: StepCommands) -> ReceivedCommands:
        """Take one message; return what can be applied now and what to answer.

        Call `confirm_applied` for each ready message, in order, once it is applied. A repeat is
        answered with how far everything is applied; one of another coordinator, epoch or plan,
        or while a grant is pending, is counted and dropped.
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
        """Take a message that brings no commands, without decoding it whole; None: not taken.

        Taken is only what `on_commands` would hand out at once and alone; there is nothing to
        apply, so it counts as applied. The answer to all that were taken is `applied_payload`.
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
        """Return the encoded answer that everything up to `applied_seq` is applied."""
        if self._headers is None:
            return encode(self._ack())
        return self._headers.applied.with_number(self._applied_seq)

    def confirm_applied(self, seq: int) -> Ack:
        """Note that `seq`, the next in order, is applied; return the answer, also kept."""
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
        """Buffer what came too early. Ask once per gap, and again when repeats show it open."""
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
    """How far one rank has got, and when it was last sent something it has not acknowledged."""

    incarnation: str
    applied_seq: int = 0
    waiting_since_s: float = 0.0
    asked_seq: int = 0
    rejected_seq: int = 0
    num_resent: int = 0


class CommandWindow:
    """The coordinator's end of the command stream, for one epoch and all its ranks.

    Keeps every message until each rank has said that it is applied. Ranks are kept apart by name:
    an answer counts for the rank and process that gave it, however often it comes.
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
        """The number the next message must have."""
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
        """Return how far `rank` has applied everything."""
        return self._ranks[rank].applied_seq

    def append(self, message: StepCommands, now_s: float) -> None:
        """Keep `message`, which the caller sends to every rank.

        Raises:
            BacklogFullError: too much is unacknowledged; nothing is kept.
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
        """Note that `rank` has applied everything up to `seq`; say whether that is news.

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
        """Return what to send again to `rank`; a repeated complaint waits for the clock.

        Raises as `on_applied` does.
        """
        progress = self._progress(rank, incarnation, epoch)
        if from_seq > self._last_seq or from_seq <= progress.asked_seq:
            return []
        progress.asked_seq = from_seq
        return self._resend(progress, from_seq, now_s)

    def on_rejected(
        self, rank: int, incarnation: str, epoch: int, seq: int, reason: str
    ) -> list[StepCommands]:
        """Return the message that `rank` could not read or obey, to be sent once more: what came
        may have been damaged.

        Raises as `on_applied` does, and ClusterError when the rank says so again: nothing behind
        that message can ever be applied.
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
        """Return, per rank that has been silent about its messages for too long, what to repeat."""
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
