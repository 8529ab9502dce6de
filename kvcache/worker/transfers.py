"""Jobs that move blocks between the tiers of a rank: started by a command, reported when they end.

Other threads move the bytes: copies/runner.py stores and loads, files/file_pool.py spills and
fetches. They see memory, ids and heads of files only. The worker's own thread changes labels and
counts which blocks and slots jobs use.

A job withdraws a host slot's label before it writes the slot. A store takes the slot's checksum,
and a load compares it: if it is wrong, no byte of the slot stays in a block, and the report names
it. Ids of device blocks were validated before. What cannot be done is reported and not raised,
because the command has been applied by then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvcache.base.arrays import EMPTY_INT32, Int32Array, Int64Array
from kvcache.base.errors import BacklogFullError, MalformedMessageError
from kvcache.base.logs import get_logger
from kvcache.offload.keys import label_keys
from kvcache.offload.specs import FILE_MEDIUM, HOST_MEDIUM
from kvcache.protocol.commands import Discard, Fetch, Load, SealSlots, Spill, Store
from kvcache.protocol.labels import LabelTable
from kvcache.protocol.messages import MAX_REPORTED_BLOCKS, JobReport
from kvcache.worker.copies.checksums import ChecksumRule, combined_checksum
from kvcache.worker.copies.engine import CopyEngine, PendingCopy
from kvcache.worker.copies.runner import CopyRunner
from kvcache.worker.copies.task import BlockMove, Comparison, CopyResult, CopyTask, HostRows
from kvcache.worker.files.file_pool import FilePool, FinishedFileJob
from kvcache.worker.files.format import heads_of_labels, labels_of_heads
from kvcache.worker.host_memory.host_pool import HostPool
from kvcache.worker.host_memory.labels import NO_CHECKSUM, Generations
from kvcache.worker.kv_cache_pool import KVCachePool
from kvcache.worker.statistics import HostStatistics, JobTally, TransferStatistics
from kvcache.worker.tiers import Tiers

logger = get_logger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""How long copies that have begun may take when a worker ends."""

MAX_DETAILS = 3
"""How many blocks a report names with what went wrong."""


class BlockUses:
    """The blocks that copies use. Not thread-safe: the worker locks around it.

    Invariant: `_counts[b]` is how often block `b` is in the ids of `_running`.
    """

    def __init__(self, num_blocks: int) -> None:
        self._counts = np.zeros(num_blocks, dtype=np.int32)
        self._running: dict[PendingCopy, Int32Array] = {}

    def add(self, copy: PendingCopy, block_ids: Int32Array) -> None:
        np.add.at(self._counts, block_ids, 1)
        self._running[copy] = block_ids

    def remove(self, copy: PendingCopy) -> None:
        np.subtract.at(self._counts, self._running.pop(copy), 1)

    def using(self, block_ids: Int32Array) -> list[PendingCopy]:
        """Return the unfinished copies that use one of these blocks, oldest first."""
        if not self._running or not self._counts[block_ids].any():
            return []
        return [
            copy
            for copy, used in self._running.items()
            if np.isin(used, block_ids).any() and not copy.is_done()
        ]


class TransferUses:
    """What transfers do to the blocks of a device: stores read them, loads write them.

    A block that a store reads is not written before the copy is over; one that a load writes is not
    used at all before. Every write is preceded by the block's `Unlabel`, or is the target of a
    zero, a copy or a load; those that happen in a forward wait when it begins, not when the command
    comes, so that a step is acknowledged at once. Returns the transfers in the way, but never
    waits.
    """

    def __init__(self, num_blocks: int) -> None:
        self.reads = BlockUses(num_blocks)
        self.writes = BlockUses(num_blocks)
        self.num_waits = 0
        self._awaited: deque[tuple[int, PendingCopy]] = deque()

    def before_write(self, block_ids: Int32Array) -> list[PendingCopy]:
        """Return the transfers that must be over before these blocks are written."""
        return self.reads.using(block_ids) + self.writes.using(block_ids)

    def before_read(self, block_ids: Int32Array) -> list[PendingCopy]:
        """Return the transfers that must be over before these blocks are read."""
        return self.writes.using(block_ids)

    def on_unlabel(self, seq: int, block_ids: Int32Array) -> None:
        """Note that the forward of `seq` or a later one will write these blocks."""
        self._awaited += ((seq, copy) for copy in self.reads.using(block_ids))

    def before_forward(self, seq: int) -> PendingCopy | None:
        """Return a copy that reads what was unlabelled for the forward of `seq`, None if none."""
        while self._awaited and self._awaited[0][0] <= seq:
            if not self._awaited[0][1].is_done():
                return self._awaited[0][1]
            self._awaited.popleft()
        return None

    def forget_awaited(self) -> None:
        """Forget the old epoch's forwards; no transfer runs."""
        self._awaited.clear()


