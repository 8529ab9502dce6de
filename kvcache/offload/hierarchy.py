"""Device, host memory, disk: plans stores and spills, fetches and loads, and discards.

The coordinator reports sealed blocks and requests; the tiers know what they hold. Each plan is a
job for all workers. The tables change when it is planned; content is visible when the job has
succeeded everywhere.

              plan_store                    plan_spills
    device ──────────────▶ host memory ──────────────▶ disk
           ◀──────────────             ◀──────────────
              plan_load                      plan_fetch

Hints move along with what they are about: a file follows those of the host memory that it was
written from, and the other way round.

Host slots with content that no file has are *dirty*: they are not evicted before they have been
spilled, unless the disk does not answer. The next victims are spilled ahead of time, so that a
store finds clean slots. Sends nothing, waits for nothing and reads no clock: time is passed in,
jobs are returned, and their results must be reported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.base.arguments import as_bool, as_integers, as_number, check_kind, check_methods
from kvcache.base.arrays import EMPTY_INT32, IndexArray, Int32Array, int32_array
from kvcache.base.errors import ConfigurationError, InvariantError
from kvcache.offload.disk_use import DiskUse
from kvcache.offload.events import OffloadingEvent
from kvcache.offload.jobs import JobKind, TransferJob, TransferTable
from kvcache.offload.keys import OffloadKey, label_keys
from kvcache.offload.options import HierarchyOptions
from kvcache.offload.slots import NO_ADDRESS, NOTHING, READY, STORING
from kvcache.offload.spills import SpillQueue
from kvcache.offload.statistics import HierarchyStatistics
from kvcache.offload.tier_manager import ReservedPlaces, TierManager
from kvcache.protocol.commands import Label
from kvcache.protocol.labels import label_rows
from kvcache.requests.request_content import Namespace

PlaceArray: TypeAlias = npt.NDArray[np.uint8]
"""A `Place` per key."""


class Place(IntEnum):
    """Where a key is. UNKNOWN: not known, because a tier is still being adopted. PEER: in another
    engine's memory; NODE: in that of another node. Hierarchies do not know these two."""

    NOWHERE = 0
    UNKNOWN = 1
    HOST = 2
    HOST_PENDING = 3
    DISK = 4
    DISK_PENDING = 5
    PEER = 6
    NODE = 7


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
        self._addresses: dict[int, None] = {}
        self._keys: dict[OffloadKey, None] = {}

    def __bool__(self) -> bool:
        return bool(self._addresses or self._keys)

    def add_addresses(self, addresses: IndexArray | Int32Array) -> None:
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
    """Host memory above a disk, or alone. One user, one thread, never blocks. Iterates over its
    tiers, the upper one first.

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
        """The jobs whose end has not been reported. For reading only."""
        self._spills = SpillQueue(host, self.options.spare_share)
        self.disk_use = DiskUse()
        """Whether the disk is used. Callers report its failures."""
        self.discards = DiscardList()
        """What workers must drop. None of it is the target of an open job."""
        self.num_without_room = 0

    def __iter__(self) -> Iterator[TierManager]:
        yield self.host
        if self.disk is not None:
            yield self.disk

    # Questions

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

    def locate(self, keys: Sequence[OffloadKey]) -> PlaceArray:
        """Return a `Place` for each of the keys, independently. Changes nothing."""
        in_host, disk = self.host.states_of(keys), self._answering_disk
        is_adopting = self.host.is_adopting
        places = np.full(len(keys), Place.NOWHERE, np.uint8)
        if disk is not None:
            is_adopting |= disk.is_adopting
            on_disk = disk.states_of(keys)
            places[on_disk == STORING] = Place.DISK_PENDING
            places[on_disk == READY] = Place.DISK
        if is_adopting:
            places[places == Place.NOWHERE] = Place.UNKNOWN
        places[in_host == STORING] = Place.HOST_PENDING
        places[in_host == READY] = Place.HOST
        return places

    def _follow_time(self, now_s: float) -> None:
        for tier in self:
            tier.eviction.follow_time(now_s)

    # Planning

    def plan_store(
        self,
        keys: Sequence[OffloadKey],
        now_s: float,
        *,
        labels: Label | None = None,
        is_private: bool = False,
        namespace: Namespace | None = None,
    ) -> TransferJob | None:
        """Plan to store device blocks in host memory: as many leading missing ones as fit.

        None if there is nothing to store, or no room for it. Keys already there count as used.
        `num_without_room` says how many were left out because of that.

        Args:
            keys: those of sealed blocks, in order of the chain.
            labels: one row per key; needed if the tiers keep labels.
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
            is_forced=is_private,
            needs_all=is_private,
            drops_dirty=not self.is_disk_in_use,
            tenant=self._tenant(namespace),
        )
        self.num_without_room = 0 if reserved is None else reserved.num_refused
        return self._write(JobKind.STORE, keys, reserved, now_s, is_private=is_private)

    def plan_fetch(self, keys: Sequence[OffloadKey], now_s: float) -> TransferJob | None:
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
            labels=self.disk.contents.labels_at(self.disk.slots.addresses_of(wanted)),
            spares=keys,
            is_forced=True,
            drops_dirty=False,
            tenant=self.disk.tenants_of(wanted[:1])[0],
        )
        job = self._write(JobKind.FETCH, wanted, reserved, now_s)
        if job is not None:
            self.disk.hold_leading(job.keys)
        return job

    def plan_import(
        self,
        keys: Sequence[OffloadKey],
        now_s: float,
        *,
        labels: Label | None = None,
        spares: Sequence[OffloadKey] = (),
    ) -> TransferJob | None:
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
        return self._write(JobKind.IMPORT, wanted, reserved, now_s)

    def plan_load(self, keys: Sequence[OffloadKey], now_s: float) -> TransferJob | None:
        """Plan to load the leading keys that are ready in host memory.

        They are held there until the job's `end`. None if there is no such key.
        """
        now_s = as_number("now_s", now_s)
        addresses = self.host.hold_leading(keys)
        if not len(addresses):
            return None
        loaded = keys[: len(addresses)]
        if self.disk is not None:
            self.disk.touch(loaded)
        return self.transfers.open(JobKind.LOAD, loaded, addresses, now_s)

    def plan_spills(self, now_s: float) -> TransferJob | None:
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
        labels = self.host.contents.labels_at(self.host.slots.addresses_of(wanted))
        reserved = disk.reserve(wanted, labels=labels, is_forced=True, tenant=tenants[0])
        if reserved is None or not len(reserved.positions):
            self._spills.pause()
            return None
        self.discards.add_keys(reserved.evicted_keys)
        spilled = [wanted[i] for i in reserved.positions.tolist()]
        self.discards.drop_keys(spilled)
        addresses = self.host.prepare_spill(spilled)
        return self.transfers.open(JobKind.SPILL, spilled, addresses, now_s)

    def _write(
        self,
        kind: JobKind,
        keys: Sequence[OffloadKey],
        reserved: ReservedPlaces | None,
        now_s: float,
        *,
        is_private: bool = False,
    ) -> TransferJob | None:
        """Open the job that fills the places reserved for `keys`; None if there are none."""
        if reserved is None:
            return None
        self._spills.note_shortage(reserved.num_refused)
        positions = reserved.positions
        if not len(positions):
            return None
        self.discards.drop_addresses(reserved.addresses)
        return self.transfers.open(
            kind,
            [keys[i] for i in positions.tolist()],
            reserved.addresses,
            now_s,
            positions=positions,
            is_private=is_private,
        )

    def _tenant(self, namespace: Namespace | None) -> str:
        """Return the name of a namespace's tenant; empty if none is known."""
        tenants = self.host.tenants
        return "" if tenants is None or namespace is None else tenants.shares.name_in(namespace)

    def _room_to_spill(self) -> int:
        return self.options.max_spilling_blocks - self.transfers.num_keys(JobKind.SPILL)

    # Results

    def end(
        self,
        job_id: int,
        ok: bool,
        failed: Collection[int] = (),
        lost: Collection[int] | None = None,
    ) -> Int32Array:
        """Record the end of a job on every rank; return the host addresses to seal.

        `failed` are the host addresses that went wrong on any rank: all of the job's if none of
        them is, or if it is a store. After a load, host memory drops them. After a fetch, the disk
        drops those among `lost`: all if it is None. Failed spills are not tried again. Imported
        content is clean: another node has it, so no file is written for it here.

        Raises InvalidInputError for a job that is not open.
        """
        ok = as_bool("ok", ok)
        failed = as_integers("failed", failed).tolist()
        lost = None if lost is None else as_integers("lost", lost).tolist()
        job = self.transfers.require(job_id)
        good, bad = job.split(ok, failed)
        match job.kind:
            case JobKind.STORE:
                self._end_store(job, ok=ok)
            case JobKind.FETCH:
                self._end_writes(self.host, job, good, bad)
                self._end_fetch(job, good, bad, bad if lost is None else job.keys_at(lost, bad))
            case JobKind.IMPORT:
                self._end_writes(self.host, job, good, bad)
            case JobKind.SPILL:
                self._end_spill(job, good, bad)
            case JobKind.LOAD:
                self.host.complete_load(job.keys)
                self.host.forget(bad)
                self._discard_labels(job)
        self.transfers.close(job, is_good=ok)
        self._spills.wake()
        if job.is_private or job.kind in (JobKind.SPILL, JobKind.LOAD):
            return EMPTY_INT32
        visible: Int32Array = job.addresses[self.host.slots.states[job.addresses] == READY]
        return visible

    def _end_store(self, job: TransferJob, *, ok: bool) -> None:
        self.host.complete_store(job.keys, success=ok)
        if ok and not job.is_private:
            self._mark_dirty(job.keys)

    def _mark_dirty(self, keys: Sequence[OffloadKey]) -> None:
        """Have those of these keys written to disk that it does not have."""
        missing = self._not_on_disk(keys)
        self._spills.mark_dirty(missing)
        if self.options.disk_write == "on_store":
            self._spills.write_through(missing)

    def _end_writes(
        self, tier: TierManager, job: TransferJob, good: list[OffloadKey], bad: list[OffloadKey]
    ) -> None:
        """End a job's writes to a tier. Those of an overdue job all failed: it was given up."""
        if job.is_overdue:
            good, bad = [], list(job.keys)
        tier.complete_store(good, success=True)
        tier.complete_store(bad, success=False)

    def _end_fetch(
        self,
        job: TransferJob,
        good: list[OffloadKey],
        bad: list[OffloadKey],
        gone: list[OffloadKey],
    ) -> None:
        """End a fetch's reads of the disk, which does not have the keys `gone`."""
        if self.disk is not None:
            if not job.is_overdue:
                self.disk.eviction.hand_on(good, self.host.eviction)
            self.disk.complete_load(job.keys)
            self.disk.forget(gone)
            self._discard_files(job.keys)
        if good and len(gone) == len(bad) and not job.is_overdue:
            self.disk_use.served()  # it answered for every file

    def _end_spill(self, job: TransferJob, good: list[OffloadKey], bad: list[OffloadKey]) -> None:
        """End a spill. The file of a key that host memory has dropped meanwhile is bad: its bytes
        may have been damaged."""
        is_known = self.host.states_of(good) == READY
        bad = bad + [good[i] for i in np.flatnonzero(~is_known).tolist()]
        good = [good[i] for i in np.flatnonzero(is_known).tolist()]
        self.host.complete_spill(job.keys)
        if self.disk is not None:
            self._end_writes(self.disk, job, good, bad)
            if not job.is_overdue:
                self.host.eviction.hand_on(good, self.disk.eviction)
            self._discard_files(job.keys)
        self._discard_labels(job)
        self._spills.mark_clean(job.keys)

    def expire(self, now_s: float) -> tuple[TransferJob, ...]:
        """Mark jobs as overdue; return each once.

        Their targets, in host memory or on disk, are invisible and in quarantine; their sources are
        held. Both until the job's result is reported. While a job of the disk is overdue, the disk
        is not used.
        """
        now_s = as_number("now_s", now_s)
        self.disk_use.look(now_s)
        self._follow_time(now_s)
        late = tuple(self.transfers.expire(now_s))
        for job in late:
            if job.kind in (JobKind.STORE, JobKind.FETCH, JobKind.IMPORT):
                self.host.forget(job.keys)
            elif job.kind is JobKind.SPILL and self.disk is not None:
                self.disk.forget(job.keys)
        return late

    # Dropping and adopting content

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Drop keys from every tier."""
        ready = [keys[i] for i in np.flatnonzero(self.host.states_of(keys) == READY).tolist()]
        addresses = self.host.slots.addresses_of(ready)
        self.host.forget(keys)
        is_gone = self.host.slots.addresses_of(ready) == NO_ADDRESS
        self.discards.add_addresses(addresses[is_gone])
        if self.disk is not None:
            self._discard_files(self.disk.forget(keys))

    def reset(self) -> None:
        """Drop all keys. Jobs in progress end without effect."""
        for tier in self:
            self.forget(tier.slots.present_keys())
        self.host.reset_cache()
        self._spills.clear()

    def begin_adoption(self) -> None:
        """Answer RETRY instead of MISS, and store nothing, until tiers are adopted.

        Raises InvalidInputError if a tier is not empty.
        """
        for tier in self:
            tier.begin_adoption()

    def adopt_host(self, labels: Label) -> None:
        """Adopt the content of all ranks' host memory: rows by address (`block_ids`), oldest first.

        Discards rows that do not fit. Raises InvalidInputError if the tier is not empty.
        """
        keys = label_keys(labels)
        refused = self.host.adopt(keys, labels.block_ids, labels)
        kept = self.host.slots.addresses_of(keys)
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

    def mark_copies(self, keys: Sequence[OffloadKey], *, are_copies: bool) -> None:
        """Take note that another node is the one that keeps these keys, or that this one is.

        Copies are evicted from host memory before other keys, until they have been loaded here, and
        no file is written for them. Skips keys that are not in host memory. Files are not marked:
        engines of one node share them, so one's copy may be another one's only file.
        """
        slots, eviction = self.host.slots, self.host.eviction
        ready = slots.ready(keys)
        changed = slots.keys_at(eviction.mark_copies(slots.slots_of(ready), are_copies=are_copies))
        if self.disk is None or not changed:
            return
        if are_copies:
            self._spills.mark_clean(changed)
        else:
            self._mark_dirty(changed)
        self._spills.wake()

    def files_changed(self, labels: Label, removed: Sequence[OffloadKey]) -> None:
        """Take note of files that other processes have written (one row each) and removed.

        Files that this process writes or reads now stay as they are until the end of their job.
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
        return [event for tier in self if (event := tier.contents.present_event()) is not None]

    def take_events(self) -> tuple[OffloadingEvent, ...]:
        """Return the events of tiers since the last call, by tier."""
        return tuple(event for tier in self for event in tier.take_events())

    def statistics(self) -> HierarchyStatistics:
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
        for tier in self:
            tier.check()
        dirty = self._spills.owed(self.host.slots.present_keys())
        num_clean = len(dirty) - len(self._not_on_disk(dirty))
        if num_clean:
            raise InvariantError(f"{num_clean} host keys are dirty without need")
        slots = self.host.slots.slots_of(np.flatnonzero(self.host.slots.is_dirty))
        if self.host.eviction.are_copies(slots).any():
            raise InvariantError("host keys are dirty that another node keeps")
        stores, loads, spills, fetches, imports = (
            sum(len(job.keys) for job in self.transfers.jobs() if job.kind is kind)
            for kind in JobKind
        )
        expected = [(stores + fetches + imports, loads, spills), (spills, fetches, 0)]
        found = [tier.slots.num_jobs() for tier in self]
        if found != expected[: len(found)]:
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

    def _discard_labels(self, job: TransferJob) -> None:
        """Discard the labels of keys that a job has read in host memory and that are gone."""
        is_gone = self.host.slots.addresses_of(job.keys) == NO_ADDRESS
        self.discards.add_addresses(job.addresses[is_gone])

    def _discard_files(self, keys: Sequence[OffloadKey]) -> None:
        """Discard the files of keys that the disk no longer has."""
        if self.disk is not None:
            gone = np.flatnonzero(self.disk.slots.addresses_of(keys) == NO_ADDRESS)
            self.discards.add_keys([keys[i] for i in gone.tolist()])
