"""The adaptive policy, slow and obvious: a list of records, and a list of names for each order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.policies.slow import Seat, SlowPolicy

DELAYS = (0.0, 0.5, 1.0)
HALF_LIVES = (16.0, 8.0, 4.0, 2.0, 1.0, 0.5, 0.25)
NUM_ORDERS = 11


@dataclass
class Record:
    name: object
    stamp: int = 0
    before: int = 0
    uses: int = 0
    line: str = ""
    was_hit: bool = False
    worths: list[float] = field(default_factory=lambda: [0.0] * len(HALF_LIVES))


class SlowAdaptive(SlowPolicy):
    """For caches so small that all contents are simulated."""

    def start(self) -> None:
        self.records: list[Record] = []
        self.num_uses = self.ruling = 0
        self.floors: dict[int, float] = {}
        self.cached: list[object] = []
        self.leads: list[list[float]] = [[] for _ in range(NUM_ORDERS)]
        self.weights: list[float] = []
        self.batches: list[int] = []
        self.lines_used: list[str] = []
        self.lines_reused: list[str] = []
        self.inside: list[dict[object, float]] = [{} for _ in range(NUM_ORDERS)]

    def before_insert(self, names: Sequence[object]) -> None:
        cached = self.cached
        names = list(dict.fromkeys(names))
        self.forget([name for name in names if isinstance(name, int) and name not in cached])
        batch, reused_lines = [], []
        for name in names:
            known = [record for record in self.records if record.name == name]
            record = known[0] if known else Record(name)
            self.records = [r for r in self.records if r.name != name] + [record]
            reused_lines += [record.line] if known else []
            self.num_uses += 1
            fading = 2.0 ** ((record.stamp - self.num_uses) / (HALF_LIVES[0] * self.capacity))
            record.worths = [worth * fading ** (1 << k) for k, worth in enumerate(record.worths)]
            record.before = record.stamp
            record.stamp, record.was_hit = self.num_uses, name in cached
            record.uses += 1
            batch.append(record)
        mean = (len(self.lines_reused) + 1) / (len(self.lines_used) + 50)
        for place, record in enumerate(batch):
            record.line = line_of(batch, place)
            reused, used = (
                lines.count(record.line) for lines in (self.lines_reused, self.lines_used)
            )
            weight = ((reused + 100 * mean) / (used + 100) / mean) ** 2
            record.worths = [worth + weight for worth in record.worths]
        self.lines_used += [record.line for record in batch]
        self.lines_reused += reused_lines
        if batch:
            self.simulate(batch)
            best = self.best()
            if best != self.ruling:
                self.ruling = best
                self.take_over()
        self.forget([record.name for record in self.records[: -64 * self.capacity]])

    def simulate(self, batch: list[Record]) -> None:
        fading = 0.5 ** (len(batch) / (8 * self.capacity))
        self.weights = [weight * fading for weight in self.weights] + [1.0]
        self.batches.append(len(batch))
        room, lru_hits = max(self.room, len(self.seats) + len(batch)), 0
        for order, inside in enumerate(self.inside):
            hits = sum(record.name in inside for record in batch)
            lru_hits = hits if order == 0 else lru_hits
            self.leads[order].append(hits - lru_hits)
            for record in batch:
                inside[record.name] = self.key(record, order, was_hit=record.name in inside)
            if len(inside) > room + room // 16:
                kept = sorted(inside, key=lambda name: inside[name])[-room:]
                self.inside[order] = {name: inside[name] for name in kept}

    def best(self) -> int:
        """Return the order with most hits, of LRU and those that surely lead it."""
        num_used = sum(w * n for w, n in zip(self.weights, self.batches, strict=True))
        least = 0.5 * num_used / max(1.0, sum(self.weights))
        gains = {0: 0.0}
        for order in range(1, NUM_ORDERS):
            weighted = [w * lead for w, lead in zip(self.weights, self.leads[order], strict=True)]
            error = sum(lead**2 for lead in weighted) ** 0.5
            if sum(weighted) > error + least:
                gains[order] = sum(weighted)
        return max(gains, key=lambda order: gains[order] + least * (order == self.ruling))

    def key(self, record: Record, order: int, *, was_hit: bool) -> float:
        if order == NUM_ORDERS - 1:
            return record.before + 1e-6 * record.stamp
        if order >= len(DELAYS):
            half_life = HALF_LIVES[order - len(DELAYS)] * self.capacity
            return float(np.log2(record.worths[order - len(DELAYS)]) + record.stamp / half_life)
        return record.stamp - (0 if was_hit else DELAYS[order] * self.capacity + 0.25)

    def worth(self, seat: Seat) -> float:
        for record in self.records:
            if record.name == seat.name:
                return self.key(record, self.ruling, was_hit=record.was_hit)
        return -np.inf

    def forget(self, names: list[object]) -> None:
        self.records = [record for record in self.records if record.name not in names]
        for inside in self.inside:
            for name in names:
                inside.pop(name, None)

    def take_over(self) -> None:
        """Give all entries new keys, as if they were inserted in the order that they had."""
        self.floors = {}
        for seat in sorted(self.seats, key=lambda seat: (seat.worth, seat.since)):
            seat.parent = self.table.describe(seat.entry).parent
            self.seat_new(seat, [])
            self.raise_floor(seat)

    def insert(self, entries: Sequence[int]) -> None:
        self.gone.clear()
        contents = [(entry, self.table.describe(entry).content) for entry in entries]
        here = [(entry, entry if name is None else name) for entry, name in contents]
        self.cached = [seat.name for seat in self.in_use if (seat.entry, seat.name) in here]
        super().insert(entries)
        self.in_use = [seat for seat in self.in_use if seat.entry not in entries]

    def discard(self, entries: Sequence[int]) -> None:
        super().discard(entries)
        for entry in entries:
            self.floors.pop(entry, None)

    def choose(self, num_entries: int) -> list[int]:
        first = sorted(self.seats, key=lambda seat: (seat.worth, seat.since))[:num_entries]
        for seat in first:
            self.gone.append((self.leave(seat.entry), []))
            self.floors.pop(seat.entry, None)
        return [seat.entry for seat in first]

    def put_back(self, entries: Sequence[int]) -> None:
        kept = [seat for seat, _ in self.gone if seat.entry in entries]
        self.gone = [gone for gone in self.gone if gone[0] not in kept]
        for seat in kept:
            super().sit_down(seat)
            self.floors[seat.entry] = seat.worth

    def sit_down(self, seat: Seat) -> None:
        super().sit_down(seat)
        self.raise_floor(seat)

    def raise_floor(self, seat: Seat) -> None:
        """The parent's key becomes at least as high as its child's."""
        if seat.parent is not None:
            self.floors[seat.parent] = max(seat.worth, self.floors.get(seat.parent, -np.inf))

    def seat_new(self, seat: Seat, names: list[bytes]) -> None:
        floor = self.floors.get(seat.entry, -np.inf)
        seat.worth, seat.since = max(self.worth(seat), floor), self.now()

    def seat_used(self, seat: Seat) -> None:
        self.seat_new(seat, [])


def line_of(batch: list[Record], place: int) -> str:
    """Return the class of one of these contents, which came together, the tail first."""
    uses = batch[place].uses
    if uses > 1:
        return f"used {next((limit for limit in (2, 3, 4, 8, 16, 64) if uses <= limit), 'more')}"
    first, behind = place, place
    while first > 0 and batch[first - 1].uses == 1:
        first -= 1
    while behind < len(batch) and batch[behind].uses == 1:
        behind += 1
    continues = len(batch) > behind + 1 and batch[behind + 1].uses > 1
    length = max(size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size <= behind - first)
    return f"new {length} {continues}"
