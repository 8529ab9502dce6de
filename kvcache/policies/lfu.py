"""Least frequently used: the least often used goes first, among equals the least recent.

`LFUPolicy` remembers the uses of evicted contents, of twice as many as there are blocks.
`AgeingLFUPolicy` remembers none, but counts new uses from the value of the last victim on,
so that formerly popular contents go in the end (LFU with dynamic ageing: Arlitt, Cherkasova,
Dilley, Friedrich, Jin, "Evaluating content management techniques for web proxy caches", 2000).
"""

from __future__ import annotations

from kvcache.policies.ghosts import GhostList
from kvcache.policies.history_policy import Member, RankedPolicy
from kvcache.policies.policy import EntryBook

_NAMES_PER_BLOCK = 2
"""An evicted content is remembered until this many capacities were evicted after it."""


class LFUPolicy(RankedPolicy):
    """An `EvictionPolicy` by the number of uses, including those before an eviction."""

    def __init__(self, capacity: int, book: EntryBook) -> None:
        """Make an empty order of entries below `capacity`, described by `book`."""
        super().__init__(capacity, book)
        self._ghosts = GhostList()

    def _place_new(self, member: Member, name: bytes | None) -> None:
        member.num_uses = 1 + (self._ghosts.take(name) or 0)
        member.rank = float(member.num_uses), self._stamp()

    def _place_used(self, member: Member) -> None:
        member.num_uses += 1
        member.rank = float(member.num_uses), self._stamp()

    def _note_evicted(self, member: Member, name: bytes | None) -> None:
        self._ghosts.add(name, member.num_uses)
        self._ghosts.trim(_NAMES_PER_BLOCK * self._room_blocks)


class AgeingLFUPolicy(RankedPolicy):
    """An `EvictionPolicy` by the number of uses and their time."""

    def __init__(self, capacity: int, book: EntryBook) -> None:
        """Make an empty order of entries below `capacity`, described by `book`."""
        super().__init__(capacity, book)
        self._age = 0.0

    def _place_new(self, member: Member, name: bytes | None) -> None:
        member.rank = self._age + 1, self._stamp()

    def _place_used(self, member: Member) -> None:
        member.num_uses += 1
        member.rank = self._age + member.num_uses, self._stamp()

    def _note_evicted(self, member: Member, name: bytes | None) -> None:
        self._age = max(self._age, member.rank[0])
