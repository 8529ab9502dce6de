"""Which blocks move between a device and host memory; and, where the CPU reaches both, moving them.

Below copy_task.py. `HotMove` copies a piece of some blocks, over all tensors, and hashes it while
the processor's cache has it. Refuses to know what a checksum should be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvcache.arrays import Int32Array
from kvcache.worker.checksums import Int64Array, as_checksums, checksum_of, checksums_of_parts
from kvcache.worker.host_pool import HostPool
from kvcache.worker.row_mover import ByteRows, Places, RowMover, rows_per_piece


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
    """Carries a move out, piece by piece, in whatever order it is asked to."""

    def __init__(self, move: BlockMove, give_way: Callable[[], None] = lambda: None) -> None:
        """Look at the ids, of which there is at least one; copy nothing yet. `give_way` is called
        between copies of a piece's size."""
        self._give_way = give_way
        self._step = rows_per_piece(move.host.slot_bytes)
        self._count = len(move.slots)
        self._movers: list[RowMover] = []
        for rows, host in zip(move.rows, move.host.tensors, strict=True):
            device_rows: ByteRows = rows.numpy()
            host_rows: ByteRows = host.numpy()
            ends = (device_rows, move.block_ids, host_rows, move.slots)
            if not move.to_host:
                ends = (*ends[2:], *ends[:2])
            if device_rows.shape[1]:
                self._movers.append(RowMover(*ends, step=self._step))

    @property
    def num_pieces(self) -> int:
        """How many pieces there are."""
        return -(-self._count // self._step)

    def places(self, piece: int) -> slice:
        """Return which blocks of the move a piece has."""
        return slice(piece * self._step, min((piece + 1) * self._step, self._count))

    def copy(self, piece: int) -> None:
        """Copy a piece."""
        if self._step == 1:
            for _ in self._parts(piece):
                pass
            return
        self._give_way()
        for mover in self._movers:
            mover.move(piece)

    def copy_and_hash(self, piece: int, chosen: Places) -> Int64Array:
        """Copy a piece; return the checksums of the blocks that are `chosen`, places in it."""
        if self._step > 1:
            self._give_way()
            moved = [mover.move(piece) for mover in self._movers]
            if len(chosen) < len(moved[0]):
                moved = [[rows[i] for i in chosen.tolist()] for rows in moved]
            return checksums_of_parts(moved)
        return as_checksums([checksum_of(part.data for part in self._parts(piece))])

    def _parts(self, piece: int) -> Iterator[ByteRows]:
        """Copy the one block of a piece, and yield its bytes part after part."""
        for mover in self._movers:
            for part in mover.move_parts(piece):
                yield part
                self._give_way()
