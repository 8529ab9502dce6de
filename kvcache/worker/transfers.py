"""Stores and loads: jobs that copy blocks between the device and host slots, and end later.

Stands between the worker, which starts a job when its command is applied, and the copy engine. A
checksum per slot is taken when a store ends and compared before a load begins: a mismatch fails the
job and no byte is copied. Ids are validated before; what cannot be done is reported, not raised,
because the command has been obeyed by then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvcache.arrays import Int32Array
from kvcache.commands import Load, Store
from kvcache.messages import JobReport
from kvcache.worker.copy_engine import CopyEngine, PendingCopy, rows_bytes
from kvcache.worker.tensors import HostPool, KVCachePool

HOST_MEDIUM = "host"
"""The medium served here; jobs for others fail with a message."""

CHECKSUM_MASK = (1 << 63) - 1
"""Checksums are kept and sent as non-negative int64."""

NO_CHECKSUM = -1


@dataclass(frozen=True, eq=False)
class _RunningJob:
    job: Store | Load
    copies: tuple[PendingCopy, ...]


class TransferJobs:
    """Runs the stores and loads of one rank, in the order in which they are started."""

    def __init__(self, pool: KVCachePool, host: HostPool | None, engine: CopyEngine) -> None:
        """Serve `host`; None means that every job fails with a message that says so."""
        self._pool = pool
        self._host = host
        self._engine = engine
        num_slots = 0 if host is None else host.num_slots
        self._checksums: npt.NDArray[np.int64] = np.full(num_slots, NO_CHECKSUM, dtype=np.int64)
        self._running: list[_RunningJob] = []
        self._ended: list[JobReport] = []

    @property
    def num_running(self) -> int:
        """Jobs whose copies are not over."""
        return len(self._running)

    def start(self, job: Store | Load) -> None:
        """Start a job, or note why it cannot be done; `poll` returns its report."""
        problem = self._problem(job)
        if problem:
            self._ended.append(JobReport(job.job_id, ok=False, detail=problem))
            return
        if self._host is None:
            return
        if isinstance(job, Store):
            self._checksums[job.destinations] = NO_CHECKSUM
        copies: list[PendingCopy] = []
        try:
            for device, host in zip(self._pool.canonical.tensors, self._host.tensors, strict=True):
                source, destination = (device, host) if isinstance(job, Store) else (host, device)
                copies.append(
                    self._engine.copy_blocks(source, job.sources, destination, job.destinations)
                )
        except RuntimeError as error:
            # The report says that nothing will write any more: wait for what was started.
            for copy in copies:
                copy.wait()
            detail = f"the copy engine failed: {error}"
            self._ended.append(JobReport(job.job_id, ok=False, detail=detail))
            return
        self._running.append(_RunningJob(job, tuple(copies)))

    @property
    def has_news(self) -> bool:
        """Whether `poll` may have something to return."""
        return bool(self._running or self._ended)

    def poll(self) -> list[JobReport]:
        """Return the reports of jobs that have ended since the last call. Never blocks."""
        still_running: list[_RunningJob] = []
        for running in self._running:
            if all(copy.is_done() for copy in running.copies):
                self._ended.append(self._finish(running.job))
            else:
                still_running.append(running)
        self._running = still_running
        ended, self._ended = self._ended, []
        return ended

    def forget_ended(self) -> None:
        """Report nothing of what has ended: its epoch is over. Nothing runs."""
        self._ended.clear()

    def wait(self) -> None:
        """Block until every started job's copies are over."""
        for running in self._running:
            for copy in running.copies:
                copy.wait()

    def _finish(self, job: Store | Load) -> JobReport:
        slots = job.destinations if isinstance(job, Store) else job.sources
        if isinstance(job, Store):
            self._checksums[slots] = self._compute_checksums(slots)
        combined = xxhash.xxh3_64_intdigest(self._checksums[slots].astype("<i8").tobytes())
        return JobReport(
            job.job_id,
            ok=True,
            checksum=combined & CHECKSUM_MASK,
            num_bytes=len(slots) * self._pool.layout.block_bytes,
        )

    def _compute_checksums(self, slots: Int32Array) -> npt.NDArray[np.int64]:
        tensors = () if self._host is None else self._host.tensors
        values: list[int] = []
        for slot in slots.tolist():
            state = xxhash.xxh3_64()
            for row in rows_bytes(tensors, slot):
                state.update(row)
            values.append(state.intdigest() & CHECKSUM_MASK)
        return np.array(values, dtype=np.int64)

    def _problem(self, job: Store | Load) -> str:
        """Say why `job` cannot be done, or return an empty string."""
        if job.medium != HOST_MEDIUM:
            return f"medium {job.medium!r} is not served here: only {HOST_MEDIUM!r} is"
        if self._host is None:
            return "this rank has no host pool: plan host_blocks above 0"
        slots = job.destinations if isinstance(job, Store) else job.sources
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < self._host.num_slots:
            return (
                f"host slots {int(slots.min())}..{int(slots.max())} are asked for, this rank has "
                f"0..{self._host.num_slots - 1}"
            )
        busy = self._busy_slots(is_writing=isinstance(job, Store)) & set(slots.tolist())
        if busy:
            return f"host slots {sorted(busy)[:8]} are in use by a running job: wait for its report"
        if isinstance(job, Load):
            return self._content_problem(slots)
        return ""

    def _content_problem(self, slots: Int32Array) -> str:
        expected = self._checksums[slots]
        empty = np.flatnonzero(expected == NO_CHECKSUM)
        if len(empty):
            return f"host slot {int(slots[empty[0]])} holds nothing that this rank stored"
        found = self._compute_checksums(slots)
        wrong = np.flatnonzero(found != expected)
        if not len(wrong):
            return ""
        first = int(wrong[0])
        return (
            f"checksum of host slot {int(slots[first])} is {int(found[first]):#018x}, "
            f"{int(expected[first]):#018x} was stored: its bytes changed in host memory "
            f"({len(wrong)} of {len(slots)} slots are wrong)"
        )

    def _busy_slots(self, *, is_writing: bool) -> set[int]:
        """Return the slots being stored to and, for a writer, those being read too."""
        busy: set[int] = set()
        for running in self._running:
            if isinstance(running.job, Store):
                busy.update(running.job.destinations.tolist())
            elif is_writing:
                busy.update(running.job.sources.tolist())
        return busy
