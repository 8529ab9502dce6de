"""The plain Coordinator: takes messages, returns messages, decides through the manager.

Three phases. *Fencing*: an epoch above every known one is saved, and every rank is asked to grant
it. *Collecting*: all have granted it, no older epoch runs, and each rank sends its labels.
*Running*: an `EpochState` serves steps, with the cached blocks on which all ranks agree. A new
process of a rank, or the loss of one, ends the epoch; clients attach again. A coordinator that
starts after a crash, and one that has lost a worker, go through the same phases.

    start ──▶ FENCING ──all granted──▶ COLLECTING ──all sent──▶ RUNNING ──another one──▶ SUPERSEDED
                 ◀──another process, or a loss──┴──────────────────┘

A state machine with one owner. It sends nothing itself, and refuses messages of other epochs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import ParamSpec

from kvcache.base.errors import (
    ClusterError,
    InvariantError,
    KVCacheError,
    MalformedMessageError,
    ProtocolError,
    RequestError,
    StaleEpochError,
    SupersededError,
)
from kvcache.base.logs import get_logger
from kvcache.coordinator.clients import Clients
from kvcache.coordinator.epoch_state import EpochStart, EpochState
from kvcache.coordinator.job_table import JobTable
from kvcache.coordinator.label_collection import LabelCollection, LabelQuestion
from kvcache.coordinator.membership import Membership
from kvcache.coordinator.parts import CoordinatorParts
from kvcache.coordinator.recovery import Recovery, recover
from kvcache.coordinator.settings import OBEYED, CoordinatorSettings, CoordinatorStatistics, Phase
from kvcache.coordinator.step_recorder import EpochEnded
from kvcache.manager import KVCacheManager
from kvcache.offload.specs import DEVICE_MEDIUM
from kvcache.protocol.messages import (
    Ack,
    Acknowledge,
    Address,
    Attach,
    Call,
    CallResult,
    ClientAddress,
    Detach,
    Detached,
    Finished,
    FromClient,
    FromWorker,
    Granted,
    Heartbeat,
    Hello,
    LabelReport,
    Nack,
    Outgoing,
    Ping,
    Progress,
    Refused,
    Rejected,
    StepCommands,
    Unattached,
    Unreadable,
    WorkerAddress,
    wire_tag,
)
from kvcache.protocol.step import StepRequest, StepResult
from kvcache.protocol.step_delivery import ReceivedMessage, UnreadableStep, error_answer
from kvcache.protocol.wire import leading_fields, prose

logger = get_logger(__name__)


REPEATED_REPORTS = (Finished, LabelReport)
"""Reports that a worker repeats until they are acknowledged or requested again."""

NAMED_CLIENTS = 8
"""Most clients that a log line names."""

_Arguments = ParamSpec("_Arguments")


class Coordinator:
    """One coordinator. `on_*` take a message or the time, and return messages to send, in order.

    Invariant: an epoch state exists exactly while running, and everything in it belongs to `epoch`.
    """

    def __init__(self, settings: CoordinatorSettings, parts: CoordinatorParts, nonce: str) -> None:
        """Take no epoch yet. `nonce` identifies this coordinator among all past and future ones.

        Raises the errors of loading the state: an unreadable state is not guessed.
        """
        self.settings = settings
        self._parts = parts
        self._clock = parts.clock
        self._members = Membership(
            settings.num_ranks,
            settings.fingerprint,
            nonce,
            parts.state_store,
            patience_s=4 * settings.resend_s,
        )
        self._jobs = JobTable(settings.num_ranks)
        self._clients = Clients(settings)
        self._phase = Phase.NEW
        self._epoch_state: EpochState | None = None
        self._collection: LabelCollection | None = None
        self._recovery = Recovery()
        self._returning: frozenset[str] = frozenset()
        self._reason = "the coordinator has not started"
        self._began_s = 0.0
        self._has_problem = False
        self._counts = CoordinatorStatistics()

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def epoch(self) -> int:
        """The present epoch, 0 before `start`."""
        return self._members.epoch

    @property
    def manager(self) -> KVCacheManager | None:
        """The manager of the present epoch, None unless running. For reading only."""
        return None if self._epoch_state is None else self._epoch_state.manager

    def missing_ranks(self) -> list[int]:
        """Return the ranks that have not granted the present epoch."""
        return self._members.missing()

    def problem(self) -> str:
        """Return which ranks do not answer, and since when, or who rules; empty if all is well."""
        if self._phase not in OBEYED:
            return self._reason if self._phase is Phase.SUPERSEDED else ""
        now_s, silence_s = self._clock.now(), self.settings.worker_silence_s
        problem = self._members.problem(now_s, silence_s)
        return problem or (
            self._collection.problem_at(now_s, silence_s) if self._collection else ""
        )

    def start(self, incarnations: Mapping[int, str] | None = None) -> list[Outgoing]:
        """Take an epoch and ask the known worker processes to grant it.

        Others are asked when they introduce themselves.

        Raises:
            ClusterError: the epoch cannot be saved; call it again later.
        """
        if self._phase is not Phase.NEW:
            raise RequestError(
                f"the coordinator is {self._phase.value}: it starts once, make another one"
            )
        for rank, incarnation in (incarnations or {}).items():
            self._members.serve(rank, incarnation, self._clock.now())
        self._members.take_epoch(self._clock.now())
        self._phase, self._reason = Phase.FENCING, ""
        self._note_taken()
        return self._grants()

    def on_worker_message(self, rank: int, message: FromWorker) -> list[Outgoing]:
        """Take a message from the worker of `rank`. Counts and drops foreign messages."""
        if self._phase not in OBEYED:
            return []
        if message.rank != rank:
            self._drop(f"rank {rank} speaks for rank {message.rank}")
            return []
        try:
            if isinstance(message, Ack) and message.nonce == self._members.nonce:
                return self._on_report(message)
            match self._as_introduction(message):
                case Hello() as hello:
                    return self._on_hello(hello)
                case Granted() as granted:
                    return self._on_granted(granted)
                case Refused() as refused:
                    return self._on_refused(refused)
                case LabelReport() as labels:
                    return self._on_labels(labels)
                case Ack() | Nack() | Rejected() | Finished() | Heartbeat() as report:
                    return self._on_report(report)
        except StaleEpochError as error:  # usual while epochs and processes change
            self._drop(str(error), logging.DEBUG)
            return []
        except ProtocolError as error:
            self._drop(f"rank {rank}: {error}")
            return []

    def on_plain_applied(self, rank: int, payload: bytes) -> bool:
        """Take an undecoded `Ack` of the worker of `rank`; return whether it was taken.

        `settle` has the consequences. Messages that need a closer look are not taken.
        """
        epoch_state, now_s = self._epoch_state, self._clock.now()
        if epoch_state is None or not epoch_state.on_plain_applied(rank, payload, now_s):
            return False
        self._members.heard_again(rank, now_s)
        return True

    def settle(self) -> list[Outgoing]:
        """Return the messages that follow from what `on_plain_applied` took."""
        return [] if self._epoch_state is None else self._guarded(self._epoch_state.settle)

    def on_client_message(self, message: FromClient) -> list[Outgoing]:
        """Take a message of the client that it names. Counts and drops foreign messages."""
        if self._phase is Phase.CLOSED:
            return []
        client_id, epoch_state = message.client_id, self._epoch_state
        if isinstance(message, Detach):
            return self._on_detach(client_id)
        if epoch_state is None:
            return self._part_from([client_id])
        if isinstance(message, Attach):
            answer = epoch_state.attach(message)
            if isinstance(answer, Unattached):
                self._counts = self._counts.plus(unattached=1)
            return [Outgoing((ClientAddress(client_id),), answer)]
        return self._on_attached_client(epoch_state, message)

    def _on_attached_client(
        self, epoch_state: EpochState, message: ReceivedMessage | Acknowledge
    ) -> list[Outgoing]:
        """Take a message that only an attached client may send; refuse others."""
        ledger = self._clients.get(message.client_id)
        if message.epoch != self.epoch or ledger is None or ledger.is_leaving:
            return self._part_from([message.client_id])
        return self._guarded(epoch_state.on_client_message, ledger, message)

    def _on_detach(self, client_id: str) -> list[Outgoing]:
        """Stop serving a client, in whatever epoch it attached: no id is used twice."""
        epoch_state = self._epoch_state
        if epoch_state is None:
            self._clients.detach(client_id)
        confirmed = Outgoing((ClientAddress(client_id),), Detached(client_id, self.epoch))
        freed = [] if epoch_state is None else self._guarded(epoch_state.detach, client_id)
        return [confirmed, *freed]

    def on_client_lost(self, client_id: str) -> None:
        """Record that a client's last connection has ended, after all its messages were handled.

        The client keeps its requests if it returns within `settings.client_return_s`.
        """
        if self._epoch_state is not None:
            self._epoch_state.on_client_lost(client_id)

    def on_worker_lost(self, rank: int, incarnation: str, reason: str) -> list[Outgoing]:
        """Record that a process is proven dead: begin a new epoch, which waits for another process.

        No effect for a process that does not serve the rank.
        """
        if self._phase not in OBEYED or self._members.incarnations.get(rank) != incarnation:
            return []
        self._members.retire(rank)
        return self._begin_epoch(f"rank {rank} is lost, process {incarnation}: {reason}")

    def on_tick(self) -> list[Outgoing]:
        """Repeat unacknowledged messages, ping silent ranks, serve steps that had to wait."""
        self._note_problem()
        if self._phase is Phase.FENCING:
            return self._grants()
        collection = self._collection
        if collection is not None:
            asked = collection.on_tick(self._clock.now(), self.settings.labels_s)
            return self._guarded(self._run, collection) if collection.is_over else asked
        if self._epoch_state is None:
            return []
        out: list[Outgoing] = []
        silent = self._members.pings_due(self._clock.now(), self.settings.heartbeat_s)
        if silent:
            ping = Ping(self._members.nonce, self.epoch)
            out.append(Outgoing(tuple(WorkerAddress(rank) for rank in silent), ping))
        return out + self._guarded(self._epoch_state.on_tick)

    def on_unreadable(self, sender: Address, payload: bytes, reason: str) -> list[Outgoing]:
        """Take an undecodable payload; `reason` says why. Its sender would repeat it.

        A step or call is refused under its number, a worker is told to send a smaller report. A
        payload of unknown kind, or not from its stated sender, gets no answer.
        """
        leading = leading_fields(payload)
        if leading is None:
            return []
        what = leading.fields
        if isinstance(sender, WorkerAddress):
            if what.get("nonce") != self._members.nonce or leading.kind not in REPEATED_REPORTS:
                return []
            unreadable = Unreadable(
                self._members.nonce, self.epoch, wire_tag(leading.kind), prose(reason)
            )
            return [Outgoing((sender,), unreadable)]
        epoch_state, client_id = self._epoch_state, sender.client_id
        if epoch_state is None or what.get("client_id") != client_id:
            return []
        if leading.kind is Attach:
            return [Outgoing((sender,), Unattached(client_id, self.epoch, prose(reason)))]
        step, epoch, is_call = what.get("step"), what.get("epoch"), leading.kind is Call
        if not (is_call or leading.kind is StepRequest) or step is None or epoch is None:
            return []
        unread = UnreadableStep(client_id, step, epoch, is_call, reason)
        return self._on_attached_client(epoch_state, unread)

    def on_unsendable(self, item: Outgoing, reason: str) -> list[Outgoing]:
        """Return the replacement for a message that cannot be sent, for `reason`.

        Answers become errors, although their step was executed. If no rank can get its
        commands, the epoch ends, because all later commands would wait.
        """
        message = item.message
        match message:
            case StepResult() | CallResult():
                answer = error_answer(
                    message,
                    MalformedMessageError.__name__,
                    f"step {message.step} was executed, but its answer cannot be sent: {reason}",
                )
                ledger = self._clients.get(message.client_id)
                if ledger is not None and message.epoch == self.epoch:
                    ledger.receiver.replace_answer(answer)
                return [Outgoing(item.to, answer)]
            case Progress():
                failures = tuple(replace(failure, detail="") for failure in message.failures)
                return [Outgoing(item.to, replace(message, failures=failures))]
            case StepCommands() if self._epoch_state is not None and message.epoch == self.epoch:
                return self._begin_epoch(
                    f"the commands of step {message.client_step} of client {message.client_id!r}, "
                    f"message {message.epoch}:{message.seq}, cannot be sent: {reason}"
                )
        return []

    def on_error(self, reason: str) -> list[Outgoing]:
        """Begin a new epoch after an error in a decision, which may have left the state half
        written. The new state is made from the labels. `reason` describes the error."""
        if self._phase not in OBEYED:
            return []
        return self._begin_epoch(f"an error of the coordinator's own: {reason}")

    def close(self) -> None:
        """Stop serving. Repeatable."""
        self._parts.recorder.close()
        if self._phase in OBEYED:
            logger.info("epoch %d ends: coordinator %s closes", self.epoch, self._members.nonce)
        self._end_epoch()
        self._parts.events.close()
        self._phase = Phase.CLOSED

    def statistics(self) -> CoordinatorStatistics:
        counts = replace(
            self._counts,
            phase=self._phase.value,
            epoch=self.epoch,
            problem=self.problem(),
            num_clients=len(self._clients),
            num_open_jobs=len(self._jobs),
            recorder=self._parts.recorder.statistics(),
            num_kept_blocks=self._recovery.num_kept_blocks,
            cold_reason=self._recovery.reason,
        )
        return counts if self._epoch_state is None else self._epoch_state.add_statistics(counts)

    def check(self) -> None:
        """Raise `InvariantError` if the state is inconsistent. Changes nothing."""
        for phase, state in (
            (Phase.RUNNING, self._epoch_state),
            (Phase.COLLECTING, self._collection),
        ):
            if (self._phase is phase) != (state is not None):
                raise InvariantError(f"phase {self._phase.value} with the wrong state")
        self._jobs.check()
        self._clients.check()
        if self._epoch_state is not None:
            self._epoch_state.check()

    def _as_introduction(self, message: FromWorker) -> FromWorker:
        """Let a process that talks to another coordinator introduce itself, if its rank is free."""
        if isinstance(message, Hello) or message.nonce == self._members.nonce:
            return message
        if message.rank not in self._members.missing():
            return message
        epoch = message.highest_epoch if isinstance(message, Refused) else message.epoch
        plan = self.settings.fingerprint  # a process of another plan refuses the grant
        return Hello(message.incarnation, message.rank, epoch, plan)

    def _on_hello(self, hello: Hello) -> list[Outgoing]:
        if hello.fingerprint != self.settings.fingerprint:
            self._drop(
                f"rank {hello.rank} process {hello.incarnation} has plan {hello.fingerprint}, "
                f"the coordinator {self.settings.fingerprint}: launch all with one configuration"
            )
            return []
        now_s = self._clock.now()
        has_replaced = self._members.serve(hello.rank, hello.incarnation, now_s)
        is_outrun = self._members.on_hello(hello, now_s)
        if has_replaced:
            return self._begin_epoch(f"rank {hello.rank} is served by another process")
        if is_outrun:
            return self._on_higher_epoch(f"rank {hello.rank} obeys epoch {hello.highest_epoch}")
        grant = self._members.grant_now(hello.rank, now_s)
        return [] if grant is None else [Outgoing((WorkerAddress(hello.rank),), grant)]

    def _on_granted(self, granted: Granted) -> list[Outgoing]:
        if self._members.on_granted(granted, self._clock.now()):
            logger.info(
                "epoch %d: rank %d obeys, process %s", self.epoch, granted.rank, granted.incarnation
            )
        if self._phase is not Phase.FENCING or not self._members.is_complete:
            return []
        question = LabelQuestion(
            self.settings.num_ranks,
            self._members.nonce,
            self.epoch,
            self._members.model_epoch,
            self.settings.resend_s,
            self.settings.layout_fingerprints,
        )
        self._collection = LabelCollection(question)
        self._phase = Phase.COLLECTING
        logger.info(
            "epoch %d: all %d ranks obey after %.3f s, their labels are collected",
            self.epoch,
            self.settings.num_ranks,
            self._clock.now() - self._began_s,
        )
        return self._collection.begin(self._clock.now())

    def _on_labels(self, report: LabelReport) -> list[Outgoing]:
        """Take a rank's labels; start running when all are there."""
        who, now_s = (report.rank, report.incarnation, report.nonce), self._clock.now()
        self._members.heard(*who, report.epoch, now_s)
        collection, epoch_state = self._collection, self._epoch_state
        if (
            report.medium != DEVICE_MEDIUM
            and epoch_state is not None
            and report.epoch == self.epoch
        ):
            return self._guarded(epoch_state.on_tier_labels, report)
        if collection is None or report.medium != DEVICE_MEDIUM:
            return []
        asked = collection.on_report(report, now_s)
        return self._guarded(self._run, collection) if collection.is_over else asked

    def _run(self, collection: LabelCollection) -> list[Outgoing]:
        """Start serving steps, with the blocks that the ranks still hold."""
        members = self._members
        if not members.knows_model_epoch:
            members.save_model_epoch(collection.settle_model_epoch())
        manager, self._recovery = recover(self._parts.make_manager, members.model_epoch, collection)
        returning = self._returning | collection.clients
        start = EpochStart(
            manager,
            collection.applied_steps(),
            frozenset() if self._recovery.is_cold else returning,
        )
        self._epoch_state = EpochState(
            self.settings, self._parts, members, self._clients, self._jobs, start=start
        )
        self._collection, self._returning = None, frozenset()
        self._phase, self._reason = Phase.RUNNING, ""
        self._counts = self._counts.plus(epochs_run=1)
        logger.info(
            "epoch %d is ready after %.3f s: %s",
            self.epoch,
            self._clock.now() - self._began_s,
            self._recovery.describe(),
        )
        return self._epoch_state.begin(self._recovery, collection)

    def _on_refused(self, refused: Refused) -> list[Outgoing]:
        logger.warning(
            "epoch %d: rank %d does not obey, process %s: %s",
            self.epoch,
            refused.rank,
            refused.incarnation,
            refused.reason,
        )
        if self._members.on_refused(refused, self._clock.now()):
            return self._on_higher_epoch(f"rank {refused.rank}: {refused.reason}")
        return []

    def _on_higher_epoch(self, reason: str) -> list[Outgoing]:
        """While fencing, take a higher epoch. Afterwards, another coordinator has taken over."""
        if self._phase is Phase.FENCING:
            return self._begin_epoch(reason)
        return self._give_way(reason)

    def _guarded(
        self,
        act: Callable[_Arguments, list[Outgoing]],
        *arguments: _Arguments.args,
        **options: _Arguments.kwargs,
    ) -> list[Outgoing]:
        """Call `act` and return its messages; if the epoch cannot continue, begin another one, or
        give way."""
        try:
            return act(*arguments, **options)
        except SupersededError as error:
            return self._give_way(str(error))
        except ProtocolError:
            raise
        except KVCacheError as error:
            return self._begin_epoch(str(error))

    def _give_way(self, reason: str) -> list[Outgoing]:
        """Stop because another coordinator has taken over: refuse all clients permanently."""
        clients = self._end_epoch()
        logger.warning(
            "epoch %d was superseded, coordinator %s stops serving: %s%s",
            self.epoch,
            self._members.nonce,
            reason,
            _who_attaches_again(clients),
        )
        self._phase = Phase.SUPERSEDED
        self._reason = f"another coordinator took over: {reason}"
        return self._part_from(clients)

    def _on_report(self, message: Ack | Nack | Rejected | Finished | Heartbeat) -> list[Outgoing]:
        """Take a report of a rank's present process in the present epoch."""
        who, now_s = (message.rank, message.incarnation, message.nonce), self._clock.now()
        if self._members.was_replaced(*who):
            self._members.serve(message.rank, message.incarnation, now_s)
            return self._grants()
        self._members.heard(*who, message.epoch, now_s)
        epoch_state = self._epoch_state
        return [] if epoch_state is None else self._guarded(epoch_state.on_report, message)

    def _begin_epoch(self, reason: str) -> list[Outgoing]:
        """End the present epoch and fence the next one. Clients must attach again."""
        clients = self._end_epoch()
        logger.warning("epoch %d ends: %s%s", self.epoch, reason, _who_attaches_again(clients))
        self._phase, self._reason = Phase.FENCING, reason
        self._members.doubt_epoch()
        grants = self._grants()
        return self._part_from(clients) + grants

    def _grants(self) -> list[Outgoing]:
        """Return the grants that are due; take the epoch first if it was not taken."""
        now_s = self._clock.now()
        if self._members.is_epoch_doubted:
            try:
                self._members.take_epoch(now_s)
                self._note_taken()
            except SupersededError as error:
                return self._give_way(str(error))
            except ClusterError as error:
                self._drop(str(error), logging.DEBUG)  # logged where it is saved
                return []
        due = self._members.grants_due(now_s, self.settings.resend_s)
        return [Outgoing((WorkerAddress(rank),), grant) for rank, grant in due.items()]

    def _end_epoch(self) -> list[str]:
        """Drop all state of the present epoch; return the clients that were attached."""
        epoch_state, self._epoch_state = self._epoch_state, None
        self._parts.recorder.record(EpochEnded())
        self._collection = None
        if epoch_state is not None:
            self._counts = self._counts.with_epoch(
                epoch_state.counts, epoch_state.window.num_resent
            )
        self._jobs.clear()
        clients = self._clients.clear()
        self._returning |= frozenset(clients)
        return clients

    def _part_from(self, client_ids: Iterable[str]) -> list[Outgoing]:
        """Tell clients that they are not attached, so that they attach again."""
        missing = ""
        if self._phase is Phase.FENCING:
            missing = f"waiting for ranks {self._members.missing()}"
        elif self._collection:
            missing = f"waiting for the labels of ranks {self._collection.missing()}"
        parts = [part for part in (self._reason, missing, self.problem()) if part]
        reason = prose("; ".join(parts) or "attach first")
        away = [Unattached(client_id, self.epoch, reason) for client_id in client_ids]
        self._counts = self._counts.plus(unattached=len(away))
        return [Outgoing((ClientAddress(message.client_id),), message) for message in away]

    def _drop(self, reason: str, level: int = logging.WARNING) -> None:
        logger.log(level, "epoch %d: a message is dropped: %s", self.epoch, reason)
        self._counts = self._counts.plus_dropped(reason)

    def _note_taken(self) -> None:
        """Log that an epoch was taken."""
        self._began_s = self._clock.now()
        logger.info(
            "epoch %d begins: coordinator %s asks %d ranks to obey, processes %s are known",
            self.epoch,
            self._members.nonce,
            self.settings.num_ranks,
            self._members.incarnations or "none",
        )

    def _note_problem(self) -> None:
        """Log when ranks begin to be silent, and when they answer again."""
        problem = self.problem()
        if problem and not self._has_problem:
            logger.warning("epoch %d: steps are refused: %s", self.epoch, problem)
        elif self._has_problem and not problem and self._phase is Phase.RUNNING:
            logger.info("epoch %d: all ranks are heard again", self.epoch)
        self._has_problem = bool(problem)


def _who_attaches_again(clients: list[str]) -> str:
    """Return the log text about the clients of an epoch that ends."""
    if not clients:
        return ""
    more = len(clients) - NAMED_CLIENTS
    names = ", ".join(clients[:NAMED_CLIENTS]) + (f" and {more} more" if more > 0 else "")
    return f"; to attach again: {names}"
