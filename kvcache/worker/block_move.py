"""Which blocks move between a device and host memory; and, where the CPU reaches both, moving them.

Below copy_task.py. `HotMove` copies a piece of some blocks, over all tensors, and hashes it while
the processor's cache has it. What is found is looked at when all is copied, because a few calls for
each piece would cost as much as the hash. Refuses to know what a checksum should be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from kvcache.arrays import Int32Array
from kvcache.worker.checksums import BoolArray, Int64Array, PieceHasher, as_checksums
from kvcache.worker.host_pool import HostPool
from kvcache.worker.row_mover import ByteRows, RowMover, Rows, rows_per_piece


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


class HotMove:
    """Carries a move out, piece after piece, and hashes what it has just copied."""

    def __init__(
        self,
        move: BlockMove,
        is_hashed: BoolArray,
        give_way: Callable[[], None] = lambda: None,
    ) -> None:
        """Look at the ids, of which there is at least one; copy nothing yet. `is_hashed[i]` says
        it of block `i`; `give_way` is called between copies of a piece's size."""
        self._give_way = give_way
        self._step = rows_per_piece(move.host.slot_bytes, move.block_ids, move.slots)
        self._is_hashed = is_hashed
        self._movers: list[RowMover] = []
        widths: list[int] = []
        for rows, host in zip(move.rows, move.host.tensors, strict=True):
            device_rows: ByteRows = rows.numpy()
            host_rows: ByteRows = host.numpy()
            ends = (device_rows, move.block_ids, host_rows, move.slots)
            if not move.to_host:
                ends = (*ends[2:], *ends[:2])
            if device_rows.shape[1]:
                self._movers.append(RowMover(*ends, step=self._step))
                widths.append(device_rows.shape[1])
        self._hasher = PieceHasher(widths, self._step)

    def run(self) -> Int64Array:
        """Copy everything; return the checksums of the blocks that are hashed, in order."""
        starts = np.arange(0, len(self._is_hashed), self._step)
        counts = np.add.reduceat(self._is_hashed, starts, dtype=np.intp).tolist()
        digests: list[int] = []
        take = self._one if self._step == 1 else self._several
        for piece, num_hashed in enumerate(counts):
            digests += take(piece, num_hashed)
        return as_checksums(digests)

    def _several(self, piece: int, num_hashed: int) -> Sequence[int]:
        """Copy a piece; return the digests of those blocks of it that are hashed."""
        self._give_way()
        moved: list[Rows] = [mover.move(piece) for mover in self._movers]
        if not num_hashed:
            return ()
        if num_hashed < len(moved[0]):
            start = piece * self._step
            chosen = self._is_hashed[start : start + self._step].nonzero()[0].tolist()
            moved = [[rows[i] for i in chosen] for rows in moved]
        return self._hasher.digests(moved)

    def _one(self, piece: int, num_hashed: int) -> Sequence[int]:
        """Copy the one block of a piece, part after part; return its digest if it is hashed."""
        state = xxhash.xxh3_64()
        for mover in self._movers:
            for part in mover.move_parts(piece):
                if num_hashed:
                    state.update(part.data)
                self._give_way()
        return (state.intdigest(),) if num_hashed else ()
