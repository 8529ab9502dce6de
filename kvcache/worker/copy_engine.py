"""Moving blocks: the protocol, and the engine for memory that the CPU reaches.

Two streams of work are told apart. *Compute-stream* work (`copy_within`, `zero_blocks`) belongs to
a forward and is ordered with it; *transfers* (`copy_blocks`) run beside forwards, behind those that
had begun, and are asked whether they are done. On CPU both happen at once. Ids are checked by the
callers, before anything is started; engines check nothing.

For one call, all sources are read before any destination is written. Destinations are distinct.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvcache.arrays import Int32Array

ByteRows = npt.NDArray[np.uint8]

MIN_MEAN_RUN_BYTES = 8192
"""Runs shorter than this on average are gathered and scattered instead of sliced: measured, slices
are 20 times slower at 256 bytes, even at 4 to 16 KiB, 1.4 times faster from 64 KiB on."""

GATHER_BYTES = 1 << 18
"""Gathered at once, so that the scatter finds the bytes in the processor's cache."""


class PendingCopy(Protocol):
    """A transfer that has been started. Whatever it reads and writes must stay alive until done."""

    def is_done(self) -> bool:
        """Say whether every byte has arrived. Never blocks."""

    def wait(self) -> None:
        """Block until every byte has arrived."""


class CopyEngine(Protocol):
    """Moves rows of `(num_rows, width)` uint8 tensors whose bytes of a row are contiguous."""

    def copy_blocks(
        self,
        sources: torch.Tensor,
        source_ids: Int32Array,
        destinations: torch.Tensor,
        destination_ids: Int32Array,
    ) -> PendingCopy:
        """Start copying row `source_ids[i]` to row `destination_ids[i]`; a transfer.

        Begins after all compute-stream work and forwards begun before this call.
        """

    def copy_within(
        self, rows: torch.Tensor, source_ids: Int32Array, destination_ids: Int32Array
    ) -> None:
        """Copy rows of one device tensor, on the compute stream."""

    def zero_blocks(self, rows: torch.Tensor, ids: Int32Array) -> None:
        """Fill rows with zero bytes, on the compute stream."""

    def on_forward_end(self) -> None:
        """Remember how far the compute stream must get for the last forward to be over."""

    def is_compute_idle(self) -> bool:
        """Say whether every forward that has ended is over on the device too. Never blocks."""

    def wait_compute(self) -> None:
        """Block until every forward that has ended is over on the device too."""

    def close(self) -> None:
        """Wait for everything started and give the engine's own resources back."""


@dataclass(frozen=True)
class DoneCopy:
    """A transfer that was over when the call returned."""

    def is_done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""


def run_starts(source_ids: Int32Array, destination_ids: Int32Array) -> npt.NDArray[np.int64]:
    """Return where a new run begins: at index 0, and where either id does not rise by 1."""
    breaks = (np.diff(source_ids) != 1) | (np.diff(destination_ids) != 1)
    first = np.zeros(min(1, len(source_ids)), dtype=np.int64)
    return np.concatenate((first, np.flatnonzero(breaks) + 1))


def consecutive_runs(
    source_ids: Int32Array, destination_ids: Int32Array
) -> Sequence[tuple[int, int, int]]:
    """Return `(first source, first destination, count)` of each run in which both rise by 1."""
    starts = run_starts(source_ids, destination_ids)
    counts = np.diff(np.append(starts, len(source_ids)))
    columns = source_ids[starts], destination_ids[starts], counts
    return list(zip(*(column.tolist() for column in columns), strict=True))


class CpuCopyEngine:
    """Copies in the calling thread: slices for runs of consecutive ids, a gather for the rest."""

    def copy_blocks(
        self,
        sources: torch.Tensor,
        source_ids: Int32Array,
        destinations: torch.Tensor,
        destination_ids: Int32Array,
    ) -> PendingCopy:
        """Copy now. Rows may overlap: then all sources are gathered first."""
        source_rows, destination_rows = _rows(sources), _rows(destinations)
        row_bytes = source_rows.shape[1]
        if not len(source_ids) or not row_bytes:
            return DoneCopy()
        is_overlapping = np.shares_memory(source_rows, destination_rows) and bool(
            np.isin(source_ids, destination_ids).any()
        )
        if is_overlapping:
            destination_rows[destination_ids] = source_rows[source_ids]
            return DoneCopy()
        num_runs = len(run_starts(source_ids, destination_ids))
        if len(source_ids) * row_bytes < num_runs * MIN_MEAN_RUN_BYTES:
            # One item per row makes numpy move whole rows instead of single bytes.
            row_type = np.dtype((np.void, row_bytes))
            whole_sources = source_rows.view(row_type)[:, 0]
            whole_destinations = destination_rows.view(row_type)[:, 0]
            step = max(1, GATHER_BYTES // row_bytes)
            is_solid = whole_sources.flags.c_contiguous  # otherwise take() would copy all of it
            for start in range(0, len(source_ids), step):
                ids = source_ids[start : start + step]
                gathered = whole_sources.take(ids) if is_solid else whole_sources[ids]
                whole_destinations[destination_ids[start : start + step]] = gathered
            return DoneCopy()
        for source, destination, count in consecutive_runs(source_ids, destination_ids):
            destination_rows[destination : destination + count] = source_rows[
                source : source + count
            ]
        return DoneCopy()

    def copy_within(
        self, rows: torch.Tensor, source_ids: Int32Array, destination_ids: Int32Array
    ) -> None:
        """Copy now."""
        self.copy_blocks(rows, source_ids, rows, destination_ids)

    def zero_blocks(self, rows: torch.Tensor, ids: Int32Array) -> None:
        """Fill now."""
        _rows(rows)[ids] = 0

    def on_forward_end(self) -> None:
        """Do nothing: a forward on CPU is over when it returns."""

    def is_compute_idle(self) -> bool:
        """Return True."""
        return True

    def wait_compute(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Do nothing: nothing is held."""


def _rows(tensor: torch.Tensor) -> ByteRows:
    rows: ByteRows = tensor.numpy()
    return rows


def rows_bytes(tensors: Sequence[torch.Tensor], row: int) -> Iterator[memoryview]:
    """Yield the bytes of one row of each tensor, in order, without copying. CPU tensors only."""
    for tensor in tensors:
        yield memoryview(_rows(tensor)[row])
