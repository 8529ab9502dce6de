"""A slow version of the hazard policy: every question visits every name."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import sqrt

from kvcache.policies import EntryInfo, guard
from kvcache.policies.reuse_table import AGE_LIMITS_BLOCKS, ReuseTable
from tests.policies.slow import Seat, SlowPolicy, names_of

NUM_LINES = 23


@dataclass
class Standing:
    """Entries of a class that came out of use together."""

    line: int
    stamp: int
    rank: tuple[float, int]
    entries: list[int] = field(default_factory=list)


@dataclass
class Known:
    """A used name; `num_passed` counts the ages it has reached since."""

    name: bytes
    line: int
    stamp: int
    uses: int
    num_passed: int = 0


@dataclass
class SlowGuard:
    """LRU's contents, the longest unused first, and those of them that were evicted."""

    lru: list[tuple[bytes, int]] = field(default_factory=list)
    missing: list[bytes] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    won: int = 0
    used: int = 0
    limit: float = 0.0

    def has(self, name: object) -> bool:
        return any(name == other for other, _ in self.lru)

    def allows(self, names: Sequence[bytes]) -> bool:
        num_had = sum(map(self.has, names))
        return bool(names) and (not num_had or len(self.missing) + num_had <= self.limit)

    def use(self, names: list[bytes], stamp: int, seat: Seat, is_hit: bool) -> int:
        """Return LRU's hits."""
        num_lru = len(names) if is_hit and seat.is_lru_hit else sum(map(self.has, names))
        num_missing = sum(name in self.missing for name in names)
        self.won += len(names) - num_lru if is_hit else -num_missing
        self.missing = [name for name in self.missing if name not in names]
        self.lru = [known for known in self.lru if known[0] not in names]
        self.lru += [(name, stamp) for name in reversed(names)]
        return num_lru

    def settle(self, num_blocks: int, num_cached: int, num_hits: int) -> None:
        self.lru = self.lru[-max(1, num_cached) :]
        self.missing = [name for name in self.missing if self.has(name)]
        self.used += num_blocks
        self.hits.append(num_hits)
        paid = guard._BUDGET_PER_BLOCK * self.used + self.won
        hits = [*self.hits, self.used / len(self.hits)]
        at_once = sum(count**2 for count in hits) / sum(hits)
        chance = min(1.0, sum(hits) / self.used)
        self.limit = max(0.0, paid)
        for count in range(len(self.lru) + 1):
            lost = count * chance
            if lost + 2 * sqrt(lost * at_once) + 4 * at_once / 6 <= paid:
                self.limit = max(self.limit, count)


