"""Entries by rank, the lowest first: what a policy with a history keeps each of its lines in.

Stands under `HistoryPolicy`. A heap; places that entries have left are dropped when they
come up, or all together when they are many. Refuses nothing: its policy knows what is in it.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Protocol, TypeAlias

Rank: TypeAlias = "tuple[float, int]"
"""What an entry is worth, and of equal ones, when it came."""

_SPARE_STALE = 64


class Line(Protocol):
    """Where `HistoryPolicy` keeps entries: a `RankedQueue`, or what orders them otherwise."""

    def __len__(self) -> int:
        """Return how many entries are here."""

    def __contains__(self, entry: object) -> bool:
        """Say whether an entry is here."""

    def __copy__(self) -> Line:
        """Return an equal line that changes alone."""

    def add(self, entry: int, rank: Rank) -> None:
        """Enter an entry that is not here."""

    def remove(self, entry: int) -> None:
        """Take out an entry that is here."""

    def pop(self) -> int:
        """Take out the next victim. There is one."""


class RankedQueue:
    """A set of entries, each with a rank. O(log n) amortised for every change.

    Invariant: every entry stands in the heap with its present rank at least once; places that say
    otherwise are stale, and never many more than entries.
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
        """Enter an entry that is not here."""
        self._ranks[entry] = rank
        heappush(self._heap, (rank, entry))

    def remove(self, entry: int) -> None:
        """Take out an entry that is here."""
        del self._ranks[entry]
        if len(self._heap) > 2 * len(self._ranks) + _SPARE_STALE:
            self._heap = [(rank, entry) for entry, rank in self._ranks.items()]
            heapify(self._heap)

    def pop(self) -> int:
        """Take out the entry of the lowest rank. There is one."""
        while True:
            rank, entry = heappop(self._heap)
            if self._ranks.get(entry) == rank:
                del self._ranks[entry]
                return entry
