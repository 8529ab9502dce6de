"""What a device's copy engine is told of a transfer: addresses and sizes, from rows and ids.

Stands before cuda_runtime.py, which hands them to CUDA. Neighbours are put together: a run of rows
without gaps is one piece, and a run with gaps one rectangle. Arithmetic only: nothing is read,
nothing is written, and ids are checked by the callers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvcache.base.arrays import Int32Array
from kvcache.worker.copy_engine import run_starts

UInt64Array = npt.NDArray[np.uint64]

MIN_RECTANGLE_ROWS = 4
"""Shorter runs of rows with gaps are pieces of the batch: a rectangle costs a call of its own."""

MAX_PITCH_BYTES = 2**31 - 1
"""More between two rows is no rectangle for CUDA."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """Copies of `sizes[i]` bytes from `sources[i]` to `destinations[i]`, all addresses.

    No piece is empty, and none reads what another writes: they may run in any order.
    """

    sources: UInt64Array
    destinations: UInt64Array
    sizes: UInt64Array

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class Rectangle:
    """`num_rows` rows of `width_bytes`, `source_pitch` and `destination_pitch` bytes apart."""

    source: int
    source_pitch: int
    destination: int
    destination_pitch: int
    width_bytes: int
    num_rows: int


@dataclass(frozen=True, eq=False)
class CopyDescriptors:
    """One transfer: pieces that go as a batch, and rectangles that go one by one."""

    pieces: Pieces
    rectangles: tuple[Rectangle, ...]


def describe_copy(
    sources: torch.Tensor,
    source_ids: Int32Array,
    destinations: torch.Tensor,
    destination_ids: Int32Array,
) -> CopyDescriptors:
    """Return the copies of row `source_ids[i]` to row `destination_ids[i]` of `(num_rows, width)`
    uint8 tensors in two memories. Valid as long as both tensors live."""
    width = sources.shape[1]
    if not width or not len(source_ids):
        return CopyDescriptors(
            _pieces(sources, source_ids[:0], destinations, source_ids[:0], 0), ()
        )
    if is_solid(sources) and is_solid(destinations):
        starts = run_starts(source_ids, destination_ids)
        counts = np.diff(np.append(starts, len(source_ids)))
        first_sources, first_destinations = source_ids[starts], destination_ids[starts]
        return CopyDescriptors(
            _pieces(sources, first_sources, destinations, first_destinations, counts * width), ()
        )
    return _describe_gapped(sources, source_ids, destinations, destination_ids)


def is_solid(rows: torch.Tensor) -> bool:
    """Say whether there is nothing between one row and the next."""
    return rows.shape[0] <= 1 or rows.stride(0) == rows.shape[1]


def mean_piece_bytes(
    source_ids: Int32Array, destination_ids: Int32Array, row_bytes: int, *, is_gapless: bool
) -> float:
    """Return how long a piece is on average: what decides which way of copying is fastest."""
    num_rows = len(source_ids)
    num_pieces = len(run_starts(source_ids, destination_ids)) if is_gapless else num_rows
    return num_rows * row_bytes / max(1, num_pieces)


def _describe_gapped(
    sources: torch.Tensor,
    source_ids: Int32Array,
    destinations: torch.Tensor,
    destination_ids: Int32Array,
) -> CopyDescriptors:
    width = sources.shape[1]
    pitches = tuple(_pitch(rows) for rows in (sources, destinations))
    starts = run_starts(source_ids, destination_ids)
    counts = np.diff(np.append(starts, len(source_ids)))
    is_long = (counts >= MIN_RECTANGLE_ROWS) & (max(pitches) <= MAX_PITCH_BYTES)
    rectangles = tuple(
        Rectangle(
            sources.data_ptr() + int(source_ids[start]) * pitches[0],
            pitches[0],
            destinations.data_ptr() + int(destination_ids[start]) * pitches[1],
            pitches[1],
            width,
            count,
        )
        for start, count in zip(starts[is_long].tolist(), counts[is_long].tolist(), strict=True)
    )
    single = ~np.repeat(is_long, counts)
    pieces = _pieces(sources, source_ids[single], destinations, destination_ids[single], width)
    return CopyDescriptors(pieces, rectangles)


def _pieces(
    sources: torch.Tensor,
    source_ids: Int32Array,
    destinations: torch.Tensor,
    destination_ids: Int32Array,
    sizes: npt.ArrayLike,
) -> Pieces:
    return Pieces(
        _addresses(sources, source_ids),
        _addresses(destinations, destination_ids),
        np.ascontiguousarray(np.broadcast_to(sizes, len(source_ids)), dtype=np.uint64),
    )


def _addresses(rows: torch.Tensor, ids: Int32Array) -> UInt64Array:
    addresses: UInt64Array = ids.astype(np.uint64) * np.uint64(_pitch(rows))
    addresses += np.uint64(rows.data_ptr())
    return addresses


def _pitch(rows: torch.Tensor) -> int:
    """Return the bytes from one row to the next; the stride of a single row means nothing."""
    return int(rows.stride(0) if rows.shape[0] > 1 else rows.shape[1])
