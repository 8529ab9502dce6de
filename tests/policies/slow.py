"""Slow and obvious versions of every policy: plain lists, searched from end to end.

A slow policy gives each entry a line and a time, and picks the next victim of all. `SlowPolicy` has
the rest of the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from kvcache.policies import EntryInfo, EntryTable


@dataclass
class Seat:
    """An entry that is inserted, or was when it came into use."""

    entry: int
    name: object
    parent: int | None
    line: str = ""
    since: int = 0
    uses: int = 1
    worth: float = 0


@dataclass
class Memory:
    """Names of evicted contents, the oldest first, each with its data."""

    names: list[tuple[bytes, int]] = field(default_factory=list)

    def add(self, names: Sequence[bytes], value: int) -> None:
        for name in names:
            self.names = [known for known in self.names if known[0] != name]
            self.names.append((name, value))

    def take(self, names: Sequence[bytes]) -> list[int]:
        values = [value for name, value in self.names if name in names]
        self.names = [known for known in self.names if known[0] not in names]
        return values

    def trim(self, limit: float) -> None:
        while len(self.names) > max(0, limit):
            del self.names[0]


def names_of(info: EntryInfo) -> list[bytes]:
    return [] if info.content is None else [info.content]


class SlowPolicy:
    """The common part of all slow policies. Subclasses have `seat_new`, `seat_used` and `pick`."""

    def __init__(self, capacity: int, table: EntryTable) -> None:
        self.capacity = capacity
        self.table = table
        self.seats: list[Seat] = []
        self.in_use: list[Seat] = []
        self.due: list[int] = []
        self.parked: list[int] = []
        self.gone: list[tuple[Seat, list[bytes]]] = []
        self.room = 0
        self.clock = 0
        self.start()

    def __deepcopy__(self, memo: dict[int, Any]) -> SlowPolicy:
        twin = object.__new__(type(self))
        memo[id(self.table)] = self.table
        twin.__dict__.update(deepcopy(vars(self), memo))
        return twin

    def start(self) -> None:
        """Make the policy's memory."""

    def seat_new(self, seat: Seat, names: list[bytes]) -> None:
        seat.since = self.now()

    def seat_used(self, seat: Seat) -> None:
        seat.since = self.now()

    def pick(self, standing: list[Seat]) -> Seat:
        return min(standing, key=lambda seat: seat.since)

    def evicted(self, seat: Seat, names: list[bytes]) -> None:
        """Record contents that were evicted."""

    def before_insert(self, names: Sequence[object]) -> None:
        """Record contents that come out of use."""

    def now(self) -> int:
        self.clock += 1
        return self.clock

    def blocks_in(self, line: str) -> int:
        return sum(seat.line == line for seat in self.seats)

    def seat(self, entry: int) -> Seat:
        return next(seat for seat in self.seats if seat.entry == entry)

    # --- the protocol ---

    def insert(self, entries: Sequence[int]) -> None:
        for seat, names in self.gone:
            self.evicted(seat, names)
        self.gone.clear()
        self.due.clear()
        infos = [self.table.describe(entry) for entry in entries]
        self.before_insert(
            [e if i.content is None else i.content for e, i in zip(entries, infos, strict=True)]
        )
        for entry, info in zip(entries, infos, strict=True):
            name = entry if info.content is None else info.content
            known = [seat for seat in self.in_use if seat.name == name]
            self.in_use = [seat for seat in self.in_use if seat.name != name]
            seat = deepcopy(known[-1]) if known else Seat(entry, name, None)
            seat.entry, seat.name, seat.parent = entry, name, info.parent
            if known:
                self.seat_used(seat)
            else:
                self.seat_new(seat, names_of(info))
            self.sit_down(seat)
        self.room = max(self.room, len(self.seats))

    def remove(self, entries: Sequence[int]) -> None:
        for entry in entries:
            seat = self.leave(entry)
            self.in_use = [other for other in self.in_use if other.name != seat.name]
            self.in_use.append(seat)
        self.in_use = self.in_use[-self.capacity :]

    def discard(self, entries: Sequence[int]) -> None:
        for entry in entries:
            self.child_has_gone(self.leave(entry).parent)

    def choose(self, num_entries: int) -> list[int]:
        chosen: list[int] = []
        going: list[int] = []
        while len(chosen) < num_entries and self.seats:
            entry = self.next_victim(going)
            info = self.table.describe(entry)
            names = names_of(info)
            self.gone.append((self.leave(entry), names))
            chosen.append(entry)
            if info.parent is not None:
                going.append(info.parent)
                self.child_has_gone(info.parent)
        return chosen

    def put_back(self, entries: Sequence[int]) -> None:
        for entry in reversed(entries):
            seat = next(seat for seat, _ in self.gone if seat.entry == entry)
            self.gone = [gone for gone in self.gone if gone[0] is not seat]
            self.sit_down(seat)
            self.due.insert(0, entry)

    def order(self) -> list[int]:
        twin = deepcopy(self)
        order = []
        while twin.seats:
            order += twin.choose(10**9)
        return order

    # --- inside ---

    def next_victim(self, going: list[int]) -> int:
        while True:
            found = self.find()
            if found is None:
                return self.parked[0]
            entry = found
            if self.table.describe(entry).num_children <= going.count(entry):
                return entry
            self.parked.append(entry)

    def find(self) -> int | None:
        waiting = [*self.due, *self.parked]
        standing = [seat for seat in self.seats if seat.entry not in waiting]
        if self.due:
            return self.due.pop(0)
        return self.pick(standing).entry if standing else None

    def child_has_gone(self, parent: int | None) -> None:
        if parent in self.parked:
            self.parked.remove(parent)
            self.due.insert(0, parent)

    def sit_down(self, seat: Seat) -> None:
        """Of seats with equal values, by number."""
        self.seats.append(seat)
        self.seats.sort(key=lambda seat: seat.entry)

    def leave(self, entry: int) -> Seat:
        seat = self.seat(entry)
        self.seats.remove(seat)
        self.due = [other for other in self.due if other != entry]
        self.parked = [other for other in self.parked if other != entry]
        return seat


