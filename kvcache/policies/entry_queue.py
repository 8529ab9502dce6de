"""A queue of small ints with removal of any member in O(1).

Part of the LRU order. A linked list in two arrays; an end that is no entry closes the circle:

    4 ▶ 9 ▶ 2      after    end: 4   4: 9   9: 2   2: end
                   before   end: 2   2: 9   9: 4   4: end

Callers must not add ints beyond the capacity, or an int twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numba import types

from kvcache.base.arrays import IndexArray, Int32Array, index_array
from kvcache.base.compiled import array_type, compiled
from kvcache.base.errors import InvariantError

Entries: TypeAlias = "Sequence[int] | IndexArray"
"""Entries in order. Arrays are used without a check of each int."""

OUT = -1
"""Marks an entry that is not in the queue."""

_links = array_type("int32")
_entries = array_type("intp", is_read=True)


class EntryQueue:
    """A double-ended queue of distinct ints in `[0, capacity)`.

    Invariant: following `_after` from the end leads through `_length` entries back to the end, and
    following `_before` leads through them in reverse; all other entries have `OUT`.
    """

    def __init__(self, capacity: int) -> None:
        """Make an empty queue."""
        self._end = capacity
        self._after: Int32Array = np.full(capacity + 1, OUT, dtype=np.int32)
        self._before: Int32Array = np.full(capacity + 1, OUT, dtype=np.int32)
        self._after[capacity] = self._before[capacity] = capacity
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, entry: object) -> bool:
        return isinstance(entry, int) and self._after.item(entry) != OUT

    def append_many(self, entries: Entries) -> None:
        """Add `entries` at the back, in order. They are distinct and not in the queue."""
        insert_behind(self._after, self._before, self._before.item(self._end), as_array(entries))
        self._length += len(entries)

    def prepend_many(self, entries: Entries) -> None:
        """Add `entries` at the front, the first of them foremost. Otherwise as `append_many`."""
        insert_behind(self._after, self._before, self._end, as_array(entries))
        self._length += len(entries)

    def pop_many(self, num_entries: int) -> IndexArray:
        """Remove and return up to `num_entries` ints from the front."""
        taken: IndexArray = np.empty(min(num_entries, self._length), dtype=np.intp)
        take_first(self._after, self._before, taken)
        self._length -= len(taken)
        return taken

    def remove_many(self, entries: Entries) -> None:
        """Remove ints that are all in the queue."""
        take_out(self._after, self._before, as_array(entries))
        self._length -= len(entries)

    def to_list(self) -> list[int]:
        """Return all ints in order. O(n)."""
        members: list[int] = []
        after = self._after.tolist()
        entry = after[self._end]
        while entry != self._end and len(members) <= self._length:
            members.append(entry)
            entry = after[entry]
        return members

    def check(self) -> None:
        """Raise InvariantError unless both directions visit as many ints as are counted. O(n)"""
        members = self.to_list()
        num_here = int(np.count_nonzero(self._after != OUT)) - 1
        if not len(members) == num_here == self._length:
            raise InvariantError(
                f"a queue of length {self._length} has {len(members)} members in order, and "
                f"{num_here} know a next one"
            )
        ways = zip([self._end, *members], [*members, self._end], strict=True)
        torn = [(one, other) for one, other in ways if self._before[other] != one]
        if torn:
            raise InvariantError(f"a queue does not lead back from {torn[0][1]} to {torn[0][0]}")


def as_array(entries: Entries) -> IndexArray:
    """Return entries as a contiguous array."""
    return np.ascontiguousarray(index_array(entries))


@compiled(types.void(_links, _links, types.intp, _entries))
def insert_behind(after: Int32Array, before: Int32Array, place: int, entries: IndexArray) -> None:
    """Insert entries, in order, after the one at `place`, which may be the end."""
    follower = after[place]
    for entry in entries:
        after[place], before[entry] = entry, place
        place = entry
    after[place], before[follower] = follower, place


@compiled(types.void(_links, _links, _entries))
def take_out(after: Int32Array, before: Int32Array, entries: IndexArray) -> None:
    """Join the neighbours of each of these entries, which are all in the queue."""
    for entry in entries:
        one, other = before[entry], after[entry]
        after[one], before[other] = other, one
        after[entry] = OUT


@compiled(types.void(_links, _links, array_type("intp")))
def take_first(after: Int32Array, before: Int32Array, taken: IndexArray) -> None:
    """Remove the first entries, as many as `taken` has room for; there are enough."""
    end = len(after) - 1
    entry = after[end]
    for index in range(len(taken)):
        taken[index] = entry
        follower = after[entry]
        after[entry] = OUT
        entry = follower
    after[end], before[entry] = entry, end
