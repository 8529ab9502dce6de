"""One tier: the slots of keys, and which ones to evict.

The hierarchy plans transfers (or another user of a single tier); the tables are below. Used for
host memory, whose addresses are sent to workers, and for files, whose addresses are only counted.
Starts no transfer, waits for nothing and reads no clock.

    slot 5 (4 blocks a slot)     | k20 | k21 | k22 |     |      k23 would come here
    addresses                       20    21    22    23

A key is that of one device block. A slot is allocated and evicted as a whole, takes blocks of one
chain in their order, and can be entered at any of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

import numpy as np

from kvcache.base.arguments import as_bool, as_byte_strings, as_text, check_kind, check_methods
from kvcache.base.arrays import BoolArray, IndexArray, Int32Array, index_array, int32_array
from kvcache.base.errors import ConfigurationError, InvalidInputError, InvariantError, shown
from kvcache.core import OffloadAnswer
from kvcache.offload.contents import TierContents
from kvcache.offload.events import OffloadingEvent
from kvcache.offload.keys import OffloadKey
from kvcache.offload.manager import OffloadingManager, PrepareStoreOutput, ReqContext
from kvcache.offload.options import TierOptions
from kvcache.offload.slots import (
    FORGOTTEN,
    NO_ADDRESS,
    NOTHING,
    READY,
    STORING,
    CountArray,
    Placement,
    SlotEviction,
    SlotTable,
    StateArray,
    place_keys,
)
from kvcache.offload.specs import HostLoadStoreSpec, LoadStoreSpec
from kvcache.offload.statistics import TierStatistics
from kvcache.policies import EVICTION_POLICIES, PolicyFactory
from kvcache.protocol.commands import Label
from kvcache.protocol.labels import label_rows
from kvcache.requests.request_content import parse_namespace_name
from kvcache.tenants import TenantLedger
from kvcache.tenants.ledger import UNOWNED


def first_of_each(values: Sequence[OffloadKey] | Sequence[int]) -> IndexArray:
    """Return the position of each value's first appearance, ascending."""
    positions = dict(zip(reversed(values), range(len(values) - 1, -1, -1), strict=True))
    return index_array(sorted(positions.values()))


def _last_of_each(values: IndexArray) -> IndexArray:
    """Return the position of each value's last appearance, ascending."""
    _, from_end = np.unique(values[::-1], return_index=True)
    positions: IndexArray = np.sort(len(values) - 1 - from_end)
    return positions


