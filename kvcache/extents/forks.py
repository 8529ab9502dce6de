"""Rows that share blocks they may still write: forks, and the copies before their writes.

Beside the reserver. A child shares every block of its parent. What is in the tree both hold by
their run; what is not (the last, partly filled block; full ones that were not cached) has one
reference for each. Only the partly filled one is ever written again: whoever of the two writes it
first gets a block of its own, with the bytes copied before the forward writes.

    parent  [b1 b2 b3']    fork    [b1 b2 b3']    child writes    [b1 b2 b3']
                          ─────▶   [b1 b2 b3']    ───────────▶    [b1 b2 b7']    copy b3 -> b7

Refuses to share what a parent has no blocks for.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

import numpy as np

from kvcache.arrays import IndexArray, Int32Array, int32_array
from kvcache.core import ForkOrigin, Reservation, TableChange
from kvcache.errors import RequestError
from kvcache.extents.block_store import NO_CONTENT
from kvcache.extents.parts import CoreParts
from kvcache.extents.pins import PinnedRuns
from kvcache.extents.rows import Row
from kvcache.extents.shape import GroupShape
from kvcache.ids import NULL_BLOCK_ID
from kvcache.managers.block_tables import SharedColumn
from kvcache.request import Request
from kvcache.specs import ceil_div

DueCopies: TypeAlias = "list[tuple[int, int]]"
"""Columns (group, column) that a forward writes and that others read too."""


class RowForks:
    """Forks of rows of one core.

    `_shared[row index]` are the columns a row may still write together with others: (group,
    column), and behind how many tokens. `_held` are both ends of copies whose command waits.
    """

    def __init__(self, parts: CoreParts, pins: PinnedRuns) -> None:
        """Know no fork."""
        self._pins = pins
        self._shape = parts.shape
        self._store = parts.store
        self._tree = parts.tree
        self._tables = parts.tables
        self._evictor = parts.evictor
        self._announcer = parts.announcer
        self._lists = parts.lists
        self._shared: dict[int, dict[tuple[int, int], int]] = {}

    def held_blocks(self) -> Counter[int]:
        """Return how many references copies hold, by block. For audits."""
        return Counter(self._store.copy_holds)

    def is_sharing(self, row: Row) -> bool:
        """Say whether a write of the row may need a copy."""
        return row.index in self._shared

    def any_sharing(self, rows: IndexArray) -> bool:
        """Say whether one of these rows shares what it may write."""
        return bool(self._shared) and not self._shared.keys().isdisjoint(rows.tolist())

    def fork(self, parent: Row, child_request: Request, origin: ForkOrigin) -> list[TableChange]:
        """Open a row for the child that shares the parent's blocks; return its tables.

        The parent has blocks for so many tokens, and none behind them is in the tree.
        """
        child = self._open_child(parent, child_request, origin.num_tokens)
        of_parent = self._shared.get(parent.index, {})
        of_child: dict[tuple[int, int], int] = {}
        changes = []
        for group in self._shape.groups:
            g = group.index
            if g in self._lists.by_group:
                keeper = self._lists.by_group[g]
                shared = keeper.fork(parent.request.request_id, child.request.request_id, origin)
                ids = self._lists.table(g, child.request.request_id)
            else:
                ids = self._share(group, parent, child, origin.num_tokens)
                column = origin.num_tokens // group.block_size
                shared = SharedColumn(column, column) if column < len(ids) else None
            if len(ids):
                changes.append(TableChange(g, 0, ids))
            if shared is not None and ids[shared.of_child]:
                before = of_parent.get((g, shared.of_parent), origin.num_tokens)
                of_parent[g, shared.of_parent] = min(before, origin.num_tokens)
                of_child[g, shared.of_child] = origin.num_tokens
        if of_child:
            self._shared[parent.index], self._shared[child.index] = of_parent, of_child
        return changes

    def require_blocks(self, parent: Row | None, request_id: str, num_tokens: int) -> None:
        """Refuse a parent that counts tokens as computed for which it has no slots."""
        # Where a state is after accepted drafts, its table does not tell.
        for group in self._shape.in_rows:
            capacity = 0
            if parent is not None:
                columns = int(self._tables.num_columns[group.index, parent.index])
                capacity = columns * group.block_size
            if capacity < num_tokens:
                raise RequestError(
                    f"request {request_id} has blocks for {capacity} tokens in group "
                    f"{group.index}, {num_tokens} computed ones cannot be shared: allocate slots "
                    "before tokens are computed"
                )

    def due_copies(self, row: Row, reservation: Reservation) -> DueCopies:
        """Return the shared columns that a reserved forward writes; each takes a block."""
        return [
            (group, column)
            for (group, column), num_tokens in self._shared.get(row.index, {}).items()
            if reservation.num_slot_tokens > num_tokens
            and self._writes(group, column, reservation)
            and self._is_read_elsewhere(self._block(row, group, column))
        ]

    def copy(self, row: Row, reservation: Reservation, due: DueCopies) -> list[TableChange]:
        """Put a new block into each of these columns; there is room.

        Columns that the forward may write as they are, are shared no more.
        """
        if row.index not in self._shared:
            return []
        changes = []
        for (group, column), new in zip(due, self._evictor.take(len(due)).tolist(), strict=True):
            old = self._block(row, group, column)
            self._put(row, group, column, new)
            if self._announcer.has_workers:
                self._store.references[[old, new]] += 1
                self._store.copy_holds.update((old, new))
                self._announcer.copies.add(old, new)
            self._store.give_back(int32_array([old]))
            changes.append(TableChange(group, column, int32_array([new])))
        self._forget_settled(row, reservation)
        return changes

    def forget(self, row: Row) -> None:
        """The row is about to give its blocks back."""
        self._shared.pop(row.index, None)

    def release_run(self, row: Row) -> None:
        """The row, which goes, holds its run no longer; copies that wait may need it still."""
        if self._store.copy_holds and self._has_copied(row):
            row.run.gather()
            self._pins.keep_for_copies(row.run)
        else:
            self._tree.release(row.run)

    def release_copied(self) -> None:
        """The commands of all copies so far have been taken."""
        if self._store.copy_holds:
            held = list(self._store.copy_holds.elements())
            self._store.copy_holds.clear()
            self._store.give_back(int32_array(held))
            self._pins.release_copied()

    def dump_state(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return what requests share, by request: group, column, and behind how many tokens."""
        return {
            row.request.request_id: sorted((*key, n) for key, n in self._shared[row.index].items())
            for row in sorted(self._tables.by_id.values(), key=lambda row: row.request.request_id)
            if row.index in self._shared
        }

    # --- inside --------------------------------------------------------------------------------

    def _open_child(self, parent: Row, request: Request, num_tokens: int) -> Row:
        """Open a row that holds what of the parent's run lies before so many tokens."""
        end = min(int(self._tables.published[parent.index]), num_tokens // self._shape.unit_tokens)
        run = parent.run
        while run.parent is not None and run.start >= end:
            run = run.parent
        if run.end > end:
            run = self._tree.split(run, end - run.start)
        self._tree.hold(run)
        child = self._tables.open(request, run)
        unoffered = self._tables.unoffered.get(parent.index, end)
        if unoffered < end:
            self._tables.leave_unoffered(child.index, unoffered)
        child.is_mute = parent.is_mute
        return child

    def _share(self, group: GroupShape, parent: Row, child: Row, num_tokens: int) -> Int32Array:
        """Give the child the parent's columns of one group, and a reference to each block."""
        tables, references, g = self._tables, self._store.references, group.index
        end = ceil_div(num_tokens, group.block_size)
        ids: Int32Array = tables.columns(g, parent.index)[:end].copy()
        tables.append(g, child.index, ids)
        if not group.is_ordered:
            first_kept = min(int(tables.first_kept[g, parent.index]), end)
            tables.first_kept[g, child.index] = first_kept
            references[ids[first_kept:]] += 1
            return ids
        num_of_tree = int(tables.published[child.index]) // group.num_units
        doubles = [c for c in parent.doubles.get(g, ()) if c < num_of_tree]
        if doubles:
            child.doubles[g] = doubles
            references[ids[doubles]] += 1
        references[ids[num_of_tree:]] += 1
        return ids

    def _forget_settled(self, row: Row, reservation: Reservation) -> None:
        """Forget the columns that a reserved forward owns from now on."""
        shared = {
            (group, column): num_tokens
            for (group, column), num_tokens in self._shared[row.index].items()
            if reservation.num_slot_tokens <= num_tokens
            or self._is_held_elsewhere(self._block(row, group, column))
        }
        if shared:
            self._shared[row.index] = shared
        else:
            del self._shared[row.index]

    def _writes(self, group: int, column: int, reservation: Reservation) -> bool:
        keeper = self._lists.by_group.get(group)
        return keeper is None or keeper.writes_column(column, reservation)

    def _put(self, row: Row, group: int, column: int, block_id: int) -> None:
        if group in self._lists.by_group:
            keeper = self._lists.by_group[group]
            keeper.replace_block(row.request.request_id, column, block_id)
        else:
            self._tables.tables[group][row.index, column] = block_id

    def _block(self, row: Row, group: int, column: int) -> int:
        if group in self._lists.by_group:
            return self._lists.by_group[group].table(row.request.request_id)[column]
        return int(self._tables.tables[group][row.index, column])

    def _has_copied(self, row: Row) -> bool:
        """Say whether copies that wait begin or end in a block that the row shares by its run."""
        copied = list(self._store.copy_holds)
        published = int(self._tables.published[row.index])
        return any(
            np.isin(
                self._tables.columns(group.index, row.index)[: published // group.num_units], copied
            ).any()
            for group in self._shape.ordered
        )

    def _is_read_elsewhere(self, block_id: int) -> bool:
        """Say whether others hold a block too, or can find it by its content."""
        if block_id == NULL_BLOCK_ID:
            return False
        is_cached = self._store.seals[block_id] != NO_CONTENT
        return bool(is_cached) or self._is_held_elsewhere(block_id)

    def _is_held_elsewhere(self, block_id: int) -> bool:
        """Say whether somebody holds a block beside one row and the copies that wait."""
        return int(self._store.references[block_id]) - self._store.copy_holds[block_id] > 1
