"""The common part of policies with a memory: all but the order itself.

A subclass assigns each entry that comes out of use to a line with a rank, and chooses the line of
the next victim. An entry that cached contents continue is chosen only if there is no other.

    insert ──▶ lines ──▶ choose        a victim with children is parked until its last child
      ▲          │                     goes, then it is due, like entries that were put back.
      │        remove                  Due entries go first, or return to their line at the
      └── in use ┘                     next insert. Contents in use are known by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import ClassVar, NamedTuple, TypeAlias, TypeVar

from kvcache.base.arrays import index_array
from kvcache.policies.entry_queue import Entries
from kvcache.policies.policy import EntryBook, EntryInfo
from kvcache.policies.ranked_queue import Line, Rank, RankedQueue

_Place: TypeAlias = "tuple[Rank, int]"

_SPARE = 64


class _Line:
    """One line. Invariant: an entry ranks below all entries behind it. Places in the heap whose
    entry has gone or has another rank are stale, and never many more than entries."""

    def __init__(self) -> None:
        self.ahead: list[_Place] = []
        self._behind: list[_Place] = []
        self._ranks_behind: dict[int, Rank] = {}
        self._num_asked = 0

    def add(self, place: _Place) -> None:
        if not self.ahead or place > self.ahead[-1]:
            self._add_behind(place)
            return
        insort(self.ahead, place)
        if len(self.ahead) > 2 * self._num_asked + _SPARE:
            self._add_behind(self.ahead.pop())

    def remove(self, entry: int, rank: Rank) -> None:
        if entry not in self._ranks_behind:
            del self.ahead[bisect_left(self.ahead, (rank, entry))]
            return
        del self._ranks_behind[entry]
        if len(self._behind) > 2 * len(self._ranks_behind) + _SPARE:
            self._behind = sorted((rank, entry) for entry, rank in self._ranks_behind.items())

    def first(self, count: int) -> list[int]:
        self._num_asked = count
        while len(self.ahead) < count and self._ranks_behind:
            place = heappop(self._behind)
            if self._ranks_behind.get(place[1]) == place[0]:
                del self._ranks_behind[place[1]]
                self.ahead.append(place)
        return [entry for _, entry in self.ahead[:count]]

    def _add_behind(self, place: _Place) -> None:
        self._ranks_behind[place[1]] = place[0]
        heappush(self._behind, place)


class LookAhead:
    """The entries of some lines, by rank; the first ones of each line are kept sorted."""

    def __init__(self, num_lines: int) -> None:
        """Start without entries."""
        self._lines = [_Line() for _ in range(num_lines)]

    def add(self, entry: int, line: int, rank: Rank) -> None:
        """Add a new entry."""
        self._lines[line].add((rank, entry))

    def remove(self, entry: int, line: int, rank: Rank) -> None:
        """Remove an entry that was added with this line and rank."""
        self._lines[line].remove(entry, rank)

    def first(self, count: int) -> list[int]:
        """Return the first `count` entries of each line, the next of a line first."""
        return [entry for line in self._lines for entry in line.first(count)]


Name: TypeAlias = "bytes | int"
"""The key of an entry in use: its content's name, or the entry's number without a name."""

P = TypeVar("P", bound="HistoryPolicy")


@dataclass(slots=True)
class Member:
    """The data of a policy about an entry that is inserted, or in use.

    `line` and `rank` are its place, or its place when it was used. `num_uses` belongs to the
    policy.
    """

    entry: int
    name: Name
    parent: int | None
    line: int = 0
    rank: Rank = (0.0, 0)
    num_uses: int = 1


class Victim(NamedTuple):
    """An entry that was chosen, and its data at that time."""

    member: Member
    info: EntryInfo


class HistoryPolicy(ABC):
    """An `EvictionPolicy` that remembers contents.

    O(log n) amortised per entry. Memory is bounded: as many members in use as there are entries,
    and the subclass's memory.

    Invariants: every member is due, parked or in its line. `_line_blocks` counts all members by
    line. `_room_blocks` is the most entries that were inserted at a time: the part of a pool that
    the policy rules.
    """

    num_lines: ClassVar[int] = 1

    def __init__(self, capacity: int, book: EntryBook) -> None:
        """Make an empty order of entries below `capacity`, described by `book`."""
        self._capacity = capacity
        self._book = book
        self._members: dict[int, Member] = {}
        self._in_use: OrderedDict[Name, Member] = OrderedDict()
        self._chosen: dict[int, Victim] = {}
        self._due: OrderedDict[int, None] = OrderedDict()
        self._parked: OrderedDict[int, None] = OrderedDict()
        self._lines: list[Line] = [RankedQueue() for _ in range(self.num_lines)]
        self._line_blocks = [0] * self.num_lines
        self._room_blocks = 0
        self._last_stamp = 0
        self._look_ahead: LookAhead | None = None  # until the first call

    # --- for subclasses ------------------------------------------------------------------------

    def _note_uses(self, names: Sequence[Name]) -> None:  # noqa: B027 - most need none
        """Record contents that come out of use, before they are placed."""

    @abstractmethod
    def _place_new(self, member: Member, name: bytes | None) -> None:
        """Set line and rank of a member whose content, of this name, is new."""

    @abstractmethod
    def _place_used(self, member: Member) -> None:
        """Set line and rank of a member that was used since it was last inserted."""

    def _pop_next(self) -> int:
        """Remove the next victim from its line; there is one in some line."""
        return self._lines[0].pop()

    @abstractmethod
    def _note_evicted(self, member: Member, name: bytes | None) -> None:
        """Record that a content was evicted."""

    def _move(self, entry: int, line: int, rank: Rank) -> None:
        """Insert a chosen entry into a line."""
        member = self._members[entry]
        if self._look_ahead is not None:
            self._look_ahead.remove(entry, member.line, member.rank)
            self._look_ahead.add(entry, line, rank)
        self._line_blocks[member.line] -= 1
        self._line_blocks[line] += 1
        self._members[entry] = replace(member, line=line, rank=rank)
        self._lines[line].add(entry, rank)

    def _stamp(self) -> int:
        """Return a number above all earlier ones."""
        self._last_stamp += 1
        return self._last_stamp

    # --- the protocol --------------------------------------------------------------------------

    @property
    def reads_contents(self) -> bool:
        """Contents that come out of use are known by their names."""
        return True

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, entry: object) -> bool:
        return entry in self._members

    def insert(self, entries: Entries) -> None:
        self._settle()
        entries = index_array(entries).tolist()
        infos = [self._book.describe(entry) for entry in entries]
        self._note_uses([_name(*one) for one in zip(entries, infos, strict=True)])
        for entry, info in zip(entries, infos, strict=True):
            used = self._in_use.pop(_name(entry, info), None)
            member = used or Member(entry, entry, None)
            if used is None:
                self._place_new(member, info.content)
            else:
                self._place_used(member)
            self._lines[member.line].add(entry, member.rank)
            self._enter(member, entry, info)
        self._room_blocks = max(self._room_blocks, sum(self._line_blocks))

    def remove(self, entries: Entries) -> None:
        for entry in index_array(entries).tolist():
            member = self._leave(entry)
            self._in_use[member.name] = member
            self._in_use.move_to_end(member.name)
        while len(self._in_use) > self._capacity:  # forgotten while they were in use
            self._in_use.popitem(last=False)

    def discard(self, entries: Entries) -> None:
        for entry in index_array(entries).tolist():
            self._unpark(self._leave(entry).parent)

    def choose(self, num_entries: int) -> Entries:
        taken = self._take(num_entries)
        for victim in taken:
            self._chosen[victim.member.entry] = victim
        return [victim.member.entry for victim in taken]

    def put_back(self, entries: Entries) -> None:
        for entry in index_array(entries).tolist()[::-1]:
            victim = self._chosen.pop(entry)
            self._enter(victim.member, entry, victim.info)
            self._make_next(entry)

    def order(self) -> list[int]:
        return [victim.member.entry for victim in self._twin()._take(len(self))]

    # --- inside --------------------------------------------------------------------------------

    def _twin(self: P) -> P:
        """Return an equal policy from which victims can be taken."""
        twin = copy(self)
        twin._look_ahead = None
        twin._members = self._members.copy()
        twin._due, twin._parked = self._due.copy(), self._parked.copy()
        twin._lines = [copy(line) for line in self._lines]
        twin._line_blocks = self._line_blocks.copy()
        return twin

    def _take(self, num_entries: int) -> list[Victim]:
        """Remove the next victims."""
        taken: list[Victim] = []
        going: dict[int, int] = {}
        while len(taken) < num_entries and self._members:
            entry, info = self._take_next(going)
            taken.append(Victim(self._drop(entry), info))
            if info.parent is not None:
                going[info.parent] = going.get(info.parent, 0) + 1
                self._unpark(info.parent)
        return taken

    def _take_next(self, going: dict[int, int]) -> tuple[int, EntryInfo]:
        """Remove and return the next entry whose children are all in `going`, by their parent."""
        while (place := self._next()) is not None:
            entry, info = place
            if info.num_children <= going.get(entry, 0):
                return place
            self._parked[entry] = None
        entry = self._parked.popitem(last=False)[0]
        return entry, self._book.describe(entry)

    def _next(self) -> tuple[int, EntryInfo] | None:
        """Remove a due entry, or the first of a line; None if there is none."""
        if not self._due and not any(self._lines):
            return None
        entry = self._due.popitem(last=False)[0] if self._due else self._pop_next()
        return entry, self._book.describe(entry)

    def _unpark(self, entry: int | None) -> None:
        """Record that a child of this entry has gone; a parked parent without children is due."""
        if entry is not None and entry in self._parked:
            del self._parked[entry]
            self._make_next(entry)

    def _make_next(self, entry: int) -> None:
        self._due[entry] = None
        self._due.move_to_end(entry, last=False)

    def _settle(self) -> None:
        """Complete evictions: chosen entries that were not put back are gone, and none is due."""
        self._settle_due()
        for victim in self._chosen.values():
            self._note_evicted(victim.member, victim.info.content)
        self._chosen.clear()

    def _settle_due(self) -> None:
        for entry in self._due:
            member = self._members[entry]
            self._lines[member.line].add(entry, member.rank)
        self._due.clear()

    def _enter(self, member: Member, entry: int, info: EntryInfo) -> None:
        """Make a member for an entry with this content, without a known past."""
        member.entry, member.name = entry, _name(entry, info)
        member.parent = info.parent
        self._members[entry] = member
        self._line_blocks[member.line] += 1
        if self._look_ahead is not None:
            self._look_ahead.add(entry, member.line, member.rank)

    def _leave(self, entry: int) -> Member:
        """Remove a member from its place."""
        if entry in self._due:
            del self._due[entry]
        elif entry in self._parked:
            del self._parked[entry]
        else:
            self._lines[self._members[entry].line].remove(entry)
        return self._drop(entry)

    def _drop(self, entry: int) -> Member:
        """Forget a member that has no place."""
        member = self._members.pop(entry)
        self._line_blocks[member.line] -= 1
        if self._look_ahead is not None:
            self._look_ahead.remove(entry, member.line, member.rank)
        return member


class RankedPolicy(HistoryPolicy):
    """A `HistoryPolicy` whose victims are the lowest ranks of a line, so that the next ones are
    known without choosing, see `LooksAhead`."""

    def look_ahead(self, num_entries: int) -> list[int]:
        if self._look_ahead is None:
            self._look_ahead = LookAhead(self.num_lines)
            for entry, member in self._members.items():
                self._look_ahead.add(entry, member.line, member.rank)
        return self._look_ahead.first(num_entries)


def _name(entry: int, info: EntryInfo) -> Name:
    return entry if info.content is None else info.content
