"""Jobs that move blocks between the tiers of a rank, and end later: started, polled, reported.

Stands between the worker, which starts a job when its command is applied, the copy engine (stores
and loads) and the file jobs (spills and fetches). A host slot's label is withdrawn before a job
writes it; its checksum is taken when a store ends and compared before a load begins: a mismatch
fails the job and no byte is copied. Ids of device blocks are validated before; what cannot be done
is reported, not raised, because the command has been obeyed by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvcache.arrays import Int32Array
from kvcache.commands import Discard, Fetch, Load, SealSlots, Spill, Store
from kvcache.labels import LabelTable
from kvcache.messages import JobReport
from kvcache.offload.specs import FILE_MEDIUM, HOST_MEDIUM
from kvcache.worker.checksums import checksum_of, combined_checksum
from kvcache.worker.copy_engine import CopyEngine, PendingCopy, rows_bytes
from kvcache.worker.host_labels import Generations, Int64Array
from kvcache.worker.host_pool import HostPool
from kvcache.worker.store_reads import StoreRead, StoreReads
from kvcache.worker.tensors import KVCachePool
from kvcache.worker.tier_statistics import HostStatistics, JobTally, TransferStatistics
from kvcache.worker.tiers import Tiers

__all__ = ["FILE_MEDIUM", "HOST_MEDIUM", "TransferJobs"]


@dataclass(frozen=True, eq=False)
class _RunningCopy:
    job: Store | Load
    copies: tuple[PendingCopy, ...]
    read: StoreRead | None = None
    generations: Generations | None = None


class TransferJobs:
    """Runs the jobs of one rank, in the order in which they are started.

    `reads` says which device blocks stores still read.
    """

    def __init__(
        self,
        pool: KVCachePool,
        tiers: Tiers,
        engine: CopyEngine,
        labels: LabelTable,
    ) -> None:
        """Move between `pool`, whose blocks have `labels`, and `tiers`: jobs for one that is not
        there fail with a message that says so."""
        self._pool = pool
        self._tiers = tiers
        self._host = tiers.host
        self._files = tiers.files
        self._holds = tiers.holds
        self._engine = engine
        self._labels = labels
        self.reads = StoreReads(pool.layout.num_blocks)
        self._running: list[_RunningCopy] = []
        self._ended: list[JobReport] = []
        self._kinds: dict[int, str] = {}
        self._tally = JobTally()

    @property
    def num_running(self) -> int:
        """Jobs that are not over."""
        return len(self._running) + (0 if self._files is None else self._files.num_running)

    def start(self, job: Store | Load | Spill | Fetch) -> None:
        """Start a job, or note why it cannot be done; `poll` returns its report."""
        problem = ""
        self._kinds[job.job_id] = type(job).__name__.lower()
        if isinstance(job, (Store, Load)):
            problem = self._copy_problem(job) or self._start_copy(job)
        elif self._files is None:
            problem = self._tiers.why_no_files
        else:
            self._files.start(job)
        if problem:
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
        return bool(self._running or self._ended or has_files)

    def poll(self) -> list[JobReport]:
        """Return the reports of jobs that have ended since the last call. Never blocks."""
        still_running: list[_RunningCopy] = []
        for running in self._running:
            if all(copy.is_done() for copy in running.copies):
                self._ended.append(self._finish(running))
            else:
                still_running.append(running)
        self._running = still_running
        ended, self._ended = self._ended, []
        if self._files is not None:
            ended += self._files.poll()
        for report in ended:
            kind = self._kinds.pop(report.job_id, "")
            self._tally.add(kind, report.num_bytes, ok=report.ok)
        return ended

    def start_epoch(self) -> None:
        """Report nothing of what has ended: its epoch is over. Nothing runs.

        Slots that were written and not sealed are forgotten: nobody will seal them.
        """
        self._ended.clear()
        self._kinds.clear()
        self.reads.forget_awaited()
        if self._files is not None:
            self._files.forget_ended()
        if self._host is not None:
            self._host.labels.withdraw_unsealed()

    def statistics(self) -> TransferStatistics:
        """Return the figures, frozen."""
        return TransferStatistics(
            num_running=self.num_running,
            num_waits=self.reads.num_waits,
            jobs=self._tally.counts(),
            host=None if self._host is None else HostStatistics.of(self._host.segment),
            files=None if self._files is None else self._files.pool.store.statistics(),
        )

    def check(self) -> None:
        """Raise InvariantError if labels or holds do not add up. Changes nothing."""
        self._holds.check()
        if self._host is not None:
            self._host.labels.check()

    def close(self) -> None:
        """Block until every started job is over, and give the tiers back."""
        for running in self._running:
            for copy in running.copies:
                copy.wait()
        self._tiers.close()

    # --- starting

    def _start_copy(self, job: Store | Load) -> str:
        """Start a store or load that has no problem; say why it failed all the same, if it did."""
        if self._host is None:
            return ""
        generations: Generations | None = None
        if isinstance(job, Store):
            generations = self._host.labels.begin(job.destinations)
            is_known = self._labels.are_labelled(job.sources)
            labels = self._labels.labels_of(job.sources[is_known])
            self._host.labels.describe(job.destinations[is_known], labels)
        else:
            self.reads.before_write(job.destinations)
        copies: list[PendingCopy] = []
        try:
            for source, sources, destination, destinations in self._parts(self._host, job):
                copies.append(self._engine.copy_blocks(source, sources, destination, destinations))
        except RuntimeError as error:
            # The report says that nothing will write any more: wait for what was started.
            for copy in copies:
                copy.wait()
            if isinstance(job, Store):
                self._host.labels.withdraw(job.destinations)
            return f"the copy engine failed: {error}"
        read: StoreRead | None = None
        if isinstance(job, Store):
            read = StoreRead(job.sources, copies)
            self.reads.add(read)
        self._holds.hold(_slots(job), to_write=isinstance(job, Store))
        self._running.append(_RunningCopy(job, tuple(copies), read, generations))
        return ""

    def _parts(
        self, host: HostPool, job: Store | Load
    ) -> Iterator[tuple[torch.Tensor, Int32Array, torch.Tensor, Int32Array]]:
        """Yield what the engine is asked for: a copy for each tensor and piece of its slots."""
        for index, (device, slots) in enumerate(zip(self._pool.rows, host.tensors, strict=True)):
            source, destination = (device, slots) if isinstance(job, Store) else (slots, device)
            for part in host.pieces(index, _slots(job)):
                yield source, job.sources[part], destination, job.destinations[part]

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
        return self._content_problem(self._host, slots)

    def _content_problem(self, host: HostPool, slots: Int32Array) -> str:
        """Say why slots cannot be loaded from, or return an empty string."""
        empty = np.flatnonzero(~host.labels.are_readable(slots))
        if len(empty):
            return f"host slot {int(slots[empty[0]])} holds nothing that this rank stored"
        expected, found = host.labels.checksums(slots), _checksums_of(host, slots)
        wrong = np.flatnonzero(found != expected)
        if not len(wrong):
            return ""
        first = int(wrong[0])
        return (
            f"checksum of host slot {int(slots[first])} is {int(found[first]):#018x}, "
            f"{int(expected[first]):#018x} was stored: its bytes changed in host memory "
            f"({len(wrong)} of {len(slots)} slots are wrong)"
        )

    # --- ending

    def _finish(self, running: _RunningCopy) -> JobReport:
        job, slots = running.job, _slots(running.job)
        self._holds.release(slots, to_write=isinstance(job, Store))
        if self._host is None:
            return JobReport(job.job_id, ok=True)
        if running.read is not None and running.generations is not None:
            self.reads.remove(running.read)
            checksums = _checksums_of(self._host, slots)
            self._host.labels.finish(slots, running.generations, checksums)
        else:
            checksums = self._host.labels.checksums(slots)
        return JobReport(
            job.job_id,
            ok=True,
            checksum=combined_checksum(checksums),
            num_bytes=len(slots) * self._pool.layout.block_bytes,
        )


def _slots(job: Store | Load) -> Int32Array:
    return job.destinations if isinstance(job, Store) else job.sources


def _checksums_of(host: HostPool, slots: Int32Array) -> Int64Array:
    values = [checksum_of(rows_bytes(host.tensors, slot)) for slot in slots.tolist()]
    return np.array(values, dtype=np.int64)
