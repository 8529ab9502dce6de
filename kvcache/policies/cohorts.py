"""What was used together and is of one class: cohorts, and the one whose members go next.

Stands under the hazard policy's order of entries and its directory of names. A cohort has an age,
so that many members cost as much as one. Refuses nothing: its owners know what is in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from copy import copy
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from kvcache.policies.ranked_queue import Rank
from kvcache.policies.reuse_table import AGE_LIMITS_BLOCKS, ReuseTable

K = TypeVar("K", int, bytes)


class Cohort(Generic[K]):
    """Members of class `line`, last used at `stamp`; the first goes first."""

    __slots__ = ("line", "members", "stamp")

    def __init__(self, line: int, stamp: int) -> None:
        """Make one without members."""
        self.line = line
        self.stamp = stamp
        self.members: dict[K, None] = {}


class CohortValue:
    """What cohorts are worth now: by the index of reuse, or, `by_recency`, by their stamp alone.

    `clock_blocks` counts the blocks used so far; the policy turns it.
    """

    def __init__(self, table: ReuseTable) -> None:
        """Start by recency."""
        self.table = table
        self.clock_blocks = 0

    def by_recency(self, line: int, stamp: int) -> Rank:
        """Return a rank that is lower the longer ago the last use was."""
        return 0.0, stamp

    def by_index(self, line: int, stamp: int) -> Rank:
        """Return a rank that is lower the less keeping a member brings.

        Of equals the oldest goes first, but where value grows with age, the youngest.
        """
        age = bisect_right(AGE_LIMITS_BLOCKS, self.clock_blocks - stamp)
        table = self.table
        return table.index[line][age], -stamp if table.grows[line][age] else stamp


class CohortHeap(Generic[K]):
    """Cohorts by rank, the lowest first, of equals the first entered. O(log n) for each cohort.

    Ranks stay until `rank_all`. Cohorts without members drop out when they come up.
    """

    def __init__(self) -> None:
        """Make an empty heap."""
        self._heap: list[tuple[Rank, int, Cohort[K]]] = []
        self._num_entered = 0

    def add(self, cohort: Cohort[K], rank: Rank) -> None:
        """Enter a cohort."""
        self._num_entered += 1
        heappush(self._heap, (rank, self._num_entered, cohort))

    def rank_all(self, ranked: Iterable[tuple[Cohort[K], Rank]]) -> None:
        """Hold these cohorts and no others."""
        self._heap = [(rank, order, cohort) for order, (cohort, rank) in enumerate(ranked)]
        self._num_entered = len(self._heap)
        heapify(self._heap)

    def pop(self) -> tuple[K, Cohort[K]]:
        """Take out the member that goes next, and say of which cohort. There is one."""
        while not self._heap[0][2].members:
            heappop(self._heap)
        cohort = self._heap[0][2]
        member = next(iter(cohort.members))
        del cohort.members[member]
        return member, cohort

    def twin(self, copies: dict[int, Cohort[K]]) -> CohortHeap[K]:
        """Return an equal heap of the copies, which are given by the `id` of their original."""
        other: CohortHeap[K] = CohortHeap()
        other._num_entered = self._num_entered
        other._heap = [(rank, order, copies[id(c)]) for rank, order, c in self._heap if c.members]
        heapify(other._heap)
        return other


class CohortLine:
    """A line of `HistoryPolicy`: entries in cohorts. Ranks say class and stamp: `(line, stamp)`."""

    def __init__(self, value: CohortValue) -> None:
        """Make an empty line, ordered by recency until `reorder`."""
        self._value = value
        self._rank = value.by_recency
        self._cohorts: dict[Rank, Cohort[int]] = {}
        self._cohort_of: dict[int, Cohort[int]] = {}
        self._heap: CohortHeap[int] = CohortHeap()

    def __len__(self) -> int:
        return len(self._cohort_of)

    def __contains__(self, entry: object) -> bool:
        return entry in self._cohort_of

    def __copy__(self) -> CohortLine:
        twin = CohortLine(self._value)
        twin._rank = self._rank
        copies: dict[int, Cohort[int]] = {}
        for key, cohort in self._cohorts.items():
            other = twin._cohorts[key] = copies[id(cohort)] = copy(cohort)
            other.members = cohort.members.copy()
            twin._cohort_of.update(dict.fromkeys(other.members, other))
        twin._heap = self._heap.twin(copies)
        return twin

    def add(self, entry: int, rank: Rank) -> None:
        """Enter an entry that is not here, behind the others of its class and stamp."""
        cohort = self._cohorts.get(rank)
        if cohort is None:
            cohort = self._cohorts[rank] = Cohort(int(rank[0]), rank[1])
            self._heap.add(cohort, self._rank(cohort.line, cohort.stamp))
        cohort.members[entry] = None
        self._cohort_of[entry] = cohort

    def remove(self, entry: int) -> None:
        """Take out an entry that is here."""
        cohort = self._cohort_of.pop(entry)
        del cohort.members[entry]
        self._drop_if_empty(cohort)

    def pop(self) -> int:
        """Take out the entry that goes next. There is one."""
        entry, cohort = self._heap.pop()
        del self._cohort_of[entry]
        self._drop_if_empty(cohort)
        return entry

    def reorder(self, *, by_recency: bool) -> None:
        """Rank all entries by what they are worth now."""
        rank = self._rank = self._value.by_recency if by_recency else self._value.by_index
        self._heap.rank_all((c, rank(c.line, c.stamp)) for c in self._cohorts.values())

    def _drop_if_empty(self, cohort: Cohort[int]) -> None:
        if not cohort.members:
            del self._cohorts[float(cohort.line), cohort.stamp]
