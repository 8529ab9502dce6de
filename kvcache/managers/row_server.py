"""The running rows of a step, served together: skip, take, cache, each for all rows at once.

Inside the core, for `reserve_rows`. Rows for which nothing is to be done are never looked at one
by one; where there is room for all others, their blocks are taken in one go. Refuses to choose:
where room is short, rows are served singly, in their order.

    busy rows ─▶ free what they skip ─▶ room for all? ─yes─▶ take blocks ─▶ cache full blocks
                                              └───no───▶ one after the other
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from kvcache.arrays import IndexArray, Int32Array, int32_array
from kvcache.commands import EMPTY_PATCH, BlockTablePatch
from kvcache.core import Reservation, RowBatch, RowsReserved, TableChange
from kvcache.errors import RequestError
from kvcache.managers.base import NEVER
from kvcache.managers.coordinators import KVCacheCoordinator
from kvcache.managers.row_board import Int64Array, RowBoard
from kvcache.request import Request

ReserveOne: TypeAlias = Callable[[Request, Reservation], "list[TableChange] | None"]
"""Reserves for one request that has been checked; None where there is no room."""


class RowServer:
    """Serves batches of rows on one coordinator, with a board of what each row still has."""

    def __init__(
        self,
        coordinator: KVCacheCoordinator,
        board: RowBoard,
        *,
        reserve_one: ReserveOne,
        may_cache: Callable[[Request], bool],
    ) -> None:
        """Serve rows of `coordinator`; `may_cache` says whose blocks become hittable."""
        self._coordinator = coordinator
        self._pool = coordinator.pool
        self._board = board
        self._reserve_one = reserve_one
        self._may_cache = may_cache

    def serve(self, rows: RowBatch) -> RowsReserved:
        """Give every row its slots, or none of them; see `Core.reserve_rows`.

        Raises:
            RequestError: a row cannot mean what it asks for; nothing was changed.
        """
        _require_columns(rows)
        is_reserved = np.ones(len(rows.requests), dtype=np.int32)
        if not self._coordinator.managers:
            return RowsReserved(is_reserved, EMPTY_PATCH)
        busy = self._board.busy_rows(rows)
        if not len(busy):
            return RowsReserved(is_reserved, EMPTY_PATCH)
        batch = _select(rows, busy)
        self._require_possible(batch)
        self._recall(batch)
        self._free_skipped(batch)
        missing = self._board.missing_blocks(batch.slots, batch.num_slot_tokens)
        if self._is_plain(batch, missing):
            patch = self._take_blocks(batch, missing)
            self._cache(batch)
        else:
            is_reserved[busy], patch = self._serve_singly(batch)
        return RowsReserved(is_reserved, patch)

    def _require_possible(self, batch: RowBatch) -> None:
        cached, wanted = batch.num_cached_tokens, batch.num_slot_tokens
        for row in np.flatnonzero(cached > wanted).tolist():
            raise RequestError(
                f"request {batch.requests[row].request_id}: {cached[row]} tokens to cache, "
                f"but slots for {wanted[row]}: reserve slots for all of them"
            )
        for row in np.flatnonzero(self._board.fills(batch.slots, cached)).tolist():
            if self._may_cache(batch.requests[row]):
                for manager in self._coordinator.managers:
                    manager.require_cacheable(batch.requests[row], int(cached[row]))

    def _recall(self, batch: RowBatch) -> None:
        """Note the rows that the board does not know (any more)."""
        board, coordinator = self._board, self._coordinator
        for request, slot in zip(batch.requests, batch.slots.tolist(), strict=True):
            request_id = request.request_id
            if not board.is_known(slot, request_id):
                full = coordinator.next_full_tokens(request_id)
                lengths = [len(manager.table(request_id)) for manager in coordinator.managers]
                board.note(slot, request_id, lengths, full if self._may_cache(request) else NEVER)

    def _free_skipped(self, batch: RowBatch) -> None:
        board, coordinator = self._board, self._coordinator
        freed: list[int] = []
        computed = batch.num_computed_tokens
        for row in np.flatnonzero(board.skips(batch.slots, computed)).tolist():
            request_id = batch.requests[row].request_id
            freed += coordinator.take_skipped_blocks(request_id, int(computed[row]))
            board.note_skip(int(batch.slots[row]), coordinator.next_skip_tokens(request_id))
        if freed:
            self._pool.give_back(freed)

    def _is_plain(self, batch: RowBatch, missing: Int64Array) -> bool:
        """Say whether there is room for all, and no row begins behind its last block."""
        if int(missing.sum()) > self._pool.get_num_free_blocks():
            return False
        return not (batch.num_computed_tokens > self._board.capacities(batch.slots)).any()

    def _take_blocks(self, batch: RowBatch, missing: Int64Array) -> BlockTablePatch:
        """Extend all tables; row by row, group by group, as `missing` says."""
        rows, groups = np.nonzero(missing.T)
        if not len(rows):
            return EMPTY_PATCH
        counts = missing[groups, rows]
        first_indices = self._board.num_blocks(batch.slots)[groups, rows]
        block_ids = self._pool.get_new_blocks(int(counts.sum()))
        managers, start = self._coordinator.managers, 0
        for row, group, count in zip(rows.tolist(), groups.tolist(), counts.tolist(), strict=True):
            end = start + count
            managers[group].extend_table(batch.requests[row].request_id, block_ids[start:end])
            start = end
        self._board.add_blocks(batch.slots, missing)
        return BlockTablePatch(
            slots=batch.slots[rows],
            groups=int32_array(groups),
            first_indices=int32_array(first_indices),
            counts=int32_array(counts),
            block_ids=int32_array(block_ids),
        )

    def _cache(self, batch: RowBatch) -> None:
        filled = np.flatnonzero(self._board.fills(batch.slots, batch.num_cached_tokens))
        if len(filled):
            requests = [batch.requests[row] for row in filled.tolist()]
            cached = batch.num_cached_tokens[filled]
            self._coordinator.cache_many(list(zip(requests, cached.tolist(), strict=True)))
            self._board.note_cached(batch.slots[filled], cached)

    def _serve_singly(self, batch: RowBatch) -> tuple[Int32Array, BlockTablePatch]:
        is_reserved: list[int] = []
        changes: list[tuple[int, TableChange]] = []
        figures = (batch.num_computed_tokens, batch.num_slot_tokens, batch.num_cached_tokens)
        columns = (column.tolist() for column in (batch.slots, *figures))
        for request, slot, *counts in zip(batch.requests, *columns, strict=True):
            changed = self._reserve_one(request, Reservation(*counts))
            is_reserved.append(changed is not None)
            changes += [(slot, change) for change in changed or ()]
        return int32_array(is_reserved), _patch(changes)


def _require_columns(rows: RowBatch) -> None:
    columns = (
        rows.slots,
        rows.num_computed_tokens,
        rows.num_slot_tokens,
        rows.num_cached_tokens,
    )
    lengths = [len(column) for column in columns]
    if any(length != len(rows.requests) for length in lengths):
        raise RequestError(
            f"a batch of {len(rows.requests)} rows has columns of {lengths} entries: give one per "
            "row"
        )


def _select(rows: RowBatch, indices: IndexArray) -> RowBatch:
    return RowBatch(
        [rows.requests[row] for row in indices.tolist()],
        rows.slots[indices],
        rows.num_computed_tokens[indices],
        rows.num_slot_tokens[indices],
        rows.num_cached_tokens[indices],
    )


def _patch(changes: list[tuple[int, TableChange]]) -> BlockTablePatch:
    """Return the changes of rows (slot, change) as one command."""
    if not changes:
        return EMPTY_PATCH
    block_ids: list[int] = []
    for _, change in changes:
        block_ids += change.block_ids
    return BlockTablePatch(
        slots=int32_array([slot for slot, _ in changes]),
        groups=int32_array([change.group for _, change in changes]),
        first_indices=int32_array([change.first_index for _, change in changes]),
        counts=int32_array([len(change.block_ids) for _, change in changes]),
        block_ids=int32_array(block_ids),
    )