@dataclass(frozen=True, eq=False)
class _RunningFileJob:
    """A job and its slots; `unknown` are named slots without a label."""

    job: Spill | Fetch
    slots: Int32Array
    generations: Generations | None = None
    unknown: Int32Array = field(default_factory=lambda: EMPTY_INT32)


class FileJobs:
    """Spills and fetches: jobs between host slots and files."""

    def __init__(self, pool: FilePool, host: HostPool) -> None:
        """Move between the slots of `host` and the files of `pool`."""
        self._pool = pool
        self._labels = host.labels
        self._uses = host.uses
        self._running: dict[int, _RunningFileJob] = {}

    @property
    def num_running(self) -> int:
        """Jobs that have not been reported."""
        return len(self._running)

    @property
    def has_news(self) -> bool:
        """Whether `poll` may have something to return."""
        return self._pool.has_finished

    def start(self, job: Spill | Fetch) -> str:
        """Start a job, or say why it cannot be done."""
        if job.medium != FILE_MEDIUM:
            return f"medium {job.medium!r} is not served here: only {FILE_MEDIUM!r} is"
        if job.job_id in self._running:
            return f"job {job.job_id} runs already: give every job an id of its own"
        return self._start_spill(job) if isinstance(job, Spill) else self._start_fetch(job)

    def discard(self, keys: bytes) -> None:
        """Remove the files of packed keys, after the jobs started for them before."""
        self._pool.discard(self._keys(keys))

    def poll(self) -> list[JobReport]:
        """Return the reports of jobs that have ended since the last call. Never blocks."""
        reports = []
        for finished in self._pool.get_finished():
            running = self._running.pop(finished.job_id)
            self._uses.release(running.slots, to_write=isinstance(running.job, Fetch))
            if running.generations is not None:
                self._label(running.slots, running.generations, finished)
            reports.append(self._report(running, finished))
        return reports

    # --- starting

    def _start_spill(self, job: Spill) -> str:
        """Start it, or say why not."""
        slots = job.sources
        problem = self._uses.problem(slots, to_write=False)
        if problem:
            return problem
        # A label may have found no room, or have changed; the other slots are written nevertheless.
        can_be = self._labels.are_readable(slots) & self._labels.are_labelled(slots)
        can_be &= self._labels.are_whole(slots)
        slots, unknown = slots[can_be], slots[~can_be]
        if len(unknown) and not len(slots):
            return _about_unknown(unknown)
        labels, every_key = self._labels.labels_of(slots), self._keys(job.keys)
        keys = [every_key[place] for place in np.flatnonzero(can_be).tolist()]
        try:
            held = label_keys(labels)
        except MalformedMessageError as error:
            return f"the content of host slots has no key: {error}"
        wrong = [i for i, key in enumerate(keys) if key != held[i]]
        if wrong:
            return f"host slot {int(slots[wrong[0]])} holds another block than its key says"
        checksums = self._labels.checksums(slots).tolist()
        heads = heads_of_labels(labels, keys, checksums, self._pool.store.shape)
        try:
            self._pool.submit_spill(job.job_id, slots.tolist(), heads)
        except BacklogFullError as error:
            return str(error)
        self._uses.acquire(slots, to_write=False)
        self._running[job.job_id] = _RunningFileJob(job, slots, unknown=unknown)
        return ""

    def _start_fetch(self, job: Fetch) -> str:
        """Start it, or say why not."""
        slots = job.destinations
        problem = self._uses.problem(slots, to_write=True)
        if problem:
            return problem
        generations = self._labels.begin(slots)
        try:
            self._pool.submit_fetch(job.job_id, self._keys(job.keys), slots.tolist())
        except BacklogFullError as error:
            self._labels.withdraw(slots)
            return str(error)
        self._uses.acquire(slots, to_write=True)
        self._running[job.job_id] = _RunningFileJob(job, slots, generations)
        return ""

    def _keys(self, packed: bytes) -> list[bytes]:
        size = self._pool.store.shape.key_bytes
        return [packed[i : i + size] for i in range(0, len(packed), size)]

    # --- ending

    def _label(
        self, slots: Int32Array, generations: Generations, finished: FinishedFileJob
    ) -> None:
        """Label fetched slots; withdraw those that failed."""
        is_awaited = self._labels.are_awaited(slots, generations)
        good = is_awaited & np.array([head is not None for head in finished.heads], np.bool_)
        self._labels.withdraw(slots[is_awaited & ~good])
        heads = [
            head
            for head, is_good in zip(finished.heads, good, strict=True)
            if head is not None and is_good
        ]
        self._labels.describe(slots[good], labels_of_heads(heads))
        checksums = np.array([head.checksum for head in heads], dtype=np.int64)
        self._labels.finish(slots[good], generations[good], checksums)

    def _report(self, running: _RunningFileJob, finished: FinishedFileJob) -> JobReport:
        unknown = running.unknown
        if finished.ok and not len(unknown):
            if isinstance(running.job, Spill):
                checksums = self._labels.checksums(running.slots)
            else:
                found = [head.checksum for head in finished.heads if head is not None]
                checksums = np.array(found, dtype=np.int64)
            checksum = combined_checksum(checksums)
            return JobReport(finished.job_id, True, checksum, finished.num_bytes)
        failures = finished.failures
        named = failures[:MAX_REPORTED_BLOCKS]
        failed = [int(running.slots[failure.place]) for failure in named] + unknown.tolist()
        details = [_about_unknown(unknown)] if len(unknown) else []
        details += [failure.detail for failure in failures[:MAX_DETAILS]]
        num_failed = len(failures) + len(unknown)
        return JobReport(
            finished.job_id,
            ok=False,
            num_bytes=finished.num_bytes,
            detail=f"{num_failed} of {len(running.slots) + len(unknown)} blocks failed: "
            + "; ".join(details),
            block_ids=tuple(failed[:MAX_REPORTED_BLOCKS]),
            lost_ids=tuple(int(running.slots[f.place]) for f in named if f.is_lost),
        )


