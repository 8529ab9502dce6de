"""Least recently used: what came out of use first goes first.

The default policy. A request gives its blocks back tail first, so its tail goes before its head.
"""

from __future__ import annotations

import numpy as np

from kvcache.arrays import index_array
from kvcache.policies.entry_queue import Entries, EntryQueue
from kvcache.policies.policy import EntryBook, Victims

_FEW = 4
"""As many entries, and fewer, are asked for one by one."""


class LRUPolicy:
    """An `EvictionPolicy` that keeps entries in the order in which they came out of use."""

    def __init__(self, capacity: int, book: EntryBook) -> None:
        """Make an empty order of entries below `capacity`, described by `book`."""
        self._queue = EntryQueue(capacity)
        self._book = book

    @property
    def reads_contents(self) -> bool:
        """What stands where depends on the order of uses alone."""
        return False

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, entry: object) -> bool:
        return entry in self._queue

    def insert(self, entries: Entries) -> None:
        self._queue.append_many(entries)

    def remove(self, entries: Entries) -> None:
        self._queue.remove_many(entries)

    def discard(self, entries: Entries) -> None:
        self._queue.remove_many(entries)

    def choose(self, num_blocks: int) -> Victims:
        if self._book.is_uniform:
            return Victims(self._queue.pop_many(num_blocks))
        queue, book = self._queue, self._book
        singly: list[int] = []
        num_of_last = missing = num_blocks
        num_at_once = 1
        while missing > 0 and num_at_once <= _FEW:
            first = queue.pop_first()
            if first is None:
                return Victims(singly, num_of_last)
            singly.append(first)
            weight = book.weight(first)
            if weight >= missing:
                return Victims(singly, missing)
            num_of_last = weight
            missing -= weight
            num_at_once = -(-missing * len(singly) // (num_blocks - missing))
        chosen = [index_array(singly)]
        while missing > 0 and len(queue):
            # Every entry frees a block at least: no more of them than blocks are needed. A run
            # frees many: so single ones were asked for first, then as many as would do if all were
            # like those.
            entries = queue.pop_many(min(missing, num_at_once))
            freed = book.weights(entries).cumsum()
            if int(freed[-1]) > missing:
                last = int(freed.searchsorted(missing))
                queue.prepend_many(entries[last + 1 :])
                entries = entries[: last + 1]
                num_of_last = missing - (int(freed[last - 1]) if last else 0)
                missing = 0
            else:
                num_of_last = int(freed[-1]) - (int(freed[-2]) if len(freed) > 1 else 0)
                missing -= int(freed[-1])
                num_at_once = -(-missing * len(entries) // int(freed[-1]))
            chosen.append(entries)
        return Victims(np.concatenate(chosen), num_of_last)

    def put_back(self, entries: Entries) -> None:
        self._queue.prepend_many(entries)

    def order(self) -> list[int]:
        return self._queue.to_list()
