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

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

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
from kvcache.base.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.base.errors import ConfigurationError, InvariantError
from kvcache.base.logs import get_logger
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
from kvcache.offload.statistics import HierarchyStatistics
from kvcache.offload.tier_manager import TierManager
from kvcache.protocol.commands import Label
from kvcache.requests.request_content import Namespace

logger = get_logger(__name__)

FIRST_REST_S = 0.25
LONGEST_REST_S = 30.0


class SpillChoice:
    """Which host content is written to disk next, and whether it is worth asking again.

    Slots that will be evicted next have to be clean by then: a share of all slots, and as many as
    the last store lacked. With write-through, everything stored goes to disk as well.
    """

    def __init__(self, host: TierManager, spare_share: float) -> None:
        """Keep `spare_share` of the slots of `host` clean or free."""
        self._host = host
        self._num_spare_slots = int(spare_share * host.options.num_slots)
        self._num_missing_slots = 0
        self._unwritten: dict[OffloadKey, None] = {}
        self._is_idle = True

    def has_next(self) -> bool:
        """Say whether `next` may have an answer; cheap to ask again as long as it has none."""
        if not self._is_idle:
            ahead = self._host.dirty_ahead(self._num_wanted_slots())
            self._is_idle = not ahead and not self._unwritten
        return not self._is_idle

    def pause(self) -> None:
        """There is no room for what is to be spilled, until something changes."""
        self._is_idle = True

    def wake(self) -> None:
        """Something has changed: there may be something to spill."""
        self._is_idle = False

    def note_shortage(self, num_refused: int) -> None:
        """A store found no room for so many keys."""
        blocks_per_slot = self._host.options.blocks_per_slot
        num_slots = -(-num_refused // blocks_per_slot)
        self._num_missing_slots = min(num_slots, self._host.options.num_slots)
        self._is_idle = False

    def write_through(self, keys: Iterable[OffloadKey]) -> None:
        """These keys are to be on disk soon. They are in the host tier, so they are bounded by it,
        and what has left it is passed over."""
        self._unwritten.update(dict.fromkeys(keys))

    def next(self, room: int) -> list[OffloadKey]:
        """Return up to `room` dirty keys that are not being spilled, the most urgent ones first."""
        if self._is_idle:
            return []
        host = self._host
        wanted = dict.fromkeys(host.dirty_ahead(self._num_wanted_slots())[:room])
        while self._unwritten and len(wanted) < room:
            waiting = list(islice(self._unwritten, room - len(wanted)))
            wanted.update(dict.fromkeys(host.owed(waiting)))
            for key in waiting:
                del self._unwritten[key]
        self._is_idle = not wanted
        self._num_missing_slots = 0
        return list(wanted)

    def _num_wanted_slots(self) -> int:
        wanted = max(self._num_spare_slots, self._num_missing_slots)
        return max(0, wanted - self._host.num_free_slots)

    def clear(self) -> None:
        """Forget what was to be spilled."""
        self._unwritten.clear()
        self._num_missing_slots = 0


@dataclass(frozen=True, eq=False)
class Discards:
    """Host addresses whose labels, and keys whose files shall be forgotten. Falsy if empty."""

    addresses: Int32Array
    keys: tuple[OffloadKey, ...]

    def __bool__(self) -> bool:
        return bool(len(self.addresses) or self.keys)


class DiscardList:
    """Discards that were not taken yet. Bounded by what the tiers can hold.

    What a new job writes needs no discard any more, so the order of commands planned together does
    not matter.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._addresses: dict[int, None] = {}
        self._keys: dict[OffloadKey, None] = {}

    def __bool__(self) -> bool:
        return bool(self._addresses or self._keys)

    def add_addresses(self, addresses: Int32Array) -> None:
        """Let host addresses be forgotten."""
        self._addresses.update(dict.fromkeys(addresses.tolist()))

    def add_keys(self, keys: Iterable[OffloadKey]) -> None:
        """Let the files of keys be forgotten."""
        self._keys.update(dict.fromkeys(keys))

    def drop_addresses(self, addresses: Int32Array) -> None:
        """Something else is written to these addresses."""
        for address in addresses.tolist() if self._addresses else ():
            self._addresses.pop(address, None)

    def drop_keys(self, keys: Iterable[OffloadKey]) -> None:
        """The files of these keys are written again."""
        for key in keys if self._keys else ():
            self._keys.pop(key, None)

    def take(self) -> Discards:
        """Return all of it, and forget it."""
        discards = Discards(int32_array(list(self._addresses)), tuple(self._keys))
        self._addresses.clear()
        self._keys.clear()
        return discards


class DiskRest:
    """Leaves a disk that does not serve alone, each time twice as long, up to `LONGEST_REST_S`.

    A disk in this state may come back with all it had. A single bad file is forgotten instead.
    `num_rests` so far; `reason` of the last one.
    """

    def __init__(self) -> None:
        """Begin awake."""
        self.num_rests = 0
        self.reason = ""
        self._next_s = FIRST_REST_S
        self._until_s: float | None = None
        self._is_doubted = False

    @property
    def is_on(self) -> bool:
        """Whether the disk is left alone."""
        return self._until_s is not None

    def begin(self, reason: str, now_s: float) -> None:
        """The disk did not serve: leave it alone. What was under way then tells nothing new."""
        if self.is_on:
            return
        self.num_rests += 1
        self.reason = reason
        self._is_doubted = True
        logger.warning("files are left alone for %g s: %s", self._next_s, reason)
        self._until_s = now_s + self._next_s
        self._next_s = min(2 * self._next_s, LONGEST_REST_S)

    def look(self, now_s: float) -> None:
        """End the rest when it is time."""
        if self._until_s is not None and now_s >= self._until_s:
            self._until_s = None
            logger.info("files are asked again after rest %d", self.num_rests)

    def served(self) -> None:
        """The disk has served: its next rest is a short one."""
        if self._is_doubted:
            self._is_doubted = False
            logger.info("files serve again after rest %d", self.num_rests)
        self._next_s = FIRST_REST_S


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
        self._transfers = TransferTable(new_job_id, self.options.deadlines)
        self._spills = SpillChoice(host, self.options.spare_share)
        self._discards = DiscardList()
        self._rest = DiskRest()
        self._disk_problem = ""
        self._adoption_problem = ""
        self.num_without_room = 0

    # Asking

    @property
    def num_open_jobs(self) -> int:
        """Jobs whose end has not been reported."""
        return len(self._transfers)

    @property
    def has_discards(self) -> bool:
        """Whether `take_discards` would return anything."""
        return bool(self._discards)

    @property
    def is_disk_in_use(self) -> bool:
        """Whether the disk is asked: it is left alone while it rests, a job of it is overdue, or it
        takes too long to say what it has."""
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
        """Return a `Place` for each of the keys, whatever comes before it. Changes nothing."""
        return locate(keys, self.host, self._answering_disk)

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
        self._spills.note_shortage(reserved.num_refused)
        if not len(reserved.positions):
            return None
        stored = [keys[i] for i in reserved.positions.tolist()]
        self._discards.drop_addresses(reserved.addresses)
        job = self._transfers.open(
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
        room = self.options.max_fetching_blocks - self._transfers.num_keys(JobKind.FETCH)
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
        self._spills.note_shortage(reserved.num_refused)
        fetched = [wanted[i] for i in reserved.positions.tolist()]
        if not fetched:
            return None
        self.disk.hold(fetched)
        self._discards.drop_addresses(reserved.addresses)
        job = self._transfers.open(JobKind.FETCH, fetched, reserved.addresses, now_s)
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
        job = self._transfers.open(JobKind.LOAD, loaded, addresses, now_s)
        return LoadJob(job.job_id, job.keys, addresses)

    def plan_spills(self, now_s: float) -> SpillJob | None:
        """Plan to write host content to disk: what will be evicted next, and what is to be there.

        To be asked once per step, after everything else, and again as long as there is an answer
        and the owner likes.
        """
        disk, now_s = self.disk, as_number("now_s", now_s)
        if disk is None or not self.has_spills:
            return None
        wanted = self._spills.next(self._room_to_spill())
        if not wanted:
            return None
        tenants = self.host.tenants_of(wanted)
        others = [place for place, name in enumerate(tenants) if name != tenants[0]]
        if others:  # each tenant for itself, the others the next time
            self._spills.write_through(wanted[others[0] :])
            wanted = wanted[: others[0]]
        reserved = disk.reserve(
            wanted, labels=self.host.labels_of(wanted), is_forced=True, tenant=tenants[0]
        )
        if reserved is None or not len(reserved.positions):
            self._spills.pause()
            return None
        self._discards.add_keys(reserved.evicted_keys)
        spilled = [wanted[i] for i in reserved.positions.tolist()]
        self._discards.drop_keys(spilled)
        job = self._transfers.open(JobKind.SPILL, spilled, self.host.prepare_spill(spilled), now_s)
        return SpillJob(job.job_id, job.keys, job.addresses)

    def _tenant(self, namespace: Namespace | None) -> str:
        """Return the name of a namespace's tenant; of no tenant where none is known."""
        tenants = self.host.tenants
        return "" if tenants is None or namespace is None else tenants.shares.name_in(namespace)

    def _room_to_spill(self) -> int:
        return self.options.max_spilling_blocks - self._transfers.num_keys(JobKind.SPILL)

    # Ending

    def stored(self, job_id: int, ok: bool) -> Int32Array:
        """A store has ended on every rank; return the host addresses that are to be sealed.

        Raises InvalidInputError for a job that is not open, as the other three do.
        """
        ok = as_bool("ok", ok)
        job = self._transfers.require(job_id, JobKind.STORE)
        self.host.complete_store(job.keys, success=ok)
        self._close(job, is_good=ok)
        if not ok or job.is_private:
            return EMPTY_INT32
        missing = self._not_on_disk(job.keys)
        self.host.mark_dirty(missing)
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
        """A fetch has ended on every rank; return the host addresses that are to be sealed.

        `failed` are those that went wrong on any rank, none for all of them. Of these, the disk
        forgets what should have come to `lost`: all where nothing is said of it.
        """
        failed = as_integers("failed", failed).tolist()
        lost = None if lost is None else as_integers("lost", lost).tolist()
        ok = as_bool("ok", ok)
        job = self._transfers.require(job_id, JobKind.FETCH)
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
            self._rest.served()  # of every file it said what is with it
        self._close(job, is_good=ok)
        return self._visible(job)

    def spilled(self, job_id: int, ok: bool, failed: Collection[int] = ()) -> None:
        """A spill has ended on every rank. What failed (as in `fetched`) is not tried again."""
        failed = as_integers("failed", failed).tolist()
        ok = as_bool("ok", ok)
        job = self._transfers.require(job_id, JobKind.SPILL)
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
        self.host.mark_clean(job.keys)
        self._close(job, is_good=ok)

    def loaded(self, job_id: int, ok: bool, failed: Collection[int] = ()) -> None:
        """A load has ended on every rank. Host memory forgets what failed (as in `fetched`)."""
        failed = as_integers("failed", failed).tolist()
        ok = as_bool("ok", ok)
        job = self._transfers.require(job_id, JobKind.LOAD)
        _, bad = job.split(ok, failed)
        self.host.complete_load(job.keys)
        self.host.forget(bad)
        self._discard_labels(job)
        self._close(job, is_good=ok)

    def rest_disk(self, reason: str, now_s: float) -> None:
        """Leave the disk alone for a while: it did not serve, and what it has is not lost by that.

        Meanwhile what it holds is not found, and nothing is spilled. `expire` ends the rest.
        """
        reason = as_text("reason", reason, may_be_empty=True)
        self._rest.begin(reason, as_number("now_s", now_s))

    def leave_disk(self, problem: str) -> None:
        """Leave the disk alone for good: a rank cannot use its own."""
        self._disk_problem = as_text("problem", problem, may_be_empty=True)

    def postpone_disk(self, problem: str) -> None:
        """Leave the disk alone until `adopt_disk`: what it has is found out, and waited for by
        nobody. Until then it is as if there were none."""
        self._adoption_problem = as_text("problem", problem, may_be_empty=True)

    def expire(self, now_s: float) -> tuple[OverdueJob, ...]:
        """Note which jobs are overdue; return each once.

        What is written then, in host memory or on disk, is invisible and in quarantine; what is
        read is held. Both until the job's end is told. Overdue jobs of the disk: it is left alone.
        """
        now_s = as_number("now_s", now_s)
        self._rest.look(now_s)
        late = self._transfers.expire(now_s)
        for job in late:
            if job.kind in (JobKind.STORE, JobKind.FETCH):
                self.host.forget(job.keys)
            elif job.kind is JobKind.SPILL and self.disk is not None:
                self.disk.forget(job.keys)
        return tuple(OverdueJob(job.job_id, job.kind, job.keys, job.addresses) for job in late)

    def take_discards(self) -> Discards:
        """Return what workers shall forget since the last call.

        Nothing in it is the target of an open job.
        """
        return self._discards.take()

    # Losing and finding content

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Let keys vanish from every tier."""
        ready = [keys[i] for i in np.flatnonzero(self.host.states_of(keys) == READY).tolist()]
        addresses = self.host.addresses_of(ready)
        self.host.forget(keys)
        is_gone = self.host.addresses_of(ready) == NO_ADDRESS
        self._discards.add_addresses(addresses[is_gone])
        if self.disk is not None:
            self._discard_files(self.disk.forget(keys))

    def reset(self) -> None:
        """Let everything vanish. Jobs under way end as they would, to no effect."""
        self.forget(self.host.keys())
        if self.disk is not None:
            self.forget(self.disk.keys())
        self.host.reset_cache()
        self._spills.clear()

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
        self._discards.add_addresses(stale[exists & ~np.isin(stale, kept)])
        self.host.mark_dirty(self._not_on_disk(keys))
        self._spills.wake()

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
        self._discards.add_keys(gone)
        self._adoption_problem = ""
        self.host.mark_clean([keys[i] for i in np.flatnonzero(is_kept).tolist()])
        self._spills.wake()

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
            open_jobs=self._transfers.by_kind(),
            num_overdue=self._transfers.num_overdue(),
            num_failed_jobs=self._transfers.num_failed,
            num_expired_jobs=self._transfers.num_expired,
            num_disk_rests=self._rest.num_rests,
            disk_problem=self._disk_problem
            or self._adoption_problem
            or (self._rest.reason if self._rest.is_on else ""),
        )

    def shutdown(self) -> None:
        """End for good."""
        self.host.shutdown()
        if self.disk is not None:
            self.disk.shutdown()

    def check(self) -> None:
        """Raise InvariantError with the sum that failed."""
        self.host.check()
        dirty = self.host.owed(self.host.keys())
        if self.disk is not None:
            self.disk.check()
        num_clean = len(dirty) - len(self._not_on_disk(dirty))
        if num_clean:
            raise InvariantError(f"{num_clean} host keys are dirty without need")
        stores, loads, spills, fetches = (
            sum(len(job.keys) for job in self._transfers.jobs() if job.kind is kind)
            for kind in (JobKind.STORE, JobKind.LOAD, JobKind.SPILL, JobKind.FETCH)
        )
        expected = [(stores + fetches, loads, spills), (spills, fetches, 0)]
        tiers = [self.host] if self.disk is None else [self.host, self.disk]
        found = [tier.num_jobs() for tier in tiers]
        if found != expected[: len(tiers)]:
            raise InvariantError(
                f"tiers count {found} writes, loads and spills of keys, open jobs make {expected}"
            )

    # Inside

    @property
    def _answering_disk(self) -> TierManager | None:
        """The disk, unless there is none, no request waits for what it has, it rests or a job
        of it is overdue."""
        if (
            self._disk_problem
            or self._adoption_problem
            or self._rest.is_on
            or self._transfers.num_overdue(JobKind.SPILL, JobKind.FETCH)
        ):
            return None
        return self.disk

    def _not_on_disk(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of the keys that the disk does not hold ready; none without a disk."""
        if self.disk is None:
            return []
        is_missing = self.disk.states_of(keys) != READY
        return [keys[i] for i in np.flatnonzero(is_missing).tolist()]

    def _discard_labels(self, job: OpenJob) -> None:
        """Let the labels go of what a job has read in host memory and is not there any more."""
        is_gone = self.host.addresses_of(job.keys) == NO_ADDRESS
        self._discards.add_addresses(job.addresses[is_gone])

    def _discard_files(self, keys: Sequence[OffloadKey]) -> None:
        """Let the files go of those keys that the disk does not hold any more."""
        if self.disk is not None:
            gone = np.flatnonzero(self.disk.addresses_of(keys) == NO_ADDRESS)
            self._discards.add_keys([keys[i] for i in gone.tolist()])

    def _visible(self, job: OpenJob) -> Int32Array:
        """Return the addresses of a job that has just written them, as far as they are ready."""
        return job.addresses[self.host.are_ready_at(job.addresses)]

    def _close(self, job: OpenJob, *, is_good: bool) -> None:
        self._transfers.close(job, is_good=is_good)
        self._spills.wake()
