"""Adaptive: learns which of several simple orders serves the load, and evicts by it.

    uses ──▶ records of names ──▶ a key for each order ──▶ simulated caches, one for each order
                                          │                      │ hits
                                          ▼                      ▼
                      victims ◀── the lowest keys of the order that rules

`orders.py` has the records and the simulated caches; docs/policies.md has more.
"""

from __future__ import annotations

import numpy as np

from kvcache.base.arrays import IndexArray, index_array
from kvcache.policies import orders, victims
from kvcache.policies.entry_queue import Entries, as_array
from kvcache.policies.policy import EntryTable, columns_of

_MOST_SIMULATED, _MOST_SAMPLED = 1 << 14, 1 << 12
"""Caches with more blocks than the first simulate a sample, of so many contents at most."""

_MOST_NAMES, _ROOMS_REMEMBERED, _LEAST_ROOMS = 1 << 16, 64, 4
"""Names remembered, in capacities: fewer than 64 in caches where that is more than 65,536 names."""

_NO_ENTRIES: IndexArray = np.empty(0, np.intp)


class AdaptivePolicy:
    """An `EvictionPolicy` by the order whose simulated cache had the most hits lately."""

    def __init__(self, capacity: int, table: EntryTable) -> None:
        """Make an empty order of entries below `capacity`, described by `table`."""
        self.reads_contents = False  # contents are known by their names, but not by digests
        self._table = table
        self._victims = victims.make_victims(capacity)
        num_sampled = _MOST_SAMPLED if capacity > _MOST_SIMULATED else capacity
        scale = 1 << ((capacity - 1) // num_sampled).bit_length()
        most = max(min(_MOST_NAMES, _ROOMS_REMEMBERED * capacity), _LEAST_ROOMS * capacity)
        num_rows = max(orders.WAYS, 1 << (most - 1).bit_length())
        self._memory = orders.make_memory(num_rows, capacity, scale)

    @property
    def ruling(self) -> int:
        """The order that rules: 0 is LRU; see `orders.py`."""
        return self._memory.number.item(orders.RULING)

    def __len__(self) -> int:
        return self._victims.number.item(victims.COUNT)

    def __contains__(self, entry: object) -> bool:
        return isinstance(entry, int) and self._victims.stamp.item(entry) > 0

    def insert(self, entries: Entries) -> None:
        entries = as_array(entries)
        names, parents = columns_of(self._table, entries)
        ruling, num_unused = self.ruling, len(self) + len(entries)
        was_unused = self._victims.stamp[entries] == 0
        orders.note_uses(self._memory, num_unused, entries, names, was_unused)
        if self.ruling != ruling:
            self._take_over()
        victims.insert(self._victims, entries, orders.keys_of(self._memory, entries), parents)

    def learn(self, num_unused: int, names: IndexArray, hits: orders.BoolArray) -> None:
        """Learn from contents that come out of use, tails first, while the caller evicts by LRU.
        `num_unused` entries are unused now; `hits` says which contents were unused before."""
        orders.note_uses(self._memory, num_unused, _NO_ENTRIES, names, hits)

    def adopt(self, entries: IndexArray) -> None:
        """Insert entries, children first, whose uses are known."""
        orders.catch_up(self._memory)
        self._memory.held[entries, 0], parents = columns_of(self._table, entries)
        victims.insert(self._victims, entries, orders.keys_of(self._memory, entries), parents)

    def remove(self, entries: Entries) -> None:
        victims.remove(self._victims, as_array(entries), False)

    def discard(self, entries: Entries) -> None:
        entries = as_array(entries)
        self._memory.held[entries] = 0
        victims.remove(self._victims, entries, True)

    def choose(self, num_entries: int) -> Entries:
        chosen: IndexArray = np.empty(min(num_entries, len(self)), np.intp)
        victims.pop(self._victims, chosen)
        return chosen

    def put_back(self, entries: Entries) -> None:
        victims.put_back(self._victims, as_array(entries))

    def order(self) -> list[int]:
        stamps, keys = self._victims.stamp, self._victims.key
        inserted = np.flatnonzero(stamps > 0)
        order: list[int] = inserted[np.lexsort((stamps[inserted], keys[inserted]))].tolist()
        return order

    def _take_over(self) -> None:
        """Put all entries in the order that rules now."""
        entries, stamps = index_array(self.order()), self._victims.stamp
        self._victims = victims.make_victims(len(stamps))
        self._victims.stamp[:] = np.minimum(stamps, 0)
        self.adopt(entries)
