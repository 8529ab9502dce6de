"""Policies that evict the lowest rank of a line, after published algorithms.

Each chooses lines and ranks for contents; `history_policy.py` has the rest.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from kvcache.policies.history_policy import HistoryPolicy, Member
from kvcache.policies.policy import EntryTable

_NAMES_PER_BLOCK = 2
"""LRU-2 remembers an evicted content until this many capacities were evicted after it."""


class GhostList(OrderedDict["bytes | None", int]):
    """Names of evicted contents, in the order of their evictions, and a policy's data about each.
    The policy decides how many names to keep. O(1) per name."""

    def add(self, name: bytes | None, value: int) -> None:
        """Remember the content that was just evicted, if it has a name."""
        if name is not None:
            self[name] = value
            self.move_to_end(name)

    def trim(self, num_names: int) -> None:
        """Forget the oldest names until at most `num_names` are left."""
        while len(self) > max(0, num_names):
            self.popitem(last=False)


class _GhostPolicy(HistoryPolicy):
    """A policy with one list of ghosts."""

    def __init__(self, capacity: int, table: EntryTable) -> None:
        super().__init__(capacity, table)
        self._ghosts = GhostList()


class LRU2Policy(_GhostPolicy):
    """LRU-2: evicts by the last use but one; entries used only once go first.

    After O'Neil, O'Neil, Weikum, "The LRU-K page replacement algorithm for database disk buffering"
    (1993), with K = 2 and no correlated references: a request counts as one use, however long it
    runs. The last use of evicted contents is remembered, of twice as many as there are blocks.
    """

    def _place_new(self, member: Member, name: bytes | None) -> None:
        member.rank = float(self._ghosts.pop(name, 0)), self._stamp()

    def _place_used(self, member: Member) -> None:
        member.rank = float(member.rank[1]), self._stamp()

    def _note_evicted(self, member: Member, name: bytes | None) -> None:
        self._ghosts.add(name, member.rank[1])
        self._ghosts.trim(_NAMES_PER_BLOCK * self._room_blocks)


_T1, _T2 = 0, 1


class ARCPolicy(HistoryPolicy):
    """Adaptive replacement: contents that come back shift room between recency and frequency.

    After Megiddo, Modha, "ARC: a self-tuning, low overhead replacement cache" (2003).
    `_target_blocks` is the target size of T1.

        B1 ◀── T1: used once           T2: used again ──▶ B2    names of evicted contents: one that
                         ◀─ p ─▶                                comes back gives its side more room
    """

    num_lines = 2

    def __init__(self, capacity: int, table: EntryTable) -> None:
        """Make an empty order of entries below `capacity`, described by `table`."""
        super().__init__(capacity, table)
        self._b1 = GhostList()
        self._b2 = GhostList()
        self._target_blocks = 0.0

    def _place_new(self, member: Member, name: bytes | None) -> None:
        len_b1, len_b2 = len(self._b1), len(self._b2)
        was_in_b1 = self._b1.pop(name, None) is not None
        was_in_b2 = self._b2.pop(name, None) is not None
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


_SMALL, _MAIN = 0, 1
_SMALL_SHARE = 0.1
"""Share of the capacity for new contents: the paper's choice."""

_MOST_USES = 3
_USES_TO_MOVE = 2


class S3FIFOPolicy(_GhostPolicy):
    """S3-FIFO: most new contents leave by a small queue before they reach the main one.

    After Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction" (2023).
    `num_uses` counts uses since an entry was enqueued.

        new ──▶ small ──used──▶ main ──▶ victims     what was used in the main queue since it was
                  │              ▲                   enqueued goes round once more for each use
                  └──▶ victims, their names remembered ──come back──▶ main
    """

    num_lines = 2

    def _place_new(self, member: Member, name: bytes | None) -> None:
        member.line = _SMALL if self._ghosts.pop(name, None) is None else _MAIN
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
