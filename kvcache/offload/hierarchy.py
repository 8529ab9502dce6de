"""Device, host memory, disk: what goes down, what comes up, and what is dropped.

Between the coordinator, which sees what is sealed and which requests come, and the tiers, which
know what they hold. Each plan is a job for all workers; the books are changed when it is planned,
content is visible when it has ended well everywhere.

              plan_store                    plan_spills
    device ──────────────▶ host memory ──────────────▶ disk
           ◀──────────────             ◀──────────────
              plan_load                      plan_fetch

Host slots whose content no file has are *dirty*: they are not evicted before they have been
spilled, unless the disk does not answer. So that a store finds clean ones, the next ones to go are
spilled ahead of time. Refuses to send, to wait and to read a clock: time is passed in, jobs are
returned, and how they ended has to be told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from kvcache.base.arguments import (
    as_bool,
    as_integers,
    as_number,
    as_text,
    as_tuple,
    check_kind,
    check_methods,
)
from kvcache.base.arrays import Int32Array
from kvcache.base.errors import ConfigurationError
from kvcache.offload.discards import Discards
from kvcache.offload.events import OffloadingEvent
from kvcache.offload.hits import Place, PlaceArray, TierHits
from kvcache.offload.job_completion import JobCompletion
from kvcache.offload.jobs import (
    FetchJob,
    JobKind,
    LoadJob,
    OverdueJob,
    SpillJob,
    StoreJob,
)
from kvcache.offload.keys import OffloadKey, label_keys
from kvcache.offload.look_up import locate, look_up
from kvcache.offload.options import HierarchyOptions
from kvcache.offload.slot_table import NOTHING, READY
from kvcache.offload.statistics import HierarchyStatistics
from kvcache.offload.tier_manager import TierManager
from kvcache.offload.tier_set import TierSet
from kvcache.protocol.commands import Label
from kvcache.requests.request_content import Namespace


class TierHierarchy:
    """Host memory above a disk, or alone. One owner, one thread, never blocks.

    Keys are those of device blocks; keys of one call are a chain, in order, of one group.
    Invariants: a dirty host key is not on disk; every hold in a tier is that of an open job. What
    came into host memory is spilled once at most: if the disk evicts it first, that was its time.
    """

    def __init__(
        self,
        host: TierManager,
        disk: TierManager | None,
        new_job_id: Callable[[], int],
        options: HierarchyOptions | None = None,
    ) -> None:
        """Begin with these tiers, which are used here only.

        `new_job_id` gives the number of a job; it is asked only when there is one.
        """
        check_kind("host", host, TierManager, ConfigurationError)
        check_kind("disk", disk, (TierManager, type(None)), ConfigurationError)
        check_kind("options", options, (HierarchyOptions, type(None)), ConfigurationError)
        check_methods("new_job_id", new_job_id, ("__call__",), ConfigurationError)
        self.host = host
        self.disk = disk
        self.options = HierarchyOptions() if options is None else options
        self._tiers = TierSet(host, disk, new_job_id, self.options)
        self._completion = JobCompletion(self._tiers)
        self.num_without_room = 0

    # Asking

    @property
    def num_open_jobs(self) -> int:
        """Jobs whose end has not been reported."""
        return len(self._tiers.transfers)

    @property
    def has_discards(self) -> bool:
        """Whether `take_discards` would return anything."""
        return bool(self._tiers.discards)

    @property
    def is_disk_in_use(self) -> bool:
        """Whether the disk is asked: it is left alone while it rests, a job of it is overdue, or it
        takes too long to say what it has."""
        return self._tiers.answering_disk is not None

    @property
    def has_spills(self) -> bool:
        """Whether `plan_spills` may have an answer."""
        return (
            self.disk is not None
            and self._room_to_spill() > 0
            and self.is_disk_in_use
            and not self.disk.is_adopting
            and self._tiers.spills.has_next()
        )

    def look_up(self, keys: Sequence[OffloadKey]) -> TierHits:
        """Return what the tiers hold of the leading keys. Changes nothing."""
        return look_up(as_tuple("keys", keys), self.host, self._tiers.answering_disk)

    def locate(self, keys: Sequence[OffloadKey]) -> PlaceArray:
        """Return a `Place` for each of the keys, whatever comes before it. Changes nothing."""
        return locate(keys, self.host, self._tiers.answering_disk)

    # Noting use

    def see(self, keys: Sequence[OffloadKey]) -> None:
        """Count a request whose blocks these are, for the store threshold of the host tier."""
        self.host.see(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Note that a request uses these: they become the newest in every tier that has them."""
        self.host.touch(keys)
        if self.disk is not None:
            self.disk.touch(keys)

    def count(self, hits: TierHits) -> None:
        """Add a request's look-up to the statistics; once per request."""
        check_kind("hits", hits, TierHits)
        num_in_host = int(np.count_nonzero(hits.places <= Place.HOST_PENDING))
        self.host.count_look_up(num_in_host, hits.num_asked - num_in_host)
        if self.disk is not None:
            num_on_disk = hits.num_keys - num_in_host
            self.disk.count_look_up(num_on_disk, hits.num_asked - num_in_host - num_on_disk)

    # Planning

    def plan_store(
        self,
        keys: Sequence[OffloadKey],
        now_s: float,
        *,
        labels: Label | None = None,
        behind: OffloadKey | None = None,
        is_private: bool = False,
        namespace: Namespace | None = None,
    ) -> StoreJob | None:
        """Plan to bring blocks of the device to host memory: as many leading missing ones as fit.

        None if there is nothing to store, or no room for it. What is there already counts as used.
        `num_without_room` says how many were left out for want of room.

        Args:
            keys: those of sealed blocks, in order of the chain.
            labels: one row per key; needed where the tiers keep labels.
            behind: the key that `keys[0]` continues.
            is_private: swapped content that has no label: stored however rarely it was seen,
                never sealed and never spilled, and dropped where room is needed; all of it or
                nothing.
            namespace: of all keys; says which tenant's they are, where there are tenants.
        """
        now_s, is_private = as_number("now_s", now_s), as_bool("is_private", is_private)
        if namespace is not None:
            check_kind("namespace", namespace, Namespace)
        reserved = self.host.reserve(
            keys,
            labels=labels,
            behind=behind,
            is_forced=is_private,
            needs_all=is_private,
            drops_dirty=not self.is_disk_in_use,
            tenant=self._tenant(namespace),
        )
        self.num_without_room = 0 if reserved is None else reserved.num_refused
        if reserved is None:
            return None
        self._tiers.spills.note_shortage(reserved.num_refused)
        if not len(reserved.positions):
            return None
        stored = [keys[i] for i in reserved.positions.tolist()]
        self._tiers.discards.drop_addresses(reserved.addresses)
        job = self._tiers.transfers.open(
            JobKind.STORE, stored, reserved.addresses, now_s, is_private=is_private
        )
        return StoreJob(job.job_id, job.keys, reserved.positions, reserved.addresses)

    def plan_fetch(self, keys: Sequence[OffloadKey], now_s: float) -> FetchJob | None:
        """Plan to bring keys from disk to host memory: as many leading ones as fit.

        Those that are not ready on disk are passed over; those in host memory stay there. None if
        there is nothing to fetch, or no room: load what is in host memory first.
        """
        now_s, in_host = as_number("now_s", now_s), self.host.states_of(keys)
        if self.disk is None or not self.is_disk_in_use:
            return None
        is_wanted = (self.disk.states_of(keys) == READY) & (in_host == NOTHING)
        room = self.options.max_fetching_blocks - self._tiers.transfers.num_keys(JobKind.FETCH)
        wanted = [keys[i] for i in np.flatnonzero(is_wanted)[: max(room, 0)].tolist()]
        if not wanted:
            return None
        reserved = self.host.reserve(
            wanted,
            labels=self.disk.labels_of(wanted),
            spares=keys,
            is_forced=True,
            drops_dirty=False,
            tenant=self.disk.tenants_of(wanted[:1])[0],
        )
        if reserved is None:
            return None
        self._tiers.spills.note_shortage(reserved.num_refused)
        fetched = [wanted[i] for i in reserved.positions.tolist()]
        if not fetched:
            return None
        self.disk.hold(fetched)
        self._tiers.discards.drop_addresses(reserved.addresses)
        job = self._tiers.transfers.open(JobKind.FETCH, fetched, reserved.addresses, now_s)
        return FetchJob(job.job_id, job.keys, reserved.addresses)

    def plan_load(self, keys: Sequence[OffloadKey], now_s: float) -> LoadJob | None:
        """Plan to bring the leading keys that are ready in host memory to the device.

        They stay where they are until `loaded`. None if there is no such key.
        """
        now_s = as_number("now_s", now_s)
        addresses = self.host.hold_leading(keys)
        if not len(addresses):
            return None
        loaded = keys[: len(addresses)]
        if self.disk is not None:
            self.disk.touch(loaded)
        job = self._tiers.transfers.open(JobKind.LOAD, loaded, addresses, now_s)
        return LoadJob(job.job_id, job.keys, addresses)

    def plan_spills(self, now_s: float) -> SpillJob | None:
        """Plan to write host content to disk: what will be evicted next, and what is to be there.

        To be asked once per step, after everything else, and again as long as there is an answer
        and the owner likes.
        """
        disk, now_s = self.disk, as_number("now_s", now_s)
        if disk is None or not self.has_spills:
            return None
        wanted = self._tiers.spills.next(self._room_to_spill())
        if not wanted:
            return None
        tenants = self.host.tenants_of(wanted)
        others = [place for place, name in enumerate(tenants) if name != tenants[0]]
        if others:  # each tenant for itself, the others the next time
            self._tiers.spills.write_through(wanted[others[0] :])
            wanted = wanted[: others[0]]
        reserved = disk.reserve(
            wanted, labels=self.host.labels_of(wanted), is_forced=True, tenant=tenants[0]
        )
        if reserved is None or not len(reserved.positions):
            self._tiers.spills.pause()
            return None
        self._tiers.discards.add_keys(reserved.evicted_keys)
        spilled = [wanted[i] for i in reserved.positions.tolist()]
        self._tiers.discards.drop_keys(spilled)
        job = self._tiers.transfers.open(
            JobKind.SPILL, spilled, self.host.prepare_spill(spilled), now_s
        )
        return SpillJob(job.job_id, job.keys, job.addresses)

    def _tenant(self, namespace: Namespace | None) -> str:
        """Return the name of a namespace's tenant; of no tenant where none is known."""
        tenants = self.host.tenants
        return "" if tenants is None or namespace is None else tenants.shares.name_in(namespace)

    def _room_to_spill(self) -> int:
        return self.options.max_spilling_blocks - self._tiers.transfers.num_keys(JobKind.SPILL)

    # Ending

    def stored(self, job_id: int, ok: bool) -> Int32Array:
        """A store has ended on every rank; return the host addresses that are to be sealed.

        Raises InvalidInputError for a job that is not open, as the other three do.
        """
        return self._completion.stored(job_id, as_bool("ok", ok))

    def fetched(
        self,
        job_id: int,
        ok: bool,
        failed: Collection[int] = (),
        lost: Collection[int] | None = None,
    ) -> Int32Array:
        """A fetch has ended on every rank; return the host addresses that are to be sealed.

        `failed` are those that went wrong on any rank, none for all of them. Of these, the disk
        forgets what should have come to `lost`: all where nothing is said of it.
        """
        failed = as_integers("failed", failed).tolist()
        lost = None if lost is None else as_integers("lost", lost).tolist()
        return self._completion.fetched(job_id, as_bool("ok", ok), failed, lost)

    def spilled(self, job_id: int, ok: bool, failed: Collection[int] = ()) -> None:
        """A spill has ended on every rank. What failed (as in `fetched`) is not tried again."""
        failed = as_integers("failed", failed).tolist()
        self._completion.spilled(job_id, as_bool("ok", ok), failed)

    def loaded(self, job_id: int, ok: bool, failed: Collection[int] = ()) -> None:
        """A load has ended on every rank. Host memory forgets what failed (as in `fetched`)."""
        failed = as_integers("failed", failed).tolist()
        self._completion.loaded(job_id, as_bool("ok", ok), failed)

    def rest_disk(self, reason: str, now_s: float) -> None:
        """Leave the disk alone for a while: it did not serve, and what it has is not lost by that.

        Meanwhile what it holds is not found, and nothing is spilled. `expire` ends the rest.
        """
        reason = as_text("reason", reason, may_be_empty=True)
        self._tiers.rest.begin(reason, as_number("now_s", now_s))

    def leave_disk(self, problem: str) -> None:
        """Leave the disk alone for good: a rank cannot use its own."""
        self._tiers.disk_problem = as_text("problem", problem, may_be_empty=True)

    def postpone_disk(self, problem: str) -> None:
        """Leave the disk alone until `adopt_disk`: what it has is found out, and waited for by
        nobody. Until then it is as if there were none."""
        self._tiers.adoption_problem = as_text("problem", problem, may_be_empty=True)

    def expire(self, now_s: float) -> tuple[OverdueJob, ...]:
        """Note which jobs are overdue; return each once.

        What is written then, in host memory or on disk, is invisible and in quarantine; what is
        read is held. Both until the job's end is told. Overdue jobs of the disk: it is left alone.
        """
        return self._completion.expire(as_number("now_s", now_s))

    def take_discards(self) -> Discards:
        """Return what workers shall forget since the last call.

        Nothing in it is the target of an open job.
        """
        return self._tiers.discards.take()

    # Losing and finding content

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Let keys vanish from every tier."""
        self._tiers.forget(keys)

    def reset(self) -> None:
        """Let everything vanish. Jobs under way end as they would, to no effect."""
        self.forget(self.host.keys())
        if self.disk is not None:
            self.forget(self.disk.keys())
        self.host.reset_cache()
        self._tiers.spills.clear()

    def begin_adoption(self) -> None:
        """Say RETRY where the answer would be MISS, and store nothing, until tiers are adopted.

        Raises InvalidInputError if a tier is not empty.
        """
        self.host.begin_adoption()
        if self.disk is not None:
            self.disk.begin_adoption()

    def adopt_host(self, labels: Label) -> None:
        """Take what all ranks hold in host memory: rows by address (`block_ids`), oldest first.

        What does not fit is discarded. Raises InvalidInputError if the tier is not empty.
        """
        keys = label_keys(labels)
        refused = self.host.adopt(keys, labels.block_ids, labels)
        kept = self.host.addresses_of(keys)
        stale = labels.block_ids[refused]
        exists = (stale >= 0) & (stale < self.host.num_addresses)
        self._tiers.discards.add_addresses(stale[exists & ~np.isin(stale, kept)])
        self.host.mark_dirty(self._tiers.not_on_disk(keys))
        self._tiers.spills.wake()

    def adopt_disk(self, labels: Label) -> None:
        """Take what all ranks have files of, oldest first. What does not fit is discarded.

        Raises InvalidInputError if the tier is not empty, ConfigurationError if there is no disk.
        """
        if self.disk is None:
            raise ConfigurationError("files cannot be adopted without a file tier: configure one")
        keys = label_keys(labels)
        refused = self.disk.adopt(keys, None, labels)
        is_kept = self.disk.states_of(keys) == READY
        gone = [keys[i] for i in refused.tolist() if not is_kept[i]]
        self._tiers.discards.add_keys(gone)
        self._tiers.adoption_problem = ""
        self.host.mark_clean([keys[i] for i in np.flatnonzero(is_kept).tolist()])
        self._tiers.spills.wake()

    # Statistics

    def present_events(self) -> list[OffloadingEvent]:
        """Return events that say all that tiers hold now, by tier."""
        tiers = [tier for tier in (self.host, self.disk) if tier is not None]
        return [event for tier in tiers if (event := tier.present_event()) is not None]

    def take_events(self) -> tuple[OffloadingEvent, ...]:
        """Return what appeared in tiers and disappeared since the last call, by tier."""
        events = self.host.take_events()
        return events if self.disk is None else events + self.disk.take_events()

    def statistics(self) -> HierarchyStatistics:
        """Return frozen statistics."""
        return HierarchyStatistics(
            host=self.host.statistics(),
            disk=None if self.disk is None else self.disk.statistics(),
            open_jobs=self._tiers.transfers.by_kind(),
            num_overdue=self._tiers.transfers.num_overdue(),
            num_failed_jobs=self._tiers.transfers.num_failed,
            num_expired_jobs=self._tiers.transfers.num_expired,
            num_disk_rests=self._tiers.rest.num_rests,
            disk_problem=self._tiers.disk_problem
            or self._tiers.adoption_problem
            or (self._tiers.rest.reason if self._tiers.rest.is_on else ""),
        )

    def shutdown(self) -> None:
        """End for good."""
        self.host.shutdown()
        if self.disk is not None:
            self.disk.shutdown()

    def check(self) -> None:
        """Raise InvariantError with the sum that failed."""
        self._tiers.check()
