"""A sample of names: when each was used last, how often, and as what.

Watches the hazard policy's entries, and teaches the table of reuse what becomes of contents,
those that were evicted included. Holds names and no blocks. Refuses to grow: a share of names is
sampled, and those longest unused are forgotten.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

from kvcache.policies.cohorts import CohortValue
from kvcache.policies.reuse_table import AGE_LIMITS_BLOCKS, NUM_AGES

_MOST_SAMPLED = 1 << 14
"""Entries of a policy from which on it samples: so that it costs the same in a larger pool."""

_MOST_NAMES = 1 << 16
_ROOMS_REMEMBERED = 64
"""How many names are remembered at most, and how many times the room. Contents come back after many
rooms where room is short, and that is where it pays to know which."""

_SPARE_STALE = 64


class _UsedTogether:
    """Names last used at `stamp`, the `num_uses`th time, as contents of class `line`."""

    __slots__ = ("line", "names", "num_uses", "stamp")

    def __init__(self, line: int, stamp: int, num_uses: int) -> None:
        self.line = line
        self.stamp = stamp
        self.num_uses = num_uses
        self.names: dict[bytes, None] = {}


class UseHistory:
    """What is known of sampled names. O(log n) amortised for each name.

    Invariant: each name is in `names` of one cohort, the one in `_cohort_of`. `scale` blocks stand
    behind each name.
    """

    def __init__(self, capacity: int, value: CohortValue) -> None:
        """Know nothing; `value` has the table that is taught, and the clock."""
        self.scale = 1 << max(0, (capacity // _MOST_SAMPLED).bit_length())
        self._value = value
        self._cohort_of: dict[bytes, _UsedTogether] = {}
        self._by_age: list[deque[_UsedTogether]] = [deque() for _ in range(NUM_AGES)]
        self._num_cohorts = 0

    def __len__(self) -> int:
        return len(self._cohort_of)

    def is_sampled(self, name: bytes | None) -> bool:
        """Say whether a name is of the sample."""
        return name is not None and not int.from_bytes(name[:4], "big") & (self.scale - 1)

    def num_uses(self, name: bytes) -> int:
        """Return how often a content was used, 0 if its name is new."""
        cohort = self._cohort_of.get(name)
        return 0 if cohort is None else cohort.num_uses

    def use(self, names: Sequence[bytes], line: int, num_uses: int, was_blocks: int) -> None:
        """Contents were used once more and are of a class now; the clock was at `was_blocks`."""
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
        """Forget the names that were not used for longest, where they are too many for a room."""
        num_names = min(_MOST_NAMES, _ROOMS_REMEMBERED * max(1, room_blocks // self.scale))
        age = NUM_AGES - 1
        while len(self._cohort_of) > num_names:
            while not self._by_age[age]:
                age -= 1
            self._num_cohorts -= 1
            for name in self._by_age[age].popleft().names:
                del self._cohort_of[name]

    def grow_older(self) -> None:
        """Report which names have passed ages unused since this was called before."""
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