def _about_unknown(slots: Int32Array) -> str:
    more = f" ({len(slots)} such slots)" if len(slots) > 1 else ""
    return f"host slot {int(slots[0])} holds nothing whose content is known{more}"


@dataclass(frozen=True, eq=False)
class _RunningCopy:
    """A store has `generations`; a load from another process's slots has `expected` checksums."""

    job: Store | Load
    generations: Generations | None = None
    expected: Int64Array | None = None


@dataclass(frozen=True, eq=False)
class Copying:
    """The engine and runner of stores and loads, and the rule for their checksums."""

    engine: CopyEngine
    runner: CopyRunner
    rule: ChecksumRule


class TransferJobs:
    """Runs the jobs of one rank, in the order in which they are started.

    `uses` says which device blocks running stores and loads read and write.
    """

    def __init__(
        self, pool: KVCachePool, tiers: Tiers, copying: Copying, labels: LabelTable
    ) -> None:
        """Move between `pool`, whose blocks have `labels`, and `tiers`. Jobs for a missing tier
        fail."""
        self._pool = pool
        self._tiers = tiers
        self._host = tiers.host
        self._files: FileJobs | None = None
        if self._host is not None and tiers.files is not None:
            self._files = FileJobs(tiers.files, self._host)
        self._engine = copying.engine
        self._runner = copying.runner
        self._rule = copying.rule
        self._labels = labels
        self.uses = TransferUses(pool.layout.num_blocks)
        self._running: dict[PendingCopy, _RunningCopy] = {}
        self._ended: list[JobReport] = []
        self._begun: dict[int, tuple[str, float]] = {}  # kind and time, by job
        self._tally = JobTally()

    @property
    def num_running(self) -> int:
        """Jobs that have not been reported."""
        return len(self._running) + (0 if self._files is None else self._files.num_running)

    def start(self, job: Store | Load | Spill | Fetch, after: Sequence[PendingCopy] = ()) -> None:
        """Start a job, or note why it cannot be done; `poll` returns its report.

        A store or load begins when `after`, and what uses its device blocks now, is over.
        """
        self._note_begun(job)
        if isinstance(job, (Store, Load)):
            problem = self._start_copy(job, after)
        elif self._files is None:
            problem = self._tiers.why_no_files
        else:
            problem = self._files.start(job)
        if problem:
            self._ended.append(JobReport(job.job_id, ok=False, detail=problem))

    def start_from(self, host: HostRows, job: Load, expected: Int64Array) -> None:
        """Load from slots of another process: `expected[i]` is the checksum of `job.sources[i]`,
        compared whatever the rule says. The caller has looked at the slots' labels, and looks again
        when the job has ended."""
        self._note_begun(job)
        comparison = Comparison(expected, np.ones(len(expected), np.bool_))
        self._submit(_RunningCopy(job, expected=expected), host, comparison)

    def go_on(self) -> None:
        """Check again whether jobs may begin: a forward that they wait for is over."""
        if self._running:
            self._runner.go_on()

    def pause(self) -> None:
        """Let copies rest for a moment, because a step is under way. Any thread."""
        if self._running:
            self._runner.pause()

    def refuse(self, job: Store | Load, problem: str) -> None:
        """Note that a job was not started, and why."""
        self._note_begun(job)
        self._ended.append(JobReport(job.job_id, ok=False, detail=problem))

    def discard(self, command: Discard) -> None:
        """Withdraw labels of slots, and remove files."""
        if self._host is not None and len(command.slots):
            self._host.labels.withdraw(command.slots)
        if self._files is not None and command.medium == FILE_MEDIUM:
            self._files.discard(command.keys)

    def seal(self, command: SealSlots) -> None:
        """Seal slots that this rank has written completely; others do not change."""
        if self._host is not None:
            self._host.labels.seal(command.slots)

    def reset(self, model_epoch: int) -> None:
        """Forget host slots of an earlier model epoch."""
        if self._host is not None:
            self._host.segment.reset(model_epoch)

    @property
    def has_news(self) -> bool:
        """Whether `poll` may have something to return."""
        has_files = self._files is not None and self._files.has_news
        return bool(self._ended or has_files) or self._runner.has_finished

    def poll(self) -> list[JobReport]:
        """Return the reports of jobs that have ended since the last call. Never blocks."""
        self._ended += [self._finish(*finished) for finished in self._runner.take_finished()]
        ended, self._ended = self._ended, []
        if self._files is not None:
            ended += self._files.poll()
        for report in ended:
            kind, begun_s = self._begun.pop(report.job_id, ("", time.monotonic()))
            self._tally.add(kind, report.num_bytes, time.monotonic() - begun_s, ok=report.ok)
        return ended

    def start_epoch(self) -> None:
        """Drop reports of ended jobs: their epoch has ended. No job runs.

        Slots that were written and not sealed are forgotten: none of them will be sealed.
        """
        self._ended.clear()
        self._begun.clear()
        self.uses.forget_awaited()
        if self._host is not None:
            self._host.labels.withdraw_unsealed()

    def statistics(self) -> TransferStatistics:
        return TransferStatistics(
            num_running=self.num_running,
            num_waits=self.uses.num_waits,
            jobs=self._tally.counts(),
            host=None if self._host is None else HostStatistics.of(self._host.segment),
            files=None if self._tiers.files is None else self._tiers.files.store.statistics(),
            files_problem=self._tiers.files_problem,
        )

    def check(self) -> None:
        """Raise InvariantError if labels or uses are inconsistent. Changes nothing."""
        if self._host is not None:
            self._host.uses.check()
            self._host.labels.check()

    def close(self) -> bool:
        """Wait for running copies, drop the rest, and close the tiers; say whether all ended.

        Tiers that a copy may still use stay open until the process ends.
        """
        is_over = self._runner.close(CLOSE_TIMEOUT_S)
        if is_over:
            self._tiers.close()
        else:
            logger.error("a copy is not over after %g s: its memory is kept", CLOSE_TIMEOUT_S)
        return is_over

    # --- starting

    def _note_begun(self, job: Store | Load | Spill | Fetch) -> None:
        self._begun[job.job_id] = (type(job).__name__.lower(), time.monotonic())

    def _start_copy(self, job: Store | Load, after: Sequence[PendingCopy]) -> str:
        """Start a store or load, or say why it cannot be done."""
        if job.medium != HOST_MEDIUM:
            return f"medium {job.medium!r} is not served here: only {HOST_MEDIUM!r} is"
        if self._host is None:
            return "this rank has no host pool: plan host_blocks above 0"
        slots, labels = _slots(job), self._host.labels
        problem = self._host.uses.problem(slots, to_write=isinstance(job, Store))
        if problem:
            return problem
        generations, comparison = None, None
        if isinstance(job, Store):
            generations = labels.begin(slots)
            is_known = self._labels.are_labelled(job.sources)
            labels.describe(slots[is_known], self._labels.labels_of(job.sources[is_known]))
        else:
            empty = np.flatnonzero(~labels.are_readable(slots))
            if len(empty):
                return f"host slot {int(slots[empty[0]])} holds nothing that this rank stored"
            comparison = Comparison(labels.checksums(slots), self._rule.chosen(len(slots)))
        self._submit(_RunningCopy(job, generations), self._host, comparison, after)
        self._host.uses.acquire(slots, to_write=isinstance(job, Store))
        return ""

    def _submit(
        self,
        running: _RunningCopy,
        host: HostRows,
        comparison: Comparison | None,
        after: Sequence[PendingCopy] = (),
    ) -> None:
        """Copy behind `after`, and behind what uses the device blocks now."""
        job, is_store = running.job, isinstance(running.job, Store)
        block_ids = job.sources if is_store else job.destinations
        before = self.uses.before_read if is_store else self.uses.before_write
        task = CopyTask(
            BlockMove(self._pool.rows, host, block_ids, _slots(job), is_store),
            self._engine,
            takes_checksums=is_store and self._rule.takes,
            comparison=comparison,
            after=(*after, *before(block_ids)),
        )
        copy = self._runner.submit(task)
        self._uses_of(job).add(copy, block_ids)
        self._running[copy] = running

    def _uses_of(self, job: Store | Load) -> BlockUses:
        return self.uses.reads if isinstance(job, Store) else self.uses.writes

    # --- ending

    def _finish(self, copy: PendingCopy, result: CopyResult) -> JobReport:
        """Release a job's blocks and slots, label the slots, and return its report."""
        running = self._running.pop(copy)
        job, slots = running.job, _slots(running.job)
        self._uses_of(job).remove(copy)
        if self._host is None:
            return JobReport(job.job_id, ok=True)
        if running.expected is None:
            self._host.uses.release(slots, to_write=isinstance(job, Store))
        labels, checksums = self._host.labels, result.checksums
        if running.expected is not None:
            checksums = running.expected
        elif running.generations is None:
            checksums = labels.checksums(slots)
        elif result.problem:
            labels.withdraw(slots[labels.are_awaited(slots, running.generations)])
        else:
            labels.finish(slots, running.generations, checksums)
        if result.problem:
            return JobReport(job.job_id, ok=False, detail=result.problem)
        if len(result.wrong):
            return _report_of_wrong(job.job_id, slots, checksums, result)
        return JobReport(
            job.job_id,
            ok=True,
            checksum=0 if NO_CHECKSUM in checksums else combined_checksum(checksums),
            num_bytes=len(slots) * self._pool.layout.block_bytes,
        )


def _slots(job: Store | Load) -> Int32Array:
    return job.destinations if isinstance(job, Store) else job.sources


def _report_of_wrong(
    job_id: int, slots: Int32Array, expected: Int64Array, result: CopyResult
) -> JobReport:
    """Return the report of a load that found slots whose bytes are not what was stored."""
    wrong = slots[result.wrong]
    found, was = int(result.found[0]), int(expected[result.wrong[0]])
    told = (
        "nothing is known of what was stored" if was == NO_CHECKSUM else f"{was:#018x} was stored"
    )
    return JobReport(
        job_id,
        ok=False,
        detail=(
            f"checksum of host slot {int(wrong[0])} is {found:#018x}, {told}: its bytes changed in "
            f"host memory ({len(wrong)} of {len(slots)} slots are wrong)"
        ),
        block_ids=tuple(np.unique(wrong)[:MAX_REPORTED_BLOCKS].tolist()),
    )
