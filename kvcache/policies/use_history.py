"""A sample of names: when each was used last, how often, and who would still have it.

Stands beside the hazard policy's entries: it teaches the table of reuse, and plays two caches of
names against each other, one by recency and one by the table. Holds names and no blocks. Refuses
to grow: a share of names is sampled, and those longest unused are forgotten.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import chain

from kvcache.policies.cohorts import Cohort, CohortHeap, CohortValue
from kvcache.policies.reuse_table import AGE_LIMITS_BLOCKS, NUM_AGES

_MOST_SAMPLED = 1 << 12
"""Entries of a policy from which on it samples: so that it costs the same in a larger pool."""

_ROOMS_REMEMBERED = 16
"""How many times the room is in names of the past. Contents come back after several rooms where
room is short, and that is where it pays to know which."""

_SPARE_STALE = 64


class _UsedTogether(Cohort[bytes]):
    """Names last used at `stamp`, the `num_uses`th time; `members` are those that the cache by
    index would still have, `names` are all that were not used since."""

    __slots__ = ("names", "num_uses")

    def __init__(self, line: int, stamp: int, num_uses: int) -> None:
        super().__init__(line, stamp)
        self.num_uses = num_uses
        self.names: dict[bytes, None] = {}


class UseHistory:
    """What is known of sampled names. O(log n) amortised for each name.

    Invariants: each name is in `names` of one cohort, the one in `_cohort_of`; `num_held` sums all
    `members`. `scale` blocks stand behind each name.
    """

    def __init__(self, capacity: int, value: CohortValue) -> None:
        """Know nothing; `value` has the table that is taught, and ranks by it."""
        self.scale = 1 << max(0, (capacity // _MOST_SAMPLED).bit_length())
        self._value = value
        self._cohort_of: dict[bytes, _UsedTogether] = {}
        self._by_age: list[deque[_UsedTogether]] = [deque() for _ in range(NUM_AGES)]
        self._num_cohorts = 0
        self._num_held = 0
        self._held: CohortHeap[bytes] = CohortHeap()
        self._recent: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._cohort_of)

    def sample(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the names that are of the sample, in the same order."""
        if self.scale == 1:
            return list(names)
        mask = self.scale - 1
        return [name for name in names if not int.from_bytes(name[:4], "big") & mask]

    def num_uses(self, names: Sequence[bytes]) -> int:
        """Return how often contents were used, 0 if most of their sampled names are new."""
        known = [c.num_uses for n in names if (c := self._cohort_of.get(n)) is not None]
        return max(known) if 2 * len(known) > len(names) else 0

    def use(self, names: Sequence[bytes], line: int, num_uses: int, was_blocks: int) -> int:
        """Contents were used once more and are of a class now; the clock was at `was_blocks`.

        Returns by how many hit blocks the cache by index was ahead of the one by recency on these.
        """
        if not names:
            return 0
        cohort = _UsedTogether(line, self._value.clock_blocks, num_uses)
        cohort_of, recent = self._cohort_of, self._recent
        num_ahead = 0
        for name in names:
            before = cohort_of.get(name)
            if before is not None:
                num_ahead += name in before.members
                age = bisect_right(AGE_LIMITS_BLOCKS, was_blocks - before.stamp)
                self._value.table.note_reuse(before.line, age, self.scale)
                self._forget(name, before)
            cohort.names[name] = cohort.members[name] = None
            cohort_of[name] = cohort
            if name in recent:
                num_ahead -= 1
                recent.move_to_end(name)
            else:
                recent[name] = None
        self._num_held += len(cohort.members)
        self._by_age[0].append(cohort)
        self._num_cohorts += 1
        self._held.add(cohort, self._value.by_index(line, cohort.stamp))
        return num_ahead * self.scale

    def settle(self, room_blocks: int) -> None:
        """Let both caches fit into `room_blocks` again, and forget what is too long ago."""
        room = max(1, room_blocks // self.scale)
        while len(self._recent) > room:
            self._recent.popitem(last=False)
        while self._num_held > room:
            self._held.pop()
            self._num_held -= 1
        self._trim(_ROOMS_REMEMBERED * room)

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

    def reorder(self) -> None:
        """Rank what is held by what it is worth now."""
        rank = self._value.by_index
        cohorts = chain.from_iterable(self._by_age)
        self._held.rank_all((c, rank(c.line, c.stamp)) for c in cohorts if c.members)

    def _trim(self, num_names: int) -> None:
        """Forget the names that were not used for longest until so many are left."""
        age = NUM_AGES - 1
        while len(self._cohort_of) > num_names:
            while not self._by_age[age]:
                age -= 1
            cohort = self._by_age[age].popleft()
            self._num_cohorts -= 1
            for name in list(cohort.names):
                self._forget(name, cohort)

    def _forget(self, name: bytes, cohort: _UsedTogether) -> None:
        del self._cohort_of[name], cohort.names[name]
        if name in cohort.members:
            del cohort.members[name]
            self._num_held -= 1
