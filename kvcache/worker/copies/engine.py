"""How blocks are moved: the protocol of copy engines, and the engine for CPU memory.

*Compute-stream* work (`copy_within`, `zero_blocks`) belongs to a forward and is ordered with it.
*Transfers* (`copy_blocks`) run concurrently with forwards, behind those that have ended; their
caller asks whether they are done. Transfers may be started in another thread than compute-stream
work. On CPU each happens in the call itself. Callers check ids before; engines check nothing.

In one call, all sources are read before any destination is written. Destinations are distinct.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvcache.base.arrays import Int32Array
from kvcache.worker.copies.rows import ByteRows, copy_rows


class PendingCopy(Protocol):
    """A transfer that has been started. Whatever it reads and writes must stay alive until done."""

    def is_done(self) -> bool:
        """Say whether every byte has arrived. Never blocks."""

    def wait(self, timeout_s: float) -> bool:
        """Block until every byte has arrived, at most `timeout_s`; say whether it has."""


class CopyEngine(Protocol):
    """Moves rows of `(num_rows, width)` uint8 tensors whose bytes of a row are contiguous.

    Where an engine `copies_at_once`, a transfer is over when its call returns: a caller that wants
    to look at the bytes on the way may as well copy them with `RowMover`, piece by piece.
    """

    copies_at_once: bool

    def copy_blocks(
        self,
        sources: torch.Tensor,
        source_ids: Int32Array,
        destinations: torch.Tensor,
        destination_ids: Int32Array,
    ) -> PendingCopy:
        """Start copying row `source_ids[i]` to row `destination_ids[i]`; a transfer.

        Begins behind the forwards that have ended, and what was asked of the compute stream before
        `on_forward_end`. The caller may reuse the arrays of ids when the copy is over.
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

    def close(self) -> None:
        """Wait for everything started and give the engine's own resources back."""


@dataclass(frozen=True)
class DoneCopy:
    """A transfer that was over when the call returned."""

    def is_done(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout_s: float) -> bool:
        """Return True at once."""
        return True


class CpuCopyEngine:
    """Copies in the calling thread, which lets others run meanwhile. Keeps nothing."""

    copies_at_once = True

    def copy_blocks(
        self,
        sources: torch.Tensor,
        source_ids: Int32Array,
        destinations: torch.Tensor,
        destination_ids: Int32Array,
    ) -> PendingCopy:
        """Copy now. Rows may overlap: then all sources are gathered first."""
        source_rows, destination_rows = _rows(sources), _rows(destinations)
        if not len(source_ids) or not source_rows.shape[1]:
            return DoneCopy()
        if len(source_ids) == 1:
            destination_rows[destination_ids[0]] = source_rows[source_ids[0]]
            return DoneCopy()
        is_overlapping = np.shares_memory(source_rows, destination_rows) and bool(
            np.isin(source_ids, destination_ids).any()
        )
        if is_overlapping:
            destination_rows[destination_ids] = source_rows[source_ids]
        else:
            copy_rows(source_rows, source_ids, destination_rows, destination_ids)
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

    def close(self) -> None:
        """Do nothing: nothing is held."""


def _rows(tensor: torch.Tensor) -> ByteRows:
    rows: ByteRows = tensor.numpy()
    return rows
