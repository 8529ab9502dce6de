"""A queue of small ints from which any member leaves in O(1).

Stands under the free list of a pool and under the LRU order. Ints enter in bulk at either end and
are not moved afterwards: each bulk is one segment, each int knows the segment it is in, and an int
that has left is skipped when its segment comes up. Refuses ints beyond its capacity, and to hold
one twice.

    segments   (#7: 4 9 2)  (#3: 5 6)  (#9: 8 5)        stamps   5 -> 9, so the 5 of #3 is stale
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.arrays import IndexArray, index_array
from kvcache.errors import BlockError, InvariantError

Entries: TypeAlias = "Sequence[int] | IndexArray"
"""Entries in order. Arrays are taken as they are, without a look at each int."""

_OUT = 0
_SPARE_STALE = 64
_FEW = 8
"""As many ints, and fewer, are quicker entered and removed one by one, and kept in a list."""
_LOOK_AHEAD = 64
"""So many ints are looked at together when the front one has left."""
_LAST_STAMP = 2**31 - 1
"""Stamps begin anew behind this one: four bytes an int are enough."""


@dataclass(slots=True, eq=False)
class _Segment:
    """Ints that entered together; those before `start` have been taken."""

    stamp: int
    members: list[int] | IndexArray
    start: int = 0


class EntryQueue:
    """A double-ended queue of distinct ints in `[0, capacity)`.

    Invariant: an int is in the queue exactly when its stamp is that of a segment, and it stands
    once at or behind that segment's start. Amortised O(1) per int for everything but `to_list`.
    """

    def __init__(self, capacity: int, members: Iterable[int] = ()) -> None:
        """Make a queue of `members`, in that order."""
        self._stamps: npt.NDArray[np.int32] = np.full(capacity, _OUT, dtype=np.int32)
        self._segments: deque[_Segment] = deque()
        self._last_stamp = _OUT
        self._length = 0
        self._num_stale = 0
        self.append_many(list(members))

    def __len__(self) -> int:
        return self._length

    def __contains__(self, entry: object) -> bool:
        return isinstance(entry, int) and bool(self._stamps[entry] != _OUT)

    def append_many(self, entries: Entries) -> None:
        """Put `entries` at the back, in order. They are distinct and none is here already."""
        if len(entries):
            self._segments.append(self._enter(entries))

    def prepend_many(self, entries: Entries) -> None:
        """Put `entries` at the front, the first of them foremost. Otherwise as `append_many`."""
        if len(entries):
            self._segments.appendleft(self._enter(entries))

    def pop_first(self) -> int | None:
        """Take the int at the front; None if there is none."""
        stamps, segments = self._stamps, self._segments
        while segments:
            segment = segments[0]
            members, at, stamp = segment.members, segment.start, segment.stamp
            entry = int(members[at])
            is_here = bool(stamps[entry] == stamp)
            num_stale = 0 if is_here else 1
            if not is_here and not isinstance(members, list):
                is_live = stamps[members[at : at + _LOOK_AHEAD]] == stamp
                num_stale = int(is_live.argmax()) or len(is_live)
            at += num_stale or 1
            self._num_stale -= num_stale
            if at == len(members):
                segments.popleft()
            else:
                segment.start = at
            if is_here:
                stamps[entry] = _OUT
                self._length -= 1
                return entry
        return None

    def pop_many(self, count: int) -> IndexArray:
        """Take up to `count` ints from the front."""
        taken: list[IndexArray] = []
        stamps, segments = self._stamps, self._segments
        missing = count
        while segments and missing > 0:
            segment = segments[0]
            end = segment.start + missing
            members = segment.members[segment.start : end]
            if isinstance(members, list):  # few: quicker one by one
                few = [entry for entry in members if stamps[entry] == segment.stamp]
                for entry in few:
                    stamps[entry] = _OUT
                live = index_array(few)
            else:
                live = members[stamps[members] == segment.stamp]
                stamps[live] = _OUT
            self._num_stale -= len(members) - len(live)
            taken.append(live)
            missing -= len(live)
            if end >= len(segment.members):
                segments.popleft()
            else:
                segment.start = end
        self._length -= count - missing
        if len(taken) == 1:
            return taken[0]
        return np.concatenate(taken) if taken else index_array(())

    def remove_many(self, entries: Entries) -> None:
        """Take out ints that are all here."""
        if len(entries) <= _FEW:
            for entry in entries:
                self._stamps[entry] = _OUT
        else:
            self._stamps[index_array(entries)] = _OUT
        self._length -= len(entries)
        self._num_stale += len(entries)
        if self._num_stale > 2 * self._length + _SPARE_STALE:
            self._compact()

    def to_list(self) -> list[int]:
        """Return all ints in order. O(n)."""
        members: list[int] = self._members().tolist()
        return members

    def require_absent(self, entries: Sequence[int]) -> None:
        """Raise BlockError if an int is beyond the capacity, given twice or here already."""
        self._require_known(entries)
        here = [entry for entry in entries if self._stamps[entry] != _OUT]
        if here:
            raise BlockError(f"blocks {here[:5]} are in the queue already: remove them first")

    def require_present(self, entries: Sequence[int]) -> None:
        """Raise BlockError if an int is beyond the capacity, given twice or not here."""
        self._require_known(entries)
        missing = [entry for entry in entries if self._stamps[entry] == _OUT]
        if missing:
            raise BlockError(f"blocks {missing[:5]} are not in the queue: add them first")

    def check(self) -> None:
        """Raise InvariantError unless the figures agree with what is here."""
        members = self.to_list()
        stamped = int(np.count_nonzero(self._stamps))
        held = sum(len(segment.members) - segment.start for segment in self._segments)
        if not len(members) == len(set(members)) == stamped == self._length:
            raise InvariantError(
                f"a queue of length {self._length} has {len(members)} members, "
                f"{len(set(members))} of them distinct, and {stamped} stamps"
            )
        if held - self._length != self._num_stale:
            raise InvariantError(
                f"a queue holds {held} ints for {self._length} members and counts "
                f"{self._num_stale} stale ones"
            )

    def _enter(self, entries: Entries) -> _Segment:
        if self._last_stamp == _LAST_STAMP:
            self._compact()
        stamp = self._last_stamp = self._last_stamp + 1
        self._length += len(entries)
        if len(entries) <= _FEW:
            few = entries.tolist() if isinstance(entries, np.ndarray) else list(entries)
            for entry in few:
                self._stamps[entry] = stamp
            return _Segment(stamp, few)
        members = np.array(entries, dtype=np.intp)
        self._stamps[members] = stamp
        return _Segment(stamp, members)

    def _members(self) -> IndexArray:
        """Return all ints in order. O(n)."""
        waiting = [segment.members[segment.start :] for segment in self._segments]
        if not waiting:
            return index_array(())
        stamps = np.repeat([segment.stamp for segment in self._segments], list(map(len, waiting)))
        members = np.concatenate(waiting, dtype=np.intp)
        here: IndexArray = members[self._stamps[members] == stamps]
        return here

    def _compact(self) -> None:
        members = self._members()
        self._segments.clear()
        self._num_stale = self._length = self._last_stamp = 0
        self.append_many(members)

    def _require_known(self, entries: Sequence[int]) -> None:
        capacity = len(self._stamps)
        unknown = [entry for entry in entries if not 0 <= entry < capacity]
        if unknown:
            raise BlockError(f"blocks {unknown[:5]} do not exist: use ids below {capacity}")
        if len(set(entries)) != len(entries):
            twice = sorted({entry for entry in entries if list(entries).count(entry) > 1})
            raise BlockError(f"blocks {twice[:5]} are given twice: give each one once")
