"""Hints by plain lists, searched from end to end: what `HintedPolicy` must do around LRU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import inf

from kvcache.policies import EntryTable
from kvcache.policies.hinted import SLACK, Trust, _Claim
from kvcache.requests.hints import CacheHint


@dataclass
class Seat:
    """An inserted entry. `line` is first, plain, due, kept or parked."""

    entry: int
    line: str
    since_s: float
    rank: float = 0.0
    until_s: float = inf
    number: int = 0


class SlowHinted:
    """All entries in one list, from the front of each line to its end."""

    def __init__(self, table: EntryTable) -> None:
        self.table = table
        self.now_s = 0.0
        self.trust = Trust()
        self.seats: list[Seat] = []
        self.lasting: dict[int, tuple[int, float]] = {}
        self.claims: dict[int, _Claim] = {}
        self.chosen: dict[int, Seat] = {}
        self.num_claims = self.num_inserted = 0
        self.numbers = count()

    def line(self, name: str) -> list[Seat]:
        return [seat for seat in self.seats if seat.line == name]

    def insert(self, entries: Sequence[int]) -> None:
        self.settle()
        num_all = len(self.seats)
        self.num_inserted += len(entries)
        for entry in entries:
            priority, until_s = self.lasting.get(entry, (50, inf))
            if until_s <= self.now_s:
                del self.lasting[entry]
                priority, until_s = 50, inf
            self.seats.append(self.ranked(entry, self.now_s, priority, until_s, num_all))

    def remove(self, entries: Sequence[int]) -> None:
        self.settle()
        for entry in entries:
            self.leave(entry)
            self.end_claim(entry, is_used=True)

    def discard(self, entries: Sequence[int]) -> None:
        self.settle()
        for entry in entries:
            self.leave(entry)
        self.forget(entries)

    def forget(self, entries: Sequence[int]) -> None:
        for entry in entries:
            self.lasting.pop(entry, None)
            self.claims.pop(entry, None)

    def hint(self, entries: Sequence[int], hint: CacheHint) -> None:
        self.settle()
        backwards = list(entries)[::-1]
        if hint.priority is not None:
            until_s = inf if hint.duration_s is None else self.now_s + hint.duration_s
            num_all = len(self.seats)
            for entry in backwards:
                self.lasting.pop(entry, None)
                if hint.priority != 50:
                    self.lasting[entry] = hint.priority, until_s
                since_s = self.leave(entry).since_s
                self.seats.append(self.ranked(entry, since_s, hint.priority, until_s, num_all))
            return
        if backwards[0] in self.claims:
            return
        is_trusted = self.trust.in_ends if hint.is_over else self.trust.in_returns
        self.num_claims += 1
        is_audited = not is_trusted or self.num_claims % 16 == 0
        wait_s = hint.returns_in_s or inf
        claim = self.claims[backwards[0]] = _Claim(self.now_s, wait_s, is_audited)
        self.trust.begin(claim)
        for entry in [] if is_audited else backwards:
            if entry not in self.lasting:
                seat = self.leave(entry)
                seat.line, seat.rank, seat.until_s = "first", 0.0, inf
                seat.number = next(self.numbers)
                if not hint.is_over:
                    seat.line, seat.rank = "due", self.now_s + wait_s
                    seat.until_s = self.now_s + SLACK * wait_s
                self.seats.append(seat)

    def choose(self, num_entries: int) -> list[int]:
        self.expire()
        if parked := self.line("parked"):
            self.move(parked[0], "parked")
            if not self.table.describe(parked[0].entry).num_children:
                self.move(parked[0], "first")
        taken: list[Seat] = []
        while len(taken) < num_entries and self.seats:
            seat, name = self.next()
            info = self.table.describe(seat.entry)
            going = [self.table.describe(other.entry).parent for other in taken]
            if name != "parked" and info.num_children > going.count(seat.entry):
                self.move(seat, "parked")
                continue
            self.seats.remove(seat)
            taken.append(seat)
            for other in self.line("parked"):
                if other.entry == info.parent:
                    self.move(other, "first")
        self.chosen |= {seat.entry: seat for seat in taken}
        return [seat.entry for seat in taken]

    def put_back(self, entries: Sequence[int]) -> None:
        self.seats = [self.chosen.pop(entry) for entry in entries] + self.seats

    def order(self) -> list[int]:
        due = sorted(self.line("due"), key=lambda seat: -seat.rank)
        merged: list[Seat] = []
        for seat in self.line("plain"):
            while due and due[0].rank - self.now_s > self.wait_s(seat):
                merged.append(due.pop(0))
            merged.append(seat)
        kept = sorted(self.line("kept"), key=lambda seat: seat.rank)
        seats = [*self.line("first"), *merged, *due, *kept, *self.line("parked")]
        return [seat.entry for seat in seats]

    # --- inside ---

    def next(self) -> tuple[Seat, str]:
        if first := self.line("first"):
            return first[0], "first"
        plain, kept = self.line("plain"), sorted(self.line("kept"), key=lambda seat: seat.rank)
        due = sorted(self.line("due"), key=lambda seat: -seat.rank)
        is_crowded = 2 * len(kept) > len(self.seats) or not (plain or due)
        if kept and is_crowded and (not plain or plain[0].since_s >= kept[0].since_s):
            return kept[0], "kept"
        if due and (not plain or due[0].rank - self.now_s > self.wait_s(plain[0])):
            return due[0], "due"
        if plain:
            return plain[0], "plain"
        return self.line("parked")[0], "parked"

    def wait_s(self, seat: Seat) -> float:
        return 3 * (self.now_s - seat.since_s)

    def ranked(
        self, entry: int, since_s: float, priority: int, until_s: float, num_all: int
    ) -> Seat:
        if priority < 50:
            return Seat(entry, "first", since_s, 0.0, until_s, next(self.numbers))
        if priority > 50:
            rank = self.num_inserted + num_all * (priority - 50) / 50
            return Seat(entry, "kept", since_s, rank, until_s, next(self.numbers))
        return Seat(entry, "plain", since_s)

    def leave(self, entry: int) -> Seat:
        [seat] = [seat for seat in self.seats if seat.entry == entry]
        self.seats.remove(seat)
        return seat

    def move(self, seat: Seat, line: str) -> None:
        self.seats.remove(seat)
        seat.line, seat.rank, seat.until_s = line, 0.0, inf
        self.seats.append(seat)

    def settle(self) -> None:
        for entry in self.chosen:
            self.lasting.pop(entry, None)
            self.end_claim(entry, is_used=False)
        self.chosen.clear()
        self.expire()

    def expire(self) -> None:
        for seat in sorted(self.seats, key=lambda seat: (seat.until_s, seat.number)):
            if seat.until_s <= self.now_s:
                if seat.line != "due":
                    del self.lasting[seat.entry]
                self.move(seat, "first" if seat.line == "due" else "plain")
                self.end_claim(seat.entry, is_used=False)

    def end_claim(self, entry: int, *, is_used: bool) -> None:
        if entry in self.claims:
            self.trust.end(self.claims.pop(entry), self.now_s, is_used=is_used)
