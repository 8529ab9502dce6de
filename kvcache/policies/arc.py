"""Adaptive replacement: contents that come back shift room between recency and frequency.

After Megiddo, Modha, "ARC: a self-tuning, low overhead replacement cache" (2003).

    B1 ◀── T1: used once           T2: used again ──▶ B2       names of evicted contents: one that
                     ◀─ p ─▶                                   comes back gives its side more room
"""

from __future__ import annotations

from kvcache.policies.ghosts import GhostList
from kvcache.policies.history_policy import Member, RankedPolicy
from kvcache.policies.policy import EntryBook

_T1, _T2 = 0, 1


class ARCPolicy(RankedPolicy):
    """An `EvictionPolicy` of two LRU orders; `_target_blocks` is the target size of the first."""

    num_lines = 2

    def __init__(self, capacity: int, book: EntryBook) -> None:
        """Make an empty order of entries below `capacity`, described by `book`."""
        super().__init__(capacity, book)
        self._b1 = GhostList()
        self._b2 = GhostList()
        self._target_blocks = 0.0

    def _place_new(self, member: Member, name: bytes | None) -> None:
        len_b1, len_b2 = len(self._b1), len(self._b2)
        was_in_b1 = self._b1.take(name) is not None
        was_in_b2 = self._b2.take(name) is not None
        target = self._target_blocks
        if was_in_b1:
            target += max(1.0, len_b2 / len_b1)
        if was_in_b2:
            target -= max(1.0, len_b1 / len_b2)
        self._target_blocks = min(max(target, 0.0), float(self._room_blocks))
        member.line = _T2 if was_in_b1 or was_in_b2 else _T1
        member.rank = 0.0, self._stamp()

    def _place_used(self, member: Member) -> None:
        member.line, member.rank = _T2, (0.0, self._stamp())

    def _pop_next(self) -> int:
        once, again = self._lines
        is_over = self._line_blocks[_T1] > self._target_blocks
        return (once if once and (is_over or not again) else again).pop()

    def _note_evicted(self, member: Member, name: bytes | None) -> None:
        (self._b1 if member.line == _T1 else self._b2).add(name, 0)
        room, (len_t1, len_t2) = self._room_blocks, self._line_blocks
        self._b1.trim(room - len_t1)
        self._b2.trim(2 * room - len_t1 - len_t2 - len(self._b1))
