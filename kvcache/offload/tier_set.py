"""The tiers of a hierarchy, with what is under way between them and what is left to be done.

Under `TierHierarchy`, which plans, and `JobCompletion`, which ends what was planned. Here is what
both need: nothing vanishes from a tier without its label or file going, too. Refuses to plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvcache.base.errors import InvariantError
from kvcache.offload.discards import DiscardList
from kvcache.offload.disk_rest import DiskRest
from kvcache.offload.jobs import JobKind, OpenJob, TransferTable
from kvcache.offload.keys import OffloadKey
from kvcache.offload.options import HierarchyOptions
from kvcache.offload.slot_table import NO_ADDRESS, READY
from kvcache.offload.spill_choice import SpillChoice
from kvcache.offload.tier_manager import TierManager


class TierSet:
    """Host memory, perhaps a disk, open jobs, discards, and what is to be spilled."""

    def __init__(
        self,
        host: TierManager,
        disk: TierManager | None,
        new_job_id: Callable[[], int],
        options: HierarchyOptions,
    ) -> None:
        """Begin with these tiers and no job."""
        self.host = host
        self.disk = disk
        self.options = options
        self.transfers = TransferTable(new_job_id, options.deadlines)
        self.spills = SpillChoice(host, options.spare_share)
        self.discards = DiscardList()
        self.rest = DiskRest()
        self.disk_problem = ""
        self.adoption_problem = ""

    @property
    def answering_disk(self) -> TierManager | None:
        """The disk, unless there is none, no request waits for what it has, it rests or a job
        of it is overdue."""
        if (
            self.disk_problem
            or self.adoption_problem
            or self.rest.is_on
            or self.transfers.num_overdue(JobKind.SPILL, JobKind.FETCH)
        ):
            return None
        return self.disk

    def not_on_disk(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of the keys that the disk does not hold ready; none without a disk."""
        if self.disk is None:
            return []
        is_missing = self.disk.states_of(keys) != READY
        return [keys[i] for i in np.flatnonzero(is_missing).tolist()]

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Let keys vanish; labels and files go now, or when the last job on them has ended."""
        ready = [keys[i] for i in np.flatnonzero(self.host.states_of(keys) == READY).tolist()]
        addresses = self.host.addresses_of(ready)
        self.host.forget(keys)
        is_gone = self.host.addresses_of(ready) == NO_ADDRESS
        self.discards.add_addresses(addresses[is_gone])
        if self.disk is not None:
            self.discard_files(self.disk.forget(keys))

    def discard_labels(self, job: OpenJob) -> None:
        """Let the labels go of what a job has read in host memory and is not there any more."""
        is_gone = self.host.addresses_of(job.keys) == NO_ADDRESS
        self.discards.add_addresses(job.addresses[is_gone])

    def discard_files(self, keys: Sequence[OffloadKey]) -> None:
        """Let the files go of those keys that the disk does not hold any more."""
        if self.disk is not None:
            gone = np.flatnonzero(self.disk.addresses_of(keys) == NO_ADDRESS)
            self.discards.add_keys([keys[i] for i in gone.tolist()])

    def check(self) -> None:
        """Raise InvariantError with the sum that failed."""
        self.host.check()
        dirty = self.host.owed(self.host.keys())
        if self.disk is not None:
            self.disk.check()
        num_clean = len(dirty) - len(self.not_on_disk(dirty))
        if num_clean:
            raise InvariantError(f"{num_clean} host keys are dirty without need")
        stores, loads, spills, fetches = (
            sum(len(job.keys) for job in self.transfers.jobs() if job.kind is kind)
            for kind in (JobKind.STORE, JobKind.LOAD, JobKind.SPILL, JobKind.FETCH)
        )
        expected = [(stores + fetches, loads, spills), (spills, fetches, 0)]
        tiers = [self.host] if self.disk is None else [self.host, self.disk]
        found = [tier.num_jobs() for tier in tiers]
        if found != expected[: len(tiers)]:
            raise InvariantError(
                f"tiers count {found} writes, loads and spills of keys, open jobs make {expected}"
            )
