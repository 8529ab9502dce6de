"""What becomes of a job when every rank has reported it, or when some did not in time.

The hierarchy planned it, and hands over how it ended. Content becomes visible here,
and nowhere else. Refuses to plan: what follows from an end is planned when the hierarchy is asked.

    ended well      destinations are ready; of a store and a fetch they are to be sealed
    ended badly     destinations are empty again; what cannot be read any more is forgotten
    overdue         destinations are in quarantine, sources held, until the end is told after all
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from kvcache.base.arrays import EMPTY_INT32, Int32Array
from kvcache.offload.jobs import JobKind, OpenJob, OverdueJob
from kvcache.offload.slot_table import READY
from kvcache.offload.tier_set import TierSet


class JobCompletion:
    """Ends the jobs of a hierarchy. What its methods mean is said there."""

    def __init__(self, tiers: TierSet) -> None:
        """End the jobs of these tiers."""
        self._tiers = tiers

    def stored(self, job_id: int, ok: bool) -> Int32Array:
        """End a store; return what is to be sealed."""
        tiers = self._tiers
        job = tiers.transfers.require(job_id, JobKind.STORE)
        tiers.host.complete_store(job.keys, success=ok)
        self._close(job, is_good=ok)
        if not ok or job.is_private:
            return EMPTY_INT32
        missing = tiers.not_on_disk(job.keys)
        tiers.host.mark_dirty(missing)
        if tiers.options.disk_write == "on_store":
            tiers.spills.write_through(missing)
        return self._visible(job)

    def fetched(
        self, job_id: int, ok: bool, failed: Collection[int], lost: Collection[int] | None
    ) -> Int32Array:
        """End a fetch; return what is to be sealed."""
        tiers = self._tiers
        job = tiers.transfers.require(job_id, JobKind.FETCH)
        good, bad = job.split(ok, failed)
        if job.is_overdue:
            tiers.host.complete_store(job.keys, success=False)
        else:
            tiers.host.complete_store(good, success=True)
            tiers.host.complete_store(bad, success=False)
        gone = bad if lost is None else job.keys_at(lost, among=bad)
        if tiers.disk is not None:
            tiers.disk.complete_load(job.keys)
            tiers.disk.forget(gone)
            tiers.discard_files(job.keys)
        if good and len(gone) == len(bad) and not job.is_overdue:
            tiers.rest.served()  # of every file it said what is with it
        self._close(job, is_good=ok)
        return self._visible(job)

    def spilled(self, job_id: int, ok: bool, failed: Collection[int]) -> None:
        """End a spill. A file of what host memory has forgotten meanwhile is no good."""
        tiers = self._tiers
        job = tiers.transfers.require(job_id, JobKind.SPILL)
        good, bad = job.split(ok and not job.is_overdue, () if job.is_overdue else failed)
        is_known = tiers.host.states_of(good) == READY
        bad += [good[i] for i in np.flatnonzero(~is_known).tolist()]
        good = [good[i] for i in np.flatnonzero(is_known).tolist()]
        tiers.host.complete_spill(job.keys)
        if tiers.disk is not None:
            tiers.disk.complete_store(good, success=True)
            tiers.disk.complete_store(bad, success=False)
            tiers.discard_files(job.keys)
        tiers.discard_labels(job)
        tiers.host.mark_clean(job.keys)
        self._close(job, is_good=ok)

    def loaded(self, job_id: int, ok: bool, failed: Collection[int]) -> None:
        """End a load."""
        tiers = self._tiers
        job = tiers.transfers.require(job_id, JobKind.LOAD)
        _, bad = job.split(ok, failed)
        tiers.host.complete_load(job.keys)
        tiers.host.forget(bad)
        tiers.discard_labels(job)
        self._close(job, is_good=ok)

    def expire(self, now_s: float) -> tuple[OverdueJob, ...]:
        """Put what overdue jobs write into quarantine; return those that were not before."""
        tiers = self._tiers
        tiers.rest.look(now_s)
        late = tiers.transfers.expire(now_s)
        for job in late:
            if job.kind in (JobKind.STORE, JobKind.FETCH):
                tiers.host.forget(job.keys)
            elif job.kind is JobKind.SPILL and tiers.disk is not None:
                tiers.disk.forget(job.keys)
        return tuple(OverdueJob(job.job_id, job.kind, job.keys, job.addresses) for job in late)

    def _visible(self, job: OpenJob) -> Int32Array:
        """Return the addresses of a job that has just written them, as far as they are ready."""
        return job.addresses[self._tiers.host.are_ready_at(job.addresses)]

    def _close(self, job: OpenJob, *, is_good: bool) -> None:
        self._tiers.transfers.close(job, is_good=is_good)
        self._tiers.spills.wake()
