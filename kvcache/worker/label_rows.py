"""How a host slot's label lies in shared memory: a row of fixed width, and cells for the rest.

Below host_labels.py, which says when rows change. A row holds everything of a label that has a
bound; namespace and extra keys have none: their first bytes are in the row, the rest in a chain of
cells that all rows share. A row carries a checksum over itself and its chain, so that a process
that died while it wrote one leaves a row that is recognised. Refuses to cut anything short: a label
that finds no cells is not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

INLINE_BYTES = 48
"""Bytes of namespace and extra keys together that need no cell: those of most requests."""

MAX_NAMES_BYTES = 1 << 16
"""Longest namespace and extra keys of one label, together."""

CELL_BYTES = 256
_CELL = np.dtype([("next", "<i4"), ("data", "u1", (CELL_BYTES - 4,))])
_CELL_DATA_BYTES = CELL_BYTES - 4

NO_CELL = -1

Rows = npt.NDArray[np.void]
"""A structured array: `row_type`'s fields for each slot."""


class SlotState(IntEnum):
    """What is known of a host slot's bytes."""

    EMPTY = 0
    WRITING = 1
    WRITTEN = 2
    SEALED = 3


def row_type(digest_bytes: int, max_block_tokens: int) -> np.dtype[Any]:
    """Return the layout of a row. `group` is -1 where the bytes have no label."""
    return np.dtype(
        [
            ("state", "u1"),
            ("pad", "u1", (3,)),
            ("row_crc", "<u4"),
            ("generation", "<u4"),
            ("group", "<i4"),
            ("token_count", "<i4"),
            ("namespace_bytes", "<i4"),
            ("extra_bytes", "<i4"),
            ("first_cell", "<i4"),
            ("checksum", "<i8"),
            ("digest", "u1", (digest_bytes,)),
            ("parent", "u1", (digest_bytes,)),
            ("tokens", "<i4", (max_block_tokens,)),
            ("inline", "u1", (INLINE_BYTES,)),
        ]
    )


def row_checksum(row: bytes, chain: bytes) -> int:
    """Return the CRC-32C of a row and what its cells hold; the state and the CRC are left out."""
    crc: int = google_crc32c.value(row[8:] + chain)
    return crc


class CellChains:
    """Cells that rows share: a free list in this process, links in the memory.

    Invariant: a cell is on the free list or in exactly one row's chain.
    """

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        """Use `memory`, a whole number of cells, of which none is taken yet."""
        self._cells: npt.NDArray[np.void] = memory.view(_CELL)
        self._is_free = np.ones(len(self._cells), dtype=np.bool_)
        self._free = list(range(len(self._cells) - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Cells that no row uses."""
        return len(self._free)

    @property
    def num_cells(self) -> int:
        """Cells there are."""
        return len(self._cells)

    @staticmethod
    def cells_for(num_bytes: int) -> int:
        """Return how many cells a label of so many variable bytes takes."""
        return -(-max(0, num_bytes - INLINE_BYTES) // _CELL_DATA_BYTES)

    def write(self, data: bytes) -> list[int]:
        """Write what does not fit into the row; return the chain of cells, the first one first.

        The caller has looked that there are cells enough.
        """
        rest = data[INLINE_BYTES:]
        chain = [self._free.pop() for _ in range(self.cells_for(len(data)))]
        self._is_free[chain] = False
        for place, cell in enumerate(chain):
            piece = rest[place * _CELL_DATA_BYTES : (place + 1) * _CELL_DATA_BYTES]
            self._cells["data"][cell, : len(piece)] = np.frombuffer(piece, np.uint8)
            self._cells["next"][cell] = NO_CELL if cell == chain[-1] else chain[place + 1]
        return chain

    def read(self, chain: Sequence[int], num_bytes: int) -> bytes:
        """Return what `write` put there, of a label of `num_bytes` variable bytes."""
        pieces = [self._cells["data"][cell].tobytes() for cell in chain]
        return b"".join(pieces)[: max(0, num_bytes - INLINE_BYTES)]

    def follow(self, first: int, num_bytes: int) -> list[int] | None:
        """Return the chain that begins at `first`, found in memory; None if it cannot be one."""
        if not 0 <= num_bytes <= MAX_NAMES_BYTES:
            return None
        chain: list[int] = []
        cell = first
        for _ in range(self.cells_for(num_bytes)):
            if not 0 <= cell < len(self._cells) or not self._is_free[cell] or cell in chain:
                return None
            chain.append(cell)
            cell = int(self._cells["next"][cell])
        return chain if cell == NO_CELL else None

    def take(self, chain: Sequence[int]) -> None:
        """Take cells that `follow` found; afterwards, once for all of them, `list_free`."""
        self._is_free[list(chain)] = False

    def list_free(self) -> None:
        """Rebuild the free list."""
        self._free = np.flatnonzero(self._is_free)[::-1].tolist()

    def release(self, chain: Sequence[int]) -> None:
        """Give cells back."""
        self._is_free[list(chain)] = True
        self._free.extend(chain)
