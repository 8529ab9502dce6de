"""Hazard: what is least likely to come back soon goes first, as learned from what came back.

Contents are told apart by how often they were used and, of new ones, by how many came with them.
How likely each class comes back at each age is counted; the victim is the one that brings the
fewest hits for the room it takes. While that does not pay, this is LRU. docs/policies.md has more.

    uses ──▶ classes ──▶ table of reuse ──▶ index ──▶ order of entries ──▶ victims
      │                       ▲                          ▲
      └──▶ sampled names ─────┴──▶ two caches of names ──┴ index or recency: who is ahead
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.arrays import index_array
from kvcache.policies.cohorts import CohortLine, CohortValue
from kvcache.policies.contest import Contest
from kvcache.policies.entry_queue import Entries
from kvcache.policies.history_policy import HistoryPolicy, Member, names_of
from kvcache.policies.policy import EntryBook, EntryInfo
from kvcache.policies.reuse_table import ReuseTable
from kvcache.policies.use_history import UseHistory

_MOST_LENGTHS = 8
_NUM_NEW_LINES = 2 * _MOST_LENGTHS
_USE_LIMITS = (2, 3, 4, 8, 16, 64)
"""Classes of contents used again: twice, three times, four, up to 8, 16, 64, more."""

NUM_LINES = _NUM_NEW_LINES + len(_USE_LIMITS) + 1

_SHARED_START_BLOCKS = 1
"""A request that continues no more than so many blocks begins a conversation: the first block is
often everybody's system prompt."""

_BLOCKS_TO_LEARN = 512
_ROOM_SHARE_TO_REORDER = 0.05
"""The index is made anew, and entries ranked anew, after so many blocks and such a share of the
room: ages have not changed by more than a step or two meanwhile."""


@dataclass(slots=True)
class _Arrival:
    """An entry that came out of use, and what is known of it from before."""

    entry: int
    info: EntryInfo
    past: Member | None
    names: list[bytes]
    num_uses: int
    line: int = 0


class HazardPolicy(HistoryPolicy):
    """An `EvictionPolicy` by learned chances of reuse, with LRU to fall back on."""

    def __init__(self, capacity: int, book: EntryBook) -> None:
        """Make an empty order of entries below `capacity`, described by `book`."""
        super().__init__(capacity, book)
        self._value = CohortValue(ReuseTable(NUM_LINES))
        self._history = UseHistory(capacity, self._value)
        self._contest = Contest()
        self._line = CohortLine(self._value)
        self._lines = [self._line]
        self._learned_at_blocks = 0
        self._reordered_at_blocks = 0

    @property
    def index_leads(self) -> bool:
        """Whether victims are chosen by what was learned; otherwise by recency."""
        return self._contest.index_leads

    def insert(self, entries: Entries) -> None:
        self._settle()
        arrivals = [self._arrival(entry) for entry in index_array(entries).tolist()]
        if not arrivals:
            return
        was_blocks = self._value.clock_blocks
        num_blocks = sum(arrival.info.weight_blocks for arrival in arrivals)
        self._value.clock_blocks += num_blocks
        classify(arrivals)
        for arrival in arrivals:
            member = arrival.past or Member(arrival.entry, arrival.entry, 0, None)
            member.num_uses = arrival.num_uses
            member.rank = float(arrival.line), self._value.clock_blocks
            self._line.add(arrival.entry, member.rank)
            self._enter(member, arrival.entry, arrival.info)
        self._room_blocks = max(self._room_blocks, sum(self._line_blocks))
        self._learn(arrivals, was_blocks, num_blocks)

    def _arrival(self, entry: int) -> _Arrival:
        info = self._book.describe(entry)
        past = self._past(entry, info)
        names = self._history.sample(names_of(info))
        before = self._history.num_uses(names) if past is None else past.num_uses
        return _Arrival(entry, info, past, names, before + 1)

    def _learn(self, arrivals: Sequence[_Arrival], was_blocks: int, num_blocks: int) -> None:
        """Play both caches, teach the table, and follow whoever leads."""
        history, room = self._history, self._room_blocks
        num_ahead = 0
        together: list[bytes] = []
        for place, arrival in enumerate(arrivals):
            together += arrival.names
            after = arrivals[place + 1] if place + 1 < len(arrivals) else None
            kind = arrival.line, arrival.num_uses
            if after is None or kind != (after.line, after.num_uses):
                num_ahead += history.use(together, arrival.line, arrival.num_uses, was_blocks)
                together = []
        history.settle(room)
        is_changed = self._contest.note(num_ahead, num_blocks, room)
        self._renew(is_changed=is_changed)

    def _renew(self, *, is_changed: bool) -> None:
        """Make the index and the ranks anew where they are old."""
        now = self._value.clock_blocks
        share = _ROOM_SHARE_TO_REORDER * self._room_blocks
        is_due = is_changed or now - self._reordered_at_blocks >= share
        if is_due:
            self._history.grow_older()
        if now - self._learned_at_blocks >= _BLOCKS_TO_LEARN:
            self._learned_at_blocks = now
            self._value.table.learn()
        if is_due:
            self._reordered_at_blocks = now
            self._history.reorder()
            self._line.reorder(by_recency=not self._contest.index_leads)

    def _place_new(self, member: Member, names: Sequence[bytes]) -> None:
        """`insert` places all that come at once."""

    def _place_used(self, member: Member) -> None:
        """`insert` places all that come at once."""

    def _note_evicted(self, member: Member, names: Sequence[bytes]) -> None:
        """The history remembers uses, whoever evicts."""


def classify(arrivals: Sequence[_Arrival]) -> None:
    """Set the class of entries that came out of use together, tails first.

    New contents next to each other came with one request; what they continue lies behind them.
    """
    place = 0
    while place < len(arrivals):
        if arrivals[place].num_uses > 1:
            arrivals[place].line = _line_of_uses(arrivals[place].num_uses)
            place += 1
            continue
        end, num_new = place, 0
        while end < len(arrivals) and arrivals[end].num_uses == 1:
            num_new += arrivals[end].info.weight_blocks
            end += 1
        start = arrivals[end - 1].info.position
        behind = end
        while behind < len(arrivals) and arrivals[behind].num_uses > 1:
            start = max(start, sum(a.info.weight_blocks for a in arrivals[end : behind + 1]))
            behind += 1
            if start > _SHARED_START_BLOCKS:
                break
        length = min(num_new.bit_length() - 1, _MOST_LENGTHS - 1)
        line = length + _MOST_LENGTHS * (start > _SHARED_START_BLOCKS)
        for arrival in arrivals[place:end]:
            arrival.line = line
        place = end


def _line_of_uses(num_uses: int) -> int:
    above = sum(num_uses > limit for limit in _USE_LIMITS)
    return _NUM_NEW_LINES + above
