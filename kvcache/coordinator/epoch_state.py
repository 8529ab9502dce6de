"""One epoch in which all ranks obey: steps in, commands out, progress back.

The Coordinator makes an `EpochState` when every rank has granted the epoch, and drops it when the
epoch ends. It begins with the cached blocks that were kept, and waits for the earlier clients. The
coordinator has already checked the epoch, sender and process of every message.

    client ──StepRequest / Call──▶ ClientLedger ─▶ StepServer ─▶ commands ─▶ CommandWindow ──▶ ranks
           ◀──answer, Progress────                                        ◀──Ack, Finished──────
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvcache.base.arrays import int32_array
from kvcache.base.errors import ClusterError, InvariantError, ProtocolError
from kvcache.base.logs import get_logger
from kvcache.coordinator.auditor import Auditor
from kvcache.coordinator.clients import ClientLedger, Clients
from kvcache.coordinator.job_table import JobTable
from kvcache.coordinator.label_collection import LabelCollection
from kvcache.coordinator.membership import Membership
from kvcache.coordinator.offloading import Offloading
from kvcache.coordinator.parts import CoordinatorParts
from kvcache.coordinator.recovery import Reattachment, Recovery
from kvcache.coordinator.serving import StepServer
from kvcache.coordinator.settings import CoordinatorSettings, CoordinatorStatistics, EpochCounts
from kvcache.coordinator.step_recorder import EpochBegun
from kvcache.manager import KVCacheManager
from kvcache.protocol.commands import Command, Fence, Reset, Unlabel
from kvcache.protocol.delivery import CommandWindow
from kvcache.protocol.label_agreement import agreed_labels
from kvcache.protocol.message_headers import MessageHeader
from kvcache.protocol.messages import (
    Ack,
    Acknowledge,
    Attach,
    Attached,
    Call,
    CallResult,
    ClientAddress,
    Finished,
    FinishedAck,
    Heartbeat,
    LabelReport,
    MissingSteps,
    Nack,
    Outgoing,
    Rejected,
    StepCommands,
    ToClient,
    Unattached,
    WorkerAddress,
)
from kvcache.protocol.step import StepRequest, StepResult
from kvcache.protocol.step_delivery import ReceivedMessage, UnreadableStep, stamped

MAX_STEPS_AT_ONCE = 256
"""Most steps executed per incoming message; the others wait for the next one."""

logger = get_logger(__name__)


@dataclass(frozen=True, eq=False)
class EpochStart:
    """What an epoch begins with: a manager, with the blocks that were kept.

    `applied_steps` says, by client, which steps every rank had applied before; `returning` are the
    clients that ran steps then.
    """

    manager: KVCacheManager
    applied_steps: Mapping[str, int]
    returning: frozenset[str]


class EpochState:
    """The state of one epoch. Every method returns what to send, in order.

    Invariant: a step is executed only when the command window has room for its message.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        parts: CoordinatorParts,
        members: Membership,
        clients: Clients,
        jobs: JobTable,
        *,
        start: EpochStart,
    ) -> None:
        """Serve the epoch that all `members` have granted."""
        self.manager = manager = start.manager
        self._applied_steps = start.applied_steps
        self._members = members
        self._epoch = members.epoch
        self._nonce = members.nonce
        self._incarnations = members.incarnations
        self._applied_headers = {
            rank: MessageHeader(Ack, self._nonce, incarnation, rank, self._epoch)
            for rank, incarnation in self._incarnations.items()
        }
        self._settings = settings
        self._clock = parts.clock
        self.window = CommandWindow(
            self._epoch, self._incarnations, settings.max_unacknowledged, settings.resend_s
        )
        self.counts = EpochCounts()
        self._auditor = Auditor(
            settings.audit, manager, jobs, parts.clock.now(), self.counts.audits
        )
        self._settled_seq = 0
        self._has_released = False  # its commands may not have been sent yet
        self._ranks = tuple(WorkerAddress(rank) for rank in range(settings.num_ranks))
        self._clients = clients
        self._jobs = jobs
        self._recorder = parts.recorder
        self._events = parts.events
        self._offloading = None
        if parts.offload is not None:
            self._offloading = Offloading(parts.offload, manager, jobs, parts.clock, parts.recorder)
        self._server = StepServer(settings, manager, jobs, parts.recorder, self._offloading)
        self.reattachment = Reattachment(
            clients, self._server, start.returning, parts.clock.now() + settings.reattach_s
        )

    def begin(self, recovery: Recovery, collection: LabelCollection) -> list[Outgoing]:
        """Make every rank drop what was not kept: the first message of the epoch."""
        commands: tuple[Command, ...] = (Reset(self.manager.model_epoch),)
        below = self._offloading
        tier_state = None if below is None else below.tiers.present_events
        known = None
        if recovery.is_cold:
            self._recorder.record(EpochBegun(self._epoch, self.manager))
        else:
            commands = tuple(self.manager.take_commands())
            known = agreed_labels(collection.label_sets())
            if below is not None:
                below.storing.know(known)
                below.follow(commands)
            self._recorder.record(
                EpochBegun(self._epoch, self.manager, collection.label_sets, commands)
            )
        self._events.begin(self.manager, self._members.first_event, known, tier_state)
        _, sent = self._send_commands("", 0, commands)
        self._events.flush()
        if self.reattachment.is_waiting:
            logger.info(
                "epoch %d: steps wait up to %.1f s for clients %s",
                self._epoch,
                self._settings.reattach_s,
                ", ".join(self.reattachment.missing()),
            )
        if below is None:
            return [sent]
        question = replace(collection.question, model_epoch=self.manager.model_epoch)
        return [sent, *below.begin(question)]

    # --- clients

    def attach(self, message: Attach) -> Attached | Unattached:
        """Attach a client, or say why not."""
        client_id = message.client_id
        if message.nonce not in ("", self._nonce):
            return Unattached(client_id, self._epoch, "another coordinator has taken its place")
        is_new = self._clients.get(client_id) is None
        reason = self._clients.attach(message, self._clock.now())
        ledger = self._clients.get(client_id)
        if reason or ledger is None:
            logger.warning(
                "epoch %d: client %s is not attached: %s", self._epoch, client_id[:256], reason
            )
            return Unattached(client_id, self._epoch, reason, self._clients.has_gone(client_id))
        if is_new:
            logger.info(
                "epoch %d: client %s is attached, its next step is %d; %d clients",
                self._epoch,
                client_id,
                ledger.receiver.next_step,
                len(self._clients),
            )
        ledger.on_heard(self._clock.now())
        return Attached(
            client_id,
            self._epoch,
            self.manager.model_epoch,
            self._settings.fingerprint,
            ledger.receiver.next_step,
            self._settings.is_content_checking,
            self._nonce,
            self._applied_steps.get(client_id, 0),
        )

    def on_client_message(
        self, ledger: ClientLedger, message: ReceivedMessage | Acknowledge
    ) -> list[Outgoing]:
        """Take a message of an attached client. Raises ClusterError if the state store fails."""
        ledger.on_heard(self._clock.now())
        out: list[Outgoing] = []
        match message:
            case StepRequest() | Call() | UnreadableStep():
                out = self._on_step(ledger, message)
            case Acknowledge():
                ledger.on_acknowledge(message.step)
        return out + self.work()

    def detach(self, client_id: str) -> list[Outgoing]:
        """Stop serving a client. Raises ClusterError as `on_client_message` does."""
        if self._clients.detach(client_id):
            logger.info("epoch %d: client %s has detached", self._epoch, client_id)
            self.reattachment.forget(client_id)
        return self.work()

    def on_client_lost(self, client_id: str) -> None:
        """Record that a client's connection has ended: if it stays silent, a tick gives it up."""
        ledger = self._clients.get(client_id)
        if ledger is not None and not ledger.is_leaving and ledger.lost_s is None:
            ledger.lost_s = self._clock.now()
            logger.info(
                "epoch %d: client %s has lost its connection: it is given up in %.1f s unless it "
                "comes back",
                self._epoch,
                client_id,
                self._settings.client_return_s,
            )

    def _why_given_up(self, ledger: ClientLedger, now_s: float) -> str:
        """Return why a client is no longer served, empty if it is."""
        silent_s, settings = now_s - ledger.heard_s, self._settings
        if silent_s > settings.client_silence_s:
            return f"it has been silent for {silent_s:.1f} s"
        if ledger.lost_s is not None and now_s - ledger.lost_s > settings.client_return_s:
            return f"its connection ended {now_s - ledger.lost_s:.1f} s ago"
        return ""

    def _on_step(self, ledger: ClientLedger, message: ReceivedMessage) -> list[Outgoing]:
        received = ledger.receiver.on_step(message)
        if received.answer is not None:
            return [_to_client(received.answer)]
        if received.missing_from is not None:
            missing = MissingSteps(ledger.client_id, self._epoch, received.missing_from)
            return [_to_client(missing)]
        return []

    # --- ranks

    def on_report(self, message: Ack | Nack | Rejected | Finished | Heartbeat) -> list[Outgoing]:
        """Take a report of a rank. Raises ProtocolError for unknown numbers, and ClusterError for
        commands that the rank cannot obey."""
        now_s, who = self._clock.now(), (message.rank, message.incarnation, message.epoch)
        match message:
            case Ack() | Heartbeat():
                self.window.on_applied(*who, message.seq, now_s)
                return self.settle()
            case Nack():
                again = self.window.on_missing(*who, message.from_seq, now_s)
                return [Outgoing((WorkerAddress(message.rank),), m) for m in again]
            case Rejected():
                again = self.window.on_rejected(*who, message.seq, message.reason)
                logger.warning(
                    "epoch %d: rank %d rejects message %d: %s",
                    self._epoch,
                    message.rank,
                    message.seq,
                    message.reason,
                )
                return [Outgoing((WorkerAddress(message.rank),), m) for m in again]
            case Finished():
                return self._on_finished(message)

    def on_plain_applied(self, rank: int, payload: bytes, now_s: float) -> bool:
        """Take an encoded `Ack` of the process that granted this epoch; return whether it is one.

        Its first bytes contain all that `on_report` and the coordinator would check. A number that
        was never sent is not taken. `settle` returns the consequences.
        """
        header = self._applied_headers.get(rank)
        seq = None if header is None else header.number(payload)
        if seq is None:
            return False
        try:
            self.window.on_applied(rank, self._incarnations[rank], self._epoch, seq, now_s)
        except ProtocolError:
            return False
        return True

    def check(self) -> None:
        """Raise `InvariantError` if the state of manager or tiers is inconsistent."""
        self.manager.check()
        if self._offloading is not None:
            self._offloading.check()

    def on_tier_labels(self, report: LabelReport) -> list[Outgoing]:
        """Take the tier contents that a rank reports."""
        if self._offloading is None:
            return []
        return [*self._offloading.on_labels(report), *self.work()]

    def settle(self) -> list[Outgoing]:
        """Tell clients what every rank has applied since the last time, and continue."""
        applied = self.window.applied_by_all
        if applied == self._settled_seq:
            return []
        self._settled_seq = applied
        changed = [one for one in self._clients.attached() if one.on_applied(applied)]
        return [*[self._progress(ledger) for ledger in changed], *self.work()]

    def _on_finished(self, message: Finished) -> list[Outgoing]:
        """Take the reports one by one; acknowledge all, or the worker would repeat them forever."""
        told: dict[str, ClientLedger] = {}
        for report in message.jobs:
            try:
                ended = self._jobs.report(message.rank, report)
            except ProtocolError as error:
                self._drop(str(error))
                continue
            if ended is None:
                continue
            if self._auditor.on_ended(ended):
                continue
            if self._offloading is not None and self._offloading.on_ended(ended):
                continue
            if ended.failures:
                self.counts.num_failed_forwards += 1
                logger.warning(
                    "epoch %d: the forward of step %d of client %s failed: %s",
                    self._epoch,
                    ended.step,
                    ended.client_id,
                    "; ".join(f"rank {one.rank}: {one.detail}" for one in ended.failures),
                )
            ledger = self._clients.get(ended.client_id)
            if ledger is not None and ledger.on_job_ended(ended):
                told[ended.client_id] = ledger
        ack = FinishedAck(self._nonce, self._epoch, tuple(job.job_id for job in message.jobs))
        news = [self._progress(ledger) for ledger in told.values()]
        return [Outgoing((WorkerAddress(message.rank),), ack), *news, *self.work()]

    # --- time and work

    def on_tick(self) -> list[Outgoing]:
        """Repeat unacknowledged messages, give up silent clients, serve steps that had to wait."""
        self._recorder.on_tick()
        self._events.on_tick()
        now_s = self._clock.now()
        out = [
            Outgoing((WorkerAddress(rank),), message)
            for rank, messages in self.window.due_for_resend(now_s).items()
            for message in messages
        ]
        if self._offloading is not None:
            out += self._offloading.on_tick()
        for ledger in self._clients.attached():
            reason = self._why_given_up(ledger, now_s)
            if reason:
                logger.warning(
                    "epoch %d: client %s is given up, %s: its requests are freed",
                    self._epoch,
                    ledger.client_id,
                    reason,
                )
                self._clients.let_go(ledger.client_id)
                self.reattachment.forget(ledger.client_id)
            elif ledger.has_news() and now_s - ledger.progress_sent_s >= self._settings.resend_s:
                out.append(self._progress(ledger))
        if self._auditor.is_due(now_s) and not self.window.is_full:
            out.append(self._send_audited("", 0, self._server.withdraw())[1])
        return out + self.work()

    def work(self) -> list[Outgoing]:
        """Execute ready steps, client by client in turn, while the command window has room."""
        out = self._let_clients_go() if self._clients.has_leaving else []
        if self._has_released and not self.window.is_full:
            self._has_released = False
            commands = self._server.withdraw()
            if commands:
                out.append(self._send_audited("", 0, commands)[1])
        if self._auditor.wrong_blocks and not self.window.is_full:
            block_ids = sorted(self._auditor.wrong_blocks)
            self._auditor.wrong_blocks.clear()
            commands = (*self._server.withdraw(block_ids), Unlabel(int32_array(block_ids)))
            out.append(self._send_commands("", 0, commands)[1])
        if self._offloading is not None and self._offloading.has_work and not self.window.is_full:
            out.append(self._send_audited("", 0, self._server.withdraw())[1])
        if self.reattachment.is_waiting and not self.reattachment.look(self._clock.now()):
            return out
        if self.reattachment.gone and not self.window.is_full:
            # Ranks forget them: the next epoch must not wait for them again.
            gone = self.reattachment.take_gone()
            logger.warning(
                "epoch %d: clients %s have not come back in time: they need new ids",
                self._epoch,
                ", ".join(gone),
            )
            fences = tuple(Fence(name) for name in gone)
            out.append(self._send_commands("", 0, fences)[1])
        num_left = MAX_STEPS_AT_ONCE
        # Steps that are refused need no room.
        while num_left > 0 and (not self.window.is_full or self._problem()):
            ready = self._clients.take_ready()
            if ready is None:
                break
            num_left -= 1
            out += self._execute(*ready)
        return out

    def _problem(self) -> str:
        """Return why steps are refused now; empty if they are not."""
        return self._members.problem(self._clock.now(), self._settings.worker_silence_s)

    def _execute(self, ledger: ClientLedger, message: ReceivedMessage) -> list[Outgoing]:
        """Serve one step; its commands leave before its answer."""
        problem = self._problem()
        server = self._server
        served = server.refuse(message, problem) if problem else server.serve(ledger, message)
        out: list[Outgoing] = []
        seq = 0
        if served.is_executed:
            self._members.save_model_epoch(self.manager.model_epoch)
            seq, sent = self._send_audited(message.client_id, message.step, served.commands)
            out.append(sent)
        answer: StepResult | CallResult = stamped(served.answer, epoch=self._epoch, seq=seq)
        ledger.receiver.store_answer(answer)
        ledger.add_executed(message.step, seq, served.has_forward)
        self.reattachment.on_executed(message.client_id, message.step)
        self.counts.num_steps += 1
        self.counts.num_refused_steps += not served.is_executed
        if isinstance(answer, StepResult):
            self.counts.num_no_room += len(answer.no_room)
        out.append(_to_client(answer))
        if not served.is_executed and ledger.on_applied(self.window.applied_by_all):
            out.append(self._progress(ledger))
        self._events.flush()
        return out

    def _let_clients_go(self) -> list[Outgoing]:
        """Fence clients that leave; free their requests once no rank can run a step of theirs."""
        out: list[Outgoing] = []
        for ledger in self._clients.leaving():
            if not ledger.fence_seq and not self.window.is_full:
                fence = (Fence(ledger.client_id),)
                ledger.fence_seq, sent = self._send_commands("", 0, fence)
                out.append(sent)
            elif ledger.fence_seq and self.window.applied_by_all >= ledger.fence_seq:
                self._server.release(ledger.client_id)
                self._clients.forget(ledger.client_id)
                self._has_released = True
        return out

    def _progress(self, ledger: ClientLedger) -> Outgoing:
        return _to_client(ledger.progress(self._epoch, self._clock.now()))

    def _send_audited(
        self, client_id: str, step: int, commands: tuple[Command, ...]
    ) -> tuple[int, Outgoing]:
        """Send commands that do not belong to a step, and a due audit with them.

        Raises ClusterError if the audit finds the coordinator's own state inconsistent.
        """
        try:
            audit = self._auditor.audit(self._clock.now())
        except InvariantError as error:
            raise ClusterError(
                f"the coordinator's state is inconsistent and is rebuilt: {error}"
            ) from error
        return self._send_commands(client_id, step, commands + audit)

    def _send_commands(
        self, client_id: str, step: int, commands: tuple[Command, ...]
    ) -> tuple[int, Outgoing]:
        """Number a message for all ranks and keep it until all have applied it."""
        message = StepCommands(
            self._nonce,
            self._settings.fingerprint,
            self._epoch,
            self.window.next_seq,
            client_id,
            step,
            commands,
        )
        self.window.append(message, self._clock.now())
        self._events.follow(commands)
        return message.seq, Outgoing(self._ranks, message)

    def add_statistics(self, counts: CoordinatorStatistics) -> CoordinatorStatistics:
        """Return the coordinator's statistics with those of this epoch added."""
        return replace(
            counts.with_epoch(self.counts, self.window.num_resent),
            last_seq=self.window.next_seq - 1,
            applied_seq=self.window.applied_by_all,
            num_unacknowledged=len(self.window),
            waiting_for_clients=tuple(self.reattachment.missing()),
            manager=self.manager.statistics(),
            offload=None if self._offloading is None else self._offloading.statistics(),
            events=self._events.statistics(),
        )

    def _drop(self, reason: str) -> None:
        logger.warning("epoch %d: a report is dropped: %s", self._epoch, reason)
        self.counts.num_dropped += 1
        self.counts.last_dropped = reason


def _to_client(message: ToClient) -> Outgoing:
    return Outgoing((ClientAddress(message.client_id),), message)
