"""Device blocks that running stores still read: whoever writes one waits for the copy first.

Between transfers, which start stores, and everything that writes blocks: a block's bytes must not
change under a copy. Every write is preceded by the block's `Unlabel`, or is the target of a zero, a
copy or a load; those that happen in a forward wait when it begins, not when the command comes, so
that a step is acknowledged at once. Refuses to cancel a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from kvcache.arrays import Int32Array
from kvcache.worker.copy_engine import PendingCopy


class StoreRead:
    """One store: the blocks that it reads, and its copies."""

    def __init__(self, block_ids: Int32Array, copies: Sequence[PendingCopy]) -> None:
        """Read `block_ids` until `copies` are done."""
        self.block_ids = block_ids
        self._copies = tuple(copies)

    def wait(self) -> None:
        """Block until nothing is read any more."""
        for copy in self._copies:
            copy.wait()


class StoreReads:
    """What is being read. Not thread-safe: the worker serialises.

    Invariant: `_counts[b]` is how often block `b` is in the block ids of `_running`.
    """

    def __init__(self, num_blocks: int) -> None:
        """Nothing is read."""
        self._counts = np.zeros(num_blocks, dtype=np.int32)
        self._running: list[StoreRead] = []
        self._awaited: deque[tuple[int, StoreRead]] = deque()
        self.num_waits = 0

    def add(self, read: StoreRead) -> None:
        """A store has begun."""
        np.add.at(self._counts, read.block_ids, 1)
        self._running.append(read)

    def remove(self, read: StoreRead) -> None:
        """A store is over."""
        np.subtract.at(self._counts, read.block_ids, 1)
        self._running.remove(read)

    def on_unlabel(self, seq: int, block_ids: Int32Array) -> None:
        """Blocks are going to be written by the forward of `seq` or a later one."""
        for read in self._reading(block_ids):
            self._awaited.append((seq, read))

    def before_forward(self, seq: int) -> None:
        """Block until the forward of `seq` may write all that was unlabelled for it."""
        while self._awaited and self._awaited[0][0] <= seq:
            _, read = self._awaited.popleft()
            self._wait(read)

    def before_write(self, block_ids: Int32Array) -> None:
        """Block until these blocks may be written."""
        for read in self._reading(block_ids):
            self._wait(read)

    def forget_awaited(self) -> None:
        """No forward of the old epoch comes any more, and nothing runs."""
        self._awaited.clear()

    def _reading(self, block_ids: Int32Array) -> list[StoreRead]:
        """Return the stores that read one of these blocks."""
        if not self._running or not self._counts[block_ids].any():
            return []
        return [r for r in self._running if np.isin(r.block_ids, block_ids).any()]

    def _wait(self, read: StoreRead) -> None:
        self.num_waits += 1
        read.wait()
