"""Arrays of integers as msgpack, written by numpy: block hashes and token ids.

Every integer is written with the code of its full width, so that all of them have one size; every
decoder reads them as the same numbers.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

from kvcache.base.arrays import Int32Array

_UINT32: Final = np.dtype([("code", "u1"), ("value", ">u4")])
_UINT64: Final = np.dtype([("code", "u1"), ("value", ">u8")])
_MAX_KEPT: Final = 1 << 20
"""Integers for which memory is kept between payloads."""

PackedArray = tuple[bytes, memoryview]
"""A msgpack array: its header, and its integers one behind the other."""


class IntegerWriter:
    """Writes arrays of integers into memory that is reused for each payload."""

    def __init__(self) -> None:
        self._tokens = _Room(_UINT32, 0xCE)
        self._hashes = _Room(_UINT64, 0xCF)
        self._header = msgpack.Packer().pack_array_header

    def reset(self) -> None:
        """Begin a payload: bytes returned before are no longer valid."""
        self._tokens.clear()
        self._hashes.clear()

    def tokens(self, values: Int32Array) -> PackedArray:
        """Return token ids, none negative, shape `(n,)`, as integers of 32 bits."""
        # From unsigned to unsigned, numpy only swaps bytes, which is twice as fast.
        return self._header(len(values)), self._tokens.put(values.view(np.uint32))

    def hashes(self, values: NDArray[np.uint64]) -> PackedArray:
        """Return hashes, shape `(n,)`, as integers of 64 bits."""
        return self._header(len(values)), self._hashes.put(values)


class _Room:
    """Memory for integers of one width. The code before each of them is written only once."""

    def __init__(self, dtype: np.dtype[Any], code: int) -> None:
        self._dtype = dtype
        self._code = code
        # Invariants: every `code` is written; bytes returned since `clear` end before `_used`.
        self._room: NDArray[Any] = np.empty(0, dtype)
        self._values = self._room["value"]
        self._used = 0

    def clear(self) -> None:
        """Reuse the memory from its start."""
        self._used = 0
        if len(self._room) > _MAX_KEPT:
            self._make(0)

    def put(self, values: NDArray[Any]) -> memoryview:
        """Write `values` and return their bytes, valid until the next `clear`."""
        start, end = self._used, self._used + len(values)
        if end > len(self._room):
            # Bytes returned before keep the smaller memory alive.
            self._make(max(len(values), min(2 * len(self._room), _MAX_KEPT)))
            start, end = 0, len(values)
        self._values[start:end] = values
        self._used = end
        return self._room[start:end].data

    def _make(self, length: int) -> None:
        self._room = np.empty(length, self._dtype)
        self._room["code"] = self._code
        self._values = self._room["value"]
        self._used = 0
