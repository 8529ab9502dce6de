"""The worker of one rank: it owns the rank's KV bytes and obeys one coordinator.

A message is validated as a whole and passes the delivery rules (`CommandReceiver`). The executor
applies messages in order, and the worker acknowledges them. Table patches, zeroes and copies wait
until the forward of their step begins.

The class has no sockets and no Ray, and starts threads for transfers only. Its owner passes
messages to `on_message`, calls `on_tick`, sends what both return, and runs forwards, in the same
thread or another one. The worker decides nothing: it never seals, frees or evicts by itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from kvcache.base.clock import Clock
from kvcache.base.errors import (
    ClusterError,
    DeadlineError,
    InvalidInputError,
    ProtocolError,
    StaleEpochError,
)
from kvcache.base.logs import get_logger
from kvcache.base.serving_loop import describe_error
from kvcache.protocol.delivery import NO_EPOCH, CommandReceiver
from kvcache.protocol.labels import LabelSet, LabelTable
from kvcache.protocol.messages import (
    CollectLabels,
    Finished,
    FinishedAck,
    Grant,
    Granted,
    LabelReport,
    Message,
    Ping,
    Refused,
    Rejected,
    StepCommands,
    Unreadable,
)
from kvcache.protocol.wire import leading_fields, prose
from kvcache.worker.block_tables import BlockTables
from kvcache.worker.copies.engine import CopyEngine
from kvcache.worker.copies.measurement import make_copy_engine
from kvcache.worker.execution import CommandExecutor
from kvcache.worker.host_memory.host_pool import HostPool
from kvcache.worker.host_memory.segment import keep_segment
from kvcache.worker.reports import LabelReporter, ReportQueue
from kvcache.worker.settings import WorkerSettings
from kvcache.worker.statistics import WorkerStatistics

logger = get_logger(__name__)


class KVCacheWorker:
    """One rank's tensors, block tables, labels and transfers.

    The model runner reads and writes `kv_caches[layer_name]` by the table `block_tables[group]`,
    which is valid between `begin_forward` and `end_forward`. All methods may be called from any
    thread.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        clock: Clock,
        copy_engine: CopyEngine | None = None,
        poll: Callable[[float], object] | None = None,
        on_news: Callable[[], None] | None = None,
    ) -> None:
        """Allocate all memory of the plan.

        `copy_engine` defaults to the one for the device. `poll(timeout_s)` receives messages and
        passes them to `on_message`; `begin_forward` calls it. Pass it if no thread receives
        messages. With `on_news`, transfers run in a second thread, which calls it when one ends.

        Raises:
            ConfigurationError: the plan or the device is invalid.
            NotEnoughMemoryError: the pool or the host pool does not fit.
        """
        device = torch.device(settings.device)
        engine = copy_engine or make_copy_engine(device)
        self.settings = settings
        self._clock = clock
        self._poll = poll
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._num_waiting = 0
        self._executor = CommandExecutor(settings, device, engine, on_news)
        self._receiver = CommandReceiver(
            settings.rank, settings.incarnation, settings.fingerprint, settings.max_buffered
        )
        self._reports = ReportQueue(self._receiver)
        self._labels = LabelReporter(settings, self._receiver, self._executor)
        self._ready: deque[StepCommands] = deque()
        self._outbox: list[Message] = []
        self._last_sent_s = clock.now()
        self._last_hello_s: float | None = None
        self._is_introducing = True
        self._is_closed = False
        self._guard = _ChangeGuard(settings.rank)
        self._refused = _RefusedMessages()

    @property
    def kv_caches(self) -> Mapping[str, torch.Tensor]:
        """Tensor of each layer, `(num_blocks, *page_shape)`; views that live as the worker does."""
        return self._executor.pool.kv_caches

    @property
    def state_caches(self) -> Mapping[str, tuple[torch.Tensor, ...]]:
        """Tensors of each layer that keeps a state, `(num_blocks, *shape)` each; views likewise."""
        return self._executor.pool.state_caches

    @property
    def block_tables(self) -> BlockTables:
        """`block_tables[group]` is the numpy table, `.tensor(group)` the one on the device."""
        return self._executor.block_tables

    @property
    def host_pool(self) -> HostPool | None:
        """The host slots that stores write and loads read, None without a host tier."""
        return self._executor.tiers.host

    @property
    def labels(self) -> LabelTable:
        """The label of each block. Only commands change it."""
        return self._executor.labels

    @property
    def epoch(self) -> int:
        """The granted epoch, 0 before the first grant."""
        return self._receiver.epoch

    @property
    def applied_seq(self) -> int:
        """Everything up to this number of the present epoch is applied."""
        return self._receiver.applied_seq

    @property
    def is_transferring(self) -> bool:
        """Whether `on_news` will be called."""
        return self._executor.transfers.num_running > 0

    # --- messages

    def introduce(self) -> None:
        """Introduce this process again until a coordinator grants it. Call it when the process is
        connected to another coordinator, which does not know it."""
        with self._condition:
            self._is_introducing, self._last_hello_s = True, None

    def on_message(self, message: Message) -> list[Message]:
        """Obey one message; return what to send to the coordinator."""
        return self.on_messages((message,))

    def on_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Obey messages that arrived together, in order, as `on_message` does one.

        They are acknowledged together. A message that must not be obeyed is counted and dropped,
        see `statistics`. Any other error is raised: it may leave tables half changed, so no later
        message is obeyed.

        Raises ClusterError after such an error: end the process, another one takes its place.
        """
        self._executor.transfers.pause()
        with self._lock, self._guard:
            if self._is_closed:
                return []
            for message in messages:
                if isinstance(message, StepCommands):
                    self._on_commands(message)
                else:
                    self._apply_ready()
                    self._on_other(message)
            return self._take_replies()

    def on_plain_steps(self, payloads: Sequence[bytes]) -> tuple[int, bytes]:
        """Obey the first of `payloads`, still encoded, as long as they bring no commands.

        Returns how many were obeyed and their encoded acknowledgement. Pass the others to
        `on_messages`. Obeys none while other work or messages wait.
        """
        self._executor.transfers.pause()
        with self._lock, self._guard:
            has_more_to_do = self._ready or self._outbox or len(self._reports)
            if has_more_to_do or self._is_closed or self._executor.has_ended_jobs:
                return 0, b""
            num_obeyed = 0
            for payload in payloads:
                step = self._receiver.take_plain(payload)
                if step is None:
                    break
                self._executor.gate.on_applied(*step)
                num_obeyed += 1
            if not num_obeyed:
                return 0, b""
            self._last_sent_s = self._clock.now()
            if self._num_waiting:
                self._condition.notify_all()
            return num_obeyed, self._receiver.applied_payload()

    def on_unreadable(self, payload: bytes, reason: str) -> list[Message]:
        """Take a payload that cannot be decoded, for `reason`; return the answers. Commands of the
        present coordinator are rejected, or it would repeat them."""
        leading = leading_fields(payload)
        if leading is None or leading.kind is not StepCommands:
            return []
        nonce, epoch, seq = map(leading.fields.get, ("nonce", "epoch", "seq"))
        with self._lock:
            if seq is None or not self._is_present(nonce, epoch):
                return []
            return [self._rejected(seq, reason)]

    def say_less(self, kind: str, reason: str) -> None:
        """Leave optional parts out of messages of `kind`: the last one could not be sent or read,
        for `reason`, and would be repeated."""
        logger.error("rank %d: a %s cannot travel: %s", self.settings.rank, kind, reason)
        with self._lock:
            self._refused.num_reports += 1
            if kind == Finished.__name__:
                self._reports.leave_details_out()
            elif kind == LabelReport.__name__:
                self._labels.leave_labels_out()

    def on_tick(self) -> list[Message]:
        """Return due messages: introductions, reports that are not acknowledged, a heartbeat after
        silence. Also continues deferred work."""
        with self._condition, self._guard:
            if self._is_closed:
                return []
            self._advance()
            now_s = self._clock.now()
            if self._is_introducing:
                last = self._last_hello_s
                if last is None or now_s - last >= self.settings.hello_interval_s:
                    self._last_hello_s = now_s
                    self._outbox.append(self._receiver.hello())
            if self._receiver.epoch != NO_EPOCH:
                self._repeat_reports(self.settings.repeat_interval_s)
                is_silent = now_s - self._last_sent_s >= self.settings.heartbeat_interval_s
                if is_silent and not self._outbox:
                    self._outbox.append(self._receiver.heartbeat())
            return self._take_replies()

    # --- forwards

    def begin_forward(self, epoch: int, seq: int, timeout_s: float) -> None:
        """Wait until the forward of step `seq` may run on this rank.

        On return, all messages up to `seq` are applied, and their table patches, zeroes and copies
        are executed (on CUDA: queued on the current stream). No new coordinator is obeyed until
        `end_forward`.

        Raises:
            StaleEpochError: another epoch has begun or is about to; also while waiting.
            RequestError: another forward is open, this one has begun before, or its client was
                fenced.
            DeadlineError: `seq` was not applied within `timeout_s`, or a transfer that uses its
                blocks was not over. The call may be repeated.
        """
        deadline_s = self._clock.now() + timeout_s
        while True:
            with self._condition:
                self._require_epoch(epoch)
                self._executor.gate.require_in_order(seq)
                copy = None
                if self._receiver.applied_seq >= seq:
                    self._run_due_forwards(before_seq=seq)
                    if (copy := self._executor.begin_forward(seq)) is None:
                        return
                remaining_s = deadline_s - self._clock.now()
                if remaining_s <= 0:
                    raise DeadlineError(
                        f"forward {seq} cannot begin within {timeout_s} s: rank "
                        f"{self.settings.rank} has applied {self._receiver.applied_seq} of epoch "
                        f"{epoch}{', and moves its blocks' if copy else ''}: ask again, or give up"
                    )
                if copy is None and self._poll is None:
                    self._wait_for_news(remaining_s)
            if copy:
                self._executor.wait_for(copy, remaining_s)
            if self._poll:
                self._poll(0.0 if copy else remaining_s)

    def end_forward(self, epoch: int, seq: int) -> None:
        """Say that the forward of step `seq` is over (on CUDA: queued). Work that waited for this
        continues; the next `on_message` or `on_tick` returns the answers.

        Raises StaleEpochError for another epoch, RequestError when it is not open.
        """
        with self._condition:
            if epoch != self._receiver.epoch:
                raise StaleEpochError(
                    f"forward {seq} of epoch {epoch} ends on rank {self.settings.rank}, which is "
                    f"in epoch {self._receiver.epoch}"
                )
            self._executor.end_forward(seq)
            with self._guard:
                self._advance()
            self._condition.notify_all()

    @property
    def has_due_forwards(self) -> bool:
        """Whether `run_due_forwards` would find one to run."""
        return self._executor.next_due_seq is not None

    def run_due_forwards(self) -> list[Message]:
        """Run the content-checked forwards that are due, in order; return their reports.

        Call it after the replies of `on_message` have been sent: *applied* must not wait for bytes.
        """
        with self._condition, self._guard:
            if self._is_closed:
                return []
            self._run_due_forwards()
            return self._take_replies()

    # --- labels, memory, statistics

    def keep_host_memory(self) -> str:
        """Pass this rank's host memory to the node's memory service again, which has nothing after
        a restart. Return why that failed; empty on success, or if there is nothing to keep.

        Waits for the memory service outside the lock, so no step waits.
        """
        with self._condition:
            host, service = self.host_pool, self.settings.memory_service
            if self._is_closed or host is None or service is None:
                return ""
        return keep_segment(host.segment, service)

    def collect_labels(self) -> LabelSet:
        """Return the labels of all blocks, as of the last applied message; a copy."""
        with self._condition:
            return self._labels.collect()

    def statistics(self) -> WorkerStatistics:
        """Return the statistics of this process, frozen."""
        with self._condition:
            executor = self._executor
            return WorkerStatistics(
                rank=self.settings.rank,
                epoch=self._receiver.epoch,
                applied_seq=self._receiver.applied_seq,
                model_epoch=executor.model_epoch,
                num_labels=len(executor.labels),
                num_forwards=executor.gate.num_forwards,
                num_deferred=len(executor.deferred),
                num_running_jobs=executor.transfers.num_running,
                num_unacknowledged_reports=len(self._reports),
                num_failed_jobs=self._reports.num_failed,
                num_bytes_compared=executor.num_bytes_compared,
                num_blocks_copied=executor.deferred.num_blocks_copied,
                num_blocks_zeroed=executor.deferred.num_blocks_zeroed,
                num_invalid_messages=self._refused.num_invalid,
                last_invalid_reason=self._refused.last_invalid,
                num_foreign_messages=self._refused.num_foreign,
                num_refused_reports=self._refused.num_reports,
                pool_bytes=executor.pool.layout.size_bytes,
                host_bytes=executor.host_bytes,
                receiver=self._receiver.statistics(),
                transfers=executor.transfers.statistics(),
            )

    def check(self) -> None:
        """Raise `InvariantError` if the state is inconsistent. Changes nothing."""
        with self._condition:
            self._executor.check(self._receiver.applied_seq)

    def close(self) -> None:
        """Wait for running work and stop obeying. May be called again."""
        with self._condition:
            if self._is_closed:
                return
            self._is_closed = True
            self._executor.close()
            self._condition.notify_all()

    # --- under the lock

    def _wait_for_news(self, timeout_s: float) -> None:
        self._num_waiting += 1
        try:
            self._condition.wait(timeout_s)
        finally:
            self._num_waiting -= 1

    def _on_other(self, message: Message) -> None:
        """Obey a message that brings no commands."""
        match message:
            case Grant():
                self._on_grant(message)
            case FinishedAck() if self._is_present(message.nonce, message.epoch):
                self._reports.acknowledge(message.job_ids)
            case Ping() if self._is_present(message.nonce, message.epoch):
                self._outbox.append(self._receiver.heartbeat())
                self._repeat_reports(after_s=0.0)
            case CollectLabels() if self._is_present(message.nonce, message.epoch):
                self._outbox.append(self._labels.report(message.first_block, message.medium))
            case Unreadable() if self._is_present(message.nonce, message.epoch):
                self.say_less(message.kind, message.reason)
            case Ping() | CollectLabels() | Unreadable():
                self._refused.num_foreign += 1
                self._refuse_superseded(message.nonce, message.epoch)
            case _:
                self._refused.num_foreign += 1

    def _on_grant(self, grant: Grant) -> None:
        """Take a grant, or defer it while work of the old epoch runs."""
        epoch, was_put_off = self._receiver.epoch, self._receiver.pending_grant is not None
        reply = self._receiver.on_grant(grant, self._executor.is_busy)
        if reply is not None:
            self._outbox.append(reply)
        if isinstance(reply, Refused):
            self._log_refusal(grant.nonce, grant.epoch, reply.reason)
        elif self._receiver.pending_grant is not None and not was_put_off:
            logger.info(
                "rank %d: epoch %d waits until what runs in epoch %d has ended",
                self.settings.rank,
                grant.epoch,
                epoch,
            )
        self._is_introducing &= not isinstance(reply, Granted)
        if self._receiver.epoch != epoch:
            logger.info(
                "rank %d obeys epoch %d of coordinator %s, process %s",
                self.settings.rank,
                self._receiver.epoch,
                grant.nonce,
                self.settings.incarnation,
            )
            self._ready.clear()
            self._reports.clear()
            self._labels.forget_files()
            self._executor.start_epoch()

    def _on_commands(self, message: StepCommands) -> None:
        """Validate a message, then pass it to delivery; keep messages that may be applied now.

        Validation comes first, so that an invalid copy does not take the message's number."""
        is_ours = self._is_present(message.nonce, message.epoch)
        if is_ours and message.seq > self._receiver.applied_seq:
            try:
                self._executor.validator.validate(message)
            except (InvalidInputError, ProtocolError) as error:
                self._refused.num_invalid += 1
                reason = f"message {message.epoch}:{message.seq}: {error}"
                self._refused.last_invalid = reason
                logger.error("rank %d refuses %s", self.settings.rank, reason)
                self._outbox.append(self._rejected(message.seq, str(error)))
                return
        received = self._receiver.on_commands(message)
        self._ready.extend(received.ready)
        self._outbox.extend(received.replies)
        if not is_ours:
            self._refuse_superseded(message.nonce, message.epoch)

    def _rejected(self, seq: int, reason: str) -> Rejected:
        receiver, rank = self._receiver, self.settings.rank
        return Rejected(
            receiver.nonce, receiver.incarnation, rank, receiver.epoch, seq, prose(reason)
        )

    def _refuse_superseded(self, nonce: str, epoch: int) -> None:
        refusal = self._receiver.refusal_of(nonce, epoch)
        if refusal is not None:
            self._log_refusal(nonce, epoch, refusal.reason)
            self._outbox.append(refusal)

    def _log_refusal(self, nonce: str, epoch: int, reason: str) -> None:
        logger.warning(
            "rank %d does not obey epoch %d of coordinator %s: %s",
            self.settings.rank,
            epoch,
            nonce,
            reason,
        )

    def _is_present(self, nonce: str | None, epoch: int | None) -> bool:
        receiver = self._receiver
        return epoch != NO_EPOCH and (nonce, epoch) == (receiver.nonce, receiver.epoch)

    def _advance(self) -> None:
        """Apply ready messages, collect ended jobs, take a deferred grant."""
        self._apply_ready()
        if self._executor.has_ended_jobs:
            for report in self._executor.take_ended_jobs():
                self._reports.add(report)
        pending = self._receiver.pending_grant
        if pending is not None:
            self._on_grant(pending)

    def _apply_ready(self) -> None:
        """Apply messages in order; a fence waits until no forward of its client runs.

        Nothing is applied while a grant is deferred: the old epoch is over already.
        """
        if self._receiver.pending_grant is not None:
            return
        applied: Message | None = None
        while self._ready and not self._executor.must_wait(self._ready[0]):
            message = self._ready.popleft()
            self._executor.apply(message)
            applied = self._receiver.confirm_applied(message.seq)
        if applied is not None:
            self._outbox.append(applied)

    def _run_due_forwards(self, before_seq: int | None = None) -> None:
        """Run content-checked forwards in order; none begins while another forward is open."""
        executor = self._executor
        while not executor.gate.is_open and self._receiver.pending_grant is None:
            seq = executor.next_due_seq
            if seq is None or (before_seq is not None and seq >= before_seq):
                return
            self._reports.add(executor.run_due_forward())

    def _repeat_reports(self, after_s: float) -> None:
        self._outbox.extend(self._reports.take_due(self._clock.now(), after_s))

    def _take_replies(self) -> list[Message]:
        """Continue deferred work, and return all messages that wait to be sent."""
        self._advance()
        if len(self._reports):
            self._outbox.extend(self._reports.take_due(self._clock.now()))
        replies, self._outbox = self._outbox, []
        # A refusal goes to another coordinator, so the present one needs a sign of life.
        if any(type(reply) is not Refused for reply in replies):
            self._last_sent_s = self._clock.now()
        if self._num_waiting:
            self._condition.notify_all()
        return replies

    def _require_epoch(self, epoch: int) -> None:
        if self._is_closed:
            raise ClusterError(f"rank {self.settings.rank} is closed: no forward can begin")
        self._guard.require()
        receiver = self._receiver
        if epoch != receiver.epoch or epoch == NO_EPOCH or receiver.pending_grant is not None:
            raise StaleEpochError(
                f"forward of epoch {epoch} on rank {self.settings.rank}, which is in epoch "
                f"{receiver.highest_epoch}: earlier steps are void: attach again"
            )


@dataclass
class _RefusedMessages:
    """Messages that were not obeyed, and why the last invalid one was not; and reports of this
    rank that could not be sent or read."""

    num_invalid: int = 0
    last_invalid: str = ""
    num_foreign: int = 0
    num_reports: int = 0


class _ChangeGuard:
    """Surrounds changes of tables: after an error in one, nothing may change or read them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._failure = ""

    def require(self) -> None:
        """Raise ClusterError if there was an error."""
        if self._failure:
            raise ClusterError(
                f"rank {self._rank} obeys no more since an error ({self._failure}): its tables may "
                "be half changed; end this process and let another one take its place"
            )

    def __enter__(self) -> None:
        self.require()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not self._failure:
            self._failure = describe_error(error)
            logger.critical(
                "rank %d cannot continue: %s", self._rank, self._failure, exc_info=error
            )
