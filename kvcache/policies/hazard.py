"""Hazard: evicts the block that is least likely to be reused soon, as learned from past reuse.

Contents are classified by their number of uses and, if new, by how many came with them. The policy
counts how likely each class is to be reused at each age, and evicts the block that brings the
fewest hits for the room it takes. A guard allows no more departures from LRU than earlier wins
cover. docs/policies.md has more.

    uses ──▶ classes ──▶ table of reuse ──▶ index ──▶ order of entries ──▶ victims
      ├──▶ sampled names ─────┘                            ▲
      └──▶ guard: LRU's hits and contents, by name ────────┘ or by recency
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from kvcache.base.arrays import index_array
from kvcache.policies.cohorts import CohortLine, CohortValue
from kvcache.policies.entry_queue import Entries
from kvcache.policies.guard import Guard
from kvcache.policies.history_policy import HistoryPolicy, Member, Victim
from kvcache.policies.policy import EntryBook, EntryInfo
from kvcache.policies.ranked_queue import RankedQueue
from kvcache.policies.reuse_table import ReuseTable
from kvcache.policies.use_history import UseHistory

_MOST_LENGTHS = 8
_NUM_NEW_LINES = 2 * _MOST_LENGTHS
_USE_LIMITS = (2, 3, 4, 8, 16, 64)
"""Classes of contents used again: twice, three times, four, up to 8, 16, 64, more."""

NUM_LINES = _NUM_NEW_LINES + len(_USE_LIMITS) + 1

_SHARED_START_BLOCKS = 1
"""A request that continues at most this many blocks begins a conversation: the first block is
often a common system prompt."""

_BLOCKS_TO_LEARN = 512
_ROOM_SHARE_TO_REORDER = 0.05
"""The index is rebuilt, and entries are ranked again, after this many blocks and this share of the
capacity: meanwhile, ages change by at most a step or two."""

_ROOMS_IN_USE = 2
"""A content in use counts as gone after this many capacities of use: no signal says which contents
were forgotten while in use. Pinned blocks do not count as capacity."""


@dataclass(slots=True)
class _Arrival:
    """An entry that came out of use, and the data kept about its content."""

    entry: int
    info: EntryInfo
    past: Member | None
    num_uses: int
    line: int = 0


class HazardPolicy(HistoryPolicy):
    """An `EvictionPolicy` by learned chances of reuse, guarded against LRU.

    Invariant: every entry that is inserted and not parked is in `_recency`, as under LRU.
    """

    def __init__(self, capacity: int, book: EntryBook) -> None:
        """Make an empty order of entries below `capacity`, described by `book`."""
        super().__init__(capacity, book)
        self._value = CohortValue(ReuseTable(NUM_LINES))
        self._history = UseHistory(capacity, self._value)
        self._guard = Guard(capacity)
        self._line = CohortLine(self._value)
        self._lines = [self._line]
        self._recency = RankedQueue()
        self._learned_at_blocks = 0
        self._reordered_at_blocks = 0

    @property
    def won_blocks(self) -> int:
        """Hits so far, minus those that LRU would have had."""
        return self._guard.won_blocks

    # --- the protocol --------------------------------------------------------------------------

    def insert(self, entries: Entries) -> None:
        self._settle()
        arrivals = [self._arrival(entry) for entry in index_array(entries).tolist()]
        if not arrivals:
            return
        was_blocks = self._value.clock_blocks
        now = self._value.clock_blocks = was_blocks + len(arrivals)
        classify(arrivals)
        for arrival in arrivals:
            past, entry, name = arrival.past, arrival.entry, arrival.info.content
            is_lru_hit = past is not None and past.is_lru_hit
            if name is not None:
                self._guard.use(name, now, is_hit=past is not None, is_lru_hit=is_lru_hit)
            member = past or Member(entry, entry, None)
            member.num_uses, member.is_lru_hit, member.turn = arrival.num_uses, False, self._stamp()
            member.rank = float(arrival.line), now
            self._line.add(entry, member.rank)
            self._recency.add(entry, (0.0, member.turn))
            self._enter(member, entry, arrival.info)
        inserted_blocks = sum(self._line_blocks)
        self._room_blocks = max(self._room_blocks, inserted_blocks)
        self._forget_long_in_use()
        self._guard.settle(len(arrivals), inserted_blocks + len(self._in_use))
        self._line.grow_old(self._guard.old_stamp)
        self._learn(arrivals, was_blocks)

    def remove(self, entries: Entries) -> None:
        members = [self._members[entry] for entry in index_array(entries).tolist()]
        for member in members:
            member.is_lru_hit = member.name in self._guard
        super().remove(entries)
        for member in members:
            member.rank = float(member.line), self._value.clock_blocks

    def put_back(self, entries: Entries) -> None:
        for entry in index_array(entries).tolist():
            name = self._chosen[entry].info.content
            if name is not None:
                self._guard.restore(name)
        super().put_back(entries)

    def _forget_long_in_use(self) -> None:
        oldest = self._value.clock_blocks - _ROOMS_IN_USE * self._room_blocks
        while self._in_use:
            if next(iter(self._in_use.values())).rank[1] >= oldest:
                return
            self._in_use.popitem(last=False)

    # --- uses ----------------------------------------------------------------------------------

    def _arrival(self, entry: int) -> _Arrival:
        info = self._book.describe(entry)
        name = info.content
        past = self._in_use.pop(entry if name is None else name, None)
        if past is not None:
            return _Arrival(entry, info, past, past.num_uses + 1)
        before = self._history.num_uses(name) if name is not None else 0
        return _Arrival(entry, info, None, before + 1)

    def _learn(self, arrivals: Sequence[_Arrival], was_blocks: int) -> None:
        """Update the table; rebuild the index and the ranks if they are old."""
        together: list[bytes] = []
        for place, arrival in enumerate(arrivals):
            name = arrival.info.content
            if name is not None and self._history.is_sampled(name):
                together.append(name)
            after = arrivals[place + 1] if place + 1 < len(arrivals) else None
            kind = arrival.line, arrival.num_uses
            if after is None or kind != (after.line, after.num_uses):
                self._history.use(together, arrival.line, arrival.num_uses, was_blocks)
                together = []
        self._history.trim(self._room_blocks)
        now = self._value.clock_blocks
        is_due = now - self._reordered_at_blocks >= _ROOM_SHARE_TO_REORDER * self._room_blocks
        if is_due:
            self._history.grow_older()
        if now - self._learned_at_blocks >= _BLOCKS_TO_LEARN:
            self._learned_at_blocks = now
            self._value.table.learn()
        if is_due:
            self._reordered_at_blocks = now
            self._line.reorder()

    # --- victims -------------------------------------------------------------------------------

    def _next(self) -> tuple[int, EntryInfo] | None:
        """Remove the first entry by index that the guard allows, or else the first by recency."""
        if not self._recency:
            return None
        entry = self._first_allowed()
        if entry is None:
            entry = self._recency.pop()
        else:
            self._recency.remove(entry)
        if entry in self._due:
            del self._due[entry]
        else:
            self._line.remove(entry)
        return entry, self._book.describe(entry)

    def _first_allowed(self) -> int | None:
        """Return a due entry, the lowest by index, or the lowest that LRU would have evicted."""
        entry = next(iter(self._due), None)
        if entry is not None:
            if self._is_allowed(entry):
                return entry
            self._settle_due()
        entry = self._line.first()
        return entry if self._is_allowed(entry) else self._line.first_old()

    def _is_allowed(self, entry: int) -> bool:
        """Return whether the guard allows the eviction; never for contents without names."""
        name = self._book.describe(entry).content
        return name is not None and self._guard.allows(name)

    def _note_chosen(self, victim: Victim) -> None:
        if victim.info.content is not None:
            self._guard.evict(victim.info.content)

    def _make_next(self, entry: int) -> None:
        super()._make_next(entry)
        if entry not in self._recency:
            self._recency.add(entry, (0.0, self._members[entry].turn))

    def _leave(self, entry: int) -> Member:
        if entry in self._recency:
            self._recency.remove(entry)
        return super()._leave(entry)

    def _twin(self) -> HazardPolicy:
        twin = super()._twin()
        twin._line = copy(self._line)
        twin._lines = [twin._line]
        twin._recency, twin._guard = copy(self._recency), self._guard.twin()
        return twin

    # --- unused ----------------------------------------------------------------------------------

    def _place_new(self, member: Member, name: bytes | None) -> None:
        """Does nothing: `insert` places entries."""

    def _place_used(self, member: Member) -> None:
        """Does nothing: `insert` places entries."""

    def _note_evicted(self, member: Member, name: bytes | None) -> None:
        """Does nothing: the guard was told when the entry was chosen."""


def classify(arrivals: Sequence[_Arrival]) -> None:
    """Set the class of entries that came out of use together, tails first.

    New contents next to each other came with one request; the blocks they continue come after them.
    """
    place = 0
    while place < len(arrivals):
        if arrivals[place].num_uses > 1:
            arrivals[place].line = _line_of_uses(arrivals[place].num_uses)
            place += 1
            continue
        end = place
        while end < len(arrivals) and arrivals[end].num_uses == 1:
            end += 1
        behind = end
        while behind < len(arrivals) and arrivals[behind].num_uses > 1:
            behind += 1
            if behind - end > _SHARED_START_BLOCKS:
                break
        length = min((end - place).bit_length() - 1, _MOST_LENGTHS - 1)
        line = length + _MOST_LENGTHS * (behind - end > _SHARED_START_BLOCKS)
        for arrival in arrivals[place:end]:
            arrival.line = line
        place = end


def _line_of_uses(num_uses: int) -> int:
    above = sum(num_uses > limit for limit in _USE_LIMITS)
    return _NUM_NEW_LINES + above
