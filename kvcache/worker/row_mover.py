"""Rows of bytes copied between memories that the CPU reaches, a piece at a time.

Below the engine, which copies all pieces, and block_move.py, which hashes each while the cache
still has it. How a piece is copied depends on where its rows lie:

    both sides in a run             one slice
    one side in a run               numpy indexes the other
    neither, short rows             gathered into a buffer that fits the cache, scattered from it
    neither, longer rows            a slice for each

Refuses rows that are source and destination at once; ids are checked by the callers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.arrays import Int32Array

ByteRows = npt.NDArray[np.uint8]
RowItems = npt.NDArray[np.void]
Places = npt.NDArray[np.intp]

Rows: TypeAlias = ByteRows | Sequence[ByteRows]
"""Rows of one array, or views of rows that lie apart."""

PIECE_BYTES = 1 << 19
"""Copied at once, so that what was copied is hashed while the cache has it. Copied and hashed,
against a plain copy: .72 with 64 KiB at once, .79 with 128, .83 with 256, .86 with 512, .79 with
1 MiB."""

GATHERED_BYTES = 1 << 18
"""The same where rows go by a buffer: what was gathered is scattered from the cache. A gather alone
reaches .77 with 256 KiB at once, .59 with 512 KiB."""

ROW_BYTES = 1 << 13
"""Rows of this length or more are read where they are, shorter ones gathered first: one numpy call
for each costs more than copying them twice. Both sides apart: .35 and .40 with rows of 4 KiB, .41
and .39 with 8, .55 and .44 with 16."""

REREAD_BYTES = 1 << 15
"""Rows of this length or more are looked at where they were written, though it takes a view of
each: the cache has that side. Loaded and compared: .61 and .62 of a copy with 64 KiB, .69 and .73
with 256; .51 and .48 with 16."""

TOUCHED_BYTES = 1 << 14
"""Of rows up to this length a word each is read before a piece is copied. The processor fetches
these words, and looks up their pages, at the same time; row after row it would wait for each.
With 4 KiB on both sides this saves a quarter, with 16 KiB a twentieth."""


def rows_per_piece(row_bytes: int, source_ids: Int32Array, destination_ids: Int32Array) -> int:
    """Return how many rows of so many bytes, over all tensors, are copied at once.

    No more than there are: what is prepared for every row of a piece would be for nobody.
    """
    is_gathered = row_bytes < ROW_BYTES and not (_is_run(source_ids) or _is_run(destination_ids))
    num_rows = (GATHERED_BYTES if is_gathered else PIECE_BYTES) // max(1, row_bytes)
    return max(1, min(num_rows, len(source_ids)))


def _is_run(ids: Int32Array) -> bool:
    return bool((ids[1:] - ids[:-1] == 1).all())


class RowMover:
    """Copies `sources[source_ids[i]]` to `destinations[destination_ids[i]]`, for all `i`.

    Both are `(num_rows, width)` with contiguous rows, as wide as one another. Destinations are
    distinct, and no source is one. `step` consecutive `i` are a piece.
    """

    def __init__(
        self,
        sources: ByteRows,
        source_ids: Int32Array,
        destinations: ByteRows,
        destination_ids: Int32Array,
        *,
        step: int,
        gathers_below_bytes: int = ROW_BYTES,
    ) -> None:
        """Look at the ids, of which there is at least one; copy nothing yet."""
        self._width = sources.shape[1]
        self._does_gather = self._width < gathers_below_bytes
        self._buffer: ByteRows | None = None
        self._step = step
        self._from = _Side(sources, source_ids, step)
        self._to = _Side(destinations, destination_ids, step)
        self.num_pieces = -(-len(source_ids) // step)
        # take() would copy what may be the same memory.
        self._is_apart = not np.may_share_memory(sources, destinations)

    def move(self, piece: int) -> Rows:
        """Copy a piece, and return its rows, in order, from where they can be read soonest: one
        of the sides, or a buffer that is valid until another piece is moved."""
        source, destination = self._from.runs[piece], self._to.runs[piece]
        if destination is not None and (self._is_apart or source is not None):
            rows = self._to.rows[destination]
            if source is not None:
                rows[:] = self._from.rows[source]
            else:
                self._from.gather(piece, rows)
            return rows
        read = self._read(piece)
        return self._write(piece, read)

    def move_parts(self, piece: int) -> Iterator[ByteRows]:
        """Copy the one row of a piece part after part, and yield each when it is copied."""
        (source,), (destination,) = self._from.each(piece), self._to.each(piece)
        for start in range(0, self._width, PIECE_BYTES):
            part = destination[start : start + PIECE_BYTES]
            part[:] = source[start : start + PIECE_BYTES]
            yield part

    def _read(self, piece: int) -> Rows:
        """Return the rows of a piece, in order: where they are, or a copy of them."""
        if (run := self._from.runs[piece]) is not None:
            return self._from.rows[run]
        if not self._does_gather:
            return self._from.each(piece)
        if self._buffer is None:
            self._buffer = np.empty((self._step, self._width), np.uint8)
        gathered = self._buffer[: self._from.num_rows(piece)]
        self._from.gather(piece, gathered)
        return gathered

    def _write(self, piece: int, rows: Rows) -> Rows:
        """Copy to the destinations of a piece what `_read` returned for it; see `move`."""
        to = self._to
        if not isinstance(rows, np.ndarray):
            destinations = to.each(piece)
            for destination, row in zip(destinations, rows, strict=True):
                destination[:] = row
            return destinations
        if (run := to.runs[piece]) is not None:
            to.rows[run] = rows
            return to.rows[run]
        to.scatter(piece, rows)
        return to.each(piece) if self._width >= REREAD_BYTES else rows


class _Side:
    """One side's rows, and which of them are each piece's. `runs[piece]`: None where ids do not
    rise by 1."""

    def __init__(self, rows: ByteRows, ids: Int32Array, step: int) -> None:
        self.rows = rows
        self._ids: Places = ids.astype(np.intp)
        self._step = step
        starts = np.arange(0, len(ids), step)
        ends = np.minimum(starts + step, len(ids))
        num_breaks = np.zeros(len(ids), np.intp)
        np.cumsum(self._ids[1:] - self._ids[:-1] != 1, out=num_breaks[1:])
        is_run = (num_breaks[ends - 1] == num_breaks[starts]).tolist()
        firsts, sizes = self._ids[starts].tolist(), (ends - starts).tolist()
        self.runs: list[slice | None] = [
            slice(first, first + size) if is_one else None
            for first, size, is_one in zip(firsts, sizes, is_run, strict=True)
        ]
        # One item a row: numpy moves whole rows then, instead of single bytes.
        self._items: RowItems = rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]
        self._is_solid = bool(rows.flags.c_contiguous)
        width = rows.shape[1]
        can_touch = self._is_solid and width % 8 == 0 and width <= TOUCHED_BYTES
        self._words = rows.reshape(-1).view(np.uint64) if can_touch else None
        self._words_per_row = width // 8

    def num_rows(self, piece: int) -> int:
        return min(self._step, len(self._ids) - piece * self._step)

    def each(self, piece: int) -> Sequence[ByteRows]:
        """Return the rows of a piece; views."""
        places = self._places(piece)
        self._touch(places)
        return [self.rows[i] for i in places.tolist()]

    def gather(self, piece: int, out: ByteRows) -> None:
        """Copy the rows of a piece to `out`, which is no part of the same memory."""
        places, items = self._places(piece), out.view(self._items.dtype)[:, 0]
        self._touch(places)
        if self._is_solid and out.flags.c_contiguous:
            # mode="raise" would write to a buffer first; ids were checked.
            self._items.take(places, out=items, mode="clip")
        else:  # take() would copy all that is not solid
            items[:] = self._items[places]

    def scatter(self, piece: int, rows: ByteRows) -> None:
        """Copy `rows` to the rows of a piece."""
        places = self._places(piece)
        self._touch(places)
        self._items[places] = rows.view(self._items.dtype)[:, 0]

    def _places(self, piece: int) -> Places:
        return self._ids[piece * self._step : (piece + 1) * self._step]

    def _touch(self, places: Places) -> None:
        if self._words is not None:
            self._words.take(places * self._words_per_row, mode="clip")
