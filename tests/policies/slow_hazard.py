"""The hazard policy once more, slow: every name is looked at for every question."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from kvcache.policies import EntryInfo
from kvcache.policies.contest import Contest
from kvcache.policies.reuse_table import AGE_LIMITS_BLOCKS, ReuseTable
from tests.policies.slow import Seat, SlowPolicy, names_of

NUM_LINES = 23
ROOMS_REMEMBERED = 16


@dataclass
class Standing:
    """Entries of a class that came out of use together."""

    line: int
    stamp: int
    rank: tuple[float, int]
    entries: list[int] = field(default_factory=list)


@dataclass
class Known:
    """A name; `batch` counts those that are known by the same words."""

    name: bytes
    line: int
    stamp: int
    uses: int
    batch: int
    rank: tuple[float, int]
    is_held: bool = True
    num_passed: int = 0


class SlowHazard(SlowPolicy):
    def start(self) -> None:
        self.blocks = self.learned = self.ranked = self.batch = 0
        self.table = ReuseTable(NUM_LINES)
        self.contest = Contest()
        self.cohorts: list[Standing] = []
        self.known: list[Known] = []
        self.recent: list[bytes] = []

    def insert(self, entries: Sequence[int]) -> None:
        for entry in self.due:
            seat = self.seat(entry)
            self.stand(entry, int(seat.line), seat.since)
        self.gone.clear()
        self.due.clear()
        if not entries:
            return
        infos = [self.book.describe(entry) for entry in entries]
        seats = [self.past(entry, info) for entry, info in zip(entries, infos, strict=True)]
        was = self.blocks
        self.blocks += sum(info.weight_blocks for info in infos)
        lines = lines_of([seat.uses for seat in seats], infos)
        for seat, info, line in zip(seats, infos, lines, strict=True):
            seat.weight, seat.parent = info.weight_blocks, info.parent
            seat.line, seat.since = str(line), self.blocks
            self.sit_down(seat)
            self.stand(seat.entry, line, seat.since)
        self.room = max(self.room, sum(seat.weight for seat in self.seats))
        ahead = self.note_uses(seats, infos, lines, was)
        self.fit()
        is_changed = self.contest.note(ahead, self.blocks - was, self.room)
        self.renew(is_changed)

    def past(self, entry: int, info: EntryInfo) -> Seat:
        name = entry if info.content is None else info.content
        known = [seat for seat in self.in_use if seat.name == name]
        self.in_use = [seat for seat in self.in_use if seat.name != name]
        if not known and info.cut_from is not None:
            known = [seat for seat in self.seats if seat.name == info.cut_from]
            known = known or [seat for seat in self.in_use if seat.name == info.cut_from]
        names = names_of(info)
        before = [one.uses for one in self.known if one.name in names]
        uses = max(before) if 2 * len(before) > len(names) else 0
        seat = deepcopy(known[-1]) if known else Seat(entry, name, 0, None, uses=uses)
        seat.entry, seat.name, seat.uses = entry, name, seat.uses + 1
        return seat

    def note_uses(
        self, seats: list[Seat], infos: list[EntryInfo], lines: list[int], was: int
    ) -> int:
        ahead = 0
        words = None
        for seat, info, line in zip(seats, infos, lines, strict=True):
            if words != (line, seat.uses):
                words = line, seat.uses
                self.batch += 1
            for name in names_of(info):
                for one in [one for one in self.known if one.name == name]:
                    ahead += one.is_held
                    age = bisect_right(AGE_LIMITS_BLOCKS, was - one.stamp)
                    self.table.note_reuse(one.line, age, 1)
                    self.known.remove(one)
                rank = self.by_index(line, self.blocks)
                self.known.append(Known(name, line, self.blocks, seat.uses, self.batch, rank))
                ahead -= name in self.recent
                self.recent = [other for other in self.recent if other != name] + [name]
        return ahead

    def fit(self) -> None:
        self.recent = self.recent[-max(1, self.room) :]
        while sum(one.is_held for one in self.known) > max(1, self.room):
            held = [one for one in self.known if one.is_held]
            min(held, key=lambda one: (one.rank, one.batch)).is_held = False
        while len(self.known) > ROOMS_REMEMBERED * max(1, self.room):
            self.known = [one for one in self.known if one.batch != self.known[0].batch]

    def renew(self, is_changed: bool) -> None:
        is_due = is_changed or self.blocks - self.ranked >= 0.05 * self.room
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
            for one in self.known:
                one.rank = self.by_index(one.line, one.stamp)
            for cohort in self.cohorts:
                cohort.rank = self.rank(cohort.line, cohort.stamp)

    def rank(self, line: int, stamp: int) -> tuple[float, int]:
        return self.by_index(line, stamp) if self.contest.index_leads else (0.0, stamp)

    def by_index(self, line: int, stamp: int) -> tuple[float, int]:
        age = sum(self.blocks - stamp >= limit for limit in AGE_LIMITS_BLOCKS)
        index = [*self.table.index[line], 0.0]
        return index[age], -stamp if index[age + 1] > index[age] else stamp

    def stand(self, entry: int, line: int, stamp: int) -> None:
        for cohort in self.cohorts:
            if (cohort.line, cohort.stamp) == (line, stamp):
                cohort.entries.append(entry)
                return
        self.cohorts.append(Standing(line, stamp, self.rank(line, stamp), [entry]))

    def step_aside(self, entry: int) -> None:
        for cohort in self.cohorts:
            cohort.entries = [other for other in cohort.entries if other != entry]
        self.cohorts = [cohort for cohort in self.cohorts if cohort.entries]

    def pick(self, standing: list[Seat]) -> Seat:
        entry = min(self.cohorts, key=lambda cohort: cohort.rank).entries[0]
        self.step_aside(entry)
        return self.seat(entry)

    def leave(self, entry: int) -> Seat:
        self.step_aside(entry)
        return super().leave(entry)


def lines_of(uses: list[int], infos: list[EntryInfo]) -> list[int]:
    """Return classes: of contents used again, how often; of new ones, how many, and behind what."""
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
        num_new = sum(info.weight_blocks for info in infos[first : last + 1])
        start = 0
        for behind in range(last + 1, len(uses)):
            if uses[behind] == 1:
                break
            start += infos[behind].weight_blocks
        start = max(start, infos[last].position)
        length = max(bits for bits in range(8) if num_new >= 2**bits)
        lines.append(length + 8 * (start > 1))
    return lines
