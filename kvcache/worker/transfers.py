"""Jobs that move blocks between the tiers of a rank, and end later: started, polled, reported.

Stands between the worker, which starts a job when its command is applied, copy_runner.py, where
stores and loads are carried out, and the file jobs (spills and fetches). Labels and holds are
changed here, in the worker's own thread; the copying code sees memory and ids only. A host slot's
label is withdrawn before a job writes it; its checksum is taken by a store and compared by a load:
of a slot that is wrong no byte stays in a block, and the report names it.
Ids of device blocks are validated before; what cannot be done is reported, not raised, because the
command has been obeyed by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.base.arrays import Int32Array
from kvcache.base.logs import get_logger
from kvcache.offload.specs import FILE_MEDIUM, HOST_MEDIUM
from kvcache.protocol.commands import Discard, Fetch, Load, SealSlots, Spill, Store
from kvcache.protocol.labels import LabelTable
from kvcache.protocol.messages import MAX_REPORTED_BLOCKS, JobReport
from kvcache.worker.block_move import BlockMove
from kvcache.worker.checksums import ChecksumRule, Int64Array, combined_checksum
from kvcache.worker.copy_engine import CopyEngine, PendingCopy
from kvcache.worker.copy_runner import CopyRunner
from kvcache.worker.copy_task import Comparison, CopyResult, CopyTask
from kvcache.worker.host_labels import NO_CHECKSUM, Generations
from kvcache.worker.store_reads import BlockUses, TransferUses
from kvcache.worker.tensors import KVCachePool
from kvcache.worker.tier_statistics import HostStatistics, JobTally, TransferStatistics
from kvcache.worker.tiers import Tiers

__all__ = ["FILE_MEDIUM", "HOST_MEDIUM", "TransferJobs"]

logger = get_logger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""How long copies that have begun may take when a worker ends."""


@dataclass(frozen=True, eq=False)
class _RunningCopy:
    job: Store | Load
    generations: Generations | None = None


@dataclass(frozen=True, eq=False)
class Copying:
    """By what stores and loads are carried out, and which checksums they take and compare."""

    engine: CopyEngine
    runner: CopyRunner
    rule: ChecksumRule


