"""Least recently used: the entry that came out of use first goes first.

The default policy. A request frees its blocks tail first, so its tail goes before its head.
"""

from __future__ import annotations

from kvcache.policies.entry_queue import Entries, EntryQueue
from kvcache.policies.policy import EntryTable


class LRUPolicy:
    """An `EvictionPolicy` that orders entries by when they came out of use."""

    def __init__(self, capacity: int, table: EntryTable) -> None:
        """Make an empty order of entries below `capacity`. It does not use `table`."""
        self._queue = EntryQueue(capacity)

    @property
    def reads_contents(self) -> bool:
        """Does nothing: only the order of uses matters."""
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

    def choose(self, num_entries: int) -> Entries:
        return self._queue.pop_many(num_entries)

    def put_back(self, entries: Entries) -> None:
        self._queue.prepend_many(entries)

    def order(self) -> list[int]:
        return self._queue.to_list()
