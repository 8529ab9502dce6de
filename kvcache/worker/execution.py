"""What commands do on one rank: they change its tables, labels and bytes.

`CommandExecutor` applies messages that its `validator` has accepted. When a message is applied,
labels change, clients are fenced and transfers start. Table patches, zeroes and copies wait in
`DeferredCommands` for the forward of their step. `ForwardGate` lets forwards begin once, in order,
and one at a time. A forward does not begin while a transfer reads what it writes, or writes what it
uses. Not thread-safe: the worker locks around it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import torch

from kvcache.base.arrays import Int32Array
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
from kvcache.protocol.messages import MAX_REPORTED_BLOCKS, JobReport, StepCommands
from kvcache.worker.block_tables import BlockTables
from kvcache.worker.content.checker import ContentChecker
from kvcache.worker.copies.checksums import ChecksumRule
from kvcache.worker.copies.engine import CopyEngine, PendingCopy
from kvcache.worker.copies.runner import CopyThread, InlineCopies
from kvcache.worker.history import BlockHistory
from kvcache.worker.kv_cache_pool import KVCachePool, PoolLayout
from kvcache.worker.settings import WorkerSettings
from kvcache.worker.tiers import make_tiers
from kvcache.worker.transfers import Copying, TransferJobs, TransferUses
from kvcache.worker.validation import CommandValidator

DeferredCommand: TypeAlias = Zero | Copy | BlockTablePatch

SETTLE_TIMEOUT_S = 1.0
"""How long a store or load is held up, and all messages behind it, by a transfer that must be over
before the deferred commands of its blocks can be executed. The job fails then."""

LONGEST_WAIT_S = 0.1

MAX_REMEMBERED_STEPS = 4096
"""Applied steps whose forward may still begin. Older ones are refused."""

MAX_REMEMBERED_CLIENTS = 1024
"""Clients whose last applied step is remembered."""


class CommandExecutor:
    """The memory of one rank and its labels, changed by commands only."""

    def __init__(
        self,
        settings: WorkerSettings,
        device: torch.device,
        engine: CopyEngine,
        on_news: Callable[[], None] | None,
    ) -> None:
        """Allocate all memory of the plan. `on_news` is called in another thread when a transfer
        has ended; without it, stores and loads run in the calling thread.

        Raises ConfigurationError for an invalid plan, NotEnoughMemoryError when pool or host pool
        do not fit.
        """
        config = settings.kv_cache_config
        rule = ChecksumRule(settings.verify)
        self._rank = settings.rank
        self._held_up_s = settings.held_up_s
        self._engine = engine
        self.pool = KVCachePool(PoolLayout.from_config(config), device)
        self.tiers = make_tiers(settings, self.pool.layout, device, rule, on_news or (lambda: None))
        self.block_tables = BlockTables(
            settings.table_widths, config.num_blocks, settings.max_num_seqs, device
        )
        self.labels = LabelTable(
            config.num_blocks, settings.digest_bytes, settings.max_block_tokens
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
            self.pool.rows, self.block_tables, engine, self.history, self.transfers.uses
        )
        self._open_forward: _OpenForward | None = None
        self._awaited: PendingCopy | None = None
        self._checker: ContentChecker | None = None
        if settings.is_content_checking:
            self._checker = ContentChecker(settings, self.pool, self.block_tables, self.history)
        self.validator = CommandValidator(settings, self.labels, self.block_tables, self._checker)
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

    def must_wait(self, message: StepCommands) -> bool:
        """Say whether `message` fences a client whose forward may still run."""
        fenced = [c.client_id for c in message.commands if isinstance(c, Fence)]
        if not fenced:
            return False
        return any(self.gate.is_running(c) for c in fenced) or not self._engine.is_compute_idle()

    def apply(self, message: StepCommands) -> None:
        """Apply one validated message; keep the commands of its forward."""
        for command in message.commands:
            match command:
                case Label():
                    self.labels.apply(command)
                case Unlabel():
                    self.labels.withdraw(command.block_ids)
                    self.transfers.uses.on_unlabel(message.seq, command.block_ids)
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
        """Wait for a transfer that is in the way; say whether it is over. Any thread.

        Waits `LONGEST_WAIT_S` at most: the caller checks whether it still matters."""
        if copy is not self._awaited:
            self._awaited = copy
            self.transfers.uses.num_waits += 1
        return copy.wait(min(timeout_s, LONGEST_WAIT_S))

    def begin_forward(self, seq: int) -> PendingCopy | None:
        """Open the forward of applied step `seq` and execute its deferred commands; or return a
        transfer that must be over before, changing nothing.

        Raises RequestError if it may not begin."""
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
            self._open_forward.set()
            self._open_forward = None
            self.transfers.go_on()

    def run_due_forward(self) -> JobReport:
        """Run the next content-checked forward; the report says what went wrong."""
        seq, command = self._due.popleft()
        if self._checker is None:
            raise InvariantError(f"forward {seq} is due, but content checking is off")
        try:
            self._clear_the_way(partial(self._in_the_way, seq), self._held_up_s)
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
        """Wait for running work, for a limited time."""
        if self.transfers.close():
            self._engine.close()  # waits for the device: without end while copies run

    def _in_the_way(self, seq: int) -> PendingCopy | None:
        """Return a transfer that must be over before the forward of `seq`, None if none must."""
        return self.transfers.uses.before_forward(seq) or self.deferred.in_the_way(seq)

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
        """Start a store or load, after executing the deferred commands of its blocks."""
        is_store = isinstance(job, Store)
        block_ids = job.sources if is_store else job.destinations
        try:
            in_the_way = partial(self.deferred.in_the_way_of_settling, block_ids)
            self._clear_the_way(in_the_way, SETTLE_TIMEOUT_S)
        except DeadlineError as error:
            self.transfers.refuse(job, str(error))
            return
        if self.deferred.settle(block_ids):
            self._engine.on_forward_end()  # the transfer begins behind what was just executed
        what, others = ("stored to", job.destinations) if is_store else ("loaded from", job.sources)
        self.history.record(seq, f"{what} host slot", block_ids, others)
        # Another rank reported first that the block is written; here it may still be written.
        forward = self._open_forward if is_store else None
        self.transfers.start(job, () if forward is None else (forward,))


class _OpenForward(threading.Event):
    """Set when the forward that runs has ended: a store must not begin before."""

    is_done = threading.Event.is_set


class DeferredCommands:
    """Commands that are applied and wait for the forward of their step. Numbers only rise.

    Loads and stores do not wait for forwards: whatever is still waiting for a block they touch
    belongs to a step that is over, and is executed first (`settle`).
    """

    def __init__(
        self,
        rows: Sequence[torch.Tensor],
        tables: BlockTables,
        engine: CopyEngine,
        history: BlockHistory,
        uses: TransferUses,
    ) -> None:
        """Execute on these; `uses` says which blocks transfers read and write."""
        self._rows = rows
        self._tables = tables
        self._engine = engine
        self._history = history
        self._uses = uses
        self._waiting: deque[tuple[int, list[DeferredCommand]]] = deque()
        self.num_blocks_copied = 0
        self.num_blocks_zeroed = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def highest_seq(self) -> int:
        """Number of the last waiting message, 0 when none waits."""
        return self._waiting[-1][0] if self._waiting else 0

    def add(self, message: StepCommands) -> None:
        """Keep what the forward of `message` must execute."""
        commands = [c for c in message.commands if isinstance(c, (Zero, Copy, BlockTablePatch))]
        if commands:
            self._waiting.append((message.seq, commands))

    def in_the_way(self, up_to_seq: int) -> PendingCopy | None:
        """Return a transfer that must be over before `execute(up_to_seq)`, None if none must."""
        for seq, commands in self._waiting:
            if seq > up_to_seq:
                break
            for command in commands:
                copies = self._in_the_way_of(command)
                if copies:
                    return copies[0]
        return None

    def in_the_way_of_settling(self, block_ids: Int32Array) -> PendingCopy | None:
        """Return a transfer that must be over before `settle(block_ids)`, None if none must."""
        for _, commands in self._waiting:
            for command in commands:
                now, _ = _split(command, block_ids)
                copies = [] if now is None else self._in_the_way_of(now)
                if copies:
                    return copies[0]
        return None

    def execute(self, up_to_seq: int) -> None:
        """Execute everything up to and including `up_to_seq`, in order. Nothing is in the way."""
        while self._waiting and self._waiting[0][0] <= up_to_seq:
            seq, commands = self._waiting.popleft()
            for command in commands:
                self._execute(seq, command)

    def settle(self, block_ids: Int32Array) -> bool:
        """Execute now, in order, the zeroes and copies of `block_ids`, and of these only; say
        whether there were any. Nothing is in the way.

        The coordinator starts a transfer on a block only when every step that has it in its tables
        completed or failed, so these cannot be wanted by a forward any more; executed later they
        would destroy what the transfer wrote.
        """
        has_executed = False
        for seq, commands in self._waiting:
            waiting: list[DeferredCommand] = []
            for command in commands:
                now, later = _split(command, block_ids)
                if now is not None:
                    self._execute(seq, now)
                    has_executed = True
                if later is not None:
                    waiting.append(later)
            commands[:] = waiting
        return has_executed

    def clear(self) -> None:
        """Drop everything: a new epoch makes it void."""
        self._waiting.clear()

    def _in_the_way_of(self, command: DeferredCommand) -> list[PendingCopy]:
        """Return transfers that still read what `command` writes, or write what it uses."""
        match command:
            case BlockTablePatch():
                return self._uses.before_read(command.block_ids)
            case Zero():
                return self._uses.before_write(command.block_ids)
            case Copy():
                read = self._uses.before_read(command.sources)
                return read + self._uses.before_write(command.destinations)

    def _execute(self, seq: int, command: DeferredCommand) -> None:
        match command:
            case BlockTablePatch():
                self._tables.apply(command)
                self._history.record(
                    seq,
                    "entered the table of slot",
                    command.block_ids,
                    np.repeat(command.slots, command.counts),
                )
            case Zero():
                for rows in self._rows:
                    self._engine.zero_blocks(rows, command.block_ids)
                self.num_blocks_zeroed += len(command.block_ids)
                self._history.record(seq, "zeroed", command.block_ids)
            case Copy():
                for rows in self._rows:
                    self._engine.copy_within(rows, command.sources, command.destinations)
                self.num_blocks_copied += len(command.destinations)
                self._history.record(
                    seq, "copied from block", command.destinations, command.sources
                )
                self._history.record(seq, "copied to block", command.sources, command.destinations)


def _split(
    command: DeferredCommand, block_ids: Int32Array
) -> tuple[DeferredCommand | None, DeferredCommand | None]:
    """Return the part of `command` that touches `block_ids`, and the rest; None for nothing."""
    match command:
        case Zero():
            touched = np.isin(command.block_ids, block_ids)
            now: DeferredCommand = Zero(command.block_ids[touched])
            later: DeferredCommand = Zero(command.block_ids[~touched])
        case Copy():
            touched = np.isin(command.sources, block_ids) | np.isin(command.destinations, block_ids)
            now = Copy(command.sources[touched], command.destinations[touched])
            later = Copy(command.sources[~touched], command.destinations[~touched])
        case BlockTablePatch():
            return None, command
    return (now if touched.any() else None), (None if touched.all() else later)


class ForwardGate:
    """Which forwards may run on this rank: in order, one at a time, not of clients given up.

    Of one epoch; executes nothing and waits for nothing. Invariant: `_fenced` holds numbers of
    `_clients` only, so both are bounded.
    """

    def __init__(self, rank: int) -> None:
        """Make the gate of `rank`, which appears in messages only."""
        self._rank = rank
        self._clients: OrderedDict[int, str] = OrderedDict()
        self._open_seq: int | None = None
        self._open_client = ""
        self._last_begun_seq = 0
        self._fenced: set[int] = set()
        self._client_steps: OrderedDict[str, int] = OrderedDict()
        self.num_forwards = 0

    @property
    def is_open(self) -> bool:
        """Whether a forward has begun and not ended."""
        return self._open_seq is not None

    @property
    def client_steps(self) -> Mapping[str, int]:
        """Number of each client's last applied step. A copy."""
        return MappingProxyType(dict(self._client_steps))

    def is_running(self, client_id: str) -> bool:
        """Say whether the open forward is of `client_id`."""
        return self.is_open and self._open_client == client_id

    def on_applied(self, seq: int, client_id: str, client_step: int) -> None:
        """Note that message `seq` is applied: the forward of the client's step may begin."""
        self._clients[seq] = client_id
        if len(self._clients) > MAX_REMEMBERED_STEPS:
            self._forget_first()
        if client_id:
            self._client_steps[client_id] = client_step
            self._client_steps.move_to_end(client_id)
            if len(self._client_steps) > MAX_REMEMBERED_CLIENTS:
                self._client_steps.popitem(last=False)

    def require_in_order(self, seq: int) -> None:
        """Raise RequestError if a forward is open, or `seq` or a later one has begun."""
        if self._open_seq is not None:
            raise RequestError(
                f"forward {seq} of rank {self._rank} begins while {self._open_seq} is open: end "
                "that one first"
            )
        if seq <= self._last_begun_seq:
            raise RequestError(
                f"forward {seq} of rank {self._rank} begins after {self._last_begun_seq}: forwards "
                "begin once and in order"
            )

    def begin(self, seq: int) -> None:
        """Open the forward of applied step `seq`; raises RequestError, changing nothing, if it may
        not begin."""
        self.require_in_order(seq)
        client_id = self._clients.get(seq)
        if client_id is None:
            raise RequestError(
                f"step {seq} of rank {self._rank} is too old for a forward, or was never sent"
            )
        if seq in self._fenced:
            raise RequestError(
                f"forward {seq} of rank {self._rank} belongs to client {client_id!r}, which was "
                "given up: attach again"
            )
        self._open_seq, self._open_client = seq, client_id
        self._last_begun_seq = seq
        self.num_forwards += 1
        while self._clients and next(iter(self._clients)) <= seq:
            self._forget_first()

    def end(self, seq: int) -> None:
        """Close the open forward; raises RequestError if `seq` is not it."""
        if self._open_seq != seq:
            raise RequestError(
                f"forward {seq} of rank {self._rank} is not open: begin it before ending it"
            )
        self._open_seq = None

    def fence(self, client_id: str) -> None:
        """Refuse the forwards of every step of `client_id` so far; it gets no other one."""
        self._fenced.update(s for s, owner in self._clients.items() if owner == client_id)
        self._client_steps.pop(client_id, None)

    def reset(self) -> None:
        """Forget steps and fences: a new epoch numbers from 1, and clients attach again."""
        self._clients.clear()
        self._last_begun_seq = 0
        self._fenced.clear()

    def check(self, applied_seq: int) -> None:
        """Raise InvariantError if a step is known that is not applied."""
        highest = max((self._last_begun_seq, *self._clients))
        if highest > applied_seq:
            raise InvariantError(
                f"rank {self._rank} may run forward {highest}, but applied only {applied_seq}"
            )

    def _forget_first(self) -> None:
        seq, _ = self._clients.popitem(last=False)
        self._fenced.discard(seq)