class SlowHazard(SlowPolicy):
    def start(self) -> None:
        self.blocks = self.learned = self.ranked = 0
        self.table = ReuseTable(NUM_LINES)
        self.guard = SlowGuard()
        self.cohorts: list[Standing] = []
        self.known: list[Known] = []

    def insert(self, entries: Sequence[int]) -> None:
        self.gone.clear()
        self.settle_due()
        if not entries:
            return
        infos = [self.book.describe(entry) for entry in entries]
        pasts = [self.past(entry, info) for entry, info in zip(entries, infos, strict=True)]
        seats = [seat for seat, _ in pasts]
        was = self.blocks
        self.blocks += len(infos)
        lines = lines_of([seat.uses for seat in seats])
        num_lru = 0
        for (seat, is_hit), info, line in zip(pasts, infos, lines, strict=True):
            num_lru += self.guard.use(names_of(info), self.blocks, seat, is_hit)
            seat.parent, seat.is_lru_hit = info.parent, False
            seat.line, seat.since, seat.turn = str(line), self.blocks, self.now()
            self.sit_down(seat)
            self.stand(seat.entry, line, seat.since)
        num_inserted = len(self.seats)
        self.room = max(self.room, num_inserted)
        self.in_use = [seat for seat in self.in_use if seat.since >= self.blocks - 2 * self.room]
        self.guard.settle(self.blocks - was, num_inserted + len(self.in_use), num_lru)
        self.note_uses(seats, infos, lines, was)
        self.renew()

    def remove(self, entries: Sequence[int]) -> None:
        for entry in entries:
            seat = self.seat(entry)
            seat.is_lru_hit = self.guard.has(seat.name)
            seat.since = self.blocks
        super().remove(entries)

    def chosen(self, names: list[bytes]) -> None:
        self.guard.missing += [name for name in names if self.guard.has(name)]

    def put_back(self, entries: Sequence[int]) -> None:
        for seat, here in self.gone:
            if seat.entry in entries:
                missing = self.guard.missing
                self.guard.missing = [name for name in missing if name not in here]
        super().put_back(entries)

    def past(self, entry: int, info: EntryInfo) -> tuple[Seat, bool]:
        name = entry if info.content is None else info.content
        known = [seat for seat in self.in_use if seat.name == name]
        self.in_use = [seat for seat in self.in_use if seat.name != name]
        names = names_of(info)
        before = [one.uses for one in self.known if one.name in names]
        uses = max(before) if 2 * len(before) > len(names) else 0
        seat = deepcopy(known[-1]) if known else Seat(entry, name, None, uses=uses)
        seat.entry, seat.name, seat.uses = entry, name, seat.uses + 1
        return seat, bool(known)

    def note_uses(
        self, seats: list[Seat], infos: list[EntryInfo], lines: list[int], was: int
    ) -> None:
        for seat, info, line in zip(seats, infos, lines, strict=True):
            for name in names_of(info):
                for one in [one for one in self.known if one.name == name]:
                    age = bisect_right(AGE_LIMITS_BLOCKS, was - one.stamp)
                    self.table.note_reuse(one.line, age, 1)
                    self.known.remove(one)
                self.known.append(Known(name, line, self.blocks, seat.uses))
        assert len(self.known) <= 64 * self.room  # all are remembered

    def renew(self) -> None:
        is_due = self.blocks - self.ranked >= 0.05 * self.room
        if is_due:
            for one in self.known:
                num_passed = sum(self.blocks - one.stamp >= limit for limit in AGE_LIMITS_BLOCKS)
                for age in range(one.num_passed, num_passed):
                    self.table.note_passed(one.line, age, 1)
                one.num_passed = num_passed
        if self.blocks - self.learned >= 512:
            self.learned = self.blocks
            self.table.learn()
        if is_due:
            self.ranked = self.blocks
            for cohort in self.cohorts:
                cohort.rank = self.by_index(cohort.line, cohort.stamp)

    def by_index(self, line: int, stamp: int) -> tuple[float, int]:
        age = sum(self.blocks - stamp >= limit for limit in AGE_LIMITS_BLOCKS)
        index = [*self.table.index[line], 0.0]
        return index[age], -stamp if index[age + 1] > index[age] else stamp

    def stand(self, entry: int, line: int, stamp: int) -> None:
        for cohort in self.cohorts:
            if (cohort.line, cohort.stamp) == (line, stamp):
                cohort.entries.append(entry)
                return
        self.cohorts.append(Standing(line, stamp, self.by_index(line, stamp), [entry]))

    def step_aside(self, entry: int) -> None:
        for cohort in self.cohorts:
            cohort.entries = [other for other in cohort.entries if other != entry]
        self.cohorts = [cohort for cohort in self.cohorts if cohort.entries]

    def settle_due(self) -> None:
        for entry in self.due:
            seat = self.seat(entry)
            self.stand(entry, int(seat.line), seat.since)
        self.due.clear()

    def find(self) -> int | None:
        waiting = [seat for seat in self.seats if seat.entry not in self.parked]
        if not waiting:
            return None
        entry = self.first_allowed()
        if entry is None:
            entry = min(waiting, key=lambda seat: seat.turn).entry
        self.due = [other for other in self.due if other != entry]
        self.step_aside(entry)
        return entry

    def first_allowed(self) -> int | None:
        if self.due and self.is_allowed(self.due[0]):
            return self.due[0]
        self.settle_due()
        entry = min(self.cohorts, key=lambda cohort: cohort.rank).entries[0]
        if self.is_allowed(entry):
            return entry
        old_stamp = self.guard.lru[0][1] if self.guard.lru else 0
        old = [cohort for cohort in self.cohorts if cohort.stamp < old_stamp]
        return min(old, key=lambda cohort: cohort.rank).entries[0] if old else None

    def is_allowed(self, entry: int) -> bool:
        names = names_of(self.book.describe(entry))
        return self.guard.allows(names)

    def leave(self, entry: int) -> Seat:
        self.step_aside(entry)
        return super().leave(entry)


def lines_of(uses: list[int]) -> list[int]:
    """Return classes: of reused contents by their uses; of new ones by their number and parent."""
    lines = []
    for place, count in enumerate(uses):
        if count > 1:
            lines.append(
                16
                + [count <= 2, count <= 3, count <= 4, count <= 8, count <= 16].count(0)
                + (count > 64)
            )
            continue
        first = last = place
        while first > 0 and uses[first - 1] == 1:
            first -= 1
        while last + 1 < len(uses) and uses[last + 1] == 1:
            last += 1
        start = 0
        for behind in range(last + 1, len(uses)):
            if uses[behind] == 1:
                break
            start += 1
        length = max(bits for bits in range(8) if last + 1 - first >= 2**bits)
        lines.append(length + 8 * (start > 1))
    return lines
