"""Device, host memory, disk: plans stores and spills, fetches and loads, and discards.

The coordinator reports sealed blocks and requests; the tiers know what they hold. Each plan is a
job for all workers. The tables change when it is planned; content is visible when the job has
succeeded everywhere.

              plan_store                    plan_spills
    device ──────────────▶ host memory ──────────────▶ disk
           ◀──────────────             ◀──────────────
              plan_load                      plan_fetch

Host slots with content that no file has are *dirty*: they are not evicted before they have been
spilled, unless the disk does not answer. The next victims are spilled ahead of time, so that a
store finds clean slots. Sends nothing, waits for nothing and reads no clock: time is passed in,
jobs are returned, and their results must be reported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.base.arguments import (
    as_bool,
    as_int,
    as_integers,
    as_number,
    as_tuple,
    check_kind,
    check_methods,
)
from kvcache.base.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.base.errors import ConfigurationError, InvariantError
from kvcache.offload.contents import label_rows
from kvcache.offload.disk_use import DiskUse
from kvcache.offload.events import OffloadingEvent
from kvcache.offload.hits import Place, PlaceArray, TierHits, locate, look_up
from kvcache.offload.jobs import (
    FetchJob,
    JobKind,
    LoadJob,
    OpenJob,
    OverdueJob,
    SpillJob,
    StoreJob,
    TransferTable,
)
from kvcache.offload.keys import OffloadKey, label_keys
from kvcache.offload.options import HierarchyOptions
from kvcache.offload.slots import NO_ADDRESS, NOTHING, READY
from kvcache.offload.spills import SpillQueue
from kvcache.offload.statistics import HierarchyStatistics
from kvcache.offload.tier_manager import TierManager
from kvcache.protocol.commands import Label
from kvcache.requests.hints import CacheHint
from kvcache.requests.request_content import Namespace


@dataclass(frozen=True, eq=False)
class Discards:
    """Host addresses whose labels, and keys whose files, must be dropped. Falsy if empty."""

    addresses: Int32Array
    keys: tuple[OffloadKey, ...]

    def __bool__(self) -> bool:
        return bool(len(self.addresses) or self.keys)


class DiscardList:
    """Discards that were not taken yet. Bounded by the size of the tiers.

    A new job overwrites its targets, which need no discard any more. So the order of commands
    planned together does not matter.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._addresses: dict[int, None] = {}
        self._keys: dict[OffloadKey, None] = {}

    def __bool__(self) -> bool:
        return bool(self._addresses or self._keys)

    def add_addresses(self, addresses: Int32Array) -> None:
        """Drop the labels of host addresses."""
        self._addresses.update(dict.fromkeys(addresses.tolist()))

    def add_keys(self, keys: Iterable[OffloadKey]) -> None:
        """Drop the files of keys."""
        self._keys.update(dict.fromkeys(keys))

    def drop_addresses(self, addresses: Int32Array) -> None:
        """Cancel discards of addresses that are overwritten."""
        for address in addresses.tolist() if self._addresses else ():
            self._addresses.pop(address, None)

    def drop_keys(self, keys: Iterable[OffloadKey]) -> None:
        """Cancel discards of keys whose files are written again."""
        for key in keys if self._keys else ():
            self._keys.pop(key, None)

    def take(self) -> Discards:
        """Return and clear all discards."""
        discards = Discards(int32_array(list(self._addresses)), tuple(self._keys))
        self._addresses.clear()
        self._keys.clear()
        return discards


