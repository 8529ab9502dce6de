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
from collections import OrderedDict
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar, TypeAlias

from kvcache.base.arrays import index_array
from kvcache.policies.entry_queue import Entries
from kvcache.policies.policy import EntryInfo, EntryTable
from kvcache.policies.ranked_queue import Rank, RankedQueue

Name: TypeAlias = "bytes | int"
"""The key of an entry in use: its content's name, or the entry's number without a name."""


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


_Victim: TypeAlias = "tuple[Member, EntryInfo]"
"""An entry that was chosen, and its data at that time."""


class HistoryPolicy(ABC):
    """An `EvictionPolicy` that remembers contents.

    O(log n) amortised per entry. Memory is bounded: as many members in use as there are entries,
    and the subclass's memory.

    Invariants: every member is due, parked or in its line. `_line_blocks` counts all members by
    line. `_room_blocks` is the most entries that were inserted at a time: the part of a pool that
    the policy rules.
    """

    num_lines: ClassVar[int] = 1

    def __init__(self, capacity: int, table: EntryTable) -> None:
        """Make an empty order of entries below `capacity`, described by `table`."""
        self.reads_contents = True
        self._capacity = capacity
        self._table = table
        self._members: dict[int, Member] = {}
        self._in_use: OrderedDict[Name, Member] = OrderedDict()
        self._chosen: dict[int, _Victim] = {}
        self._due: OrderedDict[int, None] = OrderedDict()
        self._parked: OrderedDict[int, None] = OrderedDict()
        self._lines = [RankedQueue() for _ in range(self.num_lines)]
        self._line_blocks = [0] * self.num_lines
        self._room_blocks = 0
        self._last_stamp = 0

    # --- for subclasses ------------------------------------------------------------------------

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
        self._line_blocks[member.line] -= 1
        self._line_blocks[line] += 1
        self._members[entry] = replace(member, line=line, rank=rank)
        self._lines[line].add(entry, rank)

    def _stamp(self) -> int:
        """Return a number above all earlier ones."""
        self._last_stamp += 1
        return self._last_stamp

    # --- the protocol --------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, entry: object) -> bool:
        return entry in self._members

    def insert(self, entries: Entries) -> None:
        self._settle()
        for entry in index_array(entries).tolist():
            info = self._table.describe(entry)
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
        self._chosen.update({member.entry: (member, info) for member, info in taken})
        return [member.entry for member, _ in taken]

    def put_back(self, entries: Entries) -> None:
        for entry in index_array(entries).tolist()[::-1]:
            member, info = self._chosen.pop(entry)
            self._enter(member, entry, info)
            self._make_next(entry)

    def order(self) -> list[int]:
        return [member.entry for member, _ in self._twin()._take(len(self))]

    def look_ahead(self, num_entries: int) -> list[int]:
        ahead = list(islice(self._due, num_entries))
        rest = num_entries - len(ahead)
        return ahead + [entry for line in self._lines for entry in line.first(rest)]

    # --- inside --------------------------------------------------------------------------------

    def _twin(self) -> HistoryPolicy:
        """Return an equal policy from which victims can be taken."""
        twin = copy(self)
        twin._members = self._members.copy()
        twin._due, twin._parked = self._due.copy(), self._parked.copy()
        twin._lines = [copy(line) for line in self._lines]
        twin._line_blocks = self._line_blocks.copy()
        return twin

    def _take(self, num_entries: int) -> list[_Victim]:
        """Remove the next victims."""
        taken: list[_Victim] = []
        going: dict[int, int] = {}
        while len(taken) < num_entries and self._members:
            entry, info = self._take_next(going)
            taken.append((self._drop(entry), info))
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
        return entry, self._table.describe(entry)

    def _next(self) -> tuple[int, EntryInfo] | None:
        """Remove a due entry, or the first of a line; None if there is none."""
        if not self._due and not any(self._lines):
            return None
        entry = self._due.popitem(last=False)[0] if self._due else self._pop_next()
        return entry, self._table.describe(entry)

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
        for entry in self._due:
            member = self._members[entry]
            self._lines[member.line].add(entry, member.rank)
        self._due.clear()
        for member, info in self._chosen.values():
            self._note_evicted(member, info.content)
        self._chosen.clear()

    def _enter(self, member: Member, entry: int, info: EntryInfo) -> None:
        """Make a member for an entry with this content, without a known past."""
        member.entry, member.name = entry, _name(entry, info)
        member.parent = info.parent
        self._members[entry] = member
        self._line_blocks[member.line] += 1

    def _leave(self, entry: int) -> Member:
        """Remove a member from its place."""
        if entry in self._due:
            del self._due[entry]
        elif entry in self._parked:
            del self._parked[entry]
        else:
            member = self._members[entry]
            self._lines[member.line].remove(entry, member.rank)
        return self._drop(entry)

    def _drop(self, entry: int) -> Member:
        """Forget a member that has no place."""
        member = self._members.pop(entry)
        self._line_blocks[member.line] -= 1
        return member


def _name(entry: int, info: EntryInfo) -> Name:
    return entry if info.content is None else info.content
