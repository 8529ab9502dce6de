"""Token ids, checked once on entry.

Tokens from a caller become an int32 array here, or an error that names the first value that is not
a token id.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.base.errors import RequestError, shown

MAX_TOKEN_ID = 2**31 - 1
"""Largest token id: tokens are stored and hashed as int32."""

_FEW_IDS = 512

TokenIds: TypeAlias = "Sequence[int] | array[int] | NDArray[np.integer]"


def as_token_ids(ids: TokenIds, what: str) -> NDArray[np.int32]:
    """Check token ids and return them as a contiguous one-dimensional int32 array.

    Args:
        ids: list, tuple, range, `array.array` or one-dimensional numpy array of integers.
        what: the noun for messages, as in `request r7: prompt token id`.

    Returns:
        `ids` itself if it is such an array already, else a new array.

    Raises:
        RequestError: not such a sequence, or a value that is not an integer from 0 to
            `MAX_TOKEN_ID` (booleans are not integers here); names the first one and its index.
    """
    if isinstance(ids, array):
        ids = np.asarray(ids)
    if isinstance(ids, np.ndarray):
        if ids.dtype.kind != "O" or ids.ndim != 1:
            return _from_ndarray(ids, what)
        ids = ids.tolist()
    if isinstance(ids, (str, bytes, bytearray, memoryview)) or not isinstance(ids, Sequence):
        raise RequestError(
            f"{what}s cannot be read from {type(ids).__name__}: pass a list, an array or a "
            "one-dimensional numpy array of integers"
        )
    return _from_sequence(ids, what)


def are_token_ids(values: Sequence[object]) -> bool:
    """Return whether every value is a token id; faster than `as_token_ids` for a few values."""
    return all(
        isinstance(value, (int, np.integer))
        and not isinstance(value, bool)
        and 0 <= value <= MAX_TOKEN_ID
        for value in values
    )


def _from_ndarray(ids: NDArray[np.generic], what: str) -> NDArray[np.int32]:
    if ids.ndim != 1:
        raise RequestError(f"{what}s of shape {ids.shape}: pass a one-dimensional array")
    if ids.size == 0:
        return np.empty(0, np.int32)
    if ids.dtype.kind not in "iu":  # numpy takes a timedelta for an integer
        raise _not_a_token_id(what, 0, ids[0].item())
    if ids.dtype != np.int32 or _has_negative(ids):
        wide = ids.astype(np.int64)  # unsigned ids above 2**63 become negative
        bad = np.flatnonzero((wide < 0) | (wide > MAX_TOKEN_ID))
        if bad.size:
            raise _not_a_token_id(what, int(bad[0]), ids[bad[0]].item())
    return np.ascontiguousarray(ids, dtype=np.int32)


def _has_negative(ids: NDArray[np.generic]) -> bool:
    """Return whether an int32 id is negative; for few ids, by the bytes with the sign."""
    if ids.size <= _FEW_IDS:
        return not ids.tobytes()[3::4].isascii()
    return int(np.minimum.reduce(ids)) < 0


def _from_sequence(ids: Sequence[int], what: str) -> NDArray[np.int32]:
    # The unsigned array refuses negative ids, fractions and text, in a third of numpy's time. It
    # accepts booleans as 0 and 1, and ids above MAX_TOKEN_ID, which become negative.
    try:
        tokens = np.frombuffer(array("I", ids), dtype=np.int32)
    except (TypeError, ValueError, OverflowError):
        tokens = None
    if tokens is not None:
        suspects = np.flatnonzero(tokens <= 1).tolist()
        if all(type(ids[place]) is not bool and tokens[place] >= 0 for place in suspects):
            return tokens
    for place, value in enumerate(ids):
        if not are_token_ids([value]):
            raise _not_a_token_id(what, place, value)
    return np.array(ids, dtype=np.int32)


def _not_a_token_id(what: str, place: int, value: object) -> RequestError:
    plain = value.item() if isinstance(value, np.generic) else value
    return RequestError(
        f"{what} at index {place} is {shown(plain)}: "
        f"token ids are integers from 0 to {MAX_TOKEN_ID}"
    )
