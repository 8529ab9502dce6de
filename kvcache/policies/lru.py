"""Least recently used: what came out of use first goes first.

The default policy. A request gives its blocks back tail first, so its tail goes before its head.
"""

from __future__ import annotations

import numpy as np

from kvcache.arrays import IndexArray, index_array
from kvcache.policies.entry_queue import Entries, EntryQueue
from kvcache.policies.policy import EntryBook, Victims


class LRUPolicy:
    """An `EvictionPolicy` that keeps entries in the order in which they came out of use."""

    def __init__(self, capacity: int, book: EntryBook) -> None:
        """Make an empty order of entries below `capacity`, described by `book`."""
        self._queue = EntryQueue(capacity)
        self._book = book

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
        chosen: list[IndexArray] = []
        num_of_last = missing = num_blocks
        num_at_once = 1
        while missing > 0 and len(self._queue):
            # Every entry frees a block at least: no more of them than blocks are needed. A run
            # frees many: so one is asked for first, then as many as would do if all were like it.
            entries = self._queue.pop_many(min(missing, num_at_once))
            freed = self._book.weights(entries).cumsum()
            if int(freed[-1]) > missing:
                last = int(freed.searchsorted(missing))
                self._queue.prepend_many(entries[last + 1 :])
                entries = entries[: last + 1]
                num_of_last = missing - (int(freed[last - 1]) if last else 0)
                missing = 0
            else:
                num_of_last = int(freed[-1]) - (int(freed[-2]) if len(freed) > 1 else 0)
                missing -= int(freed[-1])
                num_at_once = -(-missing * len(entries) // int(freed[-1]))
            chosen.append(entries)
        if len(chosen) == 1:
            return Victims(chosen[0], num_of_last)
        return Victims(np.concatenate(chosen) if chosen else index_array(()), num_of_last)

    def put_back(self, entries: Entries) -> None:
        self._queue.prepend_many(entries)

    def order(self) -> list[int]:
        return self._queue.to_list()
