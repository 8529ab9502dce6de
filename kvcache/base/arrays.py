"""The array types that modules exchange, and the functions that make them.

Every list of block ids, slots, counts or tokens is a contiguous int32 array: the same
representation in memory and on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int32Array: TypeAlias = npt.NDArray[np.int32]
"""One-dimensional, C-contiguous, little-endian int32."""

IndexArray: TypeAlias = npt.NDArray[np.intp]
"""One-dimensional indices into other arrays, of numpy's index type. Never sent."""

BoolArray: TypeAlias = npt.NDArray[np.bool_]
Int64Array: TypeAlias = npt.NDArray[np.int64]
UInt64Array: TypeAlias = npt.NDArray[np.uint64]
ByteArray: TypeAlias = npt.NDArray[np.uint8]

Ids: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"
"""Ids as a sequence or an array."""

EMPTY_INT32: Int32Array = np.empty(0, dtype=np.int32)
EMPTY_INT32.flags.writeable = False
EMPTY_INDEX: IndexArray = np.empty(0, dtype=np.intp)
EMPTY_INDEX.flags.writeable = False


def int32_array(values: Sequence[int] | Iterable[int] | npt.NDArray[np.integer]) -> Int32Array:
    """Return `values` as an `Int32Array`, without a copy if they already are one.

    Does not check the range: callers must check values from outside first.
    """
    if isinstance(values, np.ndarray):
        return np.ascontiguousarray(values, dtype=np.int32)
    if isinstance(values, Sequence):
        return np.array(values, dtype=np.int32)
    return np.fromiter(values, dtype=np.int32)


def index_array(values: Sequence[int] | npt.NDArray[np.integer]) -> IndexArray:
    """Return `values` as an `IndexArray`, without a copy if they already are one."""
    return np.asarray(values, dtype=np.intp)


def are_below(values: Int32Array, end: int) -> bool:
    """Return whether all of `values` are in `[0, end)`. Unsigned, a negative value is large."""
    return not len(values) or int(np.maximum.reduce(values.view(np.uint32))) < end


def are_ids(values: Int32Array, end: int) -> bool:
    """Return whether all of `values` are in `[1, end)`, the range of block ids."""
    return np.count_nonzero(values) == len(values) and are_below(values, end)


def are_distinct(values: Int32Array) -> bool:
    """Return whether all of `values` are different. Fast for ascending values."""
    count = len(values)
    if np.count_nonzero(values[1:] > values[:-1]) >= count - 1:
        return True
    ordered = np.sort(values)
    return not np.count_nonzero(ordered[1:] == ordered[:-1])


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the splitmix64 output function of each value: a permutation of 64-bit numbers."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
