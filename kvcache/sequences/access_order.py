"""Least recently used, by access times that an engine states.

The eviction policy inside the pool of a sequence allocator. Engines that manage sequences free
blocks one by one, head first, and state when each was last accessed. The oldest access goes first;
among equals the block that was freed first; among blocks freed along one sequence, the tail.
Refuses entries that weigh more than a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kvcache.base.arrays import index_array
from kvcache.policies import EntryBook
from kvcache.policies.entry_queue import Entries
from kvcache.sequences.block_tracker import NEVER_ACCESSED

_SPARE_STALE = 64


class _Place(NamedTuple):
    """An entry's place: the smallest goes first. `path` numbers the freeing of a sequence, `height`
    counts down along it."""

    last_accessed: float
    path: int
    height: int


class LastAccessOrder:
    """An `EvictionPolicy` ordered by access times. O(log n) per entry.

    `heap` may have stale places: an entry's valid place is the one in `_places`.
    """

    def __init__(self, capacity: int, book: EntryBook) -> None:
        """Make an empty order of entries below `capacity`, described by `book`."""
        self._book = book
        self._times = [NEVER_ACCESSED] * capacity
        self._places: dict[int, _Place] = {}
        self._chosen: dict[int, _Place] = {}
        self._heap: list[tuple[_Place, int]] = []
        self._last_path = 0
        self._last_entry: int | None = None

    @property
    def reads_contents(self) -> bool:
        """Does nothing: accesses are stated by entry."""
        return False

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, entry: object) -> bool:
        return entry in self._places

    def note_access(self, entry: int, time: float) -> None:
        """Record when `entry` was accessed; takes effect when it is next inserted."""
        self._times[entry] = time

    def insert(self, entries: Entries) -> None:
        for entry in index_array(entries).tolist():
            parent = self._book.describe(entry).parent
            before = None if parent is None else self._places.get(parent)
            if before is not None and parent == self._last_entry:
                path, height = before.path, before.height - 1
            else:
                self._last_path += 1
                path, height = self._last_path, 0
            self._put(entry, _Place(self._times[entry], path, height))
            self._last_entry = entry

    def remove(self, entries: Entries) -> None:
        for entry in index_array(entries).tolist():
            del self._places[entry]
        self._drop_stale()

    def discard(self, entries: Entries) -> None:
        self.remove(entries)

    def choose(self, num_entries: int) -> Entries:
        chosen: list[int] = []
        while len(chosen) < num_entries and self._places:
            place, entry = heappop(self._heap)
            if self._places.get(entry) == place:
                self._chosen[entry] = self._places.pop(entry)
                chosen.append(entry)
        return chosen

    def put_back(self, entries: Entries) -> None:
        for entry in index_array(entries).tolist():
            self._put(entry, self._chosen[entry])
        self._chosen.clear()

    def order(self) -> list[int]:
        return sorted(self._places, key=lambda entry: self._places[entry])

    def _put(self, entry: int, place: _Place) -> None:
        self._places[entry] = place
        heappush(self._heap, (place, entry))

    def _drop_stale(self) -> None:
        """Rebuild the heap when most of its places are stale."""
        if len(self._heap) > 2 * len(self._places) + _SPARE_STALE:
            live: Sequence[tuple[_Place, int]] = [
                (place, entry) for entry, place in self._places.items()
            ]
            self._heap = list(live)
            heapify(self._heap)
