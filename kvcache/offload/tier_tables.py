"""All that a tier writes down, kept in step: table, order of eviction, labels, events, counters.

Under a `TierManager`, which checks what it is asked and says what it means. Here are the moves that
change several of the tables at once. Refuses to check arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvcache.base.arrays import IndexArray, index_array
from kvcache.base.errors import InvariantError
from kvcache.offload.contents import ContentTable
from kvcache.offload.events import OffloadingEvent, parents_first
from kvcache.offload.keys import OffloadKey
from kvcache.offload.options import TierOptions
from kvcache.offload.placement import Placement
from kvcache.offload.slot_eviction import SlotEviction
from kvcache.offload.slot_table import (
    FORGOTTEN,
    NO_ADDRESS,
    READY,
    STORING,
    SlotTable,
)
from kvcache.offload.tier_counts import TierCounts
from kvcache.policies import PolicyFactory
from kvcache.protocol.commands import Label
from kvcache.requests.request_content import parse_namespace_name
from kvcache.tenants import TenantLedger
from kvcache.tenants.ledger import NOBODY


class TierTables:
    """The tables of one tier. What is where is in `table`, who goes next in `eviction`."""

    def __init__(self, options: TierOptions, policies: Mapping[str, PolicyFactory]) -> None:
        """Make empty tables. Raises ConfigurationError for options that cannot be meant."""
        self.options = options
        self.table = SlotTable(options.num_slots, options.blocks_per_slot)
        self.tenants = options.tenant_ledger()
        self.eviction = SlotEviction(self.table, options.policy, policies, self.tenants)
        self.contents = (
            None
            if options.labels is None
            else ContentTable(options.num_slots * options.blocks_per_slot, options.labels)
        )
        self.counts = TierCounts()
        self.events: list[OffloadingEvent] = []

    def num_obtainable_slots(self, *, drops_dirty: bool) -> int:
        """Return how many slots new content could have now, of the tenant that is served."""
        if self.tenants is not None:
            return self.eviction.num_obtainable(self.tenants, drops_dirty=drops_dirty)
        return len(self.table.free_slots) + self.eviction.num_evictable(drops_dirty=drops_dirty)

    def make_room(self, num_slots: int, *, drops_dirty: bool) -> tuple[OffloadKey, ...]:
        """Evict until `num_slots` slots, which can be had, are free; return the keys that went."""
        keys: tuple[OffloadKey, ...] = ()
        if self.tenants is not None and (num_own := self.tenants.demand(num_slots)):
            with self.tenants.gives_its_own():
                keys = self._evict(num_own, drops_dirty=drops_dirty)
        missing = num_slots - len(self.table.free_slots)
        return keys + self._evict(missing, drops_dirty=drops_dirty) if missing > 0 else keys

    def _evict(self, num_slots: int, *, drops_dirty: bool) -> tuple[OffloadKey, ...]:
        victims = self.eviction.choose(num_slots, drops_dirty=drops_dirty)
        addresses = self.table.addresses_in(victims)
        keys = tuple(self.table.keys_at(addresses))
        self.counts.num_evicted += len(keys)
        self.tell(addresses, removed=True)
        self._vacate(addresses)
        return keys

    def occupy(
        self, keys: Sequence[OffloadKey], placement: Placement, labels: Label | None
    ) -> IndexArray:
        """Put the placed keys into slots, as many of which are free; return their addresses."""
        table = self.table
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
        if labels is not None and self.contents is not None:
            self.contents.write(labels, placement.positions, addresses)
        return addresses

    def end_jobs(self, addresses: IndexArray) -> None:
        """Empty what was forgotten and has no job any more, and let idle slots be evicted."""
        table = self.table
        slots = table.slots_of(addresses)
        lost = table.distinct(addresses[table.states[addresses] == FORGOTTEN])
        self._vacate(lost[~table.is_working(lost)])
        self.eviction.update(slots)

    def forget(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Let keys vanish at once; return those that were ready."""
        table = self.table
        addresses = table.addresses_of(keys)
        addresses = table.distinct(addresses[addresses != NO_ADDRESS])
        addresses = addresses[table.states[addresses] != FORGOTTEN]
        was_ready = addresses[table.states[addresses] == READY]
        vanished = table.keys_at(was_ready)
        self.counts.num_forgotten += len(addresses)
        self.tell(was_ready, removed=True)
        table.mark_clean(addresses)
        table.states[addresses] = FORGOTTEN
        self.end_jobs(addresses)
        return vanished

    def adopt(
        self, keys: Sequence[OffloadKey], addresses: IndexArray | None, labels: Label | None
    ) -> IndexArray:
        """Fill the empty tier, the next to be evicted first; return what positions were kept."""
        table = self.table
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
        if labels is not None and self.contents is not None:
            self.contents.write(labels, kept, places)
        event = self.present()
        if event is not None:
            self.events.append(event)
        return kept

    def present(self) -> OffloadingEvent | None:
        """Return an event that says all that is ready and has a label, parents first."""
        addresses: IndexArray = np.flatnonzero(self.table.states == READY)
        if self.contents is None or not len(addresses):
            return None
        labelled, labels = self.contents.read(addresses)
        order = parents_first(labels)
        return self.event(addresses[labelled][order], removed=False)

    def tell(self, addresses: IndexArray, *, removed: bool) -> None:
        """Note that what lies at these addresses appeared or disappears, if that is told."""
        event = self.event(addresses, removed=removed)
        if event is not None:
            self.events.append(event)

    def event(self, addresses: IndexArray, *, removed: bool) -> OffloadingEvent | None:
        """Return an event of those addresses that have a label; None if there are none."""
        if self.contents is None or not len(addresses):
            return None
        labelled, labels = self.contents.read(addresses)
        keys = tuple(self.table.keys_at(addresses[labelled]))
        return OffloadingEvent(keys, self.options.medium, removed, labels) if keys else None

    def check(self) -> None:
        """Raise InvariantError with the sum that failed."""
        self.table.check()
        self.eviction.check()
        if self.contents is not None:
            self.contents.check()
        if self.tenants is not None:
            self.tenants.check()
            owned = np.flatnonzero(self.tenants.owners)
            if owned.tolist() != np.flatnonzero(self.table.slot_members).tolist():
                raise InvariantError("slots with contents have no tenant, or the reverse")

    def _vacate(self, addresses: IndexArray) -> None:
        if len(addresses):
            if self.contents is not None:
                self.contents.withdraw(addresses)
            freed = self.table.vacate(addresses)
            if self.tenants is not None:
                self.tenants.freed(freed)

    def _count_adopted(
        self, tenants: TenantLedger, labels: Label | None, rows: IndexArray, places: IndexArray
    ) -> None:
        """Count slots for the tenants whose contents, as the labels say, were there already."""
        slots = self.table.slots_of(places)
        if labels is None:
            tenants.took(self.table.distinct(slots), tenants.account_named(""))
            return
        for number, name in enumerate(labels.namespace_names):
            theirs = self.table.distinct(slots[labels.namespaces[rows] == number])
            if len(theirs):
                account = tenants.account(parse_namespace_name(name))
                tenants.took(theirs[tenants.owners[theirs] == NOBODY], account)


def first_of_each(values: Sequence[OffloadKey] | Sequence[int]) -> IndexArray:
    """Return the positions at which a value comes for the first time, in rising order."""
    positions = dict(zip(reversed(values), range(len(values) - 1, -1, -1), strict=True))
    return index_array(sorted(positions.values()))


def _last_of_each(values: IndexArray) -> IndexArray:
    """Return the positions at which a value comes for the last time, in rising order."""
    _, from_end = np.unique(values[::-1], return_index=True)
    positions: IndexArray = np.sort(len(values) - 1 - from_end)
    return positions
