"""Segmented LRU: contents used again are protected from contents used once.

After Karedla, Love, Wherry, "Caching strategies to improve disk system performance" (1994).

    new ──▶ probation ──▶ victims         used again: to the end of the protected
              ▲   │                       too many protected: their first to the end of probation
              └── protected
"""

from __future__ import annotations

from kvcache.policies.entry_queue import Entries
from kvcache.policies.history_policy import Member, RankedPolicy

_PROBATION, _PROTECTED = 0, 1
_PROTECTED_SHARE = 0.8
"""Share of the capacity that may be protected."""


class SLRUPolicy(RankedPolicy):
    """An `EvictionPolicy` of two LRU orders."""

    num_lines = 2

    def _place_new(self, member: Member, name: bytes | None) -> None:
        member.line, member.rank = _PROBATION, (0.0, self._stamp())

    def _place_used(self, member: Member) -> None:
        member.line, member.rank = _PROTECTED, (0.0, self._stamp())

    def insert(self, entries: Entries) -> None:
        super().insert(entries)
        protected = self._lines[_PROTECTED]
        limit = _PROTECTED_SHARE * self._room_blocks
        while protected and self._line_blocks[_PROTECTED] > limit:
            self._move(protected.pop(), _PROBATION, (0.0, self._stamp()))

    def _note_evicted(self, member: Member, name: bytes | None) -> None:
        """Evicted contents are forgotten."""

    def _pop_next(self) -> int:
        return (self._lines[_PROBATION] or self._lines[_PROTECTED]).pop()
