"""Array types that cross borders inside the package, and the one way to make them.

At the top of the import order, like `ids.py`. Everything that is a list of block ids, slots,
counts or tokens is a contiguous int32 array: one representation in memory and on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int32Array: TypeAlias = npt.NDArray[np.int32]
"""One-dimensional, C-contiguous, little-endian int32."""

IndexArray: TypeAlias = npt.NDArray[np.intp]
"""One-dimensional indices into other arrays, in the width numpy indexes with: never on the wire."""

Ids: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"
"""Ids in either form."""

EMPTY_INT32: Int32Array = np.empty(0, dtype=np.int32)
EMPTY_INT32.flags.writeable = False
EMPTY_INDEX: IndexArray = np.empty(0, dtype=np.intp)
EMPTY_INDEX.flags.writeable = False


def int32_array(values: Sequence[int] | Iterable[int] | npt.NDArray[np.integer]) -> Int32Array:
    """Return `values` as an `Int32Array`, without a copy where they are one already.

    Does not check the range: callers that take values from outside check before.
    """
    if isinstance(values, np.ndarray):
        return np.ascontiguousarray(values, dtype=np.int32)
    if isinstance(values, Sequence):
        return np.array(values, dtype=np.int32)
    return np.fromiter(values, dtype=np.int32)


def index_array(values: Sequence[int] | npt.NDArray[np.integer]) -> IndexArray:
    """Return `values` as an `IndexArray`, without a copy where they are one already."""
    return np.asarray(values, dtype=np.intp)


def are_below(values: Int32Array, end: int) -> bool:
    """Say whether all of `values` are in `[0, end)`: without its sign a negative one is large."""
    return not len(values) or int(np.maximum.reduce(values.view(np.uint32))) < end


def are_ids(values: Int32Array, end: int) -> bool:
    """Say whether all of `values` are in `[1, end)`, as blocks are."""
    return np.count_nonzero(values) == len(values) and are_below(values, end)


def are_distinct(values: Int32Array) -> bool:
    """Say whether no two of `values` are the same. Rising ones are told at little cost."""
    count = len(values)
    if np.count_nonzero(values[1:] > values[:-1]) >= count - 1:
        return True
    ordered = np.sort(values)
    return not np.count_nonzero(ordered[1:] == ordered[:-1])
