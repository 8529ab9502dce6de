"""How far each running row can go on before anything must be done for it, as arrays over slots.

Beside the core, which serves a thousand rows per step: most of them neither need a block nor fill
one, and a few comparisons of whole columns tell them from the others. What is noted for a slot
holds while only the board's own methods report changes of its request; the core forgets a request
here whenever anything else happens to it. Refuses to know blocks: it counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from numba import types

from kvcache.arrays import IndexArray, Int32Array, index_array
from kvcache.compiled import array_type, compiled
from kvcache.core import RowBatch
from kvcache.errors import InvariantError, RequestError
from kvcache.managers.base import SingleTypeKVCacheManager
from kvcache.managers.block_tables import RowLimits
from kvcache.request import Request

Int64Array: TypeAlias = npt.NDArray[np.int64]
"""Token counts: sums of int32 figures and block sizes do not overflow."""


class RowBoard:
    """Limits of rows by slot.

    Invariants: where `_owners[s]` is a request, `_slots[its id] == s`, `num_blocks[g, s]` is the
    length of its table in group `g`, and it needs nothing before its slots reach
    `_capacity_tokens[s]`, its cached tokens `_full_tokens[s]` or its computed tokens
    `_skip_tokens[s]`. A slot without owner has zeros: every row in it needs something.
    """

    def __init__(self, managers: Sequence[SingleTypeKVCacheManager]) -> None:
        """Know no row. `managers[g]` says how long tables of group `g` are."""
        self._block_sizes = _figures([manager.block_size for manager in managers])
        self._column_tokens = _figures([manager.tokens_per_column for manager in managers])
        self._extra_columns = _figures([manager.num_extra_columns for manager in managers])
        self._owners: npt.NDArray[np.object_] = np.full(0, None, dtype=object)
        self._slots: dict[str, int] = {}
        self._num_blocks: Int64Array = np.zeros((len(managers), 0), dtype=np.int64)
        self._capacity_tokens: Int64Array = np.zeros(0, dtype=np.int64)
        self._full_tokens: Int64Array = np.zeros(0, dtype=np.int64)
        self._skip_tokens: Int64Array = np.zeros(0, dtype=np.int64)

    def busy_rows(self, rows: RowBatch) -> IndexArray:
        """Return the rows for which something must be done, in order.

        Raises:
            RequestError: a slot below 0.
        """
        slots = index_array(rows.slots)
        self._reach(slots)
        busy: IndexArray = _busy_rows(
            slots,
            rows.num_slot_tokens,
            rows.num_cached_tokens,
            rows.num_computed_tokens,
            self._capacity_tokens,
            self._full_tokens,
            self._skip_tokens,
        )
        return busy

    def missing_blocks(self, slots: Int32Array, num_slot_tokens: Int32Array) -> Int64Array:
        """Return how many columns each row lacks in each group, shape `(groups, n)`."""
        missing: Int64Array = _missing_columns(
            slots, num_slot_tokens, self._num_blocks, self._column_tokens, self._extra_columns
        )
        return missing

    def growth(self, slots: Int32Array, missing: Int64Array) -> Int32Array:
        """Return how tables grow by `missing` columns, row by row and group by group: row, group,
        first new column and how many, shape `(4, k)`. Changes nothing."""
        growth: Int32Array = _growth(slots, missing, self._num_blocks)
        return growth

    def num_blocks(self, slots: Int32Array) -> Int64Array:
        """Return the lengths of the rows' tables, shape `(groups, n)`."""
        lengths: Int64Array = self._num_blocks.take(slots, axis=1)
        return lengths

    def capacities(self, slots: Int32Array) -> Int64Array:
        """Return for how many tokens the rows have slots."""
        capacities: Int64Array = self._capacity_tokens[slots]
        return capacities

    def filling(self, slots: Int32Array, num_cached_tokens: Int32Array) -> IndexArray:
        """Return the rows that have full blocks that are not hittable yet."""
        rows: IndexArray = _rows_reaching(slots, num_cached_tokens, self._full_tokens)
        return rows

    def skipping(self, slots: Int32Array, num_computed_tokens: Int32Array) -> IndexArray:
        """Return the rows that no longer read some of their blocks."""
        rows: IndexArray = _rows_reaching(slots, num_computed_tokens, self._skip_tokens)
        return rows

    def unknown_rows(self, rows: RowBatch) -> IndexArray:
        """Return the rows whose slots' figures are not those of their requests."""
        is_unknown: npt.NDArray[np.bool_] = self._owners[rows.slots] != rows.requests
        return is_unknown.nonzero()[0]

    def note(
        self, slot: int, request: Request, num_blocks: Sequence[int], limits: RowLimits
    ) -> None:
        """Note a row anew."""
        self.forget(request.request_id)
        owner: Request | None = self._owners[slot]
        if owner is not None:
            del self._slots[owner.request_id]
        self._owners[slot], self._slots[request.request_id] = request, slot
        for lengths, length in zip(self._num_blocks, num_blocks, strict=True):
            lengths[slot] = length
        self._capacity_tokens[slot], self._full_tokens[slot], self._skip_tokens[slot] = limits

    def note_cached(self, slots: Int32Array, num_cached_tokens: Int32Array) -> None:
        """Note that the full blocks of these rows are hittable up to so many tokens."""
        _note_full(slots, num_cached_tokens, self._full_tokens, self._block_sizes)

    def note_skip(self, slot: int, skip_tokens: int) -> None:
        """Note from which number of computed tokens on a row skips one more block."""
        self._skip_tokens[slot] = skip_tokens

    def add_blocks(self, slots: Int32Array, num_blocks: Int64Array) -> None:
        """Note that the tables of these rows have grown; `num_blocks` is of shape `(groups, n)`."""
        _add_columns(
            slots,
            num_blocks,
            self._num_blocks,
            self._capacity_tokens,
            self._column_tokens,
            self._extra_columns,
        )

    def forget(self, request_id: str) -> None:
        """Something else happened to this request: what was noted no longer holds."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._owners[slot] = None
            self._num_blocks[:, slot] = 0
            self._capacity_tokens[slot] = self._full_tokens[slot] = self._skip_tokens[slot] = 0

    def forget_all(self) -> None:
        """Forget every row."""
        for request_id in list(self._slots):
            self.forget(request_id)

    def check(self, tables: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Raise InvariantError if a noted row differs from `tables`: request id and lengths."""
        lengths = dict(tables)
        for request_id, slot in self._slots.items():
            noted = self._num_blocks[:, slot].tolist()
            owner: Request | None = self._owners[slot]
            if (
                owner is None
                or owner.request_id != request_id
                or noted != list(lengths.get(request_id, ()))
            ):
                raise InvariantError(
                    f"slot {slot} is noted with {noted} blocks for request {request_id}, which has "
                    f"{lengths.get(request_id)}"
                )

    def _reach(self, slots: IndexArray) -> None:
        """Grow to the highest slot there is."""
        if not len(slots):
            return
        # Read as unsigned a slot below 0 is beyond all others.
        if int(np.maximum.reduce(slots.view(np.uintp))) < len(self._owners):
            return
        lowest, highest = int(slots.min()), int(slots.max())
        if lowest < 0:
            raise RequestError(f"a row in slot {lowest}: number slots from 0 on")
        spare = highest + 1 - len(self._owners)
        if spare > 0:
            self._owners = np.append(self._owners, np.full(spare, None, dtype=object))
            self._num_blocks = np.pad(self._num_blocks, ((0, 0), (0, spare)))
            self._capacity_tokens = np.pad(self._capacity_tokens, (0, spare))
            self._full_tokens = np.pad(self._full_tokens, (0, spare))
            self._skip_tokens = np.pad(self._skip_tokens, (0, spare))


