"""LRU-2: evicts by the last use but one; entries used only once go first.

After O'Neil, O'Neil, Weikum, "The LRU-K page replacement algorithm for database disk buffering"
(1993), with K = 2 and no correlated references: a request counts as one use, however long it runs.
The last use of evicted contents is remembered, of twice as many as there are blocks.
"""

from __future__ import annotations

from kvcache.policies.ghosts import GhostList
from kvcache.policies.history_policy import Member, RankedPolicy
from kvcache.policies.policy import EntryBook

_NEVER = 0
_NAMES_PER_BLOCK = 2
"""An evicted content is remembered until this many capacities were evicted after it."""


class LRU2Policy(RankedPolicy):
    """An `EvictionPolicy` by the last use but one; entries used once by their only use."""

    def __init__(self, capacity: int, book: EntryBook) -> None:
        """Make an empty order of entries below `capacity`, described by `book`."""
        super().__init__(capacity, book)
        self._ghosts = GhostList()

    def _place_new(self, member: Member, name: bytes | None) -> None:
        member.rank = float(self._ghosts.take(name) or _NEVER), self._stamp()

    def _place_used(self, member: Member) -> None:
        member.rank = float(member.rank[1]), self._stamp()

    def _note_evicted(self, member: Member, name: bytes | None) -> None:
        self._ghosts.add(name, member.rank[1])
        self._ghosts.trim(_NAMES_PER_BLOCK * self._room_blocks)
