"""Wraps an external eviction policy, so that it cannot harm its pool.

Used for policies that do not come with the package. The wrapper also keeps an LRU order. When the
policy raises, or chooses an invalid victim, that is logged as an error, and LRU decides from then
on.
"""

from __future__ import annotations

import numpy as np

from kvcache.base.arguments import as_integers
from kvcache.base.arrays import IndexArray, index_array
from kvcache.base.errors import InvalidInputError
from kvcache.base.logs import get_logger
from kvcache.policies.entry_queue import Entries
from kvcache.policies.lru import LRUPolicy
from kvcache.policies.policy import EntryTable, EvictionPolicy

logger = get_logger(__name__)


class OutsidePolicy(LRUPolicy):
    """An `EvictionPolicy` that delegates to another one until that breaks the protocol."""

    def __init__(self, name: str, policy: EvictionPolicy, capacity: int, table: EntryTable) -> None:
        """Wrap an empty `policy`, made for the same `capacity` and `table`."""
        self._name = name
        self._policy: EvictionPolicy | None = policy
        self._capacity = capacity
        super().__init__(capacity, table)
        self.reads_contents = bool(policy.reads_contents)
        """The policy's own answer when it is new."""

    def insert(self, entries: Entries) -> None:
        super().insert(entries)
        self._tell("insert", entries)

    def remove(self, entries: Entries) -> None:
        super().remove(entries)
        self._tell("remove", entries)

    def discard(self, entries: Entries) -> None:
        super().discard(entries)
        self._tell("discard", entries)

    def put_back(self, entries: Entries) -> None:
        super().put_back(entries)
        self._tell("put_back", entries)

    def choose(self, num_entries: int) -> IndexArray:
        if self._policy is not None:
            try:
                chosen = self._checked(self._policy.choose(num_entries), num_entries)
            except Exception:
                self._give_up("choose")
            else:
                super().remove(chosen)
                return chosen
        return super().choose(num_entries)

    def order(self) -> list[int]:
        known = super().order()
        if self._policy is not None:
            try:
                order: list[int] = self._integers(self._policy.order()).tolist()
                if sorted(order) != sorted(known):
                    raise InvalidInputError(f"{len(order)} entries are not the {len(known)} here")
            except Exception:
                self._give_up("order")
            else:
                return order
        return known

    def _tell(self, method: str, entries: Entries) -> None:
        if self._policy is not None:
            try:
                getattr(self._policy, method)(index_array(entries).copy())  # it may keep it
            except Exception:
                self._give_up(method)

    def _checked(self, chosen: Entries, num_entries: int) -> IndexArray:
        """Return `entries` if they are valid, different, and enough; raises otherwise."""
        entries = self._integers(chosen)
        is_here = [entry in self for entry in entries.tolist()]
        if not all(is_here) or len(np.unique(entries)) < len(entries):
            raise InvalidInputError(f"of {len(entries)} entries {sum(is_here)} can be evicted once")
        if len(entries) != min(num_entries, len(self)):
            raise InvalidInputError(f"{len(entries)} entries are not the {num_entries} asked for")
        return entries

    def _integers(self, entries: Entries) -> IndexArray:
        return index_array(as_integers("entries", entries, 0, self._capacity - 1))

    def _give_up(self, method: str) -> None:
        """Stop using the policy, which has failed and may be in any state."""
        self._policy = None
        logger.exception(
            "the eviction policy %s failed in %s: what was used least recently goes first from now "
            "on: fix the policy, and make the cache again",
            self._name,
            method,
        )