# Spelled out: what is compiled is kept until this file changes, whatever others do.
_MOST_TOKENS = 1 << 62
"""More than any row has: the least of several figures is below."""

_SLOTS = array_type("int32", is_read=True)
_INDICES = array_type("intp", is_read=True)
_FIGURES = array_type("int64")
_READ_FIGURES = array_type("int64", is_read=True)
_OF_GROUPS = array_type("int64", 2)
_READ_OF_GROUPS = array_type("int64", 2, is_read=True)


@compiled(types.intp[::1](_INDICES, *[_SLOTS] * 3, *[_READ_FIGURES] * 3))
def _busy_rows(  # noqa: PLR0917 - three figures of rows, then before which they need nothing
    slots: IndexArray,
    num_slot_tokens: Int32Array,
    num_cached_tokens: Int32Array,
    num_computed_tokens: Int32Array,
    capacity_tokens: Int64Array,
    full_tokens: Int64Array,
    skip_tokens: Int64Array,
) -> IndexArray:
    busy = np.empty(len(slots), np.intp)
    num_busy = 0
    for row, slot in enumerate(slots):
        if (
            num_slot_tokens[row] > capacity_tokens[slot]
            or num_cached_tokens[row] >= full_tokens[slot]
            or num_computed_tokens[row] >= skip_tokens[slot]
        ):
            busy[num_busy] = row
            num_busy += 1
    return busy[:num_busy]


