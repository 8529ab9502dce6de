"""Entries by rank, the lowest first: a line of `HistoryPolicy`.

A heap. Stale places are dropped when they reach the top, or all together when they are many.
Checks nothing: its policy validates.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Protocol, TypeAlias

Rank: TypeAlias = "tuple[float, int]"
"""An entry's value and, among equals, its time of arrival."""

_SPARE_STALE = 64


class Line(Protocol):
    """The interface of a line of `HistoryPolicy`: a `RankedQueue`, or another order."""

    def __len__(self) -> int:
        """Return the number of entries."""

    def __contains__(self, entry: object) -> bool:
        """Return whether the line has an entry."""

    def __copy__(self) -> Line:
        """Return an independent copy."""

    def add(self, entry: int, rank: Rank) -> None:
        """Add a new entry."""

    def remove(self, entry: int) -> None:
        """Remove an entry of this line."""

    def pop(self) -> int:
        """Remove and return the next victim. There must be one."""


class RankedQueue:
    """A set of entries, each with a rank. O(log n) amortised for every change.

    Invariant: every entry is in the heap with its present rank at least once; other places are
    stale, and never many more than entries.
    """

    __slots__ = ("_heap", "_ranks")

    def __init__(self) -> None:
        """Make an empty queue."""
        self._ranks: dict[int, Rank] = {}
        self._heap: list[tuple[Rank, int]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, entry: object) -> bool:
        return entry in self._ranks

    def __copy__(self) -> RankedQueue:
        twin = RankedQueue()
        twin._ranks = self._ranks.copy()
        twin._heap = self._heap.copy()
        return twin

    def add(self, entry: int, rank: Rank) -> None:
        """Add a new entry."""
        self._ranks[entry] = rank
        heappush(self._heap, (rank, entry))

    def remove(self, entry: int) -> None:
        """Remove an entry of this queue."""
        del self._ranks[entry]
        if len(self._heap) > 2 * len(self._ranks) + _SPARE_STALE:
            self._heap = [(rank, entry) for entry, rank in self._ranks.items()]
            heapify(self._heap)

    def pop(self) -> int:
        """Remove and return the entry of the lowest rank. There must be one."""
        while True:
            rank, entry = heappop(self._heap)
            if self._ranks.get(entry) == rank:
                del self._ranks[entry]
                return entry