class TierHierarchy:
    """Host memory above a disk, or alone. One user, one thread, never blocks.

    Keys are those of device blocks; the keys of one call are a chain, in order, of one group.
    Invariants: a dirty host key is not on disk; every hold in a tier belongs to an open job.
    Content of host memory is spilled at most once, even if the disk evicts it first.
    """

    def __init__(
        self,
        host: TierManager,
        disk: TierManager | None,
        new_job_id: Callable[[], int],
        options: HierarchyOptions | None = None,
    ) -> None:
        """Use these tiers exclusively.

        `new_job_id` returns the number of a job, and is called only for one.
        """
        check_kind("host", host, TierManager, ConfigurationError)
        check_kind("disk", disk, (TierManager, type(None)), ConfigurationError)
        check_kind("options", options, (HierarchyOptions, type(None)), ConfigurationError)
        check_methods("new_job_id", new_job_id, ("__call__",), ConfigurationError)
        self.host = host
        self.disk = disk
        self.options = HierarchyOptions() if options is None else options
        self.transfers = TransferTable(new_job_id, self.options.deadlines)
        """The open jobs. For reading only."""
        self._spills = SpillQueue(host, self.options.spare_share)
        self.disk_use = DiskUse()
        """Whether the disk is used. Callers report its failures."""
        self.discards = DiscardList()
        """What workers must drop. None of it is the target of an open job."""
        self.num_without_room = 0

    # Questions

    @property
    def num_open_jobs(self) -> int:
        """Jobs whose end has not been reported."""
        return len(self.transfers)

    @property
    def is_disk_in_use(self) -> bool:
        """Whether the disk answers: it is not resting, lost, late or overdue with a job."""
        return self._answering_disk is not None

    @property
    def has_spills(self) -> bool:
        """Whether `plan_spills` may have an answer."""
        return (
            self.disk is not None
            and self._room_to_spill() > 0
            and self.is_disk_in_use
            and not self.disk.is_adopting
            and self._spills.has_next()
        )

    def look_up(self, keys: Sequence[OffloadKey]) -> TierHits:
        """Return what the tiers hold of the leading keys. Changes nothing."""
        return look_up(as_tuple("keys", keys), self.host, self._answering_disk)

    def locate(self, keys: Sequence[OffloadKey]) -> PlaceArray:
        """Return a `Place` for each of the keys, independently. Changes nothing."""
        return locate(keys, self.host, self._answering_disk)

    # Recording use

    def see(self, keys: Sequence[OffloadKey]) -> None:
        """Count a request with these blocks, for the store threshold of the host tier."""
        self.host.sightings.see(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Make keys the most recently used in every tier that has them."""
        self.host.touch(keys)
        if self.disk is not None:
            self.disk.touch(keys)

    def hint(
        self, keys: Sequence[OffloadKey], start: int, end: int, hint: CacheHint, now_s: float
    ) -> None:
        """Follow a hint for the blocks `keys[start:end]` in every tier that has them. `keys` is the
        chain of a request in one group, from its beginning."""
        check_kind("hint", hint, CacheHint)
        start, end = as_int("start", start), as_int("end", end)
        now_s = as_number("now_s", now_s)
        for tier in self._tiers():
            tier.eviction.hint(keys, start, end, hint, now_s)

    def _tiers(self) -> tuple[TierManager, ...]:
        return (self.host,) if self.disk is None else (self.host, self.disk)

    def _follow_time(self, now_s: float) -> None:
        for tier in self._tiers():
            tier.eviction.follow_time(now_s)

    def describe(self, keys: Sequence[OffloadKey], labels: Label) -> None:
        """Complete labels that were adopted without tokens, in every tier, with events."""
        self.host.contents.describe(keys, labels)
        if self.disk is not None:
            self.disk.contents.describe(keys, labels)

    def count(self, hits: TierHits) -> None:
        """Add a request's look-up to the statistics; once per request."""
        check_kind("hits", hits, TierHits)
        num_in_host = int(np.count_nonzero(hits.places <= Place.HOST_PENDING))
        self.host.counts.add_look_up(num_in_host, hits.num_asked - num_in_host)
        if self.disk is not None:
            num_on_disk = hits.num_keys - num_in_host
            self.disk.counts.add_look_up(num_on_disk, hits.num_asked - num_in_host - num_on_disk)

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
        """Plan to store device blocks in host memory: as many leading missing ones as fit.

        None if there is nothing to store, or no room for it. Keys already there count as used.
        `num_without_room` says how many were left out because of that.

        Args:
            keys: those of sealed blocks, in order of the chain.
            labels: one row per key; needed if the tiers keep labels.
            behind: the key that `keys[0]` continues.
            is_private: swapped content without a label: stored however rarely it was seen, never
                sealed or spilled, and dropped when its room is needed; all or nothing.
            namespace: of all keys; identifies their tenant, if there are tenants.
        """
        now_s, is_private = as_number("now_s", now_s), as_bool("is_private", is_private)
        self._follow_time(now_s)
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
        self._spills.note_shortage(reserved.num_refused)
        if not len(reserved.positions):
            return None
        stored = [keys[i] for i in reserved.positions.tolist()]
        self.discards.drop_addresses(reserved.addresses)
        job = self.transfers.open(
            JobKind.STORE, stored, reserved.addresses, now_s, is_private=is_private
        )
        return StoreJob(job.job_id, job.keys, reserved.positions, reserved.addresses)

    def plan_fetch(self, keys: Sequence[OffloadKey], now_s: float) -> FetchJob | None:
        """Plan to fetch keys from disk to host memory: as many leading ones as fit.

        Skips keys that are not ready on disk or already in host memory. None if there is nothing to
        fetch, or no room: load the keys in host memory first.
        """
        now_s, in_host = as_number("now_s", now_s), self.host.states_of(keys)
        if self.disk is None or not self.is_disk_in_use:
            return None
        is_wanted = (self.disk.states_of(keys) == READY) & (in_host == NOTHING)
        room = self.options.max_fetching_blocks - self.transfers.num_keys(JobKind.FETCH)
        wanted = [keys[i] for i in np.flatnonzero(is_wanted)[: max(room, 0)].tolist()]
        if not wanted:
            return None
        reserved = self.host.reserve(
            wanted,
            labels=self.disk.contents.labels_at(self.disk.addresses_of(wanted)),
            spares=keys,
            is_forced=True,
            drops_dirty=False,
            tenant=self.disk.tenants_of(wanted[:1])[0],
        )
        if reserved is None:
            return None
        self._spills.note_shortage(reserved.num_refused)
        fetched = [wanted[i] for i in reserved.positions.tolist()]
        if not fetched:
            return None
        self.disk.hold(fetched)
        self.discards.drop_addresses(reserved.addresses)
        job = self.transfers.open(JobKind.FETCH, fetched, reserved.addresses, now_s)
        return FetchJob(job.job_id, job.keys, reserved.addresses)

    def plan_import(
        self,
        keys: Sequence[OffloadKey],
        now_s: float,
        *,
        labels: Label | None = None,
        spares: Sequence[OffloadKey] = (),
    ) -> FetchJob | None:
        """Plan to copy keys from another node to host memory: as many leading ones as fit.

        Skips keys that host memory has. None if there is nothing to copy, or no room. `labels` as
        in `plan_store`; `spares` are not evicted for it. They are evicted before other keys, until
        they have been loaded twice: the other node has them, too.
        """
        now_s, in_host = as_number("now_s", now_s), self.host.states_of(keys)
        room = self.options.max_fetching_blocks - self.transfers.num_keys(JobKind.IMPORT)
        places = np.flatnonzero(in_host == NOTHING)[: max(room, 0)]
        if not len(places):
            return None
        wanted = [keys[i] for i in places.tolist()]
        reserved = self.host.reserve(
            wanted,
            labels=None if labels is None else label_rows(labels, places),
            spares=spares,
            is_forced=True,
            drops_dirty=not self.is_disk_in_use,
            are_copies=True,
        )
        if reserved is None:
            return None
        self._spills.note_shortage(reserved.num_refused)
        imported = [wanted[i] for i in reserved.positions.tolist()]
        if not imported:
            return None
        self.discards.drop_addresses(reserved.addresses)
        job = self.transfers.open(JobKind.IMPORT, imported, reserved.addresses, now_s)
        return FetchJob(job.job_id, job.keys, reserved.addresses)

    def plan_load(self, keys: Sequence[OffloadKey], now_s: float) -> LoadJob | None:
        """Plan to load the leading keys that are ready in host memory.

        They are held there until `loaded`. None if there is no such key.
        """
        now_s = as_number("now_s", now_s)
        addresses = self.host.hold_leading(keys)
        if not len(addresses):
            return None
        loaded = keys[: len(addresses)]
        if self.disk is not None:
            self.disk.touch(loaded)
        job = self.transfers.open(JobKind.LOAD, loaded, addresses, now_s)
        return LoadJob(job.job_id, job.keys, addresses)

    def plan_spills(self, now_s: float) -> SpillJob | None:
        """Plan to spill host content to disk: the next victims, and requested keys.

        Call it once per step, after everything else, and again while it has an answer.
        """
        disk, now_s = self.disk, as_number("now_s", now_s)
        self._follow_time(now_s)
        if disk is None or not self.has_spills:
            return None
        wanted = self._spills.next(self._room_to_spill())
        if not wanted:
            return None
        tenants = self.host.tenants_of(wanted)
        others = [place for place, name in enumerate(tenants) if name != tenants[0]]
        if others:  # one tenant at a time
            self._spills.write_through(wanted[others[0] :])
            wanted = wanted[: others[0]]
        labels = self.host.contents.labels_at(self.host.addresses_of(wanted))
        reserved = disk.reserve(wanted, labels=labels, is_forced=True, tenant=tenants[0])
        if reserved is None or not len(reserved.positions):
            self._spills.pause()
            return None
        self.discards.add_keys(reserved.evicted_keys)
        spilled = [wanted[i] for i in reserved.positions.tolist()]
        self.discards.drop_keys(spilled)
        job = self.transfers.open(JobKind.SPILL, spilled, self.host.prepare_spill(spilled), now_s)
        return SpillJob(job.job_id, job.keys, job.addresses)

    def _tenant(self, namespace: Namespace | None) -> str:
        """Return the name of a namespace's tenant; empty if none is known."""
        tenants = self.host.tenants
        return "" if tenants is None or namespace is None else tenants.shares.name_in(namespace)

    def _room_to_spill(self) -> int:
        return self.options.max_spilling_blocks - self.transfers.num_keys(JobKind.SPILL)

    # Results

    def stored(self, job_id: int, ok: bool) -> Int32Array:
        """Record the end of a store on every rank; return the host addresses to seal.

        Raises InvalidInputError for a job that is not open, as the other three do.
        """
        ok = as_bool("ok", ok)
        job = self.transfers.require(job_id, JobKind.STORE)
        self.host.complete_store(job.keys, success=ok)
        self._close(job, is_good=ok)
        if not ok or job.is_private:
            return EMPTY_INT32
        missing = self._not_on_disk(job.keys)
        self._spills.mark_dirty(missing)
        if self.options.disk_write == "on_store":
            self._spills.write_through(missing)
        return self._visible(job)

    def fetched(
        self,
        job_id: int,
        ok: bool,
        failed: Collection[int] = (),
        lost: Collection[int] | None = None,
    ) -> Int32Array:
        """Record the end of a fetch on every rank; return the host addresses to seal.

        `failed` are those that went wrong on any rank, None for all of them. Of these, the disk
        drops the keys for the addresses `lost`: all if it is None.
        """
        failed = as_integers("failed", failed).tolist()
        lost = None if lost is None else as_integers("lost", lost).tolist()
        ok = as_bool("ok", ok)
        job = self.transfers.require(job_id, JobKind.FETCH)
        good, bad = job.split(ok, failed)
        if job.is_overdue:
            self.host.complete_store(job.keys, success=False)
        else:
            self.host.complete_store(good, success=True)
            self.host.complete_store(bad, success=False)
        gone = bad if lost is None else job.keys_at(lost, among=bad)
        if self.disk is not None:
            self.disk.complete_load(job.keys)
            self.disk.forget(gone)
            self._discard_files(job.keys)
        if good and len(gone) == len(bad) and not job.is_overdue:
            self.disk_use.served()  # it answered for every file
        self._close(job, is_good=ok)
        return self._visible(job)

    def imported(self, job_id: int, ok: bool, failed: Collection[int] = ()) -> Int32Array:
        """Record the end of an import on every rank; return the host addresses to seal.

        `failed` as in `fetched`. What was imported is clean: another node has it, so no file is
        written for it here.
        """
        failed = as_integers("failed", failed).tolist()
        ok = as_bool("ok", ok)
        job = self.transfers.require(job_id, JobKind.IMPORT)
        good, bad = job.split(ok and not job.is_overdue, () if job.is_overdue else failed)
        self.host.complete_store(good, success=True)
        self.host.complete_store(bad, success=False)
        self._close(job, is_good=ok)
        return self._visible(job)

    def spilled(self, job_id: int, ok: bool, failed: Collection[int] = ()) -> None:
        """Record the end of a spill on every rank. Failed keys (as in `fetched`) are not
        retried."""
        failed = as_integers("failed", failed).tolist()
        ok = as_bool("ok", ok)
        job = self.transfers.require(job_id, JobKind.SPILL)
        good, bad = job.split(ok and not job.is_overdue, () if job.is_overdue else failed)
        is_known = self.host.states_of(good) == READY
        bad += [good[i] for i in np.flatnonzero(~is_known).tolist()]
        good = [good[i] for i in np.flatnonzero(is_known).tolist()]
        self.host.complete_spill(job.keys)
        if self.disk is not None:
            self.disk.complete_store(good, success=True)
            self.disk.complete_store(bad, success=False)
            self._discard_files(job.keys)
        self._discard_labels(job)
        self._spills.mark_clean(job.keys)
        self._close(job, is_good=ok)

    def loaded(self, job_id: int, ok: bool, failed: Collection[int] = ()) -> None:
        """Record the end of a load on every rank. Host memory drops failed keys (as in
        `fetched`)."""
        failed = as_integers("failed", failed).tolist()
        ok = as_bool("ok", ok)
        job = self.transfers.require(job_id, JobKind.LOAD)
        _, bad = job.split(ok, failed)
        self.host.complete_load(job.keys)
        self.host.forget(bad)
        self._discard_labels(job)
        self._close(job, is_good=ok)

    def expire(self, now_s: float) -> tuple[OverdueJob, ...]:
        """Mark jobs as overdue; return each once.

        Their targets, in host memory or on disk, are invisible and in quarantine; their sources are
        held. Both until the job's result is reported. While a job of the disk is overdue, the disk
        is not used.
        """
        now_s = as_number("now_s", now_s)
        self.disk_use.look(now_s)
        self._follow_time(now_s)
        late = self.transfers.expire(now_s)
        for job in late:
            if job.kind in (JobKind.STORE, JobKind.FETCH, JobKind.IMPORT):
                self.host.forget(job.keys)
            elif job.kind is JobKind.SPILL and self.disk is not None:
                self.disk.forget(job.keys)
        return tuple(OverdueJob(job.job_id, job.kind, job.keys, job.addresses) for job in late)

    # Dropping and adopting content

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Drop keys from every tier."""
        ready = [keys[i] for i in np.flatnonzero(self.host.states_of(keys) == READY).tolist()]
        addresses = self.host.addresses_of(ready)
        self.host.forget(keys)
        is_gone = self.host.addresses_of(ready) == NO_ADDRESS
        self.discards.add_addresses(addresses[is_gone])
        if self.disk is not None:
            self._discard_files(self.disk.forget(keys))

    def reset(self) -> None:
        """Drop all keys. Jobs in progress end without effect."""
        self.forget(self.host.keys())
        if self.disk is not None:
            self.forget(self.disk.keys())
        self.host.reset_cache()
        self._spills.clear()

    def begin_adoption(self) -> None:
        """Answer RETRY instead of MISS, and store nothing, until tiers are adopted.

        Raises InvalidInputError if a tier is not empty.
        """
        self.host.begin_adoption()
        if self.disk is not None:
            self.disk.begin_adoption()

    def adopt_host(self, labels: Label) -> None:
        """Adopt the content of all ranks' host memory: rows by address (`block_ids`), oldest first.

        Discards rows that do not fit. Raises InvalidInputError if the tier is not empty.
        """
        keys = label_keys(labels)
        refused = self.host.adopt(keys, labels.block_ids, labels)
        kept = self.host.addresses_of(keys)
        stale = labels.block_ids[refused]
        exists = (stale >= 0) & (stale < len(self.host.slots.keys))
        self.discards.add_addresses(stale[exists & ~np.isin(stale, kept)])
        self._spills.mark_dirty(self._not_on_disk(keys))
        self._spills.wake()

    def adopt_disk(self, labels: Label) -> None:
        """Adopt the files of all ranks, oldest first. Discards files that do not fit.

        Raises InvalidInputError if the tier is not empty, ConfigurationError without a disk.
        """
        if self.disk is None:
            raise ConfigurationError("files cannot be adopted without a file tier: configure one")
        keys = label_keys(labels)
        refused = self.disk.adopt(keys, None, labels)
        is_kept = self.disk.states_of(keys) == READY
        gone = [keys[i] for i in refused.tolist() if not is_kept[i]]
        self.discards.add_keys(gone)
        self.disk_use.adopted()
        self._spills.mark_clean([keys[i] for i in np.flatnonzero(is_kept).tolist()])
        self._spills.wake()

    def files_changed(self, labels: Label, removed: Sequence[OffloadKey]) -> None:
        """Take note of files that other processes have written (one row each) and removed.

        What is written or read here at the moment stays as it is: the end of its job says more.
        Discards nothing.
        """
        if self.disk is None:
            return
        is_ready = self.disk.states_of(removed) == READY
        self.disk.forget([removed[place] for place in np.flatnonzero(is_ready).tolist()])
        self._spills.mark_clean(self.disk.join(label_keys(labels), labels))
        self._spills.wake()

    # Statistics

    def present_events(self) -> list[OffloadingEvent]:
        """Return events with the whole content of the tiers, by tier."""
        tiers = [tier for tier in (self.host, self.disk) if tier is not None]
        return [event for tier in tiers if (event := tier.contents.present_event()) is not None]

    def take_events(self) -> tuple[OffloadingEvent, ...]:
        """Return the events of tiers since the last call, by tier."""
        events = self.host.take_events()
        return events if self.disk is None else events + self.disk.take_events()

    def statistics(self) -> HierarchyStatistics:
        """Return frozen statistics."""
        return HierarchyStatistics(
            host=self.host.statistics(),
            disk=None if self.disk is None else self.disk.statistics(),
            open_jobs=self.transfers.by_kind(),
            num_overdue=self.transfers.num_overdue(),
            num_failed_jobs=self.transfers.num_failed,
            num_expired_jobs=self.transfers.num_expired,
            num_disk_rests=self.disk_use.num_rests,
            disk_problem=self.disk_use.problem,
        )

    def check(self) -> None:
        """Raise InvariantError with the sum that failed."""
        self.host.check()
        dirty = self._spills.owed(self.host.keys())
        if self.disk is not None:
            self.disk.check()
        num_clean = len(dirty) - len(self._not_on_disk(dirty))
        if num_clean:
            raise InvariantError(f"{num_clean} host keys are dirty without need")
        stores, loads, spills, fetches, imports = (
            sum(len(job.keys) for job in self.transfers.jobs() if job.kind is kind)
            for kind in JobKind
        )
        expected = [(stores + fetches + imports, loads, spills), (spills, fetches, 0)]
        tiers = [self.host] if self.disk is None else [self.host, self.disk]
        found = [tier.slots.num_jobs() for tier in tiers]
        if found != expected[: len(tiers)]:
            raise InvariantError(
                f"tiers count {found} writes, loads and spills of keys, open jobs make {expected}"
            )

    # Inside

    @property
    def _answering_disk(self) -> TierManager | None:
        """The disk; None without one, while it is not used, or while one of its jobs is overdue."""
        is_overdue = self.transfers.num_overdue(JobKind.SPILL, JobKind.FETCH)
        return None if self.disk_use.is_off or is_overdue else self.disk

    def _not_on_disk(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the keys that the disk does not have ready; none without a disk."""
        if self.disk is None:
            return []
        is_missing = self.disk.states_of(keys) != READY
        return [keys[i] for i in np.flatnonzero(is_missing).tolist()]

    def _discard_labels(self, job: OpenJob) -> None:
        """Discard the labels of keys that a job has read in host memory and that are gone."""
        is_gone = self.host.addresses_of(job.keys) == NO_ADDRESS
        self.discards.add_addresses(job.addresses[is_gone])

    def _discard_files(self, keys: Sequence[OffloadKey]) -> None:
        """Discard the files of keys that the disk no longer has."""
        if self.disk is not None:
            gone = np.flatnonzero(self.disk.addresses_of(keys) == NO_ADDRESS)
            self.discards.add_keys([keys[i] for i in gone.tolist()])

    def _visible(self, job: OpenJob) -> Int32Array:
        """Return those addresses of a finished job that are ready."""
        visible: Int32Array = job.addresses[self.host.slots.states[job.addresses] == READY]
        return visible

    def _close(self, job: OpenJob, *, is_good: bool) -> None:
        self.transfers.close(job, is_good=is_good)
        self._spills.wake()
