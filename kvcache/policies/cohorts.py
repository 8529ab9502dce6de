"""Cohorts: entries of one class that were used together; and the cohort to evict from next.

Part of the hazard policy. A cohort has one age and one index, so that many entries cost as much
as one. Checks nothing: its caller validates.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from copy import copy
from heapq import heapify, heappop, heappush

from kvcache.policies.ranked_queue import Rank
from kvcache.policies.reuse_table import AGE_LIMITS_BLOCKS, ReuseTable

_SPARE_STALE = 64


class Cohort:
    """Entries of class `line`, last used at `stamp`, in order of eviction.

    `rank` is their value when they were last ranked; among equals the lower `number` goes first.
    """

    __slots__ = ("line", "members", "number", "rank", "stamp")

    def __init__(self, line: int, stamp: int, number: int) -> None:
        """Make one without members."""
        self.line = line
        self.stamp = stamp
        self.number = number
        self.rank: Rank = (0.0, 0)
        self.members: dict[int, None] = {}


class CohortValue:
    """The present value of cohorts, by the index of reuse.

    `clock_blocks` counts the blocks used so far; the policy advances it.
    """

    def __init__(self, table: ReuseTable) -> None:
        """Start the clock."""
        self.table = table
        self.clock_blocks = 0

    def rank(self, cohort: Cohort) -> Rank:
        """Return a rank: the lower, the fewer hits a member brings.

        Among equals the oldest goes first, but where the value grows with age, the youngest.
        """
        line, stamp, table = cohort.line, cohort.stamp, self.table
        age = bisect_right(AGE_LIMITS_BLOCKS, self.clock_blocks - stamp)
        return table.index[line][age], -stamp if table.grows[line][age] else stamp


class CohortHeap:
    """Cohorts by rank, the lowest first. O(log n) for each.

    Ranks stay as they were when a cohort was added. Empty cohorts are dropped when they reach the
    top, or all together when they are many.
    """

    def __init__(self, ranked: Iterable[tuple[Rank, Cohort]] = ()) -> None:
        """Create a heap of these cohorts."""
        self._heap = [(rank, cohort.number, cohort) for rank, cohort in ranked]
        heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, cohort: Cohort, rank: Rank) -> None:
        """Enter a cohort."""
        heappush(self._heap, (rank, cohort.number, cohort))

    def is_empty(self) -> bool:
        """Return whether no cohort has members."""
        while self._heap and not self._heap[0][2].members:
            heappop(self._heap)
        return not self._heap

    def first(self) -> int:
        """Return the member to evict next. The heap must not be empty."""
        return next(iter(self._heap[0][2].members))

    def pop_below(self, rank: Rank) -> Iterator[Cohort]:
        """Remove and yield the cohorts of lower ranks than `rank`."""
        while not self.is_empty() and self._heap[0][0] < rank:
            yield heappop(self._heap)[2]

    def drop_empty(self) -> None:
        """Drop the cohorts without members."""
        self._heap = [place for place in self._heap if place[2].members]
        heapify(self._heap)

    def twin(self, copies: dict[int, Cohort]) -> CohortHeap:
        """Return an equal heap of the copies, given by the number of their original."""
        return CohortHeap((rank, copies[num]) for rank, num, c in self._heap if c.members)


class CohortLine:
    """A line of `HistoryPolicy`: entries in cohorts, those of the lowest index first.

    A rank is class and stamp: `(line, stamp)`. Cohorts used before `old_stamp` are *old*, and have
    an additional order of their own.

    Invariant: a cohort with members is in `_cohorts` and `_heap`, and either in `_old` or in
    `_young`, which is by stamp.
    """

    def __init__(self, value: CohortValue) -> None:
        """Create an empty line without old cohorts."""
        self._value = value
        self._old_stamp = self._num_cohorts = 0
        self._cohorts: dict[Rank, Cohort] = {}
        self._cohort_of: dict[int, Cohort] = {}
        self._heap = CohortHeap()
        self._old = CohortHeap()
        self._young = CohortHeap()

    def __len__(self) -> int:
        return len(self._cohort_of)

    def __contains__(self, entry: object) -> bool:
        return entry in self._cohort_of

    def __copy__(self) -> CohortLine:
        twin = CohortLine(self._value)
        twin._old_stamp, twin._num_cohorts = self._old_stamp, self._num_cohorts
        copies: dict[int, Cohort] = {}
        for key, cohort in self._cohorts.items():
            other = twin._cohorts[key] = copies[cohort.number] = copy(cohort)
            other.members = cohort.members.copy()
            twin._cohort_of.update(dict.fromkeys(other.members, other))
        twin._heap, twin._old = self._heap.twin(copies), self._old.twin(copies)
        twin._young = self._young.twin(copies)
        return twin

    def add(self, entry: int, rank: Rank) -> None:
        """Add a new entry, behind the others of its class and stamp."""
        cohort = self._cohorts.get(rank)
        if cohort is None:
            self._num_cohorts += 1
            cohort = Cohort(int(rank[0]), rank[1], self._num_cohorts)
            cohort.rank = self._value.rank(cohort)
            self._cohorts[rank] = cohort
            self._heap.add(cohort, cohort.rank)
            if cohort.stamp < self._old_stamp:
                self._old.add(cohort, cohort.rank)
            else:
                self._young.add(cohort, (0.0, cohort.stamp))
            self._drop_many_empty()
        cohort.members[entry] = None
        self._cohort_of[entry] = cohort

    def remove(self, entry: int) -> None:
        """Remove an entry of this line."""
        cohort = self._cohort_of.pop(entry)
        del cohort.members[entry]
        if not cohort.members:
            del self._cohorts[float(cohort.line), cohort.stamp]

    def first(self) -> int:
        """Return the entry to evict next. The line must not be empty."""
        self._heap.is_empty()
        return self._heap.first()

    def first_old(self) -> int | None:
        """Return the entry of the old cohorts to evict next, if there is one."""
        return None if self._old.is_empty() else self._old.first()

    def pop(self) -> int:
        """Remove the entry to evict next. The line must not be empty."""
        entry = self.first()
        self.remove(entry)
        return entry

    def grow_old(self, old_stamp: int) -> None:
        """Make the cohorts used before `old_stamp` old; it only rises."""
        self._old_stamp = old_stamp
        for cohort in self._young.pop_below((0.0, old_stamp)):
            self._old.add(cohort, cohort.rank)

    def reorder(self) -> None:
        """Rank all entries by their present value."""
        for cohort in self._cohorts.values():
            cohort.rank = self._value.rank(cohort)
        self._heap = CohortHeap((c.rank, c) for c in self._cohorts.values())
        self._old = CohortHeap(
            (c.rank, c) for c in self._cohorts.values() if c.stamp < self._old_stamp
        )

    def _drop_many_empty(self) -> None:
        """Drop empty cohorts when they become many between two rankings."""
        limit = 2 * len(self._cohorts) + _SPARE_STALE
        for heap in (self._heap, self._old, self._young):
            if len(heap) > limit:
                heap.drop_empty()