def is_mostly(known: Sequence[int], names: Sequence[bytes]) -> bool:
    return len(known) > len(names) / 2


class SlowLRU(SlowPolicy):
    pass


class SlowLRU2(SlowPolicy):
    def start(self) -> None:
        self.memory = Memory()

    def seat_new(self, seat: Seat, names: list[bytes]) -> None:
        known = self.memory.take(names)
        seat.worth = min(known) if is_mostly(known, names) else 0
        seat.since = self.now()

    def seat_used(self, seat: Seat) -> None:
        seat.worth, seat.since = seat.since, self.now()

    def pick(self, standing: list[Seat]) -> Seat:
        return min(standing, key=lambda seat: (seat.worth, seat.since))

    def evicted(self, seat: Seat, names: list[bytes]) -> None:
        self.memory.add(names, seat.since)
        self.memory.trim(2 * self.room)


class SlowS3FIFO(SlowPolicy):
    def start(self) -> None:
        self.memory = Memory()

    def seat_new(self, seat: Seat, names: list[bytes]) -> None:
        seat.line = "main" if is_mostly(self.memory.take(names), names) else "small"
        seat.uses, seat.since = 0, self.now()

    def seat_used(self, seat: Seat) -> None:
        seat.uses = min(3, seat.uses + 1)

    def pick(self, standing: list[Seat]) -> Seat:
        while True:
            first = "small" if self.blocks_in("small") > 0.1 * self.room else "main"
            seat = min(standing, key=lambda seat: (seat.line != first, seat.since))
            if seat.line == "small" and seat.uses > 1:
                seat.line, seat.uses, seat.since = "main", 0, self.now()
            elif seat.line == "main" and seat.uses:
                seat.uses, seat.since = seat.uses - 1, self.now()
            else:
                return seat

    def evicted(self, seat: Seat, names: list[bytes]) -> None:
        if seat.line == "small":
            self.memory.add(names, 0)
            self.memory.trim(int(0.9 * self.room))


class SlowARC(SlowPolicy):
    def start(self) -> None:
        self.b1, self.b2, self.target = Memory(), Memory(), 0.0

    def seat_new(self, seat: Seat, names: list[bytes]) -> None:
        num_b1, num_b2 = len(self.b1.names), len(self.b2.names)
        of_b1, of_b2 = self.b1.take(names), self.b2.take(names)
        if of_b1:
            self.target += len(of_b1) * max(1, num_b2 / num_b1)
        if of_b2:
            self.target -= len(of_b2) * max(1, num_b1 / num_b2)
        self.target = min(max(0, self.target), self.room)
        seat.line = "t2" if is_mostly(of_b1 + of_b2, names) else "t1"
        seat.since = self.now()

    def seat_used(self, seat: Seat) -> None:
        seat.line, seat.since = "t2", self.now()

    def pick(self, standing: list[Seat]) -> Seat:
        first = "t1" if self.blocks_in("t1") > self.target else "t2"
        return min(standing, key=lambda seat: (seat.line != first, seat.since))

    def evicted(self, seat: Seat, names: list[bytes]) -> None:
        (self.b1 if seat.line == "t1" else self.b2).add(names, 0)
        num_t1, num_t2 = self.blocks_in("t1"), self.blocks_in("t2")
        self.b1.trim(self.room - num_t1)
        self.b2.trim(2 * self.room - num_t1 - num_t2 - len(self.b1.names))


SLOW_POLICIES: dict[str, type[SlowPolicy]] = {
    "arc": SlowARC,
    "lru": SlowLRU,
    "lru2": SlowLRU2,
    "s3fifo": SlowS3FIFO,
}
