"""Which host slots a running job reads or writes: no other job writes them meanwhile.

Between the jobs of both tiers, which share the slots. Any number may read a slot that no job
writes. Refuses nothing itself: it says what is in the way.
"""

from __future__ import annotations

import numpy as np

from kvcache.base.arrays import Int32Array
from kvcache.base.errors import InvariantError


class SlotHolds:
    """Counts, by slot. Not thread-safe: the worker serialises."""

    def __init__(self, num_slots: int) -> None:
        """Nothing is held."""
        self._readers = np.zeros(num_slots, dtype=np.int32)
        self._is_written = np.zeros(num_slots, dtype=np.bool_)

    @property
    def num_slots(self) -> int:
        """How many slots there are."""
        return len(self._readers)

    def problem(self, slots: Int32Array, *, to_write: bool) -> str:
        """Say why slots cannot be read (or written) now, or return an empty string."""
        if not len(slots):
            return ""
        first, last = int(slots.min()), int(slots.max())
        if not 0 <= first <= last < self.num_slots:
            return (
                f"host slots {first}..{last} are asked for, this rank has 0..{self.num_slots - 1}"
            )
        is_busy = self._is_written[slots]
        if to_write:
            is_busy = is_busy | (self._readers[slots] > 0)
        busy = np.unique(slots[is_busy]).tolist()
        if busy:
            return f"host slots {busy[:8]} are in use by a running job: wait for its report"
        return ""

    def hold(self, slots: Int32Array, *, to_write: bool) -> None:
        """Hold slots that have no `problem`."""
        if to_write:
            self._is_written[slots] = True
        else:
            np.add.at(self._readers, slots, 1)

    def release(self, slots: Int32Array, *, to_write: bool) -> None:
        """Let go of what was held."""
        if to_write:
            self._is_written[slots] = False
        else:
            np.subtract.at(self._readers, slots, 1)

    def check(self) -> None:
        """Raise InvariantError if a slot is both read and written, or read less than never."""
        wrong = np.flatnonzero((self._readers < 0) | (self._is_written & (self._readers > 0)))
        if len(wrong):
            raise InvariantError(f"host slots {wrong[:5].tolist()} are held by jobs that exclude")
