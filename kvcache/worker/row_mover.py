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
from functools import cached_property
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


class RowOrder:
    """Ids of one side's rows, `step` of them a piece; the same for all tensors of a block.

    `runs[piece]` is the slice of its rows, None where ids do not rise by 1.
    """

    def __init__(self, ids: Int32Array, step: int) -> None:
        """Look at the ids, of which there is at least one."""
        self.ids: Places = ids.astype(np.intp)
        self.step = step
        self.num_pieces = -(-len(ids) // step)
        firsts = self.ids[::step].tolist()
        is_broken = np.zeros(self.num_pieces, np.bool_)
        breaks = np.flatnonzero(self.ids[1:] - self.ids[:-1] != 1)
        if len(breaks):
            # Where a piece ends, ids may jump.
            is_broken[breaks[breaks % step != step - 1] // step] = True
        self.runs: list[slice | None] = [
            None if is_one_broken else slice(first, first + step)
            for first, is_one_broken in zip(firsts, is_broken.tolist(), strict=True)
        ]
        if self.runs[-1] is not None:
            self.runs[-1] = slice(firsts[-1], firsts[-1] + self.num_rows(self.num_pieces - 1))

    @property
    def is_in_runs(self) -> bool:
        """Whether the rows of most pieces follow one another."""
        return 4 * self.runs.count(None) <= self.num_pieces

    def num_rows(self, piece: int) -> int:
        """Return how many rows a piece has."""
        return min(self.step, len(self.ids) - piece * self.step)

    def places(self, piece: int) -> Places:
        """Return the ids of a piece; a view."""
        return self.ids[piece * self.step : (piece + 1) * self.step]


class RowBuffer:
    """Memory that stays in the cache, for one thread: what was gathered waits there."""

    def __init__(self) -> None:
        """Take nothing yet."""
        self._bytes = np.empty(0, np.uint8)

    def rows(self, num_rows: int, width: int) -> ByteRows:
        """Return `(num_rows, width)` of it, valid until the next call."""
        size = num_rows * width
        if len(self._bytes) < size:
            self._bytes = np.empty(size, np.uint8)
        return self._bytes[:size].reshape(num_rows, width)


class RowMover:
    """Copies row `i` of one side's order to row `i` of the other's. Any thread, each its pieces.

    Both sides are `(num_rows, width)` with contiguous rows, as wide as one another, and divided
    alike. Destinations are distinct, and no source is one.
    """

    def __init__(
        self,
        sources: ByteRows,
        source_order: RowOrder,
        destinations: ByteRows,
        destination_order: RowOrder,
        *,
        gathers_below_bytes: int = ROW_BYTES,
    ) -> None:
        """Copy nothing yet."""
        self._width = sources.shape[1]
        self._does_gather = self._width < gathers_below_bytes
        self._from = _Side(sources, source_order)
        self._to = _Side(destinations, destination_order)
        # take() would copy what may be the same memory.
        self._is_apart = not np.may_share_memory(sources, destinations)

    def move(self, piece: int, buffer: RowBuffer) -> Rows:
        """Copy a piece, and return its rows, in order, from where they can be read soonest: one
        of the sides, or `buffer`."""
        source, destination = self._from.order.runs[piece], self._to.order.runs[piece]
        if destination is not None and (self._is_apart or source is not None):
            rows = self._to.rows[destination]
            if source is not None:
                rows[:] = self._from.rows[source]
            else:
                self._from.gather(piece, rows)
            return rows
        read = self._read(piece, buffer)
        return self._write(piece, read)

    def move_parts(self, piece: int) -> Iterator[ByteRows]:
        """Copy the one row of a piece part after part, and yield each when it is copied."""
        (source,), (destination,) = self._from.each(piece), self._to.each(piece)
        for start in range(0, self._width, PIECE_BYTES):
            part = destination[start : start + PIECE_BYTES]
            part[:] = source[start : start + PIECE_BYTES]
            yield part

    def _read(self, piece: int, buffer: RowBuffer) -> Rows:
        """Return the rows of a piece, in order: where they are, or a copy of them."""
        if (run := self._from.order.runs[piece]) is not None:
            return self._from.rows[run]
        if not self._does_gather:
            return self._from.each(piece)
        gathered = buffer.rows(self._from.order.num_rows(piece), self._width)
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
        if (run := to.order.runs[piece]) is not None:
            to.rows[run] = rows
            return to.rows[run]
        to.scatter(piece, rows)
        return to.each(piece) if self._width >= REREAD_BYTES else rows


class _Side:
    """One side's rows, and which of them are each piece's."""

    def __init__(self, rows: ByteRows, order: RowOrder) -> None:
        self.rows = rows
        self.order = order

    def each(self, piece: int) -> Sequence[ByteRows]:
        """Return the rows of a piece; views."""
        places = self.order.places(piece)
        self._touch(places)
        return [self.rows[i] for i in places.tolist()]

    def gather(self, piece: int, out: ByteRows) -> None:
        """Copy the rows of a piece to `out`, which is no part of the same memory."""
        places, items = self.order.places(piece), out.view(self._items.dtype)[:, 0]
        self._touch(places)
        if self._is_solid and out.flags.c_contiguous:
            # mode="raise" would write to a buffer first; ids were checked.
            self._items.take(places, out=items, mode="clip")
        else:  # take() would copy all that is not solid
            items[:] = self._items[places]

    def scatter(self, piece: int, rows: ByteRows) -> None:
        """Copy `rows` to the rows of a piece."""
        places = self.order.places(piece)
        self._touch(places)
        self._items[places] = rows.view(self._items.dtype)[:, 0]

    # Made when they are asked for: pieces that are runs need none of them.

    @cached_property
    def _items(self) -> RowItems:
        """One item a row: numpy moves whole rows then, instead of single bytes."""
        items: RowItems = self.rows.view(np.dtype((np.void, self.rows.shape[1])))[:, 0]
        return items

    @cached_property
    def _is_solid(self) -> bool:
        return bool(self.rows.flags.c_contiguous)

    @cached_property
    def _words(self) -> npt.NDArray[np.uint64] | None:
        """All words, where the first of a row stands for it."""
        width = self.rows.shape[1]
        can_touch = self._is_solid and width % 8 == 0 and width <= TOUCHED_BYTES
        return self.rows.reshape(-1).view(np.uint64) if can_touch else None

    def _touch(self, places: Places) -> None:
        if self._words is not None:
            self._words.take(places * (self.rows.shape[1] // 8), mode="clip")