def audit_labels(audit: Audit, labels: LabelTable, history: BlockHistory) -> JobReport:
    """Compare this rank's labels with what the coordinator holds to be sealed, at one message.

    Changes nothing: a difference is reported with the block's history, and the coordinator
    withdraws the block.
    """
    found = labels.contents(audit.first_block, audit.end_block)
    expected = audit.block_ids
    size = max(1, labels.digest_bytes)
    span = audit.end_block - audit.first_block
    groups = np.full((2, span), -1, dtype=np.int32)
    digests = np.zeros((2, span, size), dtype=np.uint8)
    for side, (ids, of_groups, packed) in enumerate(
        ((expected, audit.groups, audit.digests), (found.block_ids, found.groups, found.digests))
    ):
        places = ids - audit.first_block
        groups[side, places] = of_groups
        digests[side, places] = np.frombuffer(packed, np.uint8).reshape(-1, size)
    is_wrong = (groups[0] != groups[1]) | (digests[0] != digests[1]).any(axis=1)
    wrong = np.flatnonzero(is_wrong)[:MAX_REPORTED_BLOCKS]
    if not len(wrong):
        return JobReport(audit.job_id, ok=True)
    details = [
        f"block {audit.first_block + place}: "
        f"{_say('the coordinator', groups[0, place], digests[0, place])}, "
        f"{_say('the rank', groups[1, place], digests[1, place])}; "
        f"{history.describe(audit.first_block + place)}"
        for place in wrong.tolist()
    ]
    block_ids = tuple((wrong + audit.first_block).tolist())
    return JobReport(audit.job_id, ok=False, detail="\n  ".join(details), block_ids=block_ids)


def _say(who: str, group: int, digest: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> str:
    if group < 0:
        return f"{who} knows no content"
    return f"{who} has group {group}, digest {digest.tobytes().hex()[:16]}"
