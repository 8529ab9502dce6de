"""The newest units of leaves that running rows grow: one array for all rows, no object touched.

Between rows, which fill a unit every few steps, and runs, whose arrays somebody may never read. A
unit waits here with all that is known of it, until its row has no more room, or until somebody
looks at the run. Refuses to know who holds a run.

    row      0  [ unit 40 | unit 41 |         |         ]   counts 2
             1  [         |         |         |         ]   closed: the row grows no leaf of its own
             2  [ unit 12 | unit 13 | unit 14 | unit 15 ]   counts 4: full, packed with the next one

    unit     [ digest before it | tokens | ids of ordered groups | handles of others ]

A unit's digest is in the unit behind it; that of a row's last unit is kept beside.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcache.arrays import IndexArray, Int32Array, index_array
from kvcache.extents.row_columns import append_units
from kvcache.extents.run import HandleArray, Piece
from kvcache.extents.shape import TreeShape

_WORD_BYTES = 4
_MOST_UNITS = 16
_MOST_ROW_BYTES = 2048
_CLOSED = 1 << 30
"""Count of a row that grows no leaf: no unit finds room."""


class LeafTails:
    """The tails of all rows of one core."""

    def __init__(self, shape: TreeShape) -> None:
        """Let no row have one."""
        self.tokens_at = shape.digest_bytes // _WORD_BYTES
        self.ids_at = self.tokens_at + shape.unit_tokens
        self.handles_at = self.ids_at + len(shape.ordered)
        self.width = self.handles_at + 2 * len(shape.others)
        self._unit_tokens = shape.unit_tokens
        self.max_units = max(1, min(_MOST_UNITS, _MOST_ROW_BYTES // (_WORD_BYTES * self.width)))
        self.counts: IndexArray = index_array(())
        self.units: npt.NDArray[np.int32] = np.zeros((0, self.max_units, self.width), np.int32)
        self.last: npt.NDArray[np.int32] = np.zeros((0, self.tokens_at), np.int32)
        # What is hashed of a unit, as one item, and the rest.
        hashed, rest = self.ids_at * _WORD_BYTES, (self.width - self.ids_at) * _WORD_BYTES
        self._unit_type = np.dtype([("hashed", f"V{hashed}"), ("rest", f"V{rest}")])

    def open(self, row: int, last: bytes) -> LeafTail:
        """Let a row's leaf, whose last unit has this digest, grow from now on."""
        self.counts[row] = 0
        self.last[row] = np.frombuffer(last, np.int32)
        return LeafTail(self, row)

    def clear(self) -> None:
        """Let no row have a tail. Nobody looks at their runs any more."""
        self.counts[:] = _CLOSED

    def hashed(self, units: npt.NDArray[np.int32]) -> list[bytes]:
        """Return, of units as they are laid out here, digest and tokens."""
        pieces: list[bytes] = units.view(self._unit_type)["hashed"].ravel().tolist()
        return pieces

    def append(
        self,
        rows: IndexArray,
        units: npt.NDArray[np.int32],
        digests: bytes,
        figures: npt.NDArray[np.int64],
    ) -> None:
        """Put a unit behind those of each row, which has room; `digests` are theirs.

        `figures` of the rows say afterwards that it is published, see row_columns.py.
        """
        packed = np.frombuffer(digests, np.int32).reshape(len(rows), -1)
        append_units(
            self.units, self.counts, self.last, figures, rows, units, packed, self._unit_tokens
        )

    def close(self, row: int) -> None:
        """Let a row's leaf grow no more."""
        self.counts[row] = _CLOSED

    def reach(self, num_rows: int) -> None:
        """Have room for at least so many rows."""
        before = len(self.counts)
        if num_rows <= before:
            return
        counts: IndexArray = np.full(num_rows, _CLOSED, dtype=np.intp)
        counts[:before] = self.counts
        units = np.zeros((num_rows, self.max_units, self.width), dtype=np.int32)
        units[:before] = self.units
        last = np.zeros((num_rows, self.tokens_at), dtype=np.int32)
        last[:before] = self.last
        self.counts, self.units, self.last = counts, units, last


class LeafTail:
    """The units by which one run has grown: those of its row's tail, and full tails before."""

    __slots__ = ("_packed", "_row", "_tails")

    def __init__(self, tails: LeafTails, row: int) -> None:
        """Stand for the tail of a row."""
        self._tails = tails
        self._row = row
        self._packed = bytearray()

    @property
    def num_units(self) -> int:
        """How many units there are."""
        count = len(self._packed) // (self._tails.width * _WORD_BYTES)
        return count + self._tails.counts.item(self._row)

    @property
    def last(self) -> bytes:
        """The digest of the last unit; before the first one that of the unit before it."""
        last: bytes = self._tails.last[self._row].tobytes()
        return last

    def pack(self) -> None:
        """Make room in the row's tail."""
        tails = self._tails
        self._packed += tails.units[self._row, : tails.counts.item(self._row)].tobytes()
        tails.counts[self._row] = 0

    def end(self) -> Piece:
        """Close the row's tail, and return all units as arrays of their own. It ends once."""
        tails = self._tails
        units: Int32Array = tails.units[self._row, : tails.counts.item(self._row)]
        if self._packed:
            packed = np.frombuffer(self._packed, np.int32).reshape(-1, tails.width)
            units = np.concatenate((packed, units))
        digests = units[1:, : tails.tokens_at].tobytes()
        if len(units):
            digests += self.last
        handles: HandleArray = np.empty((0, len(units)), dtype=np.int64)
        if tails.width > tails.handles_at:
            handles = units[:, tails.handles_at :].copy().view(np.int64).T
        tokens = units[:, tails.tokens_at : tails.ids_at].tobytes()
        ids = units[:, tails.ids_at : tails.handles_at].T.copy()
        tails.close(self._row)
        return Piece(tokens, ids, handles, digests)
