"""Requests that share blocks they may still write: forks, and the copies before their writes.

A fork shares every block of its parent, of states the newest one only; all but that and the partly
filled one of each group are never written again. Whoever of the two writes that one first gets a
block of its own, with the bytes copied before the forward writes. So does the last one that holds
it, where what the other made of it can be found by its content. Both ends of a copy are held until
its command has been taken.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvcache.base.arrays import int32_array
from kvcache.base.errors import RequestError
from kvcache.core.columns import (
    COLUMNS,
    FLAGS,
    IS_SHARING,
    NODE,
    REF,
    ColumnStore,
)
from kvcache.core.interface import ForkOrigin, Reservation, TableChange
from kvcache.core.kinds.rule import COLUMN, ENCODER, EXTRA, KIND, SIZE, STATE
from kvcache.core.notifier import Notifier
from kvcache.core.pool import acquire_all, release_all, take_blocks
from kvcache.core.rows import limit_row, replace_block, share
from kvcache.specs import ceil_div

Column = tuple[int, int]
"""Group and column of a table."""


class RowForks:
    """What the rows of one core share, and may write behind so many tokens."""

    def __init__(self, store: ColumnStore, notifier: Notifier) -> None:
        """Know no fork."""
        self._store = store
        self._notifier = notifier
        self.shared: dict[int, dict[Column, int]] = {}
        self.copied: Counter[int] = Counter()

    def require_blocks(self, parent: int, request_id: str, origin: ForkOrigin) -> None:
        """Refuse a parent that counts tokens as computed for which it has no slots."""
        c, num_tokens = self._store.columns, origin.num_tokens
        for g in range(self._store.num_groups):
            columns = 0 if parent < 0 else c.row.item(parent, COLUMNS + 2 * g)
            capacity = (columns - c.group.item(g, EXTRA)) * c.group.item(g, COLUMN)
            if c.group.item(g, KIND) == STATE:  # after accepted drafts, its table does not tell
                has_state = not num_tokens or 0 <= self._newest_column(g, origin) < columns
                capacity = num_tokens if has_state else max(0, capacity)
            if capacity < num_tokens:
                raise RequestError(
                    f"request {request_id} has blocks for {capacity} tokens in group {g}, "
                    f"{num_tokens} computed ones cannot be shared: allocate slots before tokens "
                    "are computed"
                )

    def fork(self, parent: int, child: int, origin: ForkOrigin) -> list[TableChange]:
        """Let row `child`, which is open and has nothing, share what `parent` has for so many
        tokens; return its tables. Of states that is the newest one, which moves to the column where
        the child's own tokens put it, were they its own."""
        c, num_groups, num_tokens = self._store.columns, self._store.num_groups, origin.num_tokens
        ends, columns = np.zeros(num_groups, np.int32), []
        for g, (size, kind) in enumerate(c.group[:, [SIZE, KIND]].tolist()):
            ends[g] = ceil_div(num_tokens, size)
            of_parent = of_child = num_tokens // size
            if kind == STATE and num_tokens:
                of_parent = self._newest_column(g, origin)
                of_child = (num_tokens - 1) // c.group.item(g, COLUMN)
                ends[g] = of_child + 1
            elif kind == ENCODER:  # nobody writes them again
                ends[g] = of_child = c.row.item(parent, COLUMNS + 2 * g)
            columns.append((of_parent, of_child))
        states = int32_array([of_parent for of_parent, _ in columns])
        units = num_tokens // self._store.unit_tokens
        share(self._store.address, parent, child, units, ends, states)
        changes, in_parent, in_child = [], self.shared.get(parent, {}), {}
        for g, (of_parent, of_child) in enumerate(columns):
            table = c.table[child * num_groups + g, : ends[g]].copy()
            if len(table):
                changes.append(TableChange(g, 0, table))
            if of_child < len(table) and table[of_child]:
                before = in_parent.get((g, of_parent), num_tokens)
                in_parent[g, of_parent] = min(before, num_tokens)
                in_child[g, of_child] = num_tokens
        if in_child:
            self._note(parent, in_parent)
            self._note(child, in_child)
        return changes

    def due_copies(self, r: int, reservation: Reservation) -> list[Column]:
        """Return the shared columns that a reserved forward writes; each takes a block."""
        return [
            column
            for column, num_tokens in self.shared.get(r, {}).items()
            if reservation.num_slot_tokens > num_tokens
            and self._is_written(column, reservation)
            and self._is_read_elsewhere(self._block(r, column))
        ]

    def copy(self, r: int, reservation: Reservation, due: list[Column]) -> None:
        """Put a new block into each of these columns; there is room. Columns that the forward may
        write as they are, are shared no more."""
        if r not in self.shared:
            return
        core = self._store.address
        taken = np.empty(len(due), np.int32)
        take_blocks(core, taken)
        for (g, column), new in zip(due, taken.tolist(), strict=True):
            old = self._block(r, (g, column))
            if self._notifier.has_workers:
                acquire_all(core, int32_array([old, new]))
                self.copied.update((old, new))
                self._notifier.copies.add(old, new)
            replace_block(core, r, g, column, new)
        self._note(
            r,
            {
                column: num_tokens
                for column, num_tokens in self.shared[r].items()
                if reservation.num_slot_tokens <= num_tokens
                or self._is_held_elsewhere(self._block(r, column))
            },
        )

    def forget(self, r: int) -> None:
        """The row is about to give its blocks back."""
        self.shared.pop(r, None)

    def release_copied(self) -> bool:
        """The commands of all copies so far have been taken; say whether there were any."""
        if not self.copied:
            return False
        held = int32_array(list(self.copied.elements()))
        self.copied.clear()
        release_all(self._store.address, held)
        return True

    def _newest_column(self, g: int, origin: ForkOrigin) -> int:
        """Return the column of the parent's newest state."""
        newest, tokens = origin.newest_state, self._store.columns.group.item(g, COLUMN)
        return (newest.num_own_tokens - 1) // tokens + newest.num_accepted_drafts

    def _is_written(self, column: Column, reservation: Reservation) -> bool:
        """Say whether a forward behind the fork's tokens writes a column that was shared there."""
        (g, i), group = column, self._store.columns.group
        if group.item(g, KIND) != STATE:
            return True
        return i >= (reservation.own_end - 1) // group.item(g, COLUMN)

    def _note(self, r: int, columns: dict[Column, int]) -> None:
        row = self._store.columns.row
        if columns:
            self.shared[r] = columns
            row[r, FLAGS] |= IS_SHARING
        else:
            self.shared.pop(r, None)
            row[r, FLAGS] &= ~IS_SHARING
        limit_row(self._store.address, r)

    def _block(self, r: int, column: Column) -> int:
        g, i = column
        return self._store.columns.table.item(r * self._store.num_groups + g, i)

    def _is_read_elsewhere(self, b: int) -> bool:
        """Say whether others hold a block too, or can find it by its content."""
        is_cached = self._store.columns.block.item(b, NODE) != 0
        return b != 0 and (is_cached or self._is_held_elsewhere(b))

    def _is_held_elsewhere(self, b: int) -> bool:
        """Say whether somebody holds a block beside one row and the copies that wait."""
        return self._store.columns.block.item(b, REF) - self.copied[b] > 1
