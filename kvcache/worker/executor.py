"""What one rank does with commands: the rank's memory, and everything that changes it.

Stands between the worker, which decides whether and when a message is obeyed, and tensors, tables,
labels and transfers. Labels, fences and transfers happen when a message is applied; tables, zeroes
and copies when the forward of its step begins. Not thread-safe: the worker locks around it. Refuses
messages that do not fit, before anything is changed. A forward does not begin while
a transfer is in its way: one that reads what it writes, or writes what it uses.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from kvcache.base.errors import DeadlineError, InvariantError, KVCacheError, RequestError
from kvcache.protocol.commands import (
    Audit,
    BlockTablePatch,
    Copy,
    Discard,
    Fence,
    Fetch,
    Label,
    Load,
    Reset,
    SealSlots,
    Spill,
    Store,
    Unlabel,
    WriteExpected,
    Zero,
)
from kvcache.protocol.labels import LabelTable
from kvcache.protocol.messages import JobReport, StepCommands
from kvcache.worker.block_tables import BlockTables
from kvcache.worker.checksums import ChecksumRule
from kvcache.worker.content import ContentChecker
from kvcache.worker.copy_engine import CopyEngine, PendingCopy
from kvcache.worker.copy_runner import CopyThread, InlineCopies
from kvcache.worker.deferred import DeferredCommands
from kvcache.worker.forwards import ForwardGate
from kvcache.worker.history import BlockHistory
from kvcache.worker.label_audit import audit_labels
from kvcache.worker.layout import PoolLayout
from kvcache.worker.settings import WorkerSettings
from kvcache.worker.tensors import KVCachePool
from kvcache.worker.tiers import make_tiers
from kvcache.worker.transfers import Copying, TransferJobs
from kvcache.worker.validation import CommandValidator

SETTLE_TIMEOUT_S = 1.0
"""How long a store or load is held up, and all messages behind it, by a transfer that must be over
before what was put off for its blocks can be executed. The job fails then."""

LONGEST_WAIT_S = 0.1


class _OpenForward:
    """The forward that runs, for stores that must not begin before it has ended."""

    def __init__(self) -> None:
        self._has_ended = threading.Event()

    def end(self) -> None:
        self._has_ended.set()

    def is_done(self) -> bool:
        return self._has_ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._has_ended.wait(timeout_s)


class CommandExecutor:
    """The memory of one rank and what is known about it, changed by commands only."""

    def __init__(
        self,
        settings: WorkerSettings,
        device: torch.device,
        engine: CopyEngine,
        on_news: Callable[[], None] | None,
    ) -> None:
        """Allocate everything the plan says. `on_news` is called in another thread when a transfer
        has ended; without it, stores and loads run in the calling thread.

        Raises ConfigurationError for a plan that cannot be meant, NotEnoughMemoryError when pool or
        host pool do not fit.
        """
        config = settings.kv_cache_config
        rule = ChecksumRule(settings.verify)
        self._rank = settings.rank
        self._held_up_s = settings.held_up_s
        self._engine = engine
        self.pool = KVCachePool(PoolLayout.from_config(config), device)
        self.tiers = make_tiers(settings, self.pool.layout, device, rule, on_news or (lambda: None))
        self.block_tables = BlockTables(
            settings.table_widths,
            config.num_blocks,
            settings.max_num_seqs,
            device,
        )
        self.labels = LabelTable(
            config.num_blocks, settings.digest_bytes, max(settings.block_sizes, default=1)
        )
        self.gate = ForwardGate(settings.rank)
        runner = (
            InlineCopies()
            if on_news is None
            else CopyThread(
                on_news, priority=settings.copy_priority, num_threads=settings.copy_threads
            )
        )
        self.transfers = TransferJobs(
            self.pool, self.tiers, Copying(engine, runner, rule), self.labels
        )
        self.history = BlockHistory()
        self.deferred = DeferredCommands(
            self.pool.rows,
            self.block_tables,
            engine,
            self.history,
            self.transfers.uses,
        )
        self._open_forward: _OpenForward | None = None
        self._awaited: PendingCopy | None = None
        self._checker = self._make_checker(settings) if settings.is_content_checking else None
        self._validator = CommandValidator(
            config.num_blocks,
            len(config.kv_cache_groups),
            self.labels,
            self.block_tables,
            self._checker,
            num_host_slots=config.host_blocks,
        )
        self._due: deque[tuple[int, WriteExpected]] = deque()
        self._audited: list[JobReport] = []
        self.model_epoch = 0
        self.num_bytes_compared = 0

    @property
    def is_busy(self) -> bool:
        """Whether a forward or a transfer runs, on the device too."""
        return (
            self.gate.is_open
            or self.transfers.num_running > 0
            or not self._engine.is_compute_idle()
        )

    @property
    def host_bytes(self) -> int:
        """Size of the host pool, 0 without one."""
        host = self.tiers.host
        return 0 if host is None else host.num_slots * host.slot_bytes

    @property
    def next_due_seq(self) -> int | None:
        """Number of the next content-checked forward, None when none is due."""
        return self._due[0][0] if self._due else None

    def validate(self, message: StepCommands) -> None:
        """Raise BlockError or MalformedMessageError unless all of `message` can be obeyed."""
        self._validator.validate(message)

    def must_wait(self, message: StepCommands) -> bool:
        """Say whether `message` fences a client whose forward may still run."""
        fenced = [c.client_id for c in message.commands if isinstance(c, Fence)]
        if not fenced:
            return False
        return any(self.gate.is_running(c) for c in fenced) or not self._engine.is_compute_idle()

    def apply(self, message: StepCommands) -> None:
        """Apply one validated message; what belongs into its forward is kept for that."""
        for command in message.commands:
            match command:
                case Label():
                    self.labels.apply(command)
                case Unlabel():
                    self.labels.withdraw(command.block_ids)
                    self.transfers.uses.reads.on_unlabel(message.seq, command.block_ids)
                case Reset():
                    self.labels.reset()
                    self.transfers.reset(command.model_epoch)
                    self.model_epoch = command.model_epoch
                case Fence():
                    self.gate.fence(command.client_id)
                case Store() | Load():
                    self._start_copy(message.seq, command)
                case Spill() | Fetch():
                    self.transfers.start(command)
                case Discard():
                    self.transfers.discard(command)
                case SealSlots():
                    self.transfers.seal(command)
                case WriteExpected():
                    self._due.append((message.seq, command))
                case Audit():
                    self._audited.append(audit_labels(command, self.labels, self.history))
                case Zero() | Copy() | BlockTablePatch():
                    pass  # executed when the forward begins
        self.deferred.add(message)
        self.gate.on_applied(message.seq, message.client_id, message.client_step)

    def wait_for(self, copy: PendingCopy, timeout_s: float) -> bool:
        """Wait for what is in the way, and no longer than `LONGEST_WAIT_S`, because it may not
        matter any more; say whether it was over. Any thread."""
        if copy is not self._awaited:
            self._awaited = copy
            self.transfers.uses.num_waits += 1
        return copy.wait(min(timeout_s, LONGEST_WAIT_S))

    def begin_forward(self, seq: int) -> PendingCopy | None:
        """Open the forward of applied step `seq` and execute what waited for it; or return a
        transfer that must be over before, changing nothing. RequestError if it may not begin."""
        if self._due and self._due[0][0] <= seq:
            raise RequestError(
                f"forward {seq} of rank {self._rank}: this worker runs its content-checked forward "
                f"{self._due[0][0]} itself, call run_due_forwards"
            )
        copy = self._in_the_way(seq)
        if copy is None:
            self.gate.begin(seq)
            self._open_forward = _OpenForward()
            self.deferred.execute(seq)
        return copy

    def end_forward(self, seq: int) -> None:
        """Close the open forward; raises RequestError if `seq` is not it."""
        self.gate.end(seq)
        self._engine.on_forward_end()
        if self._open_forward is not None:
            self._open_forward.end()
            self._open_forward = None
            self.transfers.go_on()

    def run_due_forward(self) -> JobReport:
        """Run the next content-checked forward; what goes wrong is in the report."""
        seq, command = self._due.popleft()
        if self._checker is None:
            raise InvariantError(f"forward {seq} is due, but content checking is off")
        try:
            self._clear_the_way(lambda: self._in_the_way(seq), self._held_up_s)
            self.gate.begin(seq)
        except RequestError as error:
            self.deferred.execute(seq)
            return JobReport(command.job_id, ok=False, detail=str(error))
        except DeadlineError as error:
            return JobReport(command.job_id, ok=False, detail=f"forward {seq}: {error}")
        num_bytes, problems = 0, []
        self.deferred.execute(seq - 1)
        try:
            num_bytes += self._checker.verify(command.verify_slots, command.verify_lengths)
        except KVCacheError as error:
            problems.append(str(error))
        self.deferred.execute(seq)
        try:
            num_bytes += self._checker.run(command, seq)
        except KVCacheError as error:
            problems.append(str(error))
        self.end_forward(seq)
        self.num_bytes_compared += num_bytes
        return JobReport(
            command.job_id, ok=not problems, num_bytes=num_bytes, detail="; ".join(problems)
        )

    @property
    def has_ended_jobs(self) -> bool:
        """Whether `take_ended_jobs` may have something to return."""
        return bool(self._audited) or self.transfers.has_news

    def take_ended_jobs(self) -> list[JobReport]:
        """Return the reports of transfers and audits that have ended since the last call."""
        audited, self._audited = self._audited, []
        return audited + self.transfers.poll() if self.transfers.has_news else audited

    def start_epoch(self) -> None:
        """Drop what the old epoch left undone; labels and bytes stay."""
        self._due.clear()
        self._audited.clear()
        self.transfers.start_epoch()
        self.deferred.clear()
        self.gate.reset()
        if self._checker is not None:
            self._checker.forget()

    def check(self, applied_seq: int) -> None:
        """Raise InvariantError if the state is inconsistent. Changes nothing."""
        self.labels.check()
        self.transfers.check()
        self.gate.check(applied_seq)
        if self.deferred.highest_seq > applied_seq:
            raise InvariantError(
                f"rank {self._rank} defers commands of {self.deferred.highest_seq}, but applied "
                f"only {applied_seq}"
            )

    def close(self) -> None:
        """End what was started, as far as it ends in time."""
        if self.transfers.close():
            self._engine.close()  # waits for the device: without end while copies run

    def _make_checker(self, settings: WorkerSettings) -> ContentChecker:
        return ContentChecker(
            self.pool,
            settings.kv_cache_config.kv_cache_groups,
            self.block_tables,
            self.history,
            rank=settings.rank,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
        )

    def _in_the_way(self, seq: int) -> PendingCopy | None:
        """Return a transfer that must be over before the forward of `seq`, None if none must."""
        return self.transfers.uses.reads.before_forward(seq) or self.deferred.in_the_way(seq)

    def _clear_the_way(
        self, in_the_way: Callable[[], PendingCopy | None], timeout_s: float
    ) -> None:
        """Wait until nothing is in the way; raises DeadlineError."""
        end_s = time.monotonic() + timeout_s
        while (copy := in_the_way()) is not None:
            remaining_s = end_s - time.monotonic()
            if not self.wait_for(copy, max(0.0, remaining_s)) and remaining_s <= 0:
                raise DeadlineError(
                    f"a transfer of rank {self._rank} still uses the blocks after {timeout_s:g} s: "
                    "wait for its report"
                )

    def _start_copy(self, seq: int, job: Store | Load) -> None:
        """Start a store or load, behind what was put off for its blocks."""
        is_store = isinstance(job, Store)
        block_ids = job.sources if is_store else job.destinations
        try:
            self._clear_the_way(
                lambda: self.deferred.in_the_way_of_settling(block_ids), SETTLE_TIMEOUT_S
            )
        except DeadlineError as error:
            self.transfers.refuse(job, str(error))
            return
        if self.deferred.settle(block_ids):
            self._engine.on_forward_end()  # the transfer begins behind what was just executed
        what, others = ("stored to", job.destinations) if is_store else ("loaded from", job.sources)
        self.history.record(seq, f"{what} host slot", block_ids, others)
        # What is stored has been written, on the rank that said so first; here it may still be.
        forward = self._open_forward if is_store else None
        self.transfers.start(job, () if forward is None else (forward,))