class TransferJobs:
    """Runs the jobs of one rank, in the order in which they are started.

    `uses` says what stores and loads that run still do to which device blocks.
    """

    def __init__(
        self,
        pool: KVCachePool,
        tiers: Tiers,
        copying: Copying,
        labels: LabelTable,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Move between `pool`, whose blocks have `labels`, and `tiers`: jobs for one that is not
        there fail with a message that says so. `now` says how long they take."""
        self._pool = pool
        self._tiers = tiers
        self._host = tiers.host
        self._files = tiers.files
        self._holds = tiers.holds
        self._engine = copying.engine
        self._runner = copying.runner
        self._rule = copying.rule
        self._labels = labels
        self.uses = TransferUses(pool.layout.num_blocks)
        self._running: dict[PendingCopy, _RunningCopy] = {}
        self._ended: list[JobReport] = []
        self._now = now
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
        problem = ""
        self._begun[job.job_id] = (type(job).__name__.lower(), self._now())
        if isinstance(job, (Store, Load)):
            problem = self._copy_problem(job)
            if not problem:
                self._start_copy(job, after)
        elif self._files is None:
            problem = self._tiers.why_no_files
        else:
            self._files.start(job)
        if problem:
            self._ended.append(JobReport(job.job_id, ok=False, detail=problem))

    def go_on(self) -> None:
        """Look again whether jobs may begin: something else that they wait for is over."""
        if self._running:
            self._runner.go_on()

    def pause(self) -> None:
        """Let copies rest for a moment, because a step is under way. Any thread."""
        if self._running:
            self._runner.pause()

    def refuse(self, job: Store | Load, problem: str) -> None:
        """Note that a job was not started, and why."""
        self._begun[job.job_id] = (type(job).__name__.lower(), self._now())
        self._ended.append(JobReport(job.job_id, ok=False, detail=problem))

    def discard(self, command: Discard) -> None:
        """Withdraw labels of slots, and have files removed."""
        if self._host is not None and len(command.slots):
            self._host.labels.withdraw(command.slots)
        if self._files is not None and command.medium == FILE_MEDIUM:
            self._files.discard(command.keys)

    def seal(self, command: SealSlots) -> None:
        """Seal slots; those that were not written to the end here are left as they are."""
        if self._host is not None:
            self._host.labels.seal(command.slots)

    def reset(self, model_epoch: int) -> None:
        """Forget what host slots hold of an earlier model epoch."""
        if self._host is not None:
            self._host.segment.reset(model_epoch)

    @property
    def has_news(self) -> bool:
        """Whether `poll` may have something to return."""
        has_files = self._files is not None and self._files.has_news
        return bool(self._ended or has_files) or self._runner.has_finished

    def poll(self) -> list[JobReport]:
        """Return the reports of jobs that have ended since the last call. Never blocks."""
        for finished in self._runner.take_finished():
            self._ended.append(self._finish(finished.copy, finished.result))
        ended, self._ended = self._ended, []
        if self._files is not None:
            ended += self._files.poll()
        for report in ended:
            kind, begun_s = self._begun.pop(report.job_id, ("", self._now()))
            self._tally.add(kind, report.num_bytes, self._now() - begun_s, ok=report.ok)
        return ended

    def start_epoch(self) -> None:
        """Report nothing of what has ended: its epoch is over. Nothing runs.

        Slots that were written and not sealed are forgotten: none of them will be sealed.
        """
        self._ended.clear()
        self._begun.clear()
        self.uses.reads.forget_awaited()
        if self._files is not None:
            self._files.forget_ended()
        if self._host is not None:
            self._host.labels.withdraw_unsealed()

    def statistics(self) -> TransferStatistics:
        """Return frozen statistics."""
        return TransferStatistics(
            num_running=self.num_running,
            num_waits=self.uses.num_waits,
            jobs=self._tally.counts(),
            host=None if self._host is None else HostStatistics.of(self._host.segment),
            files=None if self._files is None else self._files.pool.store.statistics(),
            files_problem=self._tiers.files_problem,
        )

    def check(self) -> None:
        """Raise InvariantError if labels or holds do not add up. Changes nothing."""
        self._holds.check()
        if self._host is not None:
            self._host.labels.check()

    def close(self) -> bool:
        """End what has begun, drop the rest, and give the tiers back; say whether it all ended.

        Tiers that something may still copy to or from are left to the process's end.
        """
        is_over = self._runner.close(CLOSE_TIMEOUT_S)
        if is_over:
            self._tiers.close()
        else:
            logger.error("a copy is not over after %g s: its memory is kept", CLOSE_TIMEOUT_S)
        return is_over

    # --- starting

    def _start_copy(self, job: Store | Load, after: Sequence[PendingCopy]) -> None:
        """Start a store or load that has no problem."""
        if self._host is None:
            return
        slots, block_ids = _slots(job), _block_ids(job)
        generations, comparison = None, None
        before = self.uses.before_write
        if isinstance(job, Store):
            before = self.uses.before_read
            generations = self._host.labels.begin(job.destinations)
            is_known = self._labels.are_labelled(job.sources)
            labels = self._labels.labels_of(job.sources[is_known])
            self._host.labels.describe(job.destinations[is_known], labels)
        else:
            expected = self._host.labels.checksums(slots)
            comparison = Comparison(expected, self._rule.chosen(len(slots)))
        task = CopyTask(
            BlockMove(self._pool.rows, self._host, block_ids, slots, isinstance(job, Store)),
            self._engine,
            takes_checksums=isinstance(job, Store) and self._rule.takes,
            comparison=comparison,
            after=(*after, *before(block_ids)),
        )
        copy = self._runner.submit(task)
        self._uses_of(job).add(copy, block_ids)
        self._holds.hold(slots, to_write=isinstance(job, Store))
        self._running[copy] = _RunningCopy(job, generations)

    def _copy_problem(self, job: Store | Load) -> str:
        """Say why a store or load cannot be done, or return an empty string."""
        if job.medium != HOST_MEDIUM:
            return f"medium {job.medium!r} is not served here: only {HOST_MEDIUM!r} is"
        if self._host is None:
            return "this rank has no host pool: plan host_blocks above 0"
        slots = _slots(job)
        problem = self._holds.problem(slots, to_write=isinstance(job, Store))
        if problem or isinstance(job, Store):
            return problem
        empty = np.flatnonzero(~self._host.labels.are_readable(slots))
        if len(empty):
            return f"host slot {int(slots[empty[0]])} holds nothing that this rank stored"
        return ""

    def _uses_of(self, job: Store | Load) -> BlockUses:
        return self.uses.reads if isinstance(job, Store) else self.uses.writes

    # --- ending

    def _finish(self, copy: PendingCopy, result: CopyResult) -> JobReport:
        """Let go of what a job held, write down what its slots hold, and return its report."""
        running = self._running.pop(copy)
        job, slots = running.job, _slots(running.job)
        self._holds.release(slots, to_write=isinstance(job, Store))
        self._uses_of(job).remove(copy)
        if self._host is None:
            return JobReport(job.job_id, ok=True)
        labels, checksums = self._host.labels, result.checksums
        if running.generations is None:
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


def _block_ids(job: Store | Load) -> Int32Array:
    return job.sources if isinstance(job, Store) else job.destinations


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
