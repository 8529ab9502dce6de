"""Moving blocks: the protocol, and the engine for memory that the CPU reaches.

Two streams of work are told apart. *Compute-stream* work (`copy_within`, `zero_blocks`) belongs to
a forward and is ordered with it; *transfers* (`copy_blocks`) run beside forwards, behind those that
have ended, and are asked whether they are done. Transfers may be started in another thread than
compute-stream work. On CPU each happens in the call itself. Ids are checked by the callers, before
anything is started; engines check nothing.

For one call, all sources are read before any destination is written. Destinations are distinct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvcache.arrays import Int32Array

ByteRows = npt.NDArray[np.uint8]
RowItems = npt.NDArray[np.void]

MIN_MEAN_RUN_BYTES = 1 << 14
"""Shorter runs on average are gathered and scattered, longer ones moved by a slice each. Measured
against a plain copy of as many bytes: at 4 KiB .5 and .35, at 16 KiB .6 and .65, at 64 KiB .65 and
1."""

GATHER_BYTES = 1 << 19
"""Gathered at once, so that the scatter finds the bytes in the processor's cache."""

MIN_SIDE_RUN_BYTES = 1 << 17
"""With such runs on one side, and shorter ones on the other, rows are indexed on that side only:
.85 to .95 of a plain copy."""

_FIRST = np.zeros(1, dtype=np.int64)


class PendingCopy(Protocol):
    """A transfer that has been started. Whatever it reads and writes must stay alive until done."""

    def is_done(self) -> bool:
        """Say whether every byte has arrived. Never blocks."""

    def wait(self, timeout_s: float) -> bool:
        """Block until every byte has arrived, at most `timeout_s`; say whether it has."""


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

    def wait(self, timeout_s: float) -> bool:
        """Return True at once."""
        return True


def run_starts(source_ids: Int32Array, destination_ids: Int32Array) -> npt.NDArray[np.int64]:
    """Return where a new run begins: at index 0, and where either id does not rise by 1."""
    if len(source_ids) <= 1:
        return np.arange(len(source_ids))
    breaks = source_ids[1:] - source_ids[:-1] != 1
    if destination_ids is not source_ids:
        breaks |= destination_ids[1:] - destination_ids[:-1] != 1
    return np.concatenate((_FIRST, np.flatnonzero(breaks) + 1))


def consecutive_runs(
    source_ids: Int32Array, destination_ids: Int32Array
) -> Sequence[tuple[int, int, int]]:
    """Return `(first source, first destination, count)` of each run in which both rise by 1."""
    return _runs(run_starts(source_ids, destination_ids), source_ids, destination_ids)


def _runs(
    starts: npt.NDArray[np.int64], source_ids: Int32Array, destination_ids: Int32Array
) -> Sequence[tuple[int, int, int]]:
    first_sources, first_destinations = (
        source_ids[starts].tolist(),
        destination_ids[starts].tolist(),
    )
    counts = [end - start for start, end in _bounds(starts, len(source_ids))]
    return list(zip(first_sources, first_destinations, counts, strict=True))


class CpuCopyEngine:
    """Copies in the calling thread, which lets others run meanwhile. Keeps nothing."""

    def __init__(self, min_mean_run_bytes: int = MIN_MEAN_RUN_BYTES) -> None:
        """Index rows where runs are shorter than this on average; otherwise a slice for each."""
        self._min_mean_run_bytes = min_mean_run_bytes

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
        if len(source_ids) == 1:
            destination_rows[destination_ids[0]] = source_rows[source_ids[0]]
            return DoneCopy()
        is_overlapping = np.shares_memory(source_rows, destination_rows) and bool(
            np.isin(source_ids, destination_ids).any()
        )
        if is_overlapping:
            destination_rows[destination_ids] = source_rows[source_ids]
            return DoneCopy()
        starts = run_starts(source_ids, destination_ids)
        mean_bytes = len(source_ids) * row_bytes / len(starts)
        ends = (source_rows, source_ids, destination_rows, destination_ids)
        if mean_bytes < MIN_SIDE_RUN_BYTES and _copy_by_side(*ends):
            return DoneCopy()
        if mean_bytes < self._min_mean_run_bytes:
            _gather_and_scatter(*ends)
            return DoneCopy()
        for source, destination, count in _runs(starts, source_ids, destination_ids):
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


def _items(rows: ByteRows) -> RowItems:
    """See rows as one item each: numpy moves whole rows then, instead of single bytes."""
    items: RowItems = rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]
    return items


def _copy_by_side(
    source_rows: ByteRows,
    source_ids: Int32Array,
    destination_rows: ByteRows,
    destination_ids: Int32Array,
) -> bool:
    """Copy rows where those of one side come in long runs; say whether they do. No source is a
    destination."""
    num_bytes, num_rows = len(source_ids) * source_rows.shape[1], len(source_ids)
    sources, destinations = _items(source_rows), _items(destination_rows)
    starts = run_starts(destination_ids, destination_ids)
    # take() would copy all of what is not solid, and of what may be the same memory.
    is_apart = not np.may_share_memory(sources, destinations)
    is_solid = sources.flags.c_contiguous and destinations.flags.c_contiguous
    if is_solid and is_apart and num_bytes >= len(starts) * MIN_SIDE_RUN_BYTES:
        for start, end in _bounds(starts, num_rows):
            first = int(destination_ids[start])
            run = destinations[first : first + end - start]
            # mode="raise" would write to a buffer first; ids were checked.
            sources.take(source_ids[start:end], out=run, mode="clip")
        return True
    starts = run_starts(source_ids, source_ids)
    if num_bytes >= len(starts) * MIN_SIDE_RUN_BYTES:
        for start, end in _bounds(starts, num_rows):
            first = int(source_ids[start])
            destinations[destination_ids[start:end]] = sources[first : first + end - start]
        return True
    return False


def _gather_and_scatter(
    source_rows: ByteRows,
    source_ids: Int32Array,
    destination_rows: ByteRows,
    destination_ids: Int32Array,
) -> None:
    """Copy rows by indexing them, some at a time. No source is a destination."""
    sources, destinations = _items(source_rows), _items(destination_rows)
    is_solid = bool(sources.flags.c_contiguous)  # otherwise take() would copy all of it
    step = max(1, GATHER_BYTES // source_rows.shape[1])
    for start in range(0, len(source_ids), step):
        ids = source_ids[start : start + step]
        gathered = sources.take(ids) if is_solid else sources[ids]
        destinations[destination_ids[start : start + step]] = gathered


def _bounds(starts: npt.NDArray[np.int64], end: int) -> list[tuple[int, int]]:
    """Return where each run begins and ends."""
    return list(pairwise((*starts.tolist(), end)))
