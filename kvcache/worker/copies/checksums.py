"""The checksum of a block's bytes: the same for host slots, files and reports of jobs.

It is taken when a block leaves the device, and compared before the block comes back. xxh3 with 64
bits finds damage by disks and memory; it does not protect against an adversary. `ChecksumRule` says
which blocks are compared.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import xxhash

from kvcache.base.arrays import BoolArray, Int32Array, Int64Array, UInt64Array
from kvcache.base.errors import ConfigurationError
from kvcache.worker.copies.rows import can_hash, hashes_of_rows

CHECKSUM_MASK = (1 << 63) - 1
"""Checksums are stored and sent as non-negative int64."""

SAMPLE_INTERVAL = 16
"""In mode `sample`, one block in this many is compared."""


VerifyMode: TypeAlias = Literal["always", "sample", "never"]


class ChecksumRule:
    """Which checksums are computed, and which are compared. Thread-safe."""

    def __init__(self, mode: VerifyMode = "always") -> None:
        """Compare all blocks, one of `SAMPLE_INTERVAL`, or none; then none are computed either.

        Raises ConfigurationError for an unknown mode.
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
        """Whether stores take checksums."""
        return self._interval > 0

    def chosen(self, num_blocks: int) -> BoolArray:
        """Say of each of the next `num_blocks` blocks whether to compare it.

        Depends only on the number of blocks before.
        """
        if not self._interval:
            return np.zeros(num_blocks, dtype=np.bool_)
        with self._counting:
            start, self._num_asked = self._num_asked, self._num_asked + num_blocks
        is_chosen: BoolArray = np.arange(start, start + num_blocks) % self._interval == 0
        return is_chosen


def checksum_of(pieces: Iterable[memoryview]) -> int:
    """Return the checksum of a block's bytes, given in pieces."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return int(state.intdigest()) & CHECKSUM_MASK


def as_checksums(hashes: UInt64Array) -> Int64Array:
    """Return 64-bit hashes as checksums."""
    masked: Int64Array = hashes.view(np.int64) & CHECKSUM_MASK
    return masked


def checksums_of_rows(tensors: Sequence[npt.NDArray[np.uint8]], rows: Int32Array) -> Int64Array:
    """Return the checksum of each row, over all `(num_rows, width)` tensors, in order.

    Copies nothing. Raises IndexError for a missing row.
    """
    parts = [tensor for tensor in tensors if tensor.shape[1]]
    if can_hash([part.shape[1] for part in parts]):
        return as_checksums(hashes_of_rows(parts, rows))
    values = [checksum_of(part[row].data for part in parts) for row in rows.tolist()]
    return np.array(values, dtype=np.int64)


def combined_checksum(checksums: Int64Array) -> int:
    """Return one checksum of many, in order."""
    packed = checksums.astype("<i8").tobytes()
    return int(xxhash.xxh3_64_intdigest(packed)) & CHECKSUM_MASK
