"""Hints: any policy's order, changed by what engines say about the future use of entries.

Entries without a valid hint are in the order of the *inner* policy.

    over, or false: first      go first, in order of arrival
    no hint:        inner ─┐   the longer wait goes first: an entry idle for t seconds waits for
    due:            due   ─┘   3 t more, a due one until it is due
    low priority:   first
    high priority:  kept       go last, while they are at most half of all

    insert ──▶ inner ──hint──▶ first, due, kept ──remove──▶ in use

An entry due in `s` seconds that is not used in 2.5 `s` goes first: a false hint costs its owner.
If kept entries are more than half of all, they go by how long they are unused, too. Among them,
priority 100 counts as if it had been used later by as many entries as there are. Hints about
returns and ends are followed only while they prove right. One in 16 of them is left to the inner
policy for comparison, and all of them until 16 have been compared.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import index_array
from kvcache.policies.entry_queue import Entries
from kvcache.policies.policy import EntryTable, EvictionPolicy
from kvcache.requests.hints import USUAL_PRIORITY, CacheHint

SLACK: Final = 2.5
"""A return is as expected if it comes after `1 / SLACK` to `SLACK` of the time."""

_IDLE = 3.0
_AUDITED = 16
_FEW_CLAIMS = 16
_MEMORY_CLAIMS = 256
_MOST = 0.75
_FAR_LESS = 0.25
_SPARE = 64


class HintColumns:
    """The time, and data of all entries, for all policies of one pool or tier."""

    def __init__(self, capacity: int, now_s: float) -> None:
        """Start without hints."""
        self.now_s = now_s
        self.since_s: npt.NDArray[np.float64] = np.full(capacity, now_s)
        self.lasting: dict[int, tuple[int, float]] = {}
        """Priority and end of it, of entries in use or not."""

    def forget(self, entries: Entries) -> None:
        """Forget priorities of entries without content."""
        for entry in index_array(entries).tolist():
            self.lasting.pop(entry, None)


@dataclass(slots=True)
class _Claim:
    """A claim about one entry, to be verified. `returns_in_s` inf: not at all."""

    asked_s: float
    returns_in_s: float
    is_audited: bool

    @property
    def is_over(self) -> bool:
        return self.returns_in_s == inf


@dataclass
class Trust:
    """How often claims proved right, the last few hundred counting most.

    Audited claims were left to the inner policy; those about ends are compared with the others.
    """

    num_right: float = 0.0
    num_wrong: float = 0.0
    num_due: float = 0.0
    num_due_used: float = 0.0
    num_over: float = 0.0
    num_over_used: float = 0.0
    num_over_evicted: float = 0.0

    @property
    def in_returns(self) -> bool:
        """Whether most sessions returned about when they were expected."""
        num = self.num_right + self.num_wrong
        return num >= _FEW_CLAIMS and self.num_right >= _MOST * num

    @property
    def in_ends(self) -> bool:
        """Whether the blocks of ended sessions are used again far less often than others."""
        has_ends = self.num_over_evicted >= _FEW_CLAIMS or self.num_due_used >= _FEW_CLAIMS / 2
        if self.num_over < _FEW_CLAIMS or not has_ends or not self.num_due:
            return False
        return self.num_over_used * self.num_due <= (_FAR_LESS * self.num_due_used * self.num_over)

    def begin(self, claim: _Claim) -> None:
        """Record a new claim."""
        if claim.is_audited:
            self.num_over += claim.is_over
            self.num_due += not claim.is_over

    def end(self, claim: _Claim, now_s: float, *, is_used: bool) -> None:
        """Record the end of an entry with a claim: its use, or its eviction."""
        if claim.is_over:
            self.num_over_used += claim.is_audited and is_used
            self.num_over_evicted += claim.is_audited and not is_used
        else:
            self.num_due_used += claim.is_audited and is_used
            ratio = (now_s - claim.asked_s) / claim.returns_in_s
            if is_used and 1 / SLACK <= ratio <= SLACK:
                self.num_right += 1
            elif is_used or ratio >= SLACK:
                self.num_wrong += 1
        if max(self.num_right + self.num_wrong, self.num_due, self.num_over) > _MEMORY_CLAIMS:
            for name, count in vars(self).items():
                setattr(self, name, count / 2)


_FIRST, _DUE, _KEPT = 0, 1, 2


@dataclass(slots=True)
class _Place:
    """The place of an entry outside the inner policy: `rank` orders it, until `until_s`."""

    where: int
    rank: float
    until_s: float
    stamp: int


_PARKED: Final = _Place(_FIRST, 0.0, inf, 0)
"""The place of a chosen entry that has children."""


class HintedPolicy:
    """An `EvictionPolicy` that follows hints, around another one."""

    def __init__(self, inner: EvictionPolicy, table: EntryTable, columns: HintColumns) -> None:
        """Follow hints for the entries of `inner`, which came out of use just now."""
        self.inner, self.reads_contents = inner, inner.reads_contents
        self.trust = Trust()
        self._table = table
        self._columns = columns
        self._places: dict[int, _Place] = {}
        self._first: OrderedDict[int, None] = OrderedDict()
        self._parked: OrderedDict[int, None] = OrderedDict()
        self._due: list[tuple[float, int, int]] = []
        self._kept: list[tuple[float, int, int]] = []
        self._ends: list[tuple[float, int, int]] = []
        self._num_due = self._num_kept = self._num_inserted = 0
        self._claims: dict[int, _Claim] = {}
        self._chosen: dict[int, _Place | None] = {}
        self._num_claims = self._stamp = 0

    def __len__(self) -> int:
        return len(self.inner) + len(self._places) + len(self._parked)

    def __contains__(self, entry: object) -> bool:
        return entry in self._places or entry in self._parked or entry in self.inner

    def insert(self, entries: Entries) -> None:
        self._settle()
        columns, entries, num_all = self._columns, index_array(entries), len(self)
        self._num_inserted += len(entries)
        columns.since_s[entries] = columns.now_s
        if columns.lasting:
            rest = []
            for entry in entries.tolist():
                priority, until_s = columns.lasting.get(entry, (USUAL_PRIORITY, 0.0))
                if until_s <= columns.now_s:
                    columns.lasting.pop(entry, None)
                    rest.append(entry)
                else:
                    self._prioritise(entry, priority, until_s, num_all)
            entries = index_array(rest)
        if len(entries):
            self.inner.insert(entries)

    def remove(self, entries: Entries) -> None:
        self._settle()
        rest = [entry for entry in index_array(entries).tolist() if not self._leave(entry)]
        for entry in index_array(entries).tolist():
            self._end_claim(entry, is_used=True)
        if rest:
            self.inner.remove(rest)

    def discard(self, entries: Entries) -> None:
        self._settle()
        rest = [entry for entry in index_array(entries).tolist() if not self._leave(entry)]
        self.forget(entries)
        if rest:
            self.inner.discard(rest)

    def forget(self, entries: Entries) -> None:
        """Forget hints for entries whose content is gone."""
        self._columns.forget(entries)
        for entry in index_array(entries).tolist():
            self._claims.pop(entry, None)

    def hint(
        self,
        entries: Entries,
        hint: CacheHint,
        *,
        is_needed: bool = True,
        since_s: float | None = None,
    ) -> None:
        """Follow a hint, which was given at `since_s` (None: now), for these entries, at least one.
        All are inserted, of one session, and in the order of its prefix. Of several claims about
        the last of them, the first counts."""
        self._settle()
        present = index_array(entries).tolist()[::-1]
        now_s = self._columns.now_s if since_s is None else since_s
        if hint.priority is not None:
            until_s = inf if hint.duration_s is None else now_s + hint.duration_s
            num_all = len(self)
            self._columns.forget(present)
            for entry in present:
                if hint.priority != USUAL_PRIORITY:
                    self._columns.lasting[entry] = hint.priority, until_s
                self._take_out(entry)
                self._prioritise(entry, hint.priority, until_s, num_all)
            return
        is_trusted = self.trust.in_ends if hint.is_over else self.trust.in_returns
        if not is_needed:
            for entry in present if is_trusted else ():
                if entry not in self._columns.lasting:
                    self._take_out(entry)
                    self._put(entry, _FIRST, 0.0, inf)
            return
        if present[0] in self._claims:  # to be counted once
            return
        self._num_claims += 1
        is_audited = not is_trusted or self._num_claims % _AUDITED == 0
        wait_s = inf if hint.returns_in_s is None else hint.returns_in_s
        self._claims[present[0]] = claim = _Claim(now_s, wait_s, is_audited)
        self.trust.begin(claim)
        if is_audited:
            return
        for entry in present:
            if entry in self._columns.lasting:
                continue
            self._take_out(entry)
            if hint.is_over:
                self._put(entry, _FIRST, 0.0, inf)
            else:
                self._put(entry, _DUE, now_s + wait_s, now_s + SLACK * wait_s)

    def choose(self, num_entries: int) -> Entries:
        self._expire()
        self._look_at_parked()
        waiting = deque(index_array(self.inner.choose(num_entries)).tolist())
        taken: list[int] = []
        going: dict[int, int] = {}
        while len(taken) < num_entries:
            if not waiting and len(self.inner):
                waiting.extend(index_array(self.inner.choose(num_entries)).tolist())
            entry = self._next(waiting)
            if entry < 0 and not self._parked:
                break
            if entry < 0:
                entry = self._parked.popitem(last=False)[0]
                self._chosen[entry] = _PARKED
            info = self._table.describe(entry)
            if info.num_children > going.get(entry, 0) and self._chosen[entry] is not _PARKED:
                del self._chosen[entry]
                self._parked[entry] = None
                continue
            taken.append(entry)
            if info.parent is not None:
                going[info.parent] = going.get(info.parent, 0) + 1
                self._unpark(info.parent)
        if waiting:
            self.inner.put_back(list(waiting))
        return index_array(taken)

    def put_back(self, entries: Entries) -> None:
        rest = []
        for entry in index_array(entries).tolist()[::-1]:
            place = self._chosen.pop(entry)
            if place is None:
                rest.append(entry)
            elif place is _PARKED:
                self._parked[entry] = None
                self._parked.move_to_end(entry, last=False)
            else:
                self._place(entry, place)
                if place.where == _FIRST:
                    self._first.move_to_end(entry, last=False)
        if rest:
            self.inner.put_back(rest[::-1])

    def order(self) -> list[int]:
        """Return all inserted entries in order, apart from parents before their children."""
        places, now_s = self._places, self._columns.now_s
        due = sorted((-p.rank, p.stamp, e) for e, p in places.items() if p.where == _DUE)
        kept = sorted((p.rank, p.stamp, e) for e, p in places.items() if p.where == _KEPT)
        waits = [(-rank - now_s, entry) for rank, _, entry in due]
        merged, place = [], 0
        for entry in self.inner.order():
            while place < len(waits) and waits[place][0] > self._wait_s(entry):
                merged.append(waits[place][1])
                place += 1
            merged.append(entry)
        rest = [entry for _, entry in waits[place:]]
        return [*self._first, *merged, *rest, *[e for _, _, e in kept], *self._parked]

    # --- inside --------------------------------------------------------------------------------

    def _next(self, waiting: deque[int]) -> int:
        """Take the next victim, regardless of children; `waiting` has the inner policy's. -1: only
        parked ones are left."""
        if self._first:
            return self._take(next(iter(self._first)))
        now_s = self._columns.now_s
        has_others = waiting or self._num_due
        num_all = len(self) + len(waiting)
        if self._num_kept and (not has_others or 2 * self._num_kept > num_all):
            entry = self._top(self._kept, _KEPT)
            if not waiting or self._wait_s(entry) >= self._wait_s(waiting[0]):
                return self._take(entry)
        if self._num_due:
            entry = self._top(self._due, _DUE)
            wait_s = self._places[entry].rank - now_s
            if not waiting or wait_s > self._wait_s(waiting[0]):
                return self._take(entry)
        if not waiting:
            return -1
        entry = waiting.popleft()
        self._chosen[entry] = None
        return entry

    def _wait_s(self, entry: int) -> float:
        """Return for how long an entry without a hint is expected to be unused from now on."""
        return _IDLE * (self._columns.now_s - self._columns.since_s.item(entry))

    def _take(self, entry: int) -> int:
        place = self._places[entry]
        self._leave(entry)
        self._chosen[entry] = place
        return entry

    def _top(self, heap: list[tuple[float, int, int]], where: int) -> int:
        """Return the first entry of a heap whose place is still valid; there is one."""
        while True:
            _, stamp, entry = heap[0]
            place = self._places.get(entry)
            if place is not None and place.stamp == stamp and place.where == where:
                return entry
            heappop(heap)

    def _expire(self) -> None:
        """End the hints whose time is over: false ones go first, others as usual."""
        now_s, late = self._columns.now_s, []
        while self._ends and self._ends[0][0] <= now_s:
            _, stamp, entry = heappop(self._ends)
            place = self._places.get(entry)
            if place is None or place.stamp != stamp:
                continue
            self._leave(entry)
            if place.where == _DUE:
                self._put(entry, _FIRST, 0.0, inf)
            else:
                self._columns.lasting.pop(entry, None)
                late.append(entry)
            self._end_claim(entry, is_used=False)
        if late:
            self.inner.insert(late)

    def _settle(self) -> None:
        """Complete evictions: what was chosen and not put back is gone."""
        for entry in self._chosen:
            self._columns.lasting.pop(entry, None)
            self._end_claim(entry, is_used=False)
        self._chosen.clear()
        self._expire()

    def _end_claim(self, entry: int, *, is_used: bool) -> None:
        claim = self._claims.pop(entry, None)
        if claim is not None:
            self.trust.end(claim, self._columns.now_s, is_used=is_used)

    def _prioritise(self, entry: int, priority: int, until_s: float, num_all: int) -> None:
        if priority < USUAL_PRIORITY:
            self._put(entry, _FIRST, 0.0, until_s)
        elif priority > USUAL_PRIORITY:
            ahead = num_all * (priority - USUAL_PRIORITY) / USUAL_PRIORITY
            self._put(entry, _KEPT, self._num_inserted + ahead, until_s)
        else:
            self.inner.insert([entry])

    def _put(self, entry: int, where: int, rank: float, until_s: float) -> None:
        """Give an entry that has no place a place here."""
        self._stamp += 1
        self._place(entry, _Place(where, rank, until_s, self._stamp))

    def _place(self, entry: int, place: _Place) -> None:
        self._places[entry] = place
        if place.where == _FIRST:
            self._first[entry] = None
        elif place.where == _DUE:
            self._num_due += 1
            heappush(self._due, (-place.rank, place.stamp, entry))
        else:
            self._num_kept += 1
            heappush(self._kept, (place.rank, place.stamp, entry))
        if place.until_s < inf:
            heappush(self._ends, (place.until_s, place.stamp, entry))

    def _leave(self, entry: int) -> bool:
        """Take an entry from its place here; False if it is the inner policy's."""
        if entry in self._parked:
            del self._parked[entry]
            return True
        place = self._places.pop(entry, None)
        if place is None:
            return False
        if place.where == _FIRST:
            del self._first[entry]
        elif place.where == _DUE:
            self._num_due -= 1
        else:
            self._num_kept -= 1
        self._compact()
        return True

    def _take_out(self, entry: int) -> None:
        if not self._leave(entry):
            self.inner.remove([entry])

    def _compact(self) -> None:
        """Drop stale places when they are many."""
        most = 2 * len(self._places) + _SPARE
        if max(len(self._due), len(self._kept), len(self._ends)) > most:
            places = self._places.items()
            self._due = [(-p.rank, p.stamp, e) for e, p in places if p.where == _DUE]
            self._kept = [(p.rank, p.stamp, e) for e, p in places if p.where == _KEPT]
            self._ends = [(p.until_s, p.stamp, e) for e, p in places if p.until_s < inf]
            for heap in (self._due, self._kept, self._ends):
                heapify(heap)

    def _look_at_parked(self) -> None:
        """Let the next parked entry go if its children have gone without being chosen."""
        if self._parked:
            entry = next(iter(self._parked))
            self._parked.move_to_end(entry)
            if not self._table.describe(entry).num_children:
                self._unpark(entry)

    def _unpark(self, parent: int | None) -> None:
        """Let a parent that waited for its children go next."""
        if parent is not None and parent in self._parked:
            del self._parked[parent]
            self._put(parent, _FIRST, 0.0, inf)
