"""Least recently used: the entry that came out of use first goes first.

The default policy. A request frees its blocks tail first, so its tail goes before its head.
"""

from __future__ import annotations

from kvcache.policies.entry_queue import EntryQueue
from kvcache.policies.policy import EntryTable


class LRUPolicy(EntryQueue):
    """An `EvictionPolicy` that orders entries by when they came out of use."""

    def __init__(self, capacity: int, table: EntryTable) -> None:
        """Make an empty order of entries below `capacity`. It does not use `table`."""
        super().__init__(capacity)
        self.reads_contents = False

    insert = EntryQueue.append_many
    remove = discard = EntryQueue.remove_many
    choose = EntryQueue.pop_many
    put_back = EntryQueue.prepend_many
    order = EntryQueue.to_list