class Sightings:
    """Counts of the last `capacity` keys that were seen. O(1) per key."""

    def __init__(self, threshold: int, capacity: int) -> None:
        """Start empty. Raises ConfigurationError for a threshold or capacity below 1."""
        if threshold < 1 or capacity < 1:
            raise ConfigurationError(
                f"store threshold {threshold} with room for {capacity} keys: both must be at "
                "least 1"
            )
        self.threshold = threshold
        self._capacity = capacity
        self._counts: OrderedDict[OffloadKey, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def see(self, keys: Sequence[OffloadKey]) -> None:
        """Count one sighting of each of these keys, in chain order: the last is forgotten first."""
        as_byte_strings("keys", keys)
        if self.threshold == 1:
            return
        counts = self._counts
        for key in reversed(keys):
            counts[key] = min(counts.pop(key, 0) + 1, self.threshold)
        while len(counts) > self._capacity:
            counts.popitem(last=False)

    def is_frequent(self, key: OffloadKey) -> bool:
        """Return whether a key has been seen often enough. Changes nothing."""
        return self.threshold == 1 or self._counts.get(key, 0) >= self.threshold

    def clear(self) -> None:
        """Forget all keys."""
        self._counts.clear()


@dataclass(slots=True)
class TierCounts:
    """Counters, in keys. `TierStatistics` explains them."""

    num_hits: int = 0
    num_misses: int = 0
    num_stored: int = 0
    num_failed_stores: int = 0
    num_loaded: int = 0
    num_evicted: int = 0
    num_forgotten: int = 0
    num_skipped: int = 0
    num_refused: int = 0

    def add_look_up(self, num_hits: int, num_misses: int) -> None:
        """Count a look-up of this many keys."""
        self.num_hits += num_hits
        self.num_misses += num_misses


SpecOf: TypeAlias = Callable[[Sequence[OffloadKey], Int32Array], LoadStoreSpec]
"""Makes the spec of addresses."""

SIGHTINGS_PER_BLOCK = 4
"""With a store threshold, this many keys are counted per block of the tier."""


@dataclass(frozen=True, eq=False)
class ReservedPlaces:
    """Places for keys: `positions` in the caller's keys, one address each; `evicted_keys` were
    evicted for them. There was no room for `num_refused` more."""

    positions: Int32Array
    addresses: Int32Array
    evicted_keys: tuple[OffloadKey, ...]
    num_refused: int


def _host_slots(keys: Sequence[OffloadKey], addresses: Int32Array) -> LoadStoreSpec:
    return HostLoadStoreSpec(addresses)


def _check_context(ctx: ReqContext | None) -> None:
    if ctx is not None:
        check_kind("ctx", ctx, ReqContext)


class TierManager(OffloadingManager):
    """A fixed number of slots, and their contents.

    A key is being stored, then ready; ready ones may be read by any number of loads and spills.
    While it is written or loaded, its slot is not evicted. While it is spilled or dirty (in no
    lower tier), the slot keeps its place in the order, but others are evicted first. A dropped key
    that a job still uses is invisible at once; its slot is in quarantine until that job has ended.

    The parts can be read: `slots` say where keys are, `eviction` who goes next, `contents` what the
    blocks are, `sightings` how often keys were seen.
    """

    def __init__(
        self,
        options: TierOptions,
        policies: Mapping[str, PolicyFactory] = EVICTION_POLICIES,
        spec_of: SpecOf = _host_slots,
    ) -> None:
        """Make an empty tier. Raises ConfigurationError for invalid options."""
        check_kind("options", options, TierOptions, ConfigurationError)
        check_kind("policies", policies, Mapping, ConfigurationError)
        check_methods("spec_of", spec_of, ("__call__",), ConfigurationError)
        self.options = options
        self.medium = options.medium
        self.slots = SlotTable(options.num_slots, options.blocks_per_slot)
        self.tenants = options.tenant_ledger()
        """The tenants of slots; None without tenants."""
        self.eviction = SlotEviction(self.slots, options.policy, policies, self.tenants)
        self.contents = TierContents(self.slots, options.medium, options.labels)
        num_blocks = options.num_slots * options.blocks_per_slot
        self.sightings = Sightings(options.store_after, SIGHTINGS_PER_BLOCK * num_blocks)
        self.counts = TierCounts()
        self.is_adopting = False
        """Whether the tier's contents are still being adopted."""
        self._spec_of = spec_of

    def lookup(self, key: OffloadKey, ctx: ReqContext | None = None) -> OffloadAnswer:
        _check_context(ctx)
        state = int(self.states_of([key])[0])
        self.counts.add_look_up(int(state != NOTHING), int(state == NOTHING))
        if state != NOTHING:
            return OffloadAnswer.HIT if state == READY else OffloadAnswer.HIT_PENDING
        return OffloadAnswer.RETRY if self.is_adopting else OffloadAnswer.MISS

    def states_of(self, keys: Sequence[OffloadKey]) -> StateArray:
        """Return NOTHING, STORING or READY for each key, shape `(n,)`. Changes nothing at all."""
        states = self.slots.states_of(self.slots.addresses_of(keys))
        states[states == FORGOTTEN] = NOTHING
        return states

    def tenants_of(self, keys: Sequence[OffloadKey]) -> list[str]:
        """Return the tenants of keys that are all here; empty names without tenants.

        Changes nothing.
        """
        addresses = self.slots.addresses_of(keys)
        if (tenants := self.tenants) is None:
            return [""] * len(keys)
        owners = tenants.owners[self.slots.slots_of(addresses)]
        return [tenants.numbered(number).name for number in owners.tolist()]

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        addresses = self.slots.addresses_of(keys)
        self.eviction.touch(self.slots.slots_of(addresses[addresses != NO_ADDRESS]))

    def prepare_load(
        self, keys: Sequence[OffloadKey], ctx: ReqContext | None = None
    ) -> LoadStoreSpec:
        _check_context(ctx)
        addresses = self._require(keys, (READY,), "ready to be loaded")
        return self._spec_of(keys, self._hold_at(addresses))

    def hold_leading(self, keys: Sequence[OffloadKey]) -> Int32Array:
        """Do `prepare_load` for the keys before the first one that is not ready; return their
        addresses."""
        addresses = self.slots.addresses_of(keys)
        is_missing = self.slots.states_of(addresses) != READY
        return self._hold_at(addresses[: is_missing.argmax()] if is_missing.any() else addresses)

    def complete_load(self, keys: Sequence[OffloadKey]) -> None:
        addresses = self._require_read(keys, self.slots.num_loads, "being loaded")
        self.slots.add_loads(addresses, -1)
        self.counts.num_loaded += len(keys)
        self._end_jobs(addresses)

    def prepare_spill(self, keys: Sequence[OffloadKey]) -> Int32Array:
        """Hold ready keys until `complete_spill`; return their addresses.

        Unlike a load, this does not count as use. Raises InvalidInputError unless all are ready.
        """
        addresses = self._require(keys, (READY,), "ready to be spilled")
        self.slots.add_spills(addresses, 1)
        return int32_array(addresses)

    def complete_spill(self, keys: Sequence[OffloadKey]) -> None:
        """End a spill; raises InvalidInputError if one of the keys is not being spilled."""
        addresses = self._require_read(keys, self.slots.num_spills, "being spilled")
        self.slots.add_spills(addresses, -1)
        self._end_jobs(addresses)

    def prepare_store(
        self, keys: Sequence[OffloadKey], ctx: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        _check_context(ctx)
        reserved = self.reserve(keys, needs_all=True)
        if reserved is None:
            return None
        stored = tuple(keys[i] for i in reserved.positions.tolist())
        return PrepareStoreOutput(
            stored, self._spec_of(stored, reserved.addresses), reserved.evicted_keys
        )

    def reserve(
        self,
        keys: Sequence[OffloadKey],
        *,
        labels: Label | None = None,
        spares: Sequence[OffloadKey] = (),
        is_forced: bool = False,
        drops_dirty: bool = True,
        needs_all: bool = False,
        tenant: str = "",
        are_copies: bool = False,
    ) -> ReservedPlaces | None:
        """Make room for the missing ones of `keys`, as many leading ones as fit.

        They are pending until `complete_store`. Keys already here count as used. None while the
        tier is being adopted.

        Args:
            labels: one row per key, kept if this tier keeps labels.
            spares: keys that are not evicted for these, and count as used.
            is_forced: also store keys that have not been seen often enough.
            drops_dirty: also evict keys that no lower tier has.
            needs_all: None instead of a part of them.
            tenant: of the keys, if there are tenants.
            are_copies: they come from another node, so they are evicted before others, until they
                have been loaded twice, or are marked otherwise.

        Raises InvalidInputError or MalformedMessageError for labels that do not fit the keys.
        """
        table = self.slots
        addresses, spared = table.addresses_of(keys), table.addresses_of(spares)
        is_forced = as_bool("is_forced", is_forced)
        drops_dirty = as_bool("drops_dirty", drops_dirty)
        needs_all = as_bool("needs_all", needs_all)
        tenant = as_text("tenant", tenant, may_be_empty=True)
        self.contents.validate(labels, len(keys))
        positions = self._wanted(keys, addresses, is_forced)
        if self.is_adopting:
            self.counts.num_refused += len(positions)
            return None
        if (tenants := self.tenants) is not None:
            tenants.serve(tenants.account_named(tenant))
        placement = place_keys(table, keys, addresses, positions)
        present = np.concatenate([spared, addresses])
        here = np.concatenate([table.slots_of(present[present != NO_ADDRESS]), placement.slots])
        here = here[here < table.num_slots]
        self.eviction.withhold(here)
        num_obtainable = self._num_obtainable_slots(drops_dirty=drops_dirty)
        if needs_all and num_obtainable < placement.num_new_slots:
            self.counts.num_refused += len(positions)
            self.eviction.update(here)
            return None
        placement = placement.leading(table.num_slots, num_obtainable)
        num_refused = len(positions) - len(placement.positions)
        self.counts.num_refused += num_refused
        if num_refused and tenants is not None:
            tenants.refuse(tenants.served, num_refused, num_obtainable)
        evicted = self._make_room(placement.num_new_slots, drops_dirty=drops_dirty)
        places = self._occupy(keys, placement, labels)
        if are_copies:
            self.eviction.mark_imports(table.slots_of(places))
        self.eviction.update(here)
        return ReservedPlaces(
            int32_array(placement.positions), int32_array(places), evicted, num_refused
        )

    def complete_store(self, keys: Sequence[OffloadKey], success: bool = True) -> None:
        table, success = self.slots, as_bool("success", success)
        addresses = self._require(keys, (STORING, READY, FORGOTTEN), "being stored")
        if len(set(keys)) != len(keys):
            raise InvalidInputError("a key is named twice: complete the store of each key once")
        is_written = table.is_written[addresses]
        if success and not is_written.all():
            self._refuse(keys, ~is_written, "being stored")
        written = addresses[is_written]
        alive = written[table.states[written] == STORING]
        table.end_writes(written)
        if success:
            table.states[alive] = READY
            self.counts.num_stored += len(alive)
            self.contents.tell(alive, removed=False)
        else:
            table.states[written] = FORGOTTEN
            self.counts.num_failed_stores += len(written)
        self._end_jobs(written)

    def forget(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Drop keys at once; return those that were ready. Skips unknown ones.

        A key that a job uses stays in its slot, in quarantine, until the job has ended. Until then
        no other key takes its place, and it is not stored again.
        """
        table = self.slots
        addresses = table.addresses_of(keys)
        addresses = table.distinct(addresses[addresses != NO_ADDRESS])
        addresses = addresses[table.states[addresses] != FORGOTTEN]
        was_ready = addresses[table.states[addresses] == READY]
        vanished = table.keys_at(was_ready)
        self.counts.num_forgotten += len(addresses)
        self.contents.tell(was_ready, removed=True)
        table.mark_clean(addresses)
        table.states[addresses] = FORGOTTEN
        self._end_jobs(addresses)
        return vanished

    def reset_cache(self) -> None:
        self.forget(list(self.slots.index))
        self.sightings.clear()

    def begin_adoption(self) -> None:
        """Answer RETRY instead of MISS, and store nothing, until `adopt`.

        Raises InvalidInputError if the tier is not empty.
        """
        self._require_empty()
        self.is_adopting = True

    def adopt(
        self,
        keys: Sequence[OffloadKey],
        addresses: Sequence[int] | Int32Array | None = None,
        labels: Label | None = None,
    ) -> IndexArray:
        """Fill the empty tier with existing keys, the first victim first.

        Without `addresses` (files), assigns some. Ends an adoption. Returns the positions of
        refused keys: an invalid or repeated address, a repeated key, or more keys than places (the
        first ones are refused then).

        Raises InvalidInputError if the tier is not empty, or there are not as many addresses or
        labels as keys.
        """
        self._require_empty()
        if addresses is not None and len(addresses) != len(keys):
            raise InvalidInputError(
                f"{len(addresses)} addresses for {len(keys)} keys: pass one for each key"
            )
        self.contents.validate(labels, len(keys))
        places = None if addresses is None else index_array(int32_array(addresses))
        kept = self._fill(keys, places, labels)
        self.is_adopting = False
        refused: IndexArray = np.setdiff1d(np.arange(len(keys)), kept)
        return refused

    def join(self, keys: Sequence[OffloadKey], labels: Label | None = None) -> list[OffloadKey]:
        """Take note of content that another process has put there, as much as free slots take.

        `labels` has one row per key. Skips keys that are here, however. Returns those that are
        ready now and were not.
        """
        self.contents.validate(labels, len(keys))
        is_missing = self.slots.addresses_of(keys) == NO_ADDRESS
        chosen = np.intersect1d(np.flatnonzero(is_missing), first_of_each(keys))
        chosen = chosen[: len(self.slots.free_slots) * (self.slots.blocks_per_slot == 1)]
        new = [keys[place] for place in chosen.tolist()]
        if self.is_adopting or not new:
            return []
        rows = None if labels is None else label_rows(labels, chosen)
        self.reserve(new, labels=rows, is_forced=True)
        self.complete_store(new)
        self.counts.num_stored -= len(new)
        return new

    def take_events(self) -> tuple[OffloadingEvent, ...]:
        return self.contents.take_events()

    def statistics(self) -> TierStatistics:
        options, table, counts = self.options, self.slots, self.counts
        is_ready = table.states == READY
        is_held = (table.num_loads > 0) | (table.num_spills > 0)
        is_forgotten = (table.states == FORGOTTEN).reshape(-1, table.blocks_per_slot)
        return TierStatistics(
            medium=options.medium,
            num_slots=table.num_slots,
            blocks_per_slot=table.blocks_per_slot,
            num_free_slots=len(table.free_slots),
            num_ready=int(np.count_nonzero(is_ready)),
            num_pending=int(np.count_nonzero(table.states == STORING)),
            num_held=int(np.count_nonzero(is_ready & is_held)),
            num_dirty=int(np.count_nonzero(table.is_dirty)),
            num_quarantined_slots=int(np.count_nonzero(is_forgotten.any(axis=1))),
            num_copies=self.eviction.num_copies(),
            **asdict(counts),
            stored_bytes=counts.num_stored * options.block_bytes,
            loaded_bytes=counts.num_loaded * options.block_bytes,
            tenants=() if self.tenants is None else self.tenants.statistics(),
        )

    def check(self) -> None:
        """Raise InvariantError with the sum that failed."""
        self.slots.check()
        self.eviction.check()
        self.contents.check()
        if self.tenants is not None:
            self.tenants.check()
            owned = np.flatnonzero(self.tenants.owners)
            if owned.tolist() != np.flatnonzero(self.slots.slot_members).tolist():
                raise InvariantError("slots with contents have no tenant, or the reverse")
        if self.is_adopting and self.slots.index:
            raise InvariantError(f"{len(self.slots.index)} keys in a tier that is being adopted")

    def _hold_at(self, addresses: IndexArray) -> Int32Array:
        self.slots.add_loads(addresses, 1)
        slots = self.slots.slots_of(addresses)
        self.eviction.update(slots)
        self.eviction.note_loads(slots)
        return int32_array(addresses)

    def _wanted(
        self, keys: Sequence[OffloadKey], addresses: IndexArray, is_forced: bool
    ) -> IndexArray:
        """Return the positions of keys to store, each key once."""
        positions: IndexArray = np.flatnonzero(addresses == NO_ADDRESS)
        if len(set(keys)) != len(keys):
            positions = np.intersect1d(positions, first_of_each(keys))
        if is_forced or self.sightings.threshold == 1:
            return positions
        frequent = [i for i in positions.tolist() if self.sightings.is_frequent(keys[i])]
        self.counts.num_skipped += len(positions) - len(frequent)
        return index_array(frequent)

    def _require_empty(self) -> None:
        if self.slots.index:
            raise InvalidInputError(
                f"tier {self.medium!r} holds {len(self.slots.index)} keys: adopt into a new one"
            )

    def _num_obtainable_slots(self, *, drops_dirty: bool) -> int:
        """Return how many slots the served tenant could get now for new content."""
        if self.tenants is not None:
            return self.eviction.num_obtainable(self.tenants, drops_dirty=drops_dirty)
        return len(self.slots.free_slots) + self.eviction.num_evictable(drops_dirty=drops_dirty)

    def _make_room(self, num_slots: int, *, drops_dirty: bool) -> tuple[OffloadKey, ...]:
        """Evict until `num_slots` are free, which is possible; return the evicted keys."""
        keys: tuple[OffloadKey, ...] = ()
        if self.tenants is not None and (num_own := self.tenants.demand(num_slots)):
            with self.tenants.gives_its_own():
                keys = self._evict(num_own, drops_dirty=drops_dirty)
        missing = num_slots - len(self.slots.free_slots)
        return keys + self._evict(missing, drops_dirty=drops_dirty) if missing > 0 else keys

    def _evict(self, num_slots: int, *, drops_dirty: bool) -> tuple[OffloadKey, ...]:
        victims = self.eviction.choose(num_slots, drops_dirty=drops_dirty)
        addresses = self.slots.addresses_in(victims)
        keys = tuple(self.slots.keys_at(addresses))
        self.counts.num_evicted += len(keys)
        self.contents.tell(addresses, removed=True)
        self._vacate(addresses)
        return keys

    def _occupy(
        self, keys: Sequence[OffloadKey], placement: Placement, labels: Label | None
    ) -> IndexArray:
        """Put the placed keys into free slots; return their addresses."""
        table = self.slots
        start = len(table.free_slots) - placement.num_new_slots
        new_slots = index_array(sorted(table.free_slots[start:]))
        del table.free_slots[start:]
        if self.tenants is not None:
            self.tenants.took(new_slots, self.tenants.served)
        slots = placement.slots.copy()
        is_new = slots >= table.num_slots
        slots[is_new] = new_slots[slots[is_new] - table.num_slots]
        addresses: IndexArray = slots * table.blocks_per_slot + placement.places
        table.enter([keys[i] for i in placement.positions.tolist()], addresses, STORING)
        self.contents.write(labels, placement.positions, addresses)
        return addresses

    def _end_jobs(self, addresses: IndexArray) -> None:
        """Empty dropped addresses that have no job any more, and update the policy for idle
        slots."""
        table = self.slots
        slots = table.slots_of(addresses)
        lost = table.distinct(addresses[table.states[addresses] == FORGOTTEN])
        self._vacate(lost[~table.is_working(lost)])
        self.eviction.update(slots)

    def _fill(
        self, keys: Sequence[OffloadKey], addresses: IndexArray | None, labels: Label | None
    ) -> IndexArray:
        """Fill the empty tier, the first victim first; return the positions that were kept."""
        table = self.slots
        kept = first_of_each(keys)
        if addresses is None:
            kept = kept[max(0, len(kept) - len(table.keys)) :]
            places: IndexArray = np.arange(len(kept))
        else:
            kept = kept[(addresses[kept] >= 0) & (addresses[kept] < len(table.keys))]
            kept = kept[first_of_each(addresses[kept].tolist())]
            places = addresses[kept]
        table.enter([keys[i] for i in kept.tolist()], places, READY)
        if self.tenants is not None:
            self._count_adopted(self.tenants, labels, kept, places)
        table.free_slots = np.flatnonzero(table.slot_members == 0)[::-1].tolist()
        slots = table.slots_of(places)
        self.eviction.enter(slots[_last_of_each(slots)])
        self.contents.write(labels, kept, places)
        self.contents.tell_present()
        return kept

    def _vacate(self, addresses: IndexArray) -> None:
        if len(addresses):
            self.contents.withdraw(addresses)
            freed = self.slots.vacate(addresses)
            if self.tenants is not None:
                self.tenants.freed(freed)

    def _count_adopted(
        self, tenants: TenantLedger, labels: Label | None, rows: IndexArray, places: IndexArray
    ) -> None:
        """Charge slots to the tenants of adopted contents, by their labels."""
        slots = self.slots.slots_of(places)
        if labels is None:
            tenants.took(self.slots.distinct(slots), tenants.account_named(""))
            return
        for number, name in enumerate(labels.namespace_names):
            theirs = self.slots.distinct(slots[labels.namespaces[rows] == number])
            if len(theirs):
                account = tenants.account(parse_namespace_name(name))
                tenants.took(theirs[tenants.owners[theirs] == UNOWNED], account)

    def _require(
        self, keys: Sequence[OffloadKey], states: tuple[int, ...], what: str
    ) -> IndexArray:
        """Return the addresses of keys; raises InvalidInputError unless all have this state."""
        addresses = self.slots.addresses_of(keys)
        found = self.slots.states_of(addresses)
        is_wrong: BoolArray = np.ones(len(found), np.bool_)
        for state in states:
            is_wrong &= found != state
        if is_wrong.any():
            self._refuse(keys, is_wrong, what)
        return addresses

    def _require_read(
        self, keys: Sequence[OffloadKey], counts: CountArray, what: str
    ) -> IndexArray:
        """Return the addresses of keys; raises InvalidInputError unless each has enough readers."""
        addresses = self._require(keys, (READY, FORGOTTEN), what)
        is_wrong: BoolArray = counts[addresses] < 1
        if len(self.slots.distinct(addresses)) < len(addresses):
            _, inverse, times = np.unique(addresses, return_inverse=True, return_counts=True)
            is_wrong = counts[addresses] < times[inverse]
        if is_wrong.any():
            self._refuse(keys, is_wrong, what)
        return addresses

    def _refuse(self, keys: Sequence[OffloadKey], is_wrong: BoolArray, what: str) -> None:
        """Raise InvalidInputError about the wrong keys; there is at least one."""
        wrong = np.flatnonzero(is_wrong)
        raise InvalidInputError(
            f"{len(wrong)} of {len(keys)} keys are not {what} in tier {self.medium!r}, the first "
            f"of them {shown(keys[int(wrong[0])].hex())}: nothing was changed"
        )
