"""Forks: requests that share blocks, and the copies that are made before one of them writes.

A fork shares all blocks of its parent, but only the newest of its states. Only that state, and the
partly filled block of each group, can be written again. The first request that writes such a block
gets a block of its own, and the bytes are copied before its forward. The last request that
references it gets one, too, if the block can be hit with the content that the other request made of
it. FORK references hold both ends of a copy until its command is taken.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvcache.base.arrays import int32_array
from kvcache.base.errors import RequestError
from kvcache.core import NewestState, TableChange
from kvcache.core.columns import ColumnStore
from kvcache.core.kinds.rule import COLUMN, ENCODER, EXTRA, KIND, SIZE, STATE
from kvcache.core.names import *
from kvcache.core.notifier import Notifier
from kvcache.core.pool import acquire_all, release_all, take_blocks
from kvcache.core.rows import note_row_limits, replace_block, share_row
from kvcache.specs import ceil_div

Column = tuple[int, int]
"""Group and column of a table."""


class RowForks:
    """The columns that each row shares and may write, each with the number of tokens after which it
    would be written; and the copies that wait."""

    def __init__(self, store: ColumnStore, notifier: Notifier) -> None:
        """Start without forks."""
        self._store = store
        self._notifier = notifier
        self.shared: dict[int, dict[Column, int]] = {}
        self.copied: Counter[int] = Counter()

    def require_blocks(
        self, parent: int, request_id: str, num_tokens: int, newest: NewestState
    ) -> None:
        """Raise RequestError if the parent lacks slots for tokens that it counts as computed."""
        c = self._store.columns
        for g in range(self._store.num_groups):
            columns = 0 if parent < 0 else c.row.item(parent, COLUMNS + 2 * g)
            capacity = (columns - c.group.item(g, EXTRA)) * c.group.item(g, COLUMN)
            if c.group.item(g, KIND) == STATE:  # its table does not count accepted drafts
                has_state = not num_tokens or 0 <= self._newest_column(g, newest) < columns
                capacity = num_tokens if has_state else max(0, capacity)
            if capacity < num_tokens:
                raise RequestError(
                    f"request {request_id} has blocks for {capacity} tokens in group {g}, "
                    f"{num_tokens} computed ones cannot be shared: allocate slots before tokens "
                    "are computed"
                )

    def fork(
        self, parent: int, child: int, num_tokens: int, newest: NewestState
    ) -> list[TableChange]:
        """Let row `child`, which is open and empty, share the parent's blocks of
        `num_tokens` tokens. Return its tables. A state moves to the column that it would
        have if the child had computed it."""
        c, num_groups = self._store.columns, self._store.num_groups
        ends, columns = np.zeros(num_groups, np.int32), []
        for g, (size, kind) in enumerate(c.group[:, [SIZE, KIND]].tolist()):
            ends[g] = ceil_div(num_tokens, size)
            of_parent = of_child = num_tokens // size
            if kind == STATE and num_tokens:
                of_parent = self._newest_column(g, newest)
                of_child = (num_tokens - 1) // c.group.item(g, COLUMN)
                ends[g] = of_child + 1
            elif kind == ENCODER:  # they are never written again
                ends[g] = of_child = c.row.item(parent, COLUMNS + 2 * g)
            columns.append((of_parent, of_child))
        states = int32_array([of_parent for of_parent, _ in columns])
        units = num_tokens // self._store.unit_tokens
        share_row(self._store.address, parent, child, units, ends, states)
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

    def due_copies(self, r: int, slot_tokens: int) -> list[Column]:
        """Return the shared columns that a forward with `slot_tokens` slots writes. Each needs a
        block."""
        return [
            column
            for column, num_tokens in self.shared.get(r, {}).items()
            if slot_tokens > num_tokens
            and self._is_written(r, column)
            and self._is_read_elsewhere(self._block(r, column))
        ]

    def copy(self, r: int, slot_tokens: int, due: list[Column]) -> None:
        """Put a new block into each of these columns; enough are free. Columns that the row may
        write without a copy are no longer shared."""
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
                if slot_tokens <= num_tokens or self._is_held_elsewhere(self._block(r, column))
            },
        )

    def release_copied(self) -> bool:
        """Release both ends of copies whose commands have been taken; return whether any were."""
        if not self.copied:
            return False
        held = int32_array(list(self.copied.elements()))
        self.copied.clear()
        release_all(self._store.address, held)
        return True

    def _newest_column(self, g: int, newest: NewestState) -> int:
        """Return the parent's column with its newest state."""
        tokens = self._store.columns.group.item(g, COLUMN)
        return (newest.num_own_tokens - 1) // tokens + newest.num_accepted_drafts

    def _is_written(self, r: int, column: Column) -> bool:
        """Return whether a forward that goes beyond the shared tokens writes this column."""
        (g, i), c = column, self._store.columns
        if c.group.item(g, KIND) != STATE:
            return True
        return i >= (c.forward.item(r, OWN_END) - 1) // c.group.item(g, COLUMN)

    def _note(self, r: int, columns: dict[Column, int]) -> None:
        row = self._store.columns.row
        if columns:
            self.shared[r] = columns
            row[r, FLAGS] |= IS_SHARING
        else:
            self.shared.pop(r, None)
            row[r, FLAGS] &= ~IS_SHARING
        note_row_limits(self._store.address, r)

    def _block(self, r: int, column: Column) -> int:
        g, i = column
        return self._store.columns.table.item(r * self._store.num_groups + g, i)

    def _is_read_elsewhere(self, b: int) -> bool:
        """Return whether another request references a block or can hit it."""
        is_cached = self._store.columns.block.item(b, NODE) != 0
        return b != 0 and (is_cached or self._is_held_elsewhere(b))

    def _is_held_elsewhere(self, b: int) -> bool:
        """Return whether a block has more references than one row's and those of waiting copies."""
        return self._store.columns.block.item(b, REF) - self.copied[b] > 1
