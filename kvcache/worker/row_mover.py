"""Rows of bytes copied between memories that the CPU reaches, and hashed on the way.

Between row_kernel.py, which is told addresses, and the owners of arrays: the engine, which copies,
and block_move.py, which copies blocks of many tensors and hashes them. Checks what the kernel takes
for granted. Refuses rows that are source and destination at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import Int32Array, are_below
from kvcache.worker.row_kernel import (
    COPIED,
    ONLY_READ,
    STREAMED,
    STRIPE_BYTES,
    BoolArray,
    UInt64Array,
    move_rows,
)

ByteRows = npt.NDArray[np.uint8]

STREAMED_BYTES = 1 << 20
"""Copies of this many bytes or more are written past the cache: they would drive out what others
have there, and so much of them is not read soon."""

_NO_LANES = np.empty((0, 8), np.uint64)
_NO_DIGESTS = np.empty(0, np.uint64)


@dataclass(frozen=True, eq=False)
class Side:
    """Rows `ids[i]` of `(num_rows, width)` uint8, where the bytes of a row are contiguous.

    Raises IndexError for an id without a row, ValueError for rows whose bytes lie apart.
    """

    rows: ByteRows
    ids: Int32Array

    def __post_init__(self) -> None:
        if not are_below(self.ids, len(self.rows)):
            least, most = int(self.ids.min()), int(self.ids.max())
            raise IndexError(f"rows {least} to {most} of {len(self.rows)}: ids begin at 0")
        if self.rows.shape[1] > 1 and self.rows.strides[1] != 1:
            raise ValueError(
                f"bytes of a row are {self.rows.strides[1]} apart: none may be between"
            )

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return int(self.rows.shape[1])

    @property
    def is_aligned(self) -> bool:
        """Whether every row begins, and ends, where a stripe does."""
        address: int = self.rows.ctypes.data
        return not (address | self.rows.strides[0] | self.width) % STRIPE_BYTES

    def places(self) -> tuple[int, int, Int32Array]:
        """Return what the kernel takes: the address of row 0, bytes from row to row, and ids."""
        ids = np.ascontiguousarray(self.ids, np.int32)
        return self.rows.ctypes.data, self.rows.strides[0], ids


@dataclass(frozen=True, eq=False)
class BlockHashes:
    """Which of some blocks are hashed, and what came of it. Threads hash different ones at once.

    Shapes: `(n,)` bool and uint64. `digests[i]` is there when all parts of block `i` were hashed.
    """

    is_hashed: BoolArray
    digests: UInt64Array

    @classmethod
    def of(cls, is_hashed: BoolArray) -> BlockHashes:
        """Hash these, none yet."""
        return cls(np.ascontiguousarray(is_hashed), np.zeros(len(is_hashed), np.uint64))


class PieceHashes:
    """Blocks `first` to `end`, whose parts one thread hashes in order."""

    def __init__(self, hashes: BlockHashes, first: int, end: int) -> None:
        """Hash nothing yet."""
        self.hashes = hashes
        self.first = first
        self.end = end
        # Of one line of the cache each.
        memory = np.empty(8 * (end - first) + 7, np.uint64)
        start = -memory.ctypes.data % STRIPE_BYTES // 8
        self.lanes = memory[start : start + 8 * (end - first)].reshape(-1, 8)


class RowMover:
    """Copies row `i` of one side to row `i` of the other. Any thread, each other rows.

    Both sides are as wide as one another. Destinations are distinct, and no source is one.
    """

    def __init__(self, source: Side, destination: Side, start: int = 0, total: int = 0) -> None:
        """Copy nothing yet. Rows are the part from `start` on of blocks of `total` bytes.

        Raises ValueError where the sides differ.
        """
        if source.width != destination.width:
            raise ValueError(f"rows of {source.width} bytes to rows of {destination.width}")
        if len(source.ids) != len(destination.ids):
            raise ValueError(f"{len(source.ids)} rows to {len(destination.ids)}")
        if not destination.rows.flags.writeable:
            raise ValueError("the rows to write are read-only")
        is_streamed = destination.is_aligned and len(source.ids) * source.width >= STREAMED_BYTES
        self._start = start
        self._total = total
        self._way = STREAMED if is_streamed else COPIED
        self._memories = source.rows, destination.rows  # while there are addresses of theirs
        self._from, self._to = source.places(), destination.places()
        self._not_hashed = np.zeros(len(source.ids), np.bool_)

    def copy(self, first: int, end: int, low: int, high: int) -> None:
        """Copy bytes `low` to `high` of these rows."""
        bounds = (first, end, low, high, 0, 0)
        move_rows(
            *self._from, *self._to, *bounds, self._not_hashed, _NO_LANES, _NO_DIGESTS, self._way
        )

    def copy_hashed(self, piece: PieceHashes, low: int, high: int) -> None:
        """Copy bytes `low` to `high` of a piece's rows, and hash those that are. `low` is between
        stripes, and blocks are such that the kernel can hash."""
        bounds = (piece.first, piece.end, low, high, self._start, self._total)
        hashes = piece.hashes
        move_rows(
            *self._from,
            *self._to,
            *bounds,
            hashes.is_hashed,
            piece.lanes,
            hashes.digests,
            self._way,
        )


def copy_rows(sources: ByteRows, source_ids: Int32Array, to: ByteRows, ids: Int32Array) -> None:
    """Copy row `source_ids[i]` to row `ids[i]` of `to`; see `RowMover`."""
    mover = RowMover(Side(sources, source_ids), Side(to, ids))
    mover.copy(0, len(ids), 0, sources.shape[1])


def hashes_of_rows(parts: Sequence[ByteRows], ids: Int32Array) -> UInt64Array:
    """Return the hash of each block: row `i` of every part, in order. `can_hash` said so of their
    widths. Nothing is copied."""
    hashes = BlockHashes.of(np.ones(len(ids), np.bool_))
    piece = PieceHashes(hashes, 0, len(ids))
    start, total = 0, sum(part.shape[1] for part in parts)
    for part in parts:
        places, width = Side(part, ids).places(), part.shape[1]
        bounds = (0, len(ids), 0, width, start, total)
        move_rows(
            *places, *places, *bounds, hashes.is_hashed, piece.lanes, hashes.digests, ONLY_READ
        )
        start += width
    return hashes.digests
