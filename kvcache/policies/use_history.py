"""A sample of names: the time, number and class of each one's last use.

Teaches the hazard policy's table the fate of contents, including evicted ones. Holds names and no
blocks. Only a share of names is sampled, and the longest unused are forgotten.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

from kvcache.policies.cohorts import CohortValue
from kvcache.policies.reuse_table import AGE_LIMITS_BLOCKS, NUM_AGES

_MOST_SAMPLED = 1 << 14
"""Larger policies sample, so that the cost stays the same."""

_MOST_NAMES = 1 << 16
_ROOMS_REMEMBERED = 64
"""Most names that are remembered, and their number in capacities. In a small cache contents come
back after many capacities, and there it pays to know which."""

_SPARE_STALE = 64


class _UsedTogether:
    """Names last used at `stamp`, for the `num_uses`th time, as contents of class `line`."""

    __slots__ = ("line", "names", "num_uses", "stamp")

    def __init__(self, line: int, stamp: int, num_uses: int) -> None:
        self.line = line
        self.stamp = stamp
        self.num_uses = num_uses
        self.names: dict[bytes, None] = {}


class UseHistory:
    """The data of sampled names. O(log n) amortised for each name.

    Invariant: each name is in `names` of one cohort, the one in `_cohort_of`. A sampled name stands
    for `scale` blocks.
    """

    def __init__(self, capacity: int, value: CohortValue) -> None:
        """Start without names; `value` has the table to teach, and the clock."""
        self.scale = 1 << max(0, (capacity // _MOST_SAMPLED).bit_length())
        self._value = value
        self._cohort_of: dict[bytes, _UsedTogether] = {}
        self._by_age: list[deque[_UsedTogether]] = [deque() for _ in range(NUM_AGES)]
        self._num_cohorts = 0

    def __len__(self) -> int:
        return len(self._cohort_of)

    def is_sampled(self, name: bytes | None) -> bool:
        """Return whether a name is in the sample."""
        return name is not None and not int.from_bytes(name[:4], "big") & (self.scale - 1)

    def num_uses(self, name: bytes) -> int:
        """Return how often a content was used, 0 if its name is unknown."""
        cohort = self._cohort_of.get(name)
        return 0 if cohort is None else cohort.num_uses

    def use(self, names: Sequence[bytes], line: int, num_uses: int, was_blocks: int) -> None:
        """Record another use of contents, now of a class; the clock was at `was_blocks`."""
        if not names:
            return
        cohort = _UsedTogether(line, self._value.clock_blocks, num_uses)
        cohort_of, table = self._cohort_of, self._value.table
        for name in names:
            before = cohort_of.get(name)
            if before is not None:
                age = bisect_right(AGE_LIMITS_BLOCKS, was_blocks - before.stamp)
                table.note_reuse(before.line, age, self.scale)
                del before.names[name]
            cohort.names[name] = None
            cohort_of[name] = cohort
        self._by_age[0].append(cohort)
        self._num_cohorts += 1

    def trim(self, room_blocks: int) -> None:
        """Forget the names that were unused longest, if there are too many for the capacity."""
        num_names = min(_MOST_NAMES, _ROOMS_REMEMBERED * max(1, room_blocks // self.scale))
        age = NUM_AGES - 1
        while len(self._cohort_of) > num_names:
            while not self._by_age[age]:
                age -= 1
            self._num_cohorts -= 1
            for name in self._by_age[age].popleft().names:
                del self._cohort_of[name]

    def grow_older(self) -> None:
        """Report the names that have passed ages unused since the last call."""
        now, table = self._value.clock_blocks, self._value.table
        for age, limit in enumerate(AGE_LIMITS_BLOCKS):
            waiting, latest = self._by_age[age], now - limit
            while waiting and waiting[0].stamp <= latest:
                cohort = waiting.popleft()
                if cohort.names:
                    table.note_passed(cohort.line, age, len(cohort.names) * self.scale)
                    self._by_age[age + 1].append(cohort)
                else:
                    self._num_cohorts -= 1
        if self._num_cohorts > 2 * len(self._cohort_of) + _SPARE_STALE:
            self._by_age = [deque(c for c in cohorts if c.names) for cohorts in self._by_age]
            self._num_cohorts = sum(map(len, self._by_age))
