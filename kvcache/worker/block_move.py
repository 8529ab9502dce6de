"""Which blocks move between a device and host memory; and, where the CPU reaches both, moving them.

Below copy_task.py. `HotMove` copies a piece of some blocks, over all tensors, and hashes it on the
way. Refuses to know what a checksum should be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
import xxhash

from kvcache.base.arrays import Int32Array
from kvcache.worker.checksums import Int64Array, as_checksums
from kvcache.worker.copy_pool import CopyPool
from kvcache.worker.host_pool import HostPool
from kvcache.worker.row_kernel import BoolArray, can_hash
from kvcache.worker.row_mover import BlockHashes, PieceHashes, RowMover, Side


@dataclass(frozen=True, eq=False)
class BlockMove:
    """Which bytes: `block_ids[i]` of the device's rows and `slots[i]` of the host's tensors.

    Shapes: `(n,)`. `rows[k]` is `(num_blocks, width)` uint8, tensor `k` of `host` as wide.
    """

    rows: Sequence[torch.Tensor]
    host: HostPool
    block_ids: Int32Array
    slots: Int32Array
    to_host: bool


_Item = TypeVar("_Item")

HELPED_PIECES = 4
"""Moves of fewer pieces are copied by one thread: another would wake up when they are over."""

PIECE_BYTES = 1 << 19
"""Copied at once; between pieces copies give way. A tenth of a millisecond or less."""


class HotMove:
    """Carries a move out, a piece of some blocks after another, and hashes what it copies."""

    def __init__(self, move: BlockMove, is_hashed: BoolArray, pool: CopyPool) -> None:
        """Look at the ids, of which there is at least one; copy nothing yet. `is_hashed[i]` says
        it of block `i`. `pool` copies, and gives way between copies of a piece's size. Raises
        ValueError where there are not as many of these as blocks."""
        if not len(move.block_ids) == len(move.slots) == len(is_hashed):
            counts = len(move.block_ids), len(move.slots), len(is_hashed)
            raise ValueError("{} blocks, {} slots, {} marks: one for each".format(*counts))
        self._pool = pool
        self._hashes = BlockHashes.of(is_hashed)
        sides = [
            (Side(rows.numpy(), move.block_ids), Side(host.numpy(), move.slots))
            for rows, host in zip(move.rows, move.host.tensors, strict=True)
            if rows.shape[1]
        ]
        self._widths = [on_device.width for on_device, _ in sides]
        self._does_hash = bool(is_hashed.any())
        self._can_hash = can_hash(self._widths)
        starts = (0, *accumulate(self._widths))
        self._movers = [
            RowMover(*(pair if move.to_host else pair[::-1]), start, starts[-1])
            for pair, start in zip(sides, starts, strict=False)
        ]
        self._written = [pair[1] if move.to_host else pair[0] for pair in sides]
        self._step = min(len(is_hashed), max(1, PIECE_BYTES // max(self._widths, default=1)))

    def run(self) -> Int64Array:
        """Copy everything; return the checksums of the blocks that are hashed, in order."""
        starts = range(0, len(self._hashes.is_hashed), self._step)
        waiting = deque(starts)

        def copy_pieces() -> None:
            """Copy while pieces are left: a thread with less of a processor copies less."""
            try:
                for start in _each_taken(waiting):
                    self.copy_piece(start)
            except Exception:
                waiting.clear()  # no thread goes on
                raise

        if len(starts) >= HELPED_PIECES:
            self._pool.run(copy_pieces)
        else:
            copy_pieces()
        return as_checksums(self._hashes.digests[self._hashes.is_hashed])

    def copy_piece(self, first: int) -> None:
        """Copy the piece that begins with this block, a tensor's rows after another's."""
        end = min(first + self._step, len(self._hashes.is_hashed))
        piece = PieceHashes(self._hashes, first, end)
        for mover, width in zip(self._movers, self._widths, strict=True):
            for low in range(0, width, PIECE_BYTES):
                self._pool.give_way()
                high = min(width, low + PIECE_BYTES)
                if self._does_hash and self._can_hash:
                    mover.copy_hashed(piece, low, high)
                else:
                    mover.copy(first, end, low, high)
        if self._does_hash and not self._can_hash:
            self._hash(range(first, end))

    def _hash(self, places: Sequence[int]) -> None:
        """Hash blocks that the kernel does not: odd or short ones."""
        hashes = self._hashes
        for place in places:
            if hashes.is_hashed[place]:
                state = xxhash.xxh3_64()
                for side in self._written:
                    state.update(side.rows[side.ids[place]].data)
                hashes.digests[place] = state.intdigest()


def _each_taken(waiting: deque[_Item]) -> Iterator[_Item]:
    """Yield what is there, to each of the threads that ask something else."""
    while True:
        try:
            taken = waiting.popleft()
        except IndexError:
            return
        yield taken
