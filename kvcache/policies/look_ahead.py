"""The first entries of each line, without choosing victims.

For a caller that asks often, such as a tier that writes files for blocks that will be evicted soon.
To choose victims and put them back would cost a walk through the policy each time. Here an entry
costs O(log n) when it comes near the end of its line, and a step through a list per call. The
order in which lines take turns is not known here.

    line 1   | 8  5  2 | 3  9  4  7        ahead, sorted, as far as ever asked | behind, a heap
    line 2   | 1  6  0 | .  .
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
from typing import TypeAlias

from kvcache.policies.ranked_queue import Rank

_Place: TypeAlias = "tuple[Rank, int]"

_SPARE = 64


class _Line:
    """One line. Invariant: an entry ranks below all entries behind it. Places in the heap whose
    entry has gone or has another rank are stale, and never many more than entries."""

    def __init__(self) -> None:
        self.ahead: list[_Place] = []
        self._behind: list[_Place] = []
        self._ranks_behind: dict[int, Rank] = {}
        self._num_asked = 0

    def add(self, place: _Place) -> None:
        if not self.ahead or place > self.ahead[-1]:
            self._add_behind(place)
            return
        insort(self.ahead, place)
        if len(self.ahead) > 2 * self._num_asked + _SPARE:
            self._add_behind(self.ahead.pop())

    def remove(self, entry: int, rank: Rank) -> None:
        if entry not in self._ranks_behind:
            del self.ahead[bisect_left(self.ahead, (rank, entry))]
            return
        del self._ranks_behind[entry]
        if len(self._behind) > 2 * len(self._ranks_behind) + _SPARE:
            self._behind = sorted((rank, entry) for entry, rank in self._ranks_behind.items())

    def first(self, count: int) -> list[int]:
        self._num_asked = count
        while len(self.ahead) < count and self._ranks_behind:
            place = heappop(self._behind)
            if self._ranks_behind.get(place[1]) == place[0]:
                del self._ranks_behind[place[1]]
                self.ahead.append(place)
        return [entry for _, entry in self.ahead[:count]]

    def _add_behind(self, place: _Place) -> None:
        self._ranks_behind[place[1]] = place[0]
        heappush(self._behind, place)


class LookAhead:
    """The entries of some lines, by rank; the first ones of each line are kept sorted."""

    def __init__(self, num_lines: int) -> None:
        """Start without entries."""
        self._lines = [_Line() for _ in range(num_lines)]

    def add(self, entry: int, line: int, rank: Rank) -> None:
        """Add a new entry."""
        self._lines[line].add((rank, entry))

    def remove(self, entry: int, line: int, rank: Rank) -> None:
        """Remove an entry that was added with this line and rank."""
        self._lines[line].remove(entry, rank)

    def first(self, count: int) -> list[int]:
        """Return the first `count` entries of each line, the next of a line first."""
        return [entry for line in self._lines for entry in line.first(count)]
