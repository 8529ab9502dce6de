"""The plain Coordinator: takes messages, returns messages, decides through the manager.

    client ──StepRequest / Call──▶ ClientLedger ─▶ manager ─▶ commands ─▶ CommandWindow ──▶ ranks
           ◀──answer, Progress────                                    ◀──Applied, Finished──

Two phases. *Fencing*: an epoch above every known one is saved, and every rank asked to grant it.
*Running*: all ranks have granted, steps are served. Another process for a rank, or the loss of one,
begins a new epoch in which everything is cold. A state machine without threads, sockets or Ray, one
owner; it sends nothing itself, waits for nothing, and refuses whatever is not of its epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import Enum

from kvcache.client_ledger import ClientLedger
from kvcache.clients import Clients
from kvcache.clock import Clock
from kvcache.commands import Command, Fence, Reset
from kvcache.coordinator_settings import CoordinatorSettings, CoordinatorStatistics
from kvcache.delivery import CommandWindow
from kvcache.errors import ClusterError, InvariantError, KVCacheError, ProtocolError
from kvcache.job_book import JobBook
from kvcache.manager import KVCacheManager
from kvcache.membership import Membership
from kvcache.messages import (
    Acknowledge,
    Applied,
    Attach,
    Attached,
    Call,
    CallResult,
    ClientAddress,
    Detach,
    Finished,
    FinishedAck,
    FromClient,
    FromWorker,
    Granted,
    Heartbeat,
    Hello,
    Message,
    Missing,
    MissingSteps,
    Outgoing,
    Ping,
    Refused,
    StepCommands,
    ToClient,
    Unattached,
    WorkerAddress,
)
from kvcache.serving import Served, StepServer
from kvcache.state_store import StateStore
from kvcache.step import StepRequest, StepResult
from kvcache.step_delivery import StepMessage

logger = logging.getLogger(__name__)

ManagerFactory = Callable[[int], KVCacheManager]
"""Makes a cold manager for a new epoch; the argument is the model epoch."""


class Phase(Enum):
    """How far the coordinator is."""

    NEW = "new"
    FENCING = "fencing"
    RUNNING = "running"
    SUPERSEDED = "superseded"
    CLOSED = "closed"


class Coordinator:
    """One coordinator. `on_*` take what arrived or the clock, and return what to send, in order.

    Invariant: manager, window and clients belong to `epoch`, and exist exactly while running.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        manager_factory: ManagerFactory,
        clock: Clock,
        nonce: str,
        state_store: StateStore,
    ) -> None:
        """Take no epoch yet. `nonce` tells this coordinator from all others, for ever."""
        self.settings = settings
        self._make_manager = manager_factory
        self._clock = clock
        self._members = Membership(settings.num_ranks, settings.fingerprint, nonce, state_store)
        self._ranks = tuple(WorkerAddress(rank) for rank in range(settings.num_ranks))
        self._jobs = JobBook(settings.num_ranks)
        self._clients = Clients(settings)
        self._phase = Phase.NEW
        self._window: CommandWindow | None = None
        self._server: StepServer | None = None
        self._reason = "the coordinator has not started"
        self._counts = CoordinatorStatistics()

    @property
    def phase(self) -> Phase:
        """How far it is."""
        return self._phase

    @property
    def epoch(self) -> int:
        """The present epoch, 0 before `start`."""
        return self._members.epoch

    @property
    def manager(self) -> KVCacheManager | None:
        """The manager of the present epoch, None unless running. For looking, not for changing."""
        return None if self._server is None else self._server.manager

    @property
    def is_degraded(self) -> bool:
        """Whether a rank does not answer, so that steps are refused."""
        return bool(self.problem())

    def problem(self) -> str:
        """Say which ranks do not answer, and since when; empty when all do."""
        return self._members.problem(self._clock.now(), self.settings.worker_silence_s)

    def start(self, incarnations: Mapping[int, str] | None = None) -> list[Outgoing]:
        """Take an epoch and ask the worker processes known already to grant it.

        Others are asked when they introduce themselves. Raises ClusterError when the epoch cannot
        be saved; it may be called again then.
        """
        for rank, incarnation in (incarnations or {}).items():
            self._members.serve(rank, incarnation)
        self._members.take_epoch(self._clock.now())
        self._phase = Phase.FENCING
        return self._grants()

    def on_worker_message(self, rank: int, message: FromWorker) -> list[Outgoing]:
        """Take a message that came from the worker of `rank`. Counts and drops what is foreign."""
        if self._phase not in (Phase.FENCING, Phase.RUNNING):
            return []
        if message.rank != rank:
            self._refuse(f"rank {rank} speaks for rank {message.rank}")
            return []
        try:
            match message:
                case Hello():
                    return self._on_hello(message)
                case Granted():
                    return self._on_granted(message)
                case Refused():
                    return self._on_refused(message)
            self._members.heard(
                rank, message.incarnation, message.nonce, message.epoch, self._clock.now()
            )
            return self._on_report(message)
        except ProtocolError as error:
            self._refuse(str(error))
            return []

    def on_client_message(self, message: FromClient) -> list[Outgoing]:
        """Take a message of the client it names. Counts and drops what is foreign."""
        if self._phase is Phase.CLOSED:
            return []
        now_s = self._clock.now()
        client_id = message.client_id
        if isinstance(message, Attach):
            return [self._attach(message)]
        ledger = self._clients.get(client_id) if self._phase is Phase.RUNNING else None
        if message.epoch != self.epoch or ledger is None or ledger.is_leaving:
            self._counts = self._counts.plus(num_unattached=1)
            reason = "attach first" if self._phase is Phase.RUNNING else self._why_not_running()
            return [_to_client(Unattached(client_id, self.epoch, reason))]
        ledger.heard_s = now_s
        out: list[Outgoing] = []
        match message:
            case StepRequest() | Call():
                out = self._on_step(ledger, message)
            case Acknowledge():
                ledger.on_acknowledge(message.step)
            case Detach():
                self._clients.let_go(client_id)
        return out + self._work()

    def on_worker_lost(self, rank: int, incarnation: str, reason: str) -> list[Outgoing]:
        """A process is proven dead: begin a new epoch, which runs when the rank is served again.

        No effect for a process that does not serve the rank.
        """
        if self._phase not in (Phase.FENCING, Phase.RUNNING):
            return []
        if self._members.incarnations.get(rank) != incarnation:
            return []
        self._members.retire(rank)
        return self._begin_epoch(f"rank {rank} is lost: {reason}")

    def on_tick(self) -> list[Outgoing]:
        """Repeat what is not acknowledged, ping who is silent, serve what had to wait."""
        now_s, settings = self._clock.now(), self.settings
        if self._phase is Phase.FENCING:
            return self._grants()
        window = self._window
        if self._phase is not Phase.RUNNING or window is None:
            return []
        out = [
            Outgoing((WorkerAddress(rank),), message)
            for rank, messages in window.due_for_resend(now_s).items()
            for message in messages
        ]
        pinged = self._members.pings_due(now_s, settings.heartbeat_s)
        if pinged:
            ping = Ping(self._members.nonce, self.epoch)
            out.append(Outgoing(tuple(WorkerAddress(rank) for rank in pinged), ping))
        for ledger in self._clients.attached():
            if now_s - ledger.heard_s > settings.client_silence_s:
                self._clients.let_go(ledger.client_id)
            elif ledger.has_news() and now_s - ledger.progress_sent_s >= settings.resend_s:
                out.append(_to_client(ledger.progress(self.epoch, now_s)))
        return out + self._work()

    def close(self) -> None:
        """Serve nobody any more. May be called again."""
        self._phase = Phase.CLOSED
        self._forget_epoch()

    def statistics(self) -> CoordinatorStatistics:
        """Return figures, frozen."""
        window, manager = self._window, self.manager
        return replace(
            self._counts,
            phase=self._phase.value,
            epoch=self.epoch,
            problem=self.problem() if self._phase is not Phase.NEW else "",
            num_clients=len(self._clients),
            num_open_jobs=len(self._jobs),
            last_seq=0 if window is None else window.next_seq - 1,
            applied_seq=0 if window is None else window.applied_by_all,
            num_unacknowledged=0 if window is None else len(window),
            num_resent=self._counts.num_resent + (0 if window is None else window.num_resent),
            manager=None if manager is None else manager.statistics(),
        )

    def check(self) -> None:
        """Raise `InvariantError` if the books do not add up. Changes nothing."""
        is_running = self._phase is Phase.RUNNING
        if is_running != (self._window is not None) or is_running != (self._server is not None):
            raise InvariantError(f"phase {self._phase.value} with the wrong books")
        self._jobs.check()
        self._clients.check()
        if self._server is not None:
            self._server.manager.check()

    # --- workers

    def _on_hello(self, hello: Hello) -> list[Outgoing]:
        if hello.fingerprint != self.settings.fingerprint:
            self._refuse(
                f"rank {hello.rank} process {hello.incarnation} has plan {hello.fingerprint}, "
                f"the coordinator {self.settings.fingerprint}: launch all with one configuration"
            )
            return []
        is_another = self._members.serve(hello.rank, hello.incarnation)
        is_outrun = self._members.on_hello(hello, self._clock.now())
        if is_another and self._phase is Phase.RUNNING:
            return self._begin_epoch(f"rank {hello.rank} is served by another process")
        if is_outrun:
            return self._on_higher_epoch(f"rank {hello.rank} obeys epoch {hello.highest_epoch}")
        grant = self._members.grant_now(hello.rank, self._clock.now())
        return [] if grant is None else [Outgoing((WorkerAddress(hello.rank),), grant)]

    def _on_granted(self, granted: Granted) -> list[Outgoing]:
        is_news = self._members.on_granted(granted, self._clock.now())
        if not is_news or self._phase is not Phase.FENCING or not self._members.is_complete:
            return []
        return self._run()

    def _on_refused(self, refused: Refused) -> list[Outgoing]:
        if self._members.on_refused(refused, self._clock.now()):
            return self._on_higher_epoch(f"rank {refused.rank}: {refused.reason}")
        return []

    def _on_higher_epoch(self, reason: str) -> list[Outgoing]:
        """While fencing, take a higher one. While running, somebody else has taken over."""
        if self._phase is Phase.FENCING:
            return self._begin_epoch(reason)
        logger.error("epoch %d was superseded: %s", self.epoch, reason)
        self._phase, self._reason = Phase.SUPERSEDED, f"another coordinator took over: {reason}"
        return self._part_from_clients(self._forget_epoch())

    def _on_report(self, message: Applied | Missing | Finished | Heartbeat) -> list[Outgoing]:
        """Take a report of a rank's present process in the present epoch."""
        window = self._window
        if window is None:
            return []
        now_s, who = self._clock.now(), (message.rank, message.incarnation, message.epoch)
        match message:
            case Applied() | Heartbeat():
                if window.on_applied(*who, message.seq, now_s):
                    return self._on_applied()
                return []
            case Missing():
                again = window.on_missing(*who, message.from_seq, now_s)
                return [Outgoing((WorkerAddress(message.rank),), m) for m in again]
            case Finished():
                return self._on_finished(message)

    def _on_applied(self) -> list[Outgoing]:
        out: list[Outgoing] = []
        if self._window is not None:
            applied, now_s = self._window.applied_by_all, self._clock.now()
            for ledger in self._clients.attached():
                if ledger.on_applied(applied):
                    out.append(_to_client(ledger.progress(self.epoch, now_s)))
        return out + self._work()

    def _on_finished(self, message: Finished) -> list[Outgoing]:
        """Note the reports one by one; acknowledge all, or the worker repeats them for ever."""
        told: dict[str, ClientLedger] = {}
        for report in message.jobs:
            try:
                ended = self._jobs.report(message.rank, report)
            except ProtocolError as error:
                self._refuse(str(error))
                continue
            ledger = None if ended is None else self._clients.get(ended.client_id)
            if ended is not None and ended.failures:
                self._counts = self._counts.plus(num_failed_forwards=1)
            if ended is not None and ledger is not None and ledger.on_job_ended(ended):
                told[ended.client_id] = ledger
        job_ids = tuple(report.job_id for report in message.jobs)
        ack = FinishedAck(self._members.nonce, self.epoch, job_ids)
        now_s = self._clock.now()
        news = [_to_client(ledger.progress(self.epoch, now_s)) for ledger in told.values()]
        return [Outgoing((WorkerAddress(message.rank),), ack), *news, *self._work()]

    # --- epochs

    def _begin_epoch(self, reason: str) -> list[Outgoing]:
        """Void the present epoch and fence the next one. Clients must attach again."""
        logger.warning("epoch %d ends: %s", self.epoch, reason)
        self._phase, self._reason = Phase.FENCING, reason
        clients = self._forget_epoch()
        try:
            self._members.take_epoch(self._clock.now())
        except ClusterError as error:
            self._refuse(str(error))
            self._members.doubt_epoch()
        return self._part_from_clients(clients) + self._grants()

    def _grants(self) -> list[Outgoing]:
        """Return the grants that are due; take the epoch first where that failed before."""
        now_s = self._clock.now()
        if self._members.is_epoch_doubted:
            try:
                self._members.take_epoch(now_s)
            except ClusterError as error:
                self._refuse(str(error))
                return []
        due = self._members.grants_due(now_s, self.settings.resend_s)
        return [Outgoing((WorkerAddress(rank),), grant) for rank, grant in due.items()]

    def _run(self) -> list[Outgoing]:
        """All ranks have granted: begin cold. The first command makes every rank forget."""
        settings = self.settings
        manager = self._make_manager(self._members.model_epoch)
        self._server = StepServer(settings, manager, self._jobs)
        self._window = CommandWindow(
            self.epoch, self._members.incarnations, settings.max_unacknowledged, settings.resend_s
        )
        self._phase, self._reason = Phase.RUNNING, ""
        self._counts = self._counts.plus(num_epochs_run=1)
        _, out = self._send_commands("", 0, (Reset(manager.model_epoch),))
        return [out]

    def _forget_epoch(self) -> list[str]:
        """Drop all books of the present epoch; return the clients that were attached."""
        if self._window is not None:
            self._counts = self._counts.plus(num_resent=self._window.num_resent)
        self._window = self._server = None
        self._jobs.clear()
        return self._clients.clear()

    def _part_from_clients(self, client_ids: Iterable[str]) -> list[Outgoing]:
        reason = self._why_not_running()
        return [_to_client(Unattached(c, self.epoch, reason)) for c in client_ids]

    def _why_not_running(self) -> str:
        missing = f"waiting for ranks {self._members.missing()}"
        parts = (self._reason, missing if self._phase is Phase.FENCING else "", self.problem())
        return "; ".join(part for part in parts if part)

    # --- clients

    def _attach(self, message: Attach) -> Outgoing:
        client_id = message.client_id
        reason = self._why_not_running() if self._phase is not Phase.RUNNING else ""
        manager = self.manager
        if manager is not None and not reason:
            reason = self._clients.attach(client_id, message.next_step, self._clock.now())
        ledger = self._clients.get(client_id)
        if reason or manager is None or ledger is None:
            self._counts = self._counts.plus(num_unattached=1)
            return _to_client(Unattached(client_id, self.epoch, reason))
        attached = Attached(
            client_id,
            self.epoch,
            manager.model_epoch,
            self.settings.fingerprint,
            ledger.receiver.next_step,
            self.settings.is_content_checking,
        )
        return _to_client(attached)

    def _on_step(self, ledger: ClientLedger, message: StepMessage) -> list[Outgoing]:
        received = ledger.receiver.on_step(message)
        if received.answer is not None:
            return [_to_client(received.answer)]
        if received.missing_from is not None:
            missing = MissingSteps(ledger.client_id, self.epoch, received.missing_from)
            return [_to_client(missing)]
        return []

    def _work(self) -> list[Outgoing]:
        """Execute what is ready, client by client in turn, while the command window has room."""
        out: list[Outgoing] = []
        out += self._let_clients_go()
        while self._has_room():
            taken = [(ledger, m) for ledger in self._clients.attached() if (m := _take(ledger))]
            if not taken:
                break
            for ledger, message in taken:
                out += self._execute(ledger, message)
        return out

    def _has_room(self) -> bool:
        """Whether every client could take a step now. Refused steps need no room."""
        window = self._window
        if window is None:
            return False
        free = self.settings.max_unacknowledged - len(window)
        return free >= max(1, self._clients.num_attached) or self.is_degraded

    def _execute(self, ledger: ClientLedger, message: StepMessage) -> list[Outgoing]:
        """Serve one step; its commands leave before its answer."""
        server = self._server
        if server is None:
            return []
        problem = self.problem()
        served = server.refuse(message, problem) if problem else server.serve(ledger, message)
        out: list[Outgoing] = []
        seq = 0
        if served.is_executed:
            self._members.save_model_epoch(server.manager.model_epoch)
            seq, sent = self._send_commands(message.client_id, message.step, served.commands)
            out.append(sent)
        answer: StepResult | CallResult = replace(served.answer, epoch=self.epoch, seq=seq)
        ledger.receiver.store_answer(answer)
        ledger.add_executed(message.step, seq, served.has_forward)
        self._counts = self._counts.plus(
            num_steps=1, num_refused_steps=0 if served.is_executed else 1
        )
        out.append(_to_client(answer))
        if not served.is_executed and self._window is not None:
            ledger.on_applied(self._window.applied_by_all)
            out.append(_to_client(ledger.progress(self.epoch, self._clock.now())))
        return out

    def _let_clients_go(self) -> list[Outgoing]:
        """Fence clients that leave; free what they had once no rank can run a step of theirs."""
        window, server = self._window, self._server
        out: list[Outgoing] = []
        if window is None or server is None:
            return out
        for ledger in self._clients.leaving():
            if not ledger.is_leaving and not window.is_full:
                fence = (Fence(ledger.client_id),)
                ledger.fence_seq, sent = self._send_commands(ledger.client_id, 0, fence)
                out.append(sent)
            elif ledger.is_leaving and window.applied_by_all >= ledger.fence_seq:
                server.release(ledger.client_id)
                self._clients.forget(ledger.client_id)
        return out

    def _send_commands(
        self, client_id: str, step: int, commands: tuple[Command, ...]
    ) -> tuple[int, Outgoing]:
        """Number a message for all ranks and keep it until all have applied it."""
        window = self._window
        if window is None:
            raise InvariantError("commands outside an epoch")
        message = StepCommands(
            self._members.nonce,
            self.settings.fingerprint,
            self.epoch,
            window.next_seq,
            client_id,
            step,
            commands,
        )
        window.append(message, self._clock.now())
        return message.seq, Outgoing(self._ranks, message)

    def _refuse(self, reason: str) -> None:
        logger.debug("dropped: %s", reason)
        self._counts = self._counts.plus(num_dropped=1).with_reason(reason)


def _to_client(message: ToClient) -> Outgoing:
    return Outgoing((ClientAddress(message.client_id),), message)


def _take(ledger: ClientLedger) -> StepMessage | None:
    return None if ledger.is_leaving else ledger.receiver.take_ready()
