"""2Q: new contents wait in a queue; only those that return after an eviction are kept by recency.

After Johnson, Shasha, "2Q: a low overhead high performance buffer management replacement
algorithm" (1994), the full version: uses while a content waits in the first queue count as one,
since they are often close to each other.

    new ──▶ A1in (FIFO) ──▶ victims, their names remembered in A1out ──comes back──▶ Am (LRU)
"""

from __future__ import annotations

from kvcache.policies.ghosts import GhostList
from kvcache.policies.history_policy import Member, RankedPolicy
from kvcache.policies.policy import EntryBook

_A1IN, _AM = 0, 1
_A1IN_SHARE = 0.25
_A1OUT_SHARE = 0.5
"""Shares of the capacity for new contents and for remembered names: the paper's choice."""


class TwoQPolicy(RankedPolicy):
    """An `EvictionPolicy` of a FIFO of new contents and an LRU order of those that came back."""

    num_lines = 2

    def __init__(self, capacity: int, book: EntryBook) -> None:
        """Make an empty order of entries below `capacity`, described by `book`."""
        super().__init__(capacity, book)
        self._a1out = GhostList()

    def _place_new(self, member: Member, name: bytes | None) -> None:
        member.line = _A1IN if self._a1out.take(name) is None else _AM
        member.rank = 0.0, self._stamp()

    def _place_used(self, member: Member) -> None:
        if member.line == _AM:
            member.rank = 0.0, self._stamp()

    def _pop_next(self) -> int:
        new, kept = self._lines
        limit = _A1IN_SHARE * self._room_blocks
        is_full = self._line_blocks[_A1IN] > limit
        return (new if new and (is_full or not kept) else kept).pop()

    def _note_evicted(self, member: Member, name: bytes | None) -> None:
        if member.line == _A1IN:
            self._a1out.add(name, 0)
            self._a1out.trim(int(_A1OUT_SHARE * self._room_blocks))
