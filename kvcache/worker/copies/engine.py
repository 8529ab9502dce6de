"""The protocol of copy engines, and the engine for CPU memory.

*Compute-stream* work (`copy_within`, `zero_blocks`) belongs to a forward and is ordered with it.
*Transfers* (`copy_blocks`) run concurrently with forwards, behind those that have ended; the caller
checks whether they are done. Another thread than that of compute-stream work may start transfers.
On CPU every call does its work at once. Callers validate ids; engines do not.

A call reads all sources before it writes any destination. Destinations are distinct.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvcache.base.arrays import Int32Array
from kvcache.worker.copies.rows import ByteRows, copy_rows


class PendingCopy(Protocol):
    """A started transfer. Its sources and destinations must stay alive until it is done."""

    def is_done(self) -> bool:
        """Say whether every byte has arrived. Never blocks."""

    def wait(self, timeout_s: float) -> bool:
        """Block until every byte has arrived, at most `timeout_s`; say whether it has."""


class CopyEngine(Protocol):
    """Moves rows of `(num_rows, width)` uint8 tensors whose rows are contiguous.

    If an engine `copies_at_once`, a transfer is done when its call returns. Then a caller that
    needs to read the bytes on the way can copy them with `RowMover`, piece by piece.
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

        Begins behind ended forwards, and behind the compute-stream work before
        `on_forward_end`. The caller may reuse the arrays of ids when the copy is done.
        """

    def copy_within(
        self, rows: torch.Tensor, source_ids: Int32Array, destination_ids: Int32Array
    ) -> None:
        """Copy rows of one device tensor, on the compute stream."""

    def zero_blocks(self, rows: torch.Tensor, ids: Int32Array) -> None:
        """Fill rows with zero bytes, on the compute stream."""

    def on_forward_end(self) -> None:
        """Record the point that the compute stream must reach for the last forward to be done."""

    def is_compute_idle(self) -> bool:
        """Say whether every ended forward is also done on the device. Never blocks."""

    def close(self) -> None:
        """Wait for everything started and release the engine's resources."""


@dataclass(frozen=True)
class DoneCopy:
    """A transfer that was done when its call returned."""

    def is_done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        """Return True at once."""
        return True


class CpuCopyEngine:
    """Copies in the calling thread without Python's lock. Has no state."""

    copies_at_once = True

    def copy_blocks(
        self,
        sources: torch.Tensor,
        source_ids: Int32Array,
        destinations: torch.Tensor,
        destination_ids: Int32Array,
    ) -> PendingCopy:
        """Copy now. If rows overlap, all sources are gathered first."""
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
        self.copy_blocks(rows, source_ids, rows, destination_ids)

    def zero_blocks(self, rows: torch.Tensor, ids: Int32Array) -> None:
        """Fill now."""
        _rows(rows)[ids] = 0

    def on_forward_end(self) -> None:
        """Do nothing: a forward on CPU is done when it returns."""

    def is_compute_idle(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: there are no resources."""


def _rows(tensor: torch.Tensor) -> ByteRows:
    rows: ByteRows = tensor.numpy()
    return rows
