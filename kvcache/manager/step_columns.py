"""The columns of a step's running rows: what they say by themselves, whatever their rows are.

Under row_plan.py, for which they are checked. Refuses columns that do not fit each other; knows no
slot table.
"""

from __future__ import annotations

import numpy as np
from numba import types

from kvcache.arrays import Int32Array
from kvcache.compiled import array_type, compiled
from kvcache.errors import RequestError
from kvcache.step import RunningRequests

_INT32 = np.dtype(np.int32)
_ARRAYS = frozenset({np.ndarray})
_READ = array_type("int32", is_read=True)

IS_DECODE, ARE_SAME_SLOTS = 1, 2
"""What `look_at` says."""


def look_at(running: RunningRequests, last_slots: Int32Array) -> int:
    """Say of the columns of a step `IS_DECODE`, if each row appends a token id and computes one
    and nothing else, and `ARE_SAME_SLOTS`, if its slots are these; 0 if neither.

    So it is in most steps: one look at all columns is enough. Arrays of other types or shapes are
    neither.
    """
    try:
        return _look_at_columns(
            running.slots,
            running.num_new_tokens,
            running.num_draft_tokens,
            running.num_rejected_tokens,
            running.token_offsets,
            running.token_ids,
            running.draft_token_ids,
            last_slots,
        )
    except TypeError:
        return 0


@compiled(types.intp(_READ, _READ, _READ, _READ, _READ, _READ, _READ, _READ))
def _look_at_columns(  # noqa: PLR0917 - the columns of a step
    slots: Int32Array,
    num_new: Int32Array,
    num_draft: Int32Array,
    num_rejected: Int32Array,
    offsets: Int32Array,
    token_ids: Int32Array,
    draft_token_ids: Int32Array,
    last_slots: Int32Array,
) -> int:
    """Do `look_at`."""
    count, seen = len(slots), 0
    are_same = count == len(last_slots)
    for i in range(count if are_same else 0):
        are_same &= slots[i] == last_slots[i]
    if are_same:
        seen |= ARE_SAME_SLOTS
    if len(num_new) != count or len(num_draft) != count or len(num_rejected) != count:
        return seen
    if len(offsets) != count + 1 or len(token_ids) != count or len(draft_token_ids):
        return seen
    is_decode = offsets[count] == count
    for i in range(count):
        others = num_draft[i] | num_rejected[i]
        is_decode &= (num_new[i] == 1) & (others == 0) & (offsets[i] == i) & (token_ids[i] >= 0)
    if is_decode:
        seen |= IS_DECODE
    return seen


def token_counts(where: str, running: RunningRequests) -> Int32Array:
    """Return how many tokens each row appends; refuse counts that do not fit each other."""
    offsets, token_ids = running.token_offsets, running.token_ids
    counts = offsets[1:] - offsets[:-1]
    first, last = int(offsets[0]), int(offsets[-1])
    # Falling offsets could seem to rise where the difference overflows: none may be below 0.
    rises = np.count_nonzero(counts < 0) == 0 and np.count_nonzero(offsets < 0) == 0
    if first != 0 or last != len(token_ids) or not rises:
        raise RequestError(
            f"{where}: running.token_offsets run from {first} to {last} for "
            f"{len(token_ids)} token ids: pass offsets that rise from 0 to that number"
        )
    if len(running.draft_token_ids):
        num_drafts = int(running.num_draft_tokens.sum())
        if len(running.draft_token_ids) != num_drafts:
            raise RequestError(
                f"{where}: {len(running.draft_token_ids)} draft_token_ids for {num_drafts} "
                "drafts: pass one per draft or none"
            )
    return counts


def require_token_ids(where: str, running: RunningRequests) -> None:
    """Refuse what is no token id."""
    for name, ids in (
        ("token_ids", running.token_ids),
        ("draft_token_ids", running.draft_token_ids),
    ):
        if len(ids) and np.count_nonzero(ids < 0):
            i = int(ids.argmin())
            raise RequestError(
                f"{where}: running.{name}[{i}] is {int(ids[i])}: token ids are not negative"
            )


def fit(running: RunningRequests) -> bool:
    """Whether all columns are int32 arrays and of the right shapes."""
    slots, offsets, token_ids = running.slots, running.token_offsets, running.token_ids
    if not _ARRAYS.issuperset(map(type, vars(running).values())) or slots.ndim != 1:
        return False
    num_new, num_draft = running.num_new_tokens, running.num_draft_tokens
    rejected, draft_ids = running.num_rejected_tokens, running.draft_token_ids
    shape = (len(slots),)
    return (
        shape == slots.shape == num_new.shape == num_draft.shape == rejected.shape
        and offsets.shape == (len(slots) + 1,)
        and token_ids.ndim == draft_ids.ndim == 1
        and _INT32 == slots.dtype == num_new.dtype == num_draft.dtype == rejected.dtype
        and _INT32 == offsets.dtype == token_ids.dtype == draft_ids.dtype
    )
