"""Jobs that end after their command is applied, and the ranks that have reported them.

A job has ended when every rank has reported it, and succeeded only if it did everywhere. Ranks are
a set, because reports are repeated until they are acknowledged. Does not know what a job does. The
command window bounds the jobs: each message has few.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache.base.errors import InvariantError, MalformedMessageError, RequestError
from kvcache.protocol.messages import MAX_REPORTED_BLOCKS, FailedForward, JobReport


@dataclass(eq=False)
class Job:
    """A job of a client's step, or of none; open until it is `reported` by every rank.

    `failures`, by rank at the end, are empty if it succeeded everywhere; `block_ids` are those that
    some rank reports as wrong or failed; `is_wholly_failed`: a rank failed without naming blocks,
    or names more than a report holds. `lost_ids` of them are lost for good; `has_unread`: others
    may be read later.
    """

    job_id: int
    client_id: str = ""
    step: int = 0
    num_bytes: int = 0
    reported: set[int] = field(default_factory=set)
    failures: list[FailedForward] = field(default_factory=list)
    block_ids: set[int] = field(default_factory=set)
    is_wholly_failed: bool = False
    lost_ids: set[int] = field(default_factory=set)
    has_unread: bool = False


class JobTable:
    """Open jobs of one epoch. Numbers are never reused, not even in later epochs."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._last_id = 0
        self._open: dict[int, Job] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, client_id: str = "", step: int = 0) -> int:
        """Begin the job of a client's step, or of none; return its number."""
        self._last_id += 1
        self._open[self._last_id] = Job(self._last_id, client_id, step)
        return self._last_id

    def cancel(self, job_id: int) -> None:
        """Drop an open job that was not sent to any rank; raises RequestError if it is not open."""
        if self._open.pop(job_id, None) is None:
            raise RequestError(f"job {job_id} is not open: cancel what was opened and never sent")

    def report(self, rank: int, report: JobReport) -> Job | None:
        """Record one rank's report; return the job if it was the last one missing.

        A repeat, or a report of a finished job, changes nothing.

        Raises MalformedMessageError for a number that was never used.
        """
        if not 0 < report.job_id <= self._last_id:
            raise MalformedMessageError(
                f"rank {rank} reports job {report.job_id}, the last one was {self._last_id}"
            )
        job = self._open.get(report.job_id)
        if job is None or rank in job.reported:
            return None
        job.reported.add(rank)
        job.num_bytes += report.num_bytes
        if not report.ok:
            job.failures.append(FailedForward(job.step, rank, report.detail))
            job.block_ids.update(report.block_ids)
            job.is_wholly_failed |= not 0 < len(report.block_ids) < MAX_REPORTED_BLOCKS
            job.lost_ids.update(report.lost_ids)
            job.has_unread |= len(report.lost_ids) < max(1, len(report.block_ids))
        if len(job.reported) < self._num_ranks:
            return None
        del self._open[report.job_id]
        job.failures.sort(key=lambda failure: failure.rank)
        return job

    def clear(self) -> None:
        """Drop all open jobs: their epoch has ended."""
        self._open.clear()

    def check(self) -> None:
        """Raise `InvariantError` if an open job was reported by every rank."""
        for job_id, job in self._open.items():
            if len(job.reported) >= self._num_ranks:
                raise InvariantError(f"job {job_id} is open, but all ranks have reported it")
