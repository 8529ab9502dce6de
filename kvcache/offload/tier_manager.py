"""One tier: which keys are in which slots, and who goes when there is no room.

Between the hierarchy (or the owner of a single tier), which plans transfers, and the tier's books
below. Used for host memory, whose addresses workers are told, and for files, of which only the
number matters. Refuses to start a transfer, to wait and to read a clock.

    slot 5 (4 blocks a slot)     | k20 | k21 | k22 |     |      k23 would come here
    addresses                       20    21    22    23

A key is that of one device block. A slot is allotted and evicted as a whole, takes blocks of one
chain in their order, and can be entered at any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvcache.base.arguments import (
    as_bool,
    as_byte_strings,
    as_bytes,
    as_int,
    as_integers,
    as_text,
    check_kind,
    check_methods,
)
from kvcache.base.arrays import IndexArray, Int32Array, index_array, int32_array
from kvcache.base.errors import ConfigurationError, InvalidInputError, InvariantError
from kvcache.offload.context import ReqContext
from kvcache.offload.events import OffloadingEvent
from kvcache.offload.key_checks import KeyChecks
from kvcache.offload.keys import OffloadKey
from kvcache.offload.manager import OffloadAnswer, OffloadingManager, PrepareStoreOutput
from kvcache.offload.options import TierOptions
from kvcache.offload.placement import place_keys
from kvcache.offload.sightings import Sightings
from kvcache.offload.slot_table import (
    FORGOTTEN,
    NO_ADDRESS,
    NOTHING,
    READY,
    STORING,
    BoolArray,
    StateArray,
)
from kvcache.offload.specs import HostLoadStoreSpec, LoadStoreSpec
from kvcache.offload.statistics import TierStatistics
from kvcache.offload.tier_tables import TierTables, first_of_each
from kvcache.policies import EVICTION_POLICIES, PolicyFactory
from kvcache.protocol.commands import Label
from kvcache.tenants import TenantLedger

SpecOf: TypeAlias = Callable[[Sequence[OffloadKey], Int32Array], LoadStoreSpec]
"""How a tier says where keys lie, given their addresses."""

SIGHTINGS_PER_BLOCK = 4
"""Where there is a store threshold, so many keys are counted per block that the tier can hold."""


@dataclass(frozen=True, eq=False)
class ReservedPlaces:
    """Places for keys: `positions` in the keys that were given, one address each; `evicted_keys`
    had to go for them. For `num_refused` more there was no room."""

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
    """A fixed number of slots, and what is in them.

    A key is being stored, then ready; ready ones may be read by any number of loads and spills.
    While it is written or loaded its slot is not evicted; while it is spilled, or dirty (in no
    lower tier), the slot keeps its place in the order, but others go. What is forgotten while a job
    works on it is invisible at once, and its slot is in quarantine until that job has ended.
    """

    def __init__(
        self,
        options: TierOptions,
        policies: Mapping[str, PolicyFactory] = EVICTION_POLICIES,
        spec_of: SpecOf = _host_slots,
    ) -> None:
        """Make an empty tier. Raises ConfigurationError for options that cannot be meant."""
        check_kind("options", options, TierOptions, ConfigurationError)
        check_kind("policies", policies, Mapping, ConfigurationError)
        check_methods("spec_of", spec_of, ("__call__",), ConfigurationError)
        self.options = options
        self._tables = TierTables(options, policies)
        self._table = self._tables.table
        self._counts = self._tables.counts
        self._checks = KeyChecks(self._table, options.medium)
        num_blocks = options.num_slots * options.blocks_per_slot
        self._sightings = Sightings(options.store_after, SIGHTINGS_PER_BLOCK * num_blocks)
        self._spec_of = spec_of
        self._is_adopting = False

    @property
    def medium(self) -> str:
        """The medium's name."""
        return self.options.medium

    @property
    def num_free_slots(self) -> int:
        """Slots that hold nothing."""
        return len(self._table.free_slots)

    @property
    def num_addresses(self) -> int:
        """Places for device blocks."""
        return len(self._table.keys)

    @property
    def is_adopting(self) -> bool:
        """Whether what the tier holds is still being found out."""
        return self._is_adopting

    def lookup(self, key: OffloadKey, ctx: ReqContext | None = None) -> OffloadAnswer:
        _check_context(ctx)
        state = int(self.states_of([key])[0])
        self.count_look_up(int(state != NOTHING), int(state == NOTHING))
        if state != NOTHING:
            return OffloadAnswer.HIT if state == READY else OffloadAnswer.HIT_PENDING
        return OffloadAnswer.RETRY if self._is_adopting else OffloadAnswer.MISS

    def states_of(self, keys: Sequence[OffloadKey]) -> StateArray:
        """Return NOTHING, STORING or READY for each key, shape `(n,)`. Changes nothing at all."""
        states = self._table.states_of(self._table.addresses_of(keys))
        states[states == FORGOTTEN] = NOTHING
        return states

    def addresses_of(self, keys: Sequence[OffloadKey]) -> Int32Array:
        """Return where keys lie, -1 for those that are not here, shape `(n,)`. No mutation."""
        return int32_array(self._table.addresses_of(keys))

    def are_ready_at(self, addresses: Int32Array) -> BoolArray:
        """Say of each address whether something ready lies there, shape `(n,)`. No mutation."""
        places = as_integers("addresses", addresses, at_most=self.num_addresses - 1)
        found: BoolArray = self._table.states[places] == READY
        return found

    def keys(self) -> list[OffloadKey]:
        """Return all keys that are ready or being stored. No mutation."""
        addresses = np.flatnonzero((self._table.states == STORING) | (self._table.states == READY))
        return self._table.keys_at(addresses)

    def owed(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of the keys that are dirty and not being spilled, in order. No mutation."""
        addresses = self._table.addresses_of(keys)
        is_owed = self._table.is_dirty[addresses] & (self._table.num_spills[addresses] == 0)
        is_owed &= addresses != NO_ADDRESS
        return [keys[i] for i in np.flatnonzero(is_owed).tolist()]

    def dirty_ahead(self, num_slots: int) -> list[OffloadKey]:
        """Return the dirty keys in the next `num_slots` slots to be evicted, in that order.

        Without those in slots that are being spilled. Changes nothing.
        """
        ahead = self._tables.eviction.dirty_ahead(as_int("num_slots", num_slots))
        addresses = self._table.addresses_in(ahead)
        return self._table.keys_at(addresses[self._table.is_dirty[addresses]])

    def labels_of(self, keys: Sequence[OffloadKey]) -> Label | None:
        """Return the labels of keys that are all here, one row each; None unless all have one."""
        if self._tables.contents is None:
            self._table.addresses_of(keys)
            return None
        addresses = self._checks.require(keys, (STORING, READY), "here")
        if not len(addresses):
            return None
        labelled, labels = self._tables.contents.read(addresses)
        return labels if len(labelled) == len(keys) else None

    @property
    def tenants(self) -> TenantLedger | None:
        """Who has which slot; None where there are no tenants."""
        return self._tables.tenants

    def tenants_of(self, keys: Sequence[OffloadKey]) -> list[str]:
        """Return whose slots these keys, all of which are here, lie in; no names without tenants.

        Changes nothing.
        """
        addresses = self._table.addresses_of(keys)
        if (tenants := self.tenants) is None:
            return [""] * len(keys)
        owners = tenants.owners[self._table.slots_of(addresses)]
        return [tenants.numbered(number).name for number in owners.tolist()]

    def see(self, keys: Sequence[OffloadKey]) -> None:
        """Count a sighting of each key, for the store threshold."""
        as_byte_strings("keys", keys)
        self._sightings.see(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        addresses = self._table.addresses_of(keys)
        self._tables.eviction.touch(self._table.slots_of(addresses[addresses != NO_ADDRESS]))

    def count_look_up(self, num_hits: int, num_misses: int) -> None:
        """Add to the statistics what was asked for by other ways than `lookup`."""
        hits, misses = as_int("num_hits", num_hits), as_int("num_misses", num_misses)
        self._counts.num_hits += hits
        self._counts.num_misses += misses

    def mark_dirty(self, keys: Sequence[OffloadKey]) -> None:
        """Note that ready keys are in no tier below. Others are passed over."""
        self._table.mark_dirty(self._checks.ready(keys))

    def mark_clean(self, keys: Sequence[OffloadKey]) -> None:
        """Note that ready keys may be dropped. Others are passed over."""
        self._table.mark_clean(self._checks.ready(keys))

    def prepare_load(
        self, keys: Sequence[OffloadKey], ctx: ReqContext | None = None
    ) -> LoadStoreSpec:
        _check_context(ctx)
        return self._spec_of(keys, self.hold(keys))

    def hold(self, keys: Sequence[OffloadKey]) -> Int32Array:
        """Do what `prepare_load` does; return the addresses."""
        return self._hold_at(self._checks.require(keys, (READY,), "ready to be loaded"))

    def hold_leading(self, keys: Sequence[OffloadKey]) -> Int32Array:
        """Do what `hold` does for those keys that come before the first one that is not ready."""
        addresses = self._table.addresses_of(keys)
        is_missing = self._table.states_of(addresses) != READY
        return self._hold_at(addresses[: is_missing.argmax()] if is_missing.any() else addresses)

    def complete_load(self, keys: Sequence[OffloadKey]) -> None:
        addresses = self._checks.require_read(keys, self._table.num_loads, "being loaded")
        self._table.add_loads(addresses, -1)
        self._counts.num_loaded += len(keys)
        self._tables.end_jobs(addresses)

    def prepare_spill(self, keys: Sequence[OffloadKey]) -> Int32Array:
        """Keep ready keys where they are until `complete_spill`; return their addresses.

        Unlike a load it is no use of them. Raises InvalidInputError unless all are ready.
        """
        addresses = self._checks.require(keys, (READY,), "ready to be spilled")
        self._table.add_spills(addresses, 1)
        return int32_array(addresses)

    def complete_spill(self, keys: Sequence[OffloadKey]) -> None:
        """End a spill; raises InvalidInputError if one of the keys is not being spilled."""
        addresses = self._checks.require_read(keys, self._table.num_spills, "being spilled")
        self._table.add_spills(addresses, -1)
        self._tables.end_jobs(addresses)

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
        behind: OffloadKey | None = None,
        spares: Sequence[OffloadKey] = (),
        is_forced: bool = False,
        drops_dirty: bool = True,
        needs_all: bool = False,
        tenant: str = "",
    ) -> ReservedPlaces | None:
        """Make room for the missing ones of `keys`, as many leading ones as fit.

        They are pending until `complete_store`. What is here already counts as used. None while
        the tier is being adopted.

        Args:
            labels: one row per key, kept where this tier keeps labels.
            behind: the key that `keys[0]` continues, so that it may share that key's slot.
            spares: keys that are not evicted for these, and count as used.
            is_forced: store also what has not been seen often enough.
            drops_dirty: evict also what no lower tier has.
            needs_all: None instead of a part of them.
            tenant: whose they are, where there are tenants.

        Raises InvalidInputError or MalformedMessageError for labels that do not fit the keys.
        """
        tables, table = self._tables, self._table
        addresses, spared = table.addresses_of(keys), table.addresses_of(spares)
        is_forced = as_bool("is_forced", is_forced)
        drops_dirty = as_bool("drops_dirty", drops_dirty)
        needs_all = as_bool("needs_all", needs_all)
        tenant = as_text("tenant", tenant, may_be_empty=True)
        if behind is not None:
            as_bytes("behind", behind)
        if labels is not None:
            check_kind("labels", labels, Label)
            if tables.contents is not None:
                tables.contents.validate(labels, len(keys))
        positions = self._wanted(keys, addresses, is_forced)
        if self._is_adopting:
            self._counts.num_refused += len(positions)
            return None
        if (tenants := tables.tenants) is not None:
            tenants.serve(tenants.account_named(tenant))
        placement = place_keys(table, keys, addresses, positions, behind)
        present = np.concatenate([spared, addresses])
        here = np.concatenate([table.slots_of(present[present != NO_ADDRESS]), placement.slots])
        here = here[here < table.num_slots]
        tables.eviction.withhold(here)
        num_obtainable = tables.num_obtainable_slots(drops_dirty=drops_dirty)
        if needs_all and num_obtainable < placement.num_new_slots:
            self._counts.num_refused += len(positions)
            tables.eviction.update(here)
            return None
        placement = placement.leading(table.num_slots, num_obtainable)
        num_refused = len(positions) - len(placement.positions)
        self._counts.num_refused += num_refused
        if num_refused and tenants is not None:
            tenants.refuse(tenants.served, num_refused, num_obtainable)
        evicted = tables.make_room(placement.num_new_slots, drops_dirty=drops_dirty)
        places = tables.occupy(keys, placement, labels)
        tables.eviction.update(here)
        return ReservedPlaces(
            int32_array(placement.positions), int32_array(places), evicted, num_refused
        )

    def complete_store(self, keys: Sequence[OffloadKey], success: bool = True) -> None:
        table, success = self._table, as_bool("success", success)
        addresses = self._checks.require(keys, (STORING, READY, FORGOTTEN), "being stored")
        if len(set(keys)) != len(keys):
            raise InvalidInputError("a key is named twice: complete the store of each key once")
        is_written = table.is_written[addresses]
        if success and not is_written.all():
            self._checks.refuse(keys, ~is_written, "being stored")
        written = addresses[is_written]
        alive = written[table.states[written] == STORING]
        table.end_writes(written)
        if success:
            table.states[alive] = READY
            self._counts.num_stored += len(alive)
            self._tables.tell(alive, removed=False)
        else:
            table.states[written] = FORGOTTEN
            self._counts.num_failed_stores += len(written)
        self._tables.end_jobs(written)

    def forget(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Let keys vanish at once; return those that were ready. Unknown ones are passed over.

        What a job works on stays in its slot, in quarantine, until that job is completed: no other
        key comes there before, and the key itself is not stored again before.
        """
        return self._tables.forget(keys)

    def reset_cache(self) -> None:
        self._tables.forget(list(self._table.index))
        self._sightings.clear()

    def begin_adoption(self) -> None:
        """Say RETRY instead of MISS, and store nothing, until `adopt`.

        Raises InvalidInputError if the tier is not empty.
        """
        self._require_empty()
        self._is_adopting = True

    def adopt(
        self,
        keys: Sequence[OffloadKey],
        addresses: Sequence[int] | Int32Array | None = None,
        labels: Label | None = None,
    ) -> IndexArray:
        """Fill the empty tier with keys that are there already, the next to be evicted first.

        Without `addresses` (files) they get some. Ends an adoption. Returns the positions of those
        that were refused: an address that does not exist or is named twice, a key that is named
        twice, or more keys than places (the first ones are refused then).

        Raises InvalidInputError if the tier is not empty, or there are not as many addresses or
        labels as keys.
        """
        self._require_empty()
        if addresses is not None and len(addresses) != len(keys):
            raise InvalidInputError(
                f"{len(addresses)} addresses for {len(keys)} keys: pass one for each key"
            )
        if labels is not None and self._tables.contents is not None:
            self._tables.contents.validate(labels, len(keys))
        places = None if addresses is None else index_array(int32_array(addresses))
        kept = self._tables.adopt(keys, places, labels)
        self._is_adopting = False
        refused: IndexArray = np.setdiff1d(np.arange(len(keys)), kept)
        return refused

    def present_event(self) -> OffloadingEvent | None:
        """Return an event that says all that is ready now, parents first; None without labels."""
        return self._tables.present()

    def take_events(self) -> tuple[OffloadingEvent, ...]:
        events = tuple(self._tables.events)
        self._tables.events.clear()
        return events

    def restate(self) -> OffloadingEvent | None:
        """Return an event that says all that is ready, parents first, where labels are kept.

        For subscribers that have to start over. Changes nothing.
        """
        return self._tables.present()

    def statistics(self) -> TierStatistics:
        told = () if self.tenants is None else self.tenants.statistics()
        return self._counts.statistics(self.options, self._table, told)

    def on_new_request(self, ctx: ReqContext) -> None:
        """It is all the same to this tier."""
        check_kind("ctx", ctx, ReqContext)

    on_request_finished = on_new_request

    def on_schedule_end(self) -> None:
        """Nothing is put off."""

    def shutdown(self) -> None:
        """Books end with their process."""

    def num_jobs(self) -> tuple[int, int, int]:
        """Return how many keys are written, loaded (each as often as it is) and spilled."""
        table = self._table
        return (
            int(table.is_written.sum()),
            int(table.num_loads.sum()),
            int(table.num_spills.sum()),
        )

    def order(self) -> list[int]:
        """Return the idle slots, the next to be evicted first. For audits."""
        return self._tables.eviction.order()

    def check(self) -> None:
        """Raise InvariantError with the sum that failed."""
        self._tables.check()
        if self._is_adopting and self._table.index:
            raise InvariantError(f"{len(self._table.index)} keys in a tier that is being adopted")

    def _hold_at(self, addresses: IndexArray) -> Int32Array:
        self._table.add_loads(addresses, 1)
        self._tables.eviction.update(self._table.slots_of(addresses))
        return int32_array(addresses)

    def _wanted(
        self, keys: Sequence[OffloadKey], addresses: IndexArray, is_forced: bool
    ) -> IndexArray:
        """Return the positions of keys that are to be stored, each key once."""
        positions: IndexArray = np.flatnonzero(addresses == NO_ADDRESS)
        if len(set(keys)) != len(keys):
            positions = np.intersect1d(positions, first_of_each(keys))
        if is_forced or self._sightings.threshold == 1:
            return positions
        frequent = [i for i in positions.tolist() if self._sightings.is_frequent(keys[i])]
        self._counts.num_skipped += len(positions) - len(frequent)
        return index_array(frequent)

    def _require_empty(self) -> None:
        if self._table.index:
            raise InvalidInputError(
                f"tier {self.medium!r} holds {len(self._table.index)} keys: adopt into a new one"
            )
