"""Entries by rank, the lowest first: a line of `HistoryPolicy`.

A heap, and before it a sorted list of the entries that were asked for without being removed.

    sorted: the first ones ──▶ heap: all others      each ranks below all behind it
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from typing import TypeAlias

Rank: TypeAlias = "tuple[float, int]"
"""An entry's value and, among equals, its time of arrival."""

_SPARE = 64


class RankedQueue:
    """A set of entries, each with a rank. O(log n) amortised for every change. Checks nothing.

    Invariant: every entry is in the sorted list or, with its present rank, in the heap. Other
    places of the heap are stale, and never many more than entries.
    """

    __slots__ = ("_heap", "_num_asked", "_ranks", "_sorted")

    def __init__(self) -> None:
        """Make an empty queue."""
        self._sorted: list[tuple[Rank, int]] = []
        self._heap: list[tuple[Rank, int]] = []
        self._ranks: dict[int, Rank] = {}  # of the entries in the heap
        self._num_asked = 0

    def __len__(self) -> int:
        return len(self._sorted) + len(self._ranks)

    def __copy__(self) -> RankedQueue:
        twin = RankedQueue()
        twin._sorted, twin._heap = self._sorted.copy(), self._heap.copy()
        twin._ranks, twin._num_asked = self._ranks.copy(), self._num_asked
        return twin

    def add(self, entry: int, rank: Rank) -> None:
        """Add a new entry."""
        if self._sorted and (rank, entry) < self._sorted[-1]:
            insort(self._sorted, (rank, entry))
            if len(self._sorted) <= 2 * self._num_asked + _SPARE:
                return
            rank, entry = self._sorted.pop()
        self._ranks[entry] = rank
        heappush(self._heap, (rank, entry))

    def remove(self, entry: int, rank: Rank) -> None:
        """Remove an entry of this queue, which has this rank."""
        if entry not in self._ranks:
            del self._sorted[bisect_left(self._sorted, (rank, entry))]
            return
        del self._ranks[entry]
        if len(self._heap) > 2 * len(self._ranks) + _SPARE:
            self._heap = [(rank, entry) for entry, rank in self._ranks.items()]
            heapify(self._heap)

    def pop(self) -> int:
        """Remove and return the entry of the lowest rank. There must be one."""
        return (self._sorted.pop(0) if self._sorted else self._pop_behind())[1]

    def first(self, num_entries: int) -> list[int]:
        """Return the first `num_entries`, or all, without removing them."""
        self._num_asked = num_entries
        while len(self._sorted) < num_entries and self._ranks:
            self._sorted.append(self._pop_behind())
        return [entry for _, entry in self._sorted[:num_entries]]

    def _pop_behind(self) -> tuple[Rank, int]:
        while True:
            rank, entry = heappop(self._heap)
            if self._ranks.get(entry) == rank:
                del self._ranks[entry]
                return rank, entry
