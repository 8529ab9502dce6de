"""The checksum of a block's bytes: one for host slots, files and reports of jobs.

Taken when a block leaves the device, compared before it comes back. xxh3 with 64 bits: it finds
what disks and memory do to bytes, and is no protection against an adversary. `ChecksumRule` says
which blocks are compared; refuses to say what follows from a difference.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import xxhash

from kvcache.arrays import Int32Array
from kvcache.errors import ConfigurationError
from kvcache.worker.row_mover import Rows

CHECKSUM_MASK = (1 << 63) - 1
"""Checksums are kept and sent as non-negative int64."""

SAMPLE_INTERVAL = 16
"""Blocks of which one is compared when only a sample is."""

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

VerifyMode: TypeAlias = Literal["always", "sample", "never"]


class ChecksumRule:
    """Which checksums are taken, and which are compared. Any thread may ask."""

    def __init__(self, mode: VerifyMode = "always") -> None:
        """Compare all blocks, one of `SAMPLE_INTERVAL`, or none, and then take none either.

        Raises ConfigurationError for another word.
        """
        if mode not in get_args(VerifyMode):
            raise ConfigurationError(
                f"verify is {mode!r}: choose one of {', '.join(get_args(VerifyMode))}"
            )
        self.mode = mode
        self._interval = {"always": 1, "sample": SAMPLE_INTERVAL, "never": 0}[mode]
        self._num_asked = 0
        self._counting = threading.Lock()

    @property
    def takes(self) -> bool:
        """Whether a checksum is taken of what is stored."""
        return self._interval > 0

    def chosen(self, num_blocks: int) -> BoolArray:
        """Say of each of the next `num_blocks` blocks whether it is to be compared.

        Depends on nothing but how many were asked for before.
        """
        if not self._interval:
            return np.zeros(num_blocks, dtype=np.bool_)
        with self._counting:
            start, self._num_asked = self._num_asked, self._num_asked + num_blocks
        is_chosen: BoolArray = np.arange(start, start + num_blocks) % self._interval == 0
        return is_chosen


def checksum_of(pieces: Iterable[memoryview]) -> int:
    """Return the checksum of a block's bytes, piece after piece."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return int(state.intdigest()) & CHECKSUM_MASK


class PieceHasher:
    """Hashes pieces of blocks, a tensor's rows after another's.

    Slices are made once, for all pieces: for short rows they cost as much as the hash.
    """

    def __init__(self, widths: Sequence[int], num_rows: int) -> None:
        """Expect a part of each of these widths, of at most so many rows."""
        cuts = {w: [slice(i * w, (i + 1) * w) for i in range(num_rows)] for w in set(widths)}
        self._slices = [cuts[width] for width in widths]

    def digests(self, parts: Iterable[Rows]) -> Sequence[int]:
        """Return 64 bits for each block, whose bytes are row `i` of every part, in order. A part is
        hashed before the next one is asked for."""
        states: list[xxhash.xxh3_64] = []
        for rows, cuts in zip(parts, self._slices, strict=True):
            views = _views(rows, cuts)
            if len(self._slices) == 1:
                return list(map(xxhash.xxh3_64_intdigest, views))
            states = states or [xxhash.xxh3_64() for _ in rows]
            for state, view in zip(states, views, strict=True):
                state.update(view)
        return [state.intdigest() for state in states]


def as_checksums(digests: Sequence[int]) -> Int64Array:
    """Return digests of 64 bits as checksums."""
    masked: Int64Array = np.array(digests, dtype=np.uint64).view(np.int64) & CHECKSUM_MASK
    return masked


def _views(rows: Rows, cuts: Sequence[slice]) -> Iterable[memoryview]:
    """Return the bytes of each row."""
    if not isinstance(rows, np.ndarray) or not rows.flags.c_contiguous:
        return [row.data for row in rows]
    return map(rows.reshape(-1).data.__getitem__, cuts[: len(rows)])


def checksums_of_rows(tensors: Sequence[npt.NDArray[np.uint8]], rows: Int32Array) -> Int64Array:
    """Return the checksum of each row, over all `(num_rows, width)` tensors, in order.

    Only contiguous tensors. Nothing is copied.
    """
    views = [(t.reshape(-1).data, t.shape[1]) for t in tensors if t.shape[1]]
    if len(views) == 1:
        view, width = views[0]
        digest = xxhash.xxh3_64_intdigest
        starts = (rows.astype(np.int64) * width).tolist()
        values = [digest(view[start : start + width]) & CHECKSUM_MASK for start in starts]
    else:
        values = [
            checksum_of(view[row * width : (row + 1) * width] for view, width in views)
            for row in rows.tolist()
        ]
    return np.array(values, dtype=np.int64)


def combined_checksum(checksums: Int64Array) -> int:
    """Return one checksum of those of many blocks, in order."""
    packed = checksums.astype("<i8").tobytes()
    return int(xxhash.xxh3_64_intdigest(packed)) & CHECKSUM_MASK
