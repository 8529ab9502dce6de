"""Open transfers between tiers, and their deadlines.

The hierarchy plans them; the coordinator sends them to workers and reports their results. It has a
clock, and asks for overdue jobs. An overdue job stays here until its end is reported, because until
then a worker may still read or write.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvcache.base.arguments import as_int, as_number, check_fields, check_kind
from kvcache.base.arrays import EMPTY_INT32, Int32Array
from kvcache.base.errors import InvalidInputError
from kvcache.offload.keys import OffloadKey


class JobKind(Enum):
    """The kinds of transfers: device to host, host to device, host to files, files to host, and
    from other engines to host."""

    STORE = "store"
    LOAD = "load"
    SPILL = "spill"
    FETCH = "fetch"
    IMPORT = "import"


@dataclass(frozen=True)
class Deadlines:
    """How long each kind of job may take, in seconds; an import as long as a fetch.

    Raises ConfigurationError for values that are not positive.
    """

    store_s: float = 30.0
    load_s: float = 30.0
    spill_s: float = 120.0
    fetch_s: float = 120.0

    def __post_init__(self) -> None:
        check_fields(self, as_number, "store_s", "load_s", "spill_s", "fetch_s", above=0)

    def of(self, kind: JobKind) -> float:
        """Return how long a job of this kind may take."""
        check_kind("kind", kind, JobKind)
        like = JobKind.FETCH if kind is JobKind.IMPORT else kind
        limit_s: float = getattr(self, f"{like.value}_s")
        return limit_s


@dataclass(eq=False, slots=True)
class TransferJob:
    """A transfer that every worker carries out, until its end has been reported.

    `addresses`, shape `(n,)`, are those of `keys` in host memory: where a store, fetch or import
    writes, and what a load or spill reads. `positions`, for a job that writes there, are the places
    of `keys` among the keys that were reserved for. `is_private`: content that is never sealed or
    spilled.
    """

    job_id: int
    kind: JobKind
    keys: tuple[OffloadKey, ...]
    addresses: Int32Array
    positions: Int32Array
    deadline_s: float
    is_private: bool = False
    is_overdue: bool = False

    def split(self, ok: bool, failed: Collection[int]) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Return the keys that succeeded and those that failed.

        `failed` are host addresses; if none of them belongs to the job, all have failed.
        """
        if ok:
            return list(self.keys), []
        is_bad = np.isin(self.addresses, list(failed))
        if not is_bad.any():
            return [], list(self.keys)
        good = [key for key, bad in zip(self.keys, is_bad, strict=True) if not bad]
        return good, [key for key, bad in zip(self.keys, is_bad, strict=True) if bad]

    def keys_at(
        self, addresses: Collection[int], among: Collection[OffloadKey]
    ) -> list[OffloadKey]:
        """Return those of the job's keys `among` that are at these host addresses."""
        is_there = np.isin(self.addresses, list(addresses)).tolist()
        known = set(among)
        return [k for k, there in zip(self.keys, is_there, strict=True) if there and k in known]


class TransferTable:
    """Open jobs by number. Bounded by what the hierarchy plans."""

    def __init__(self, new_job_id: Callable[[], int], deadlines: Deadlines) -> None:
        """Start without jobs. `new_job_id` returns unused numbers."""
        self._new_job_id = new_job_id
        self._deadlines = deadlines
        self._open: dict[int, TransferJob] = {}
        self._num_keys = dict.fromkeys(JobKind, 0)
        self._num_overdue = dict.fromkeys(JobKind, 0)
        self.num_expired = 0
        self.num_failed = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self,
        kind: JobKind,
        keys: Sequence[OffloadKey],
        addresses: Int32Array,
        now_s: float,
        *,
        positions: Int32Array = EMPTY_INT32,
        is_private: bool = False,
    ) -> TransferJob:
        deadline_s, keys = now_s + self._deadlines.of(kind), tuple(keys)
        job_id = self._new_job_id()
        job = TransferJob(job_id, kind, keys, addresses, positions, deadline_s, is_private)
        self._open[job.job_id] = job
        self._num_keys[kind] += len(job.keys)
        return job

    def require(self, job_id: int) -> TransferJob:
        """Return an open job; raises InvalidInputError if it is unknown."""
        job = self._open.get(as_int("job_id", job_id))
        if job is None:
            raise InvalidInputError(f"job {job_id} is not open: report the end of each job once")
        return job

    def kind_of(self, job_id: int) -> JobKind | None:
        """Return what an open job does; None if it is not open here."""
        job = self._open.get(job_id)
        return None if job is None else job.kind

    def close(self, job: TransferJob, *, is_good: bool) -> None:
        del self._open[job.job_id]
        self._num_keys[job.kind] -= len(job.keys)
        self._num_overdue[job.kind] -= job.is_overdue
        self.num_failed += not is_good

    def expire(self, now_s: float) -> list[TransferJob]:
        """Mark overdue jobs; return those that were not before."""
        late = [
            job for job in self._open.values() if not job.is_overdue and job.deadline_s <= now_s
        ]
        for job in late:
            job.is_overdue = True
            self._num_overdue[job.kind] += 1
        self.num_expired += len(late)
        return late

    def num_keys(self, kind: JobKind) -> int:
        """Return how many blocks the open jobs of a kind move."""
        return self._num_keys[kind]

    def num_overdue(self, *kinds: JobKind) -> int:
        """Return how many open jobs of these kinds are overdue; of all kinds by default."""
        return sum(self._num_overdue[kind] for kind in kinds or JobKind)

    def by_kind(self) -> dict[str, int]:
        """Return how many jobs of each kind are open."""
        counts = dict.fromkeys((kind.value for kind in JobKind), 0)
        for job in self._open.values():
            counts[job.kind.value] += 1
        return counts

    def jobs(self) -> list[TransferJob]:
        """Return all open jobs. For audits."""
        return list(self._open.values())