@compiled(types.intp[::1](_SLOTS, _SLOTS, _READ_FIGURES))
def _rows_reaching(slots: Int32Array, num_tokens: Int32Array, limits: Int64Array) -> IndexArray:
    rows = np.empty(len(slots), np.intp)
    num_rows = 0
    for row, slot in enumerate(slots):
        if num_tokens[row] >= limits[slot]:
            rows[num_rows] = row
            num_rows += 1
    return rows[:num_rows]


@compiled(types.int64[:, ::1](_SLOTS, _SLOTS, _READ_OF_GROUPS, _READ_FIGURES, _READ_FIGURES))
def _missing_columns(
    slots: Int32Array,
    num_tokens: Int32Array,
    num_blocks: Int64Array,
    column_tokens: Int64Array,
    extra_columns: Int64Array,
) -> Int64Array:
    missing = np.empty((len(num_blocks), len(slots)), np.int64)
    for group in range(len(num_blocks)):
        size, num_extra = column_tokens[group], extra_columns[group]
        for row, slot in enumerate(slots):
            wanted = -(-np.int64(num_tokens[row]) // size) + num_extra
            missing[group, row] = max(0, wanted - num_blocks[group, slot])
    return missing


@compiled(types.int32[:, ::1](_SLOTS, _READ_OF_GROUPS, _READ_OF_GROUPS))
def _growth(slots: Int32Array, missing: Int64Array, num_blocks: Int64Array) -> Int32Array:
    growth = np.empty((4, np.count_nonzero(missing)), np.int32)
    index = 0
    for row, slot in enumerate(slots):
        for group in range(len(missing)):
            if missing[group, row]:
                growth[0, index], growth[1, index] = row, group
                growth[2, index] = num_blocks[group, slot]
                growth[3, index] = missing[group, row]
                index += 1
    return growth


@compiled(types.void(_SLOTS, _SLOTS, _FIGURES, _READ_FIGURES))
def _note_full(
    slots: Int32Array, num_tokens: Int32Array, full_tokens: Int64Array, block_sizes: Int64Array
) -> None:
    for row, slot in enumerate(slots):
        first = _MOST_TOKENS
        for size in block_sizes:
            first = min(first, (num_tokens[row] // size + 1) * size)
        full_tokens[slot] = first


@compiled(types.void(_SLOTS, _READ_OF_GROUPS, _OF_GROUPS, _FIGURES, _READ_FIGURES, _READ_FIGURES))
def _add_columns(  # noqa: PLR0917 - what is added, what it changes, how columns count
    slots: Int32Array,
    num_more: Int64Array,
    num_blocks: Int64Array,
    capacity_tokens: Int64Array,
    column_tokens: Int64Array,
    extra_columns: Int64Array,
) -> None:
    for row, slot in enumerate(slots):
        capacity = _MOST_TOKENS
        for group in range(len(num_blocks)):
            num_blocks[group, slot] += num_more[group, row]
            num_columns = num_blocks[group, slot] - extra_columns[group]
            capacity = min(capacity, num_columns * column_tokens[group])
        capacity_tokens[slot] = capacity


def _figures(values: Sequence[int]) -> Int64Array:
    return np.array(values, dtype=np.int64)
