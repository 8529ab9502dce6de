"""Least recently used: what came out of use first goes first.

The default policy. A request gives its blocks back tail first, so its tail goes before its head.
"""

from __future__ import annotations

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
        entries: list[int] = []
        num_of_last = missing = num_blocks
        while missing > 0 and len(self._queue):
            entries += self._queue.pop_many(1).tolist()
            num_of_last = min(missing, self._book.describe(entries[-1]).weight_blocks)
            missing -= num_of_last
        return Victims(entries, num_of_last)

    def put_back(self, entries: Entries) -> None:
        self._queue.prepend_many(entries)

    def order(self) -> list[int]:
        return self._queue.to_list()
