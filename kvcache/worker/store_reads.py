"""Device blocks that running transfers still use, and who has to wait for them.

Between transfers, which start and end, and everything else that uses blocks. A block that a store
reads is not written before the copy is over; one that a load writes is not used at all before.
Every write is preceded by the block's `Unlabel`, or is the target of a zero, a copy or a load;
those that happen in a forward wait when it begins, not when the command comes, so that a step is
acknowledged at once. Says what is in the way; refuses to wait itself, and to cancel a copy.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from kvcache.base.arrays import Int32Array
from kvcache.worker.copy_engine import PendingCopy


class BlockUses:
    """Which blocks which copies use. Not thread-safe: the worker serialises.

    Invariant: `_counts[b]` is how often block `b` is in the ids of `_running`.
    """

    def __init__(self, num_blocks: int) -> None:
        """Nothing is used."""
        self._counts = np.zeros(num_blocks, dtype=np.int32)
        self._running: dict[PendingCopy, Int32Array] = {}

    def add(self, copy: PendingCopy, block_ids: Int32Array) -> None:
        """A copy uses these blocks from now on."""
        np.add.at(self._counts, block_ids, 1)
        self._running[copy] = block_ids

    def remove(self, copy: PendingCopy) -> None:
        """A copy is over."""
        np.subtract.at(self._counts, self._running.pop(copy), 1)

    def using(self, block_ids: Int32Array) -> list[PendingCopy]:
        """Return the copies that use one of these blocks and are not done, as they began."""
        if not self._running or not self._counts[block_ids].any():
            return []
        return [
            copy
            for copy, used in self._running.items()
            if np.isin(used, block_ids).any() and not copy.is_done()
        ]


class StoreReads(BlockUses):
    """Blocks that stores read, and the forwards that will write them."""

    def __init__(self, num_blocks: int) -> None:
        """Nothing is read."""
        super().__init__(num_blocks)
        self._awaited: deque[tuple[int, PendingCopy]] = deque()

    def on_unlabel(self, seq: int, block_ids: Int32Array) -> None:
        """Blocks are going to be written by the forward of `seq` or a later one."""
        self._awaited += ((seq, copy) for copy in self.using(block_ids))

    def before_forward(self, seq: int) -> PendingCopy | None:
        """Return a copy that reads what was unlabelled for the forward of `seq`, None if none."""
        while self._awaited and self._awaited[0][0] <= seq:
            if not self._awaited[0][1].is_done():
                return self._awaited[0][1]
            self._awaited.popleft()
        return None

    def forget_awaited(self) -> None:
        """No forward of the old epoch comes any more, and nothing runs."""
        self._awaited.clear()


class TransferUses:
    """What transfers do to the blocks of a device: stores read them, loads write them."""

    def __init__(self, num_blocks: int) -> None:
        """No transfer runs."""
        self.reads = StoreReads(num_blocks)
        self.writes = BlockUses(num_blocks)
        self.num_waits = 0

    def before_write(self, block_ids: Int32Array) -> list[PendingCopy]:
        """Return the transfers that must be over before these blocks are written."""
        return self.reads.using(block_ids) + self.writes.using(block_ids)

    def before_read(self, block_ids: Int32Array) -> list[PendingCopy]:
        """Return the transfers that must be over before these blocks are read."""
        return self.writes.using(block_ids)
