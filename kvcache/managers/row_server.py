"""The running rows of a step, served together: skip, take, cache, each for all rows at once.

Inside the core, for `reserve_rows`. Rows for which nothing is to be done are never looked at one
by one; where there is room for all others, their blocks are taken in one go. Refuses to choose:
where room is short, rows are served singly, in their order.

    busy rows ─▶ free what they skip ─▶ room for all? ─yes─▶ take blocks ─▶ cache full blocks
                                              └───no───▶ one after the other

Rows whose tables get null columns (a chunk passes by states that nobody keeps) come singly, last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.arrays import EMPTY_INDEX, IndexArray, Int32Array, int32_array
from kvcache.commands import EMPTY_PATCH, BlockTablePatch
from kvcache.core import (
    NewestState,
    Reservation,
    RowBatch,
    RowsReserved,
    RowStates,
    RowTokens,
    TableChange,
    patch_of,
)
from kvcache.errors import RequestError
from kvcache.managers.block_tables import NEVER
from kvcache.managers.coordinators import KVCacheCoordinator
from kvcache.managers.forks import TableForks
from kvcache.managers.row_board import Int64Array, RowBoard
from kvcache.managers.row_cacher import RowCacher
from kvcache.request import Request
from kvcache.tenants import TenantAccount, TenantLedger

ReserveOne: TypeAlias = Callable[[Request, Reservation], "list[TableChange] | None"]
"""Reserves for one request that has been checked; None where there is no room."""


@dataclass(frozen=True, eq=False)
class _SelectedTokens:
    """The tokens of some rows of a batch: row `i` is row `rows[i]` there."""

    tokens: RowTokens
    rows: IndexArray

    def sync(self, rows: IndexArray) -> None:
        self.tokens.sync(self.rows[rows])

    def num_tokens(self, rows: IndexArray) -> npt.NDArray[np.integer]:
        return self.tokens.num_tokens(self.rows[rows])

    def newest_units(self, rows: IndexArray, units: IndexArray) -> npt.NDArray[np.int32]:
        return self.tokens.newest_units(self.rows[rows], units)


class RowServer:
    """Serves batches of rows on one coordinator, with a board of what each row still has."""

    def __init__(
        self,
        coordinator: KVCacheCoordinator,
        board: RowBoard,
        *,
        reserve_one: ReserveOne,
        may_cache: Callable[[Request], bool],
        forks: TableForks,
    ) -> None:
        """Serve rows of `coordinator`; `may_cache` says whose blocks become hittable, `forks` whose
        writes may need copies: those come singly."""
        self._coordinator = coordinator
        self._pool = coordinator.pool
        self._board = board
        self._cacher = RowCacher(coordinator)
        self._reserve_one = reserve_one
        self._may_cache = may_cache
        self._forks = forks

    def serve(self, rows: RowBatch) -> RowsReserved:
        """Give every row its slots, or none of them; see `Core.reserve_rows`.

        Raises:
            RequestError: a row cannot mean what it asks for; nothing was changed.
        """
        rows.require_columns()
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
        missing = self._missing_blocks(batch)
        jumping = self._find_jumping(batch, missing)
        if not self._is_plain(batch, missing, jumping):
            is_reserved[busy], patch = self._serve_singly(batch)
        elif not len(jumping):
            patch = self._serve_together(batch, missing)
        else:
            others = np.delete(np.arange(len(busy)), jumping)
            together = self._serve_together(_select(batch, others), missing.take(others, axis=1))
            is_reserved[busy[jumping]], singly = self._serve_singly(_select(batch, jumping))
            patch = _joined(together, singly)
        return RowsReserved(is_reserved, patch)

    def _serve_together(self, batch: RowBatch, missing: Int64Array) -> BlockTablePatch:
        patch = self._take_blocks(batch, missing)
        self._cache(batch)
        return patch

    def _require_possible(self, batch: RowBatch) -> None:
        if self._coordinator.state_managers and batch.states is None:
            raise RequestError(
                "a batch of rows without states, but a KV cache group keeps states: say where each "
                "row's forwards end"
            )
        cached, wanted = batch.num_cached_tokens, batch.num_slot_tokens
        if np.count_nonzero(cached > wanted):
            row = int((cached > wanted).argmax())
            raise RequestError(
                f"request {batch.requests[row].request_id}: {cached[row]} tokens to cache, "
                f"but slots for {wanted[row]}: reserve slots for all of them"
            )
        if batch.are_tokens_known:
            return
        num_tokens = batch.tokens.num_tokens(np.arange(len(cached)))
        # Only where more is to be cached than there are tokens it matters where blocks end.
        lacking = (cached > num_tokens).nonzero()[0]
        if not len(lacking):
            return
        batch.tokens.sync(lacking)
        for row in lacking.tolist():
            if self._may_cache(batch.requests[row]):
                for manager in self._coordinator.managers:
                    manager.require_cacheable(batch.requests[row], int(cached[row]))

    def _recall(self, batch: RowBatch) -> None:
        """Note the rows that the board does not know (any more)."""
        board, coordinator = self._board, self._coordinator
        for row in board.unknown_rows(batch).tolist():
            request: Request = batch.requests[row]
            request_id = request.request_id
            limits = coordinator.row_limits(request_id)
            if not self._may_cache(request):
                limits = limits._replace(full_tokens=NEVER)
            lengths = [len(manager.table(request_id)) for manager in coordinator.managers]
            board.note(int(batch.slots[row]), request, lengths, limits)

    def _free_skipped(self, batch: RowBatch) -> None:
        board, coordinator = self._board, self._coordinator
        freed: list[int] = []
        computed = batch.num_computed_tokens
        for row in board.skipping(batch.slots, computed).tolist():
            request_id = batch.requests[row].request_id
            freed += coordinator.take_skipped_blocks(request_id, int(computed[row]))
            board.note_skip(int(batch.slots[row]), coordinator.next_skip_tokens(request_id))
        if freed:
            self._pool.give_back(freed)

    def _missing_blocks(self, batch: RowBatch) -> Int64Array:
        """Return how many columns the tables lack, shape `(groups, n)`."""
        missing = self._board.missing_blocks(batch.slots, batch.num_slot_tokens)
        if batch.states is not None:
            of_states = self._board.missing_blocks(batch.slots, batch.states.num_own_tokens)
            for manager in self._coordinator.state_managers:
                missing[manager.group] = of_states[manager.group]
        return missing

    def _find_jumping(self, batch: RowBatch, missing: Int64Array) -> IndexArray:
        """Return the rows whose tables of states grow otherwise than by blocks at their end."""
        states = batch.states
        if states is None:
            return EMPTY_INDEX
        is_jumping = np.zeros(len(batch.requests), dtype=np.bool_)
        for manager in self._coordinator.state_managers:
            size = manager.tokens_per_column
            written = (states.num_own_tokens - np.int64(1)) // size
            last = (states.num_last_own_tokens - np.int64(1)) // size
            is_jumping |= (missing[manager.group] > 0) & (written > last + 1)
        return is_jumping.nonzero()[0]

    def _is_plain(self, batch: RowBatch, missing: Int64Array, jumping: IndexArray) -> bool:
        """Say whether there is room for all, and no row begins behind its last block or shares."""
        num_null = 0
        if self._forks.has_any and any(
            self._forks.is_sharing(request.request_id) for request in batch.requests
        ):
            return False
        if batch.states is not None and len(jumping):
            own = batch.states.num_own_tokens[jumping]
            lengths = self._board.num_blocks(batch.slots[jumping])
            for manager in self._coordinator.state_managers:
                passed = (own - np.int64(1)) // manager.tokens_per_column - lengths[manager.group]
                num_null += int(np.maximum(passed, 0).sum())
        if self._pool.tenants is not None:
            if len(jumping) or not self._have_room(batch, missing, self._pool.tenants):
                return False
        elif int(np.add.reduce(missing, axis=None)) - num_null > self._pool.get_num_free_blocks():
            return False
        is_behind = batch.num_computed_tokens > self._board.capacities(batch.slots)
        return not np.count_nonzero(is_behind)

    def _have_room(self, batch: RowBatch, missing: Int64Array, tenants: TenantLedger) -> bool:
        """Say whether each tenant has room for all that its rows lack."""
        rows = np.repeat(np.arange(len(batch.requests)), missing.sum(axis=0))
        wanted = Counter(_accounts(batch, rows, tenants))
        return tenants.has_room(wanted, self._pool.get_num_free_blocks())

    def _take_blocks(self, batch: RowBatch, missing: Int64Array) -> BlockTablePatch:
        """Extend all tables; row by row, group by group, as `missing` says."""
        rows, groups, first_indices, counts = growth = self._board.growth(batch.slots, missing)
        if not growth.size:
            return EMPTY_PATCH
        if self._pool.tenants is None:
            block_ids = self._pool.get_new_blocks(int(np.add.reduce(counts)))
        else:
            accounts = _accounts(batch, np.repeat(rows, counts), self._pool.tenants)
            block_ids = self._pool.get_new_blocks_for(accounts)
        managers, start = self._coordinator.managers, 0
        for row, group, count in zip(rows.tolist(), groups.tolist(), counts.tolist(), strict=True):
            end = start + count
            managers[group].extend_table(batch.requests[row].request_id, block_ids[start:end])
            start = end
        self._board.add_blocks(batch.slots, missing)
        return BlockTablePatch(
            slots=batch.slots[rows],
            groups=groups,
            first_indices=first_indices,
            counts=counts,
            block_ids=int32_array(block_ids),
        )

    def _cache(self, batch: RowBatch) -> None:
        filled = self._board.filling(batch.slots, batch.num_cached_tokens)
        if len(filled):
            if batch.states is not None:
                own_ends = batch.states.num_own_tokens[filled].tolist()
                for row, own_end in zip(filled.tolist(), own_ends, strict=True):
                    self._coordinator.note_own_end(batch.requests[row].request_id, own_end)
            self._cacher.cache(batch, filled)
            self._board.note_cached(batch.slots[filled], batch.num_cached_tokens[filled])

    def _serve_singly(self, batch: RowBatch) -> tuple[Int32Array, BlockTablePatch]:
        is_reserved: list[int] = []
        changes: list[tuple[int, TableChange]] = []
        batch.tokens.sync(np.arange(len(batch.requests)))
        figures = (batch.num_computed_tokens, batch.num_slot_tokens, batch.num_cached_tokens)
        columns = (column.tolist() for column in (batch.slots, *figures))
        states = _states(batch)
        rows = zip(batch.requests, states, *columns, strict=True)
        for request, (own_end, newest), slot, computed, wanted, cached in rows:
            reservation = Reservation(computed, wanted, cached, 0, own_end, newest)
            changed = self._reserve_one(request, reservation)
            is_reserved.append(changed is not None)
            changes += [(slot, change) for change in changed or ()]
        return int32_array(is_reserved), patch_of(changes)


def _accounts(batch: RowBatch, rows: IndexArray, tenants: TenantLedger) -> list[TenantAccount]:
    """Return the tenant of each of these rows."""
    return [tenants.account(batch.requests[row].namespace) for row in rows.tolist()]


def _select(rows: RowBatch, indices: IndexArray) -> RowBatch:
    states = rows.states
    if states is not None:
        states = RowStates(
            states.num_own_tokens[indices],
            states.num_last_own_tokens[indices],
            states.num_accepted_drafts[indices],
        )
    return RowBatch(
        rows.requests[indices],
        rows.slots[indices],
        rows.num_computed_tokens[indices],
        rows.num_slot_tokens[indices],
        rows.num_cached_tokens[indices],
        _SelectedTokens(rows.tokens, indices),
        states,
        rows.are_tokens_known,
    )


def _states(batch: RowBatch) -> Iterable[tuple[int | None, NewestState | None]]:
    """Return, per row, where its forward ends and where its newest state is."""
    states = batch.states
    if states is None:
        return repeat((None, None), len(batch.requests))
    newest = map(
        NewestState, states.num_last_own_tokens.tolist(), states.num_accepted_drafts.tolist()
    )
    return zip(states.num_own_tokens.tolist(), newest, strict=True)


def _joined(one: BlockTablePatch, other: BlockTablePatch) -> BlockTablePatch:
    """Return the changes of both, those of `one` first."""
    return BlockTablePatch(
        slots=np.concatenate((one.slots, other.slots)),
        groups=np.concatenate((one.groups, other.groups)),
        first_indices=np.concatenate((one.first_indices, other.first_indices)),
        counts=np.concatenate((one.counts, other.counts)),
        block_ids=np.concatenate((one.block_ids, other.block_ids)),
    )
