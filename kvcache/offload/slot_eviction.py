"""Which slot of a tier goes next: an eviction policy over the idle slots.

Changes of a tier's tables are brought here afterwards: idle slots enter the policy, used
ones leave it, empty ones are forgotten. Slots that must stay for now (their content is being copied
to the tier below, or is owed to it) keep their place in the order and are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from kvcache.base.arrays import IndexArray, Int32Array, index_array
from kvcache.base.errors import InvariantError
from kvcache.offload.slot_table import BoolArray, SlotTable
from kvcache.policies import EntryInfo, LooksAhead, PolicyFactory, make_eviction_policy
from kvcache.tenants import TenantLedger, TenantPolicy
from kvcache.tenants.ledger import required


class SlotEviction:
    """The order of idle slots. It is the policy's `EntryBook`, too.

    Invariant: a slot is in the policy exactly when it has members and no holds (writes or loads).
    """

    def __init__(
        self,
        table: SlotTable,
        policy: str,
        policies: Mapping[str, PolicyFactory],
        tenants: TenantLedger | None = None,
    ) -> None:
        """Order the slots of `table`, by tenants if there are any.

        Raises ConfigurationError for an unknown policy.
        """
        self._table = table
        self._tenants = tenants
        make = partial(make_eviction_policy, policy, table.num_slots, self, policies)
        self._policy = (
            make()
            if tenants is None
            else TenantPolicy(table.num_slots, self, tenants, make, counts_unheld=True)
        )
        self._is_in: BoolArray = np.zeros(table.num_slots, np.bool_)

    def describe(self, entry: int) -> EntryInfo:
        """Return what the policy may know of a slot: the key of the last block in it."""
        table = self._table
        place = int(table.next_places[entry])
        last = entry * table.blocks_per_slot + place - 1
        return EntryInfo(content=table.keys[last] if place else None)

    def tenant_numbers(self, entries: IndexArray) -> Int32Array:
        """Return whose slots these are. There are tenants."""
        numbers: Int32Array = required(self._tenants).owners[entries]
        return numbers

    def update(self, slots: IndexArray) -> None:
        """Bring the policy in line with the books of these slots, given in order of the chain.

        Those that came out of use enter as used most recently, the last ones to go first.
        """
        slots = self._table.distinct(slots)
        table, is_in = self._table, self._is_in[slots]
        is_used = table.slot_holds[slots] > 0
        is_empty = table.slot_members[slots] == 0
        self._leave(slots[is_in & is_used])
        gone = slots[is_in & is_empty]
        if len(gone):
            self._policy.discard(gone)
            self._is_in[gone] = False
        self.enter(slots[~is_in & ~is_used & ~is_empty][::-1])

    def enter(self, slots: IndexArray) -> None:
        """Let slots that have just come out of use in; the first of them goes first."""
        if len(slots):
            self._policy.insert(slots)
            self._is_in[slots] = True

    def withhold(self, slots: IndexArray) -> None:
        """Take those of the slots out that are in, until `update` brings them back."""
        slots = self._table.distinct(slots)
        self._leave(slots[self._is_in[slots]])

    def touch(self, slots: IndexArray) -> None:
        """Make those of the slots that are in the most recently used."""
        slots = self._table.distinct(slots)
        waiting = slots[self._is_in[slots]]
        if len(waiting):
            self._policy.remove(waiting)
            self._policy.insert(waiting[::-1])

    def num_evictable(self, *, drops_dirty: bool) -> int:
        """Return how many slots `choose` can take."""
        table = self._table
        if not table.slot_spills.any() and (drops_dirty or not table.slot_dirty.any()):
            return len(self._policy)
        must_stay = table.slot_spills > 0
        if not drops_dirty:
            must_stay |= table.slot_dirty > 0
        return int(np.count_nonzero(self._is_in & ~must_stay))

    def num_obtainable(self, tenants: TenantLedger, *, drops_dirty: bool) -> int:
        """Return how many slots the served tenant could have now, free ones included."""
        table = self._table
        must_stay = table.slot_spills > 0
        if not drops_dirty:
            must_stay |= table.slot_dirty > 0
        owners = tenants.owners[self._is_in & ~must_stay]
        can_go = index_array(np.bincount(owners, minlength=tenants.num_numbers))
        return max(0, tenants.num_obtainable(len(table.free_slots), can_go))

    def choose(self, num_slots: int, *, drops_dirty: bool) -> IndexArray:
        """Take out the next `num_slots` slots that may go; there are as many."""
        table, policy = self._table, self._policy
        victims: list[IndexArray] = []
        kept: list[IndexArray] = []
        missing, num_kept = num_slots, 0
        while missing > 0 and len(policy):
            chosen = index_array(policy.choose(missing + num_kept))
            if not len(chosen):
                break
            must_stay = table.slot_spills[chosen] > 0
            if not drops_dirty:
                must_stay |= table.slot_dirty[chosen] > 0
            may_go = np.flatnonzero(~must_stay)[:missing]
            victims.append(chosen[may_go])
            if self._tenants is not None:
                self._tenants.evicted(victims[-1])
                self._tenants.freed(victims[-1])
            kept.append(np.delete(chosen, may_go))
            missing -= len(may_go)
            num_kept += len(kept[-1])
        if num_kept:
            policy.put_back(np.concatenate(kept))
        result = np.concatenate(victims) if victims else index_array(())
        self._is_in[result] = False
        if missing > 0:
            raise InvariantError(f"{missing} of {num_slots} slots to evict could not be found")
        return result

    def dirty_ahead(self, num_slots: int) -> IndexArray:
        """Return which of the next `num_slots` slots owe a copy that is not being made yet, in
        order.

        Of a policy with several lines, so many of each: which gives how many shows later. Changes
        nothing.
        """
        if num_slots < 1 or not len(self._policy):
            return index_array(())
        slots, table = self._next(num_slots), self._table
        is_owed = (table.slot_dirty[slots] > 0) & (table.slot_spills[slots] == 0)
        ahead: IndexArray = slots[is_owed]
        return ahead

    def _next(self, num_slots: int) -> IndexArray:
        """Return the next `num_slots` slots, as `LooksAhead` means it. Changes nothing."""
        policy = self._policy
        if isinstance(policy, LooksAhead):
            return index_array(policy.look_ahead(num_slots))
        if self._tenants is not None:
            self._tenants.demand(num_slots)
        chosen = index_array(policy.choose(num_slots))
        policy.put_back(chosen)
        return chosen

    def order(self) -> list[int]:
        """Return all idle slots, the next to go first. For audits; changes nothing."""
        return self._policy.order()

    def check(self) -> None:
        """Raise InvariantError unless the policy has the idle slots."""
        table = self._table
        idle = np.flatnonzero((table.slot_members > 0) & (table.slot_holds == 0)).tolist()
        found = sorted(self._policy.order())
        if found != idle or len(self._policy) != len(idle):
            raise InvariantError(
                f"the policy has {len(found)} slots, {len(idle)} are idle; they differ in "
                f"{sorted(set(found) ^ set(idle))[:5]}"
            )
        if np.flatnonzero(self._is_in).tolist() != idle:
            raise InvariantError("slots are noted as waiting that are not, or the reverse")

    def _leave(self, slots: IndexArray) -> None:
        if len(slots):
            self._policy.remove(slots)
            self._is_in[slots] = False
