"""The checksum of a block's bytes: one for host slots, files and reports of jobs.

Taken when a block leaves the device, compared before it comes back. xxh3 with 64 bits: it finds
what disks and memory do to bytes, and is no protection against an adversary.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

CHECKSUM_MASK = (1 << 63) - 1
"""Checksums are kept and sent as non-negative int64."""


def checksum_of(pieces: Iterable[memoryview]) -> int:
    """Return the checksum of a block's bytes, piece after piece."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return int(state.intdigest()) & CHECKSUM_MASK


def combined_checksum(checksums: npt.NDArray[np.int64]) -> int:
    """Return one checksum of those of many blocks, in order."""
    packed = checksums.astype("<i8").tobytes()
    return int(xxhash.xxh3_64_intdigest(packed)) & CHECKSUM_MASK
