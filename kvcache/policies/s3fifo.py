"""S3-FIFO: most new contents leave by a small queue before they reach the main one.

After Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction" (2023).

    new ──▶ small ──used──▶ main ──▶ victims       what was used in the main queue since it was
              │              ▲                     enqueued goes round once more for each use
              └──▶ victims, their names remembered ──come back──▶ main
"""

from __future__ import annotations

from dataclasses import replace

from kvcache.policies.ghosts import GhostList
from kvcache.policies.history_policy import Member, RankedPolicy
from kvcache.policies.policy import EntryBook

_SMALL, _MAIN = 0, 1
_SMALL_SHARE = 0.1
"""Share of the capacity for new contents: the paper's choice."""

_MOST_USES = 3
_USES_TO_MOVE = 2


class S3FIFOPolicy(RankedPolicy):
    """An `EvictionPolicy` of two FIFO queues; `num_uses` counts uses since it was enqueued."""

    num_lines = 2

    def __init__(self, capacity: int, book: EntryBook) -> None:
        """Make an empty order of entries below `capacity`, described by `book`."""
        super().__init__(capacity, book)
        self._ghosts = GhostList()

    def _place_new(self, member: Member, name: bytes | None) -> None:
        member.line = _SMALL if self._ghosts.take(name) is None else _MAIN
        member.num_uses, member.rank = 0, (0.0, self._stamp())

    def _place_used(self, member: Member) -> None:
        member.num_uses = min(member.num_uses + 1, _MOST_USES)

    def _pop_next(self) -> int:
        small, main = self._lines
        while True:
            is_full = self._line_blocks[_SMALL] > _SMALL_SHARE * self._room_blocks
            line = small if small and (is_full or not main) else main
            entry = line.pop()
            member = self._members[entry]
            if (line is small and member.num_uses < _USES_TO_MOVE) or not member.num_uses:
                return entry
            left = 0 if line is small else member.num_uses - 1
            self._members[entry] = replace(member, num_uses=left)
            self._move(entry, _MAIN, (0.0, self._stamp()))

    def _note_evicted(self, member: Member, name: bytes | None) -> None:
        if member.line == _SMALL:
            self._ghosts.add(name, 0)
            self._ghosts.trim(int((1 - _SMALL_SHARE) * self._room_blocks))
