"""Where new keys of a chain go: behind their parents while the slot has room, else into new slots.

Between a tier, which knows what is missing, and its table. Only proposes: nothing is changed here.

    blocks_per_slot 4, keys k0 .. k8, of which k0 k1 are in slot 5     | k0 | k1 |    |    |
    k2 k3 continue slot 5, k4 .. k7 take a new slot, k8 another one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.base.arrays import IndexArray, index_array
from kvcache.offload.keys import GROUP_BYTES, OffloadKey
from kvcache.offload.slot_table import FORGOTTEN, NO_ADDRESS, SlotTable


@dataclass(frozen=True, eq=False)
class Placement:
    """New key `i` is `positions[i]` of the keys given and goes to place `places[i]` of slot
    `slots[i]`; numbers from the table's `num_slots` on are slots still to be had, in order."""

    positions: IndexArray
    slots: IndexArray
    places: IndexArray
    num_new_slots: int

    def leading(self, num_slots: int, num_new_slots: int) -> Placement:
        """Return what comes before a new slot that is not to be had, where `num_new_slots` are."""
        if num_new_slots >= self.num_new_slots:
            return self
        beyond = np.flatnonzero(self.slots >= num_slots + num_new_slots)
        end = int(beyond[0])
        return Placement(self.positions[:end], self.slots[:end], self.places[:end], num_new_slots)


def place_keys(
    table: SlotTable,
    keys: Sequence[OffloadKey],
    addresses: IndexArray,
    positions: IndexArray,
    behind: OffloadKey | None,
) -> Placement:
    """Return a place for each key at `positions`, none of which is in the table.

    `addresses` are those of all keys; `behind` is the key that `keys[0]` continues.
    """
    if table.blocks_per_slot == 1:
        count = len(positions)
        slots = np.arange(table.num_slots, table.num_slots + count)
        return Placement(positions, slots, np.zeros(count, np.intp), count)
    return _PlacesInSlots(table).place(keys, addresses, positions, behind)


class _PlacesInSlots:
    """Walks along a chain, a place at a time."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._size = table.blocks_per_slot
        self._filled: dict[int, int] = {}
        self._num_new = 0

    def place(
        self,
        keys: Sequence[OffloadKey],
        addresses: IndexArray,
        positions: IndexArray,
        behind: OffloadKey | None,
    ) -> Placement:
        slots: list[int] = []
        places: list[int] = []
        wanted = set(positions.tolist())
        slot, place = -1, self._size
        if behind is not None and behind in self._table.index:
            slot, place = self._end_of(self._table.index[behind])
        previous = behind
        for i, (key, address) in enumerate(zip(keys, addresses.tolist(), strict=True)):
            if address != NO_ADDRESS:
                slot, place = self._end_of(address)
            elif i not in wanted:
                slot, place = -1, self._size
            else:
                is_continued = (
                    previous is not None and previous[-GROUP_BYTES:] == key[-GROUP_BYTES:]
                )
                if place == self._size or not is_continued:
                    slot, place = self._table.num_slots + self._num_new, 0
                    self._num_new += 1
                slots.append(slot)
                places.append(place)
                place += 1
                self._filled[slot] = place
            previous = key
        return Placement(positions, index_array(slots), index_array(places), self._num_new)

    def _end_of(self, address: int) -> tuple[int, int]:
        """Return slot and place behind an address; no place where something else follows."""
        table = self._table
        slot, place = divmod(address, self._size)
        filled = self._filled.get(slot, int(table.next_places[slot]))
        if table.states[address] == FORGOTTEN or place + 1 != filled:
            return slot, self._size
        return slot, place + 1
