"""Block tables where a request keeps states: the newest ones, each in the column of its tokens.

Under the manager of states, and under every core that keeps such tables by request.

    mode none                    [s0 | s1 .. sk]     one state, and one per draft token

    mode align, block 4          column i stands for the tokens [4i, 4i + 4)
    10 tokens                    [null null s2 | s3 .. ]   the state after them is in column 2
    then 9 more in one chunk     [null null s2 null s4 | s5 .. ]   is read from 2, kept in 4

The state after `n` own tokens of a forward is in column `c(n) = (n - 1) // block_size`, those after
its drafts in the columns behind; drafts and lookahead need no columns for their tokens. A forward
writes no state but these, so that the columns a chunk passes stay null, and only a column whose
last token ends a forward holds the state at its boundary: that one can be hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.arrays import Ids, index_array
from kvcache.core import ForkOrigin, NewestState, Reservation
from kvcache.errors import ConfigurationError
from kvcache.ids import NULL_BLOCK_ID as NULL_ID
from kvcache.managers.block_tables import (
    NEVER,
    UNBOUNDED_TOKENS,
    BlockTables,
    SharedColumn,
    TablePool,
    check_request_id,
    check_reservation,
)
from kvcache.specs import KVCacheSpec, MambaSpec, ceil_div


@dataclass(frozen=True, slots=True)
class _Columns:
    """What a table gets: columns up to `total`, a block in each of `kept`, null in the others.

    Blocks in the columns `spare` are of no use there: they move to where they are.
    """

    total: int
    kept: list[int]
    spare: list[int]


class StateColumns(BlockTables):
    """What tables of states do otherwise than tables of tokens.

    `_boundaries` are the columns, by request, whose last token ended a forward.
    """

    _is_aligned: bool
    _boundaries: dict[str, set[int]]

    def keep_states(self) -> None:
        """Set up columns of states; raises ConfigurationError for a spec without states."""
        spec = self.spec
        if not isinstance(spec, MambaSpec):
            raise ConfigurationError(
                f"a spec of kind {spec.kind!r} has no states: use it with its own manager"
            )
        self._is_aligned = spec.mamba_cache_mode == "align"
        self.tokens_per_column = spec.block_size if self._is_aligned else UNBOUNDED_TOKENS
        self.num_extra_columns = spec.num_speculative_blocks
        self._boundaries = {}

    def next_skip_tokens(self, request_id: str) -> int:
        if not self._is_aligned:
            return NEVER
        return (self._first_kept.get(request_id, 0) + 1) * self.block_size + 1

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        reservation: Reservation,
        new_computed_blocks: Ids = (),
    ) -> int:
        """Return how many free blocks a reservation takes, a hit that is free included."""
        check_request_id(request_id)
        check_reservation(reservation)
        new_computed_blocks = self._as_ids(new_computed_blocks)
        table = self._tables.get(request_id)
        if table is None:
            table = index_array(new_computed_blocks).tolist()
        columns = self._columns(table, reservation)
        needed = max(0, len(columns.kept) - len(columns.spare))
        if len(new_computed_blocks):
            skipped = self.num_skipped_blocks(reservation.num_computed_tokens)
            needed += self._blocks.num_unheld(new_computed_blocks[skipped:])
        return needed

    def allocate_new_blocks(self, request_id: str, reservation: Reservation) -> list[int]:
        """Extend a request's table as reserved; return what entered it, nulls included.

        Blocks that a long forward passes by move to the columns it writes: so a request holds no
        more states than its spec says.

        Raises:
            OutOfBlocksError: too few are free; nothing was changed.
        """
        check_request_id(request_id)
        check_reservation(reservation)
        table = self._tables.get(request_id, [])
        columns = self._columns(table, reservation)
        spare = columns.spare[: len(columns.kept)]
        block_ids = [table[column] for column in spare]
        block_ids += self._blocks.get_new_blocks(len(columns.kept) - len(spare))
        for column in spare:
            table[column] = NULL_ID
        num_before = len(table)
        table += [NULL_ID] * (columns.total - num_before)
        for column, block_id in zip(columns.kept, block_ids, strict=True):
            table[column] = block_id
        self._tables[request_id] = table
        return table[num_before:]

    def fork(self, parent_id: str, child_id: str, origin: ForkOrigin) -> SharedColumn | None:
        """Let a child share the newest state only: it reads no other.

        The state moves to the column where the child's own tokens put it, were they its own.
        """
        table = self._tables.get(parent_id, [])
        if not origin.num_tokens:
            return super().fork(parent_id, child_id, origin)
        newest = origin.newest_state
        of_parent = self._column(newest.num_own_tokens) + newest.num_accepted_drafts
        of_child = self._column(origin.num_tokens)
        self._share(parent_id, child_id, [NULL_ID] * of_child + [table[of_parent]])
        self._first_kept[child_id] = of_child
        self.note_cached(child_id, origin.num_tokens // self.block_size)
        return SharedColumn(of_parent, of_child)

    def writes_column(self, column: int, reservation: Reservation) -> bool:
        return column >= self._column(reservation.own_end)

    def forget_request(self, request_id: str) -> list[int]:
        self._boundaries.pop(request_id, None)
        return super().forget_request(request_id)

    def note_own_end(self, request_id: str, num_own_tokens: int) -> None:
        """Note the column whose boundary the forward ends at, if it does."""
        if self._is_aligned and num_own_tokens and num_own_tokens % self.block_size == 0:
            first_kept = self._first_kept.get(request_id, 0)
            kept = {c for c in self._boundaries.get(request_id, ()) if c >= first_kept}
            self._boundaries[request_id] = kept | {self._column(num_own_tokens)}

    def take_back_boundaries(self, request_id: str, num_columns: int) -> None:
        """The forwards that ended in columns from `num_columns` on failed: no state is there."""
        if request_id in self._boundaries:
            kept = {c for c in self._boundaries[request_id] if c < num_columns}
            self._boundaries[request_id] = kept

    def boundaries(self, request_id: str, start: int, end: int) -> list[int]:
        """Return the columns in `[start, end)` that hold the state at their boundary."""
        table = self._tables.get(request_id, [])
        return [
            column
            for column in sorted(self._boundaries.get(request_id, ()))
            if start <= column < min(end, len(table)) and self._blocks.can_be_cached(table[column])
        ]

    def _column(self, num_tokens: int) -> int:
        """Return the column of the state after so many tokens; -1 for the state before any."""
        return (num_tokens - 1) // self.tokens_per_column

    def _columns(self, table: Sequence[int], reservation: Reservation) -> _Columns:
        """Say how a table grows; `table` is the request's, or the hit that it adopts."""
        held = len(table)
        total = ceil_div(reservation.own_end, self.tokens_per_column) + self.num_extra_columns
        if total <= held:
            return _Columns(held, [], [])
        written = self._column(reservation.own_end)
        kept = list(range(max(held, written), total))
        read = self._column(reservation.num_computed_tokens)
        if held <= read < written:
            # Its state comes from elsewhere, with external tokens.
            kept.insert(0, read)
        return _Columns(total, kept, self._spare_columns(table, reservation.newest_state, written))

    def _spare_columns(
        self, table: Sequence[int], newest: NewestState | None, written: int
    ) -> list[int]:
        """Return columns before `written` whose states the forward does not read."""
        if newest is None:
            return []
        last = self._column(newest.num_own_tokens)
        if written <= last + 1:
            return []
        read = last + newest.num_accepted_drafts
        return [
            column
            for column, block_id in enumerate(table[:written])
            if block_id and column != read and self._is_own_scratch(block_id)
        ]

    def _is_own_scratch(self, block_id: int) -> bool:
        """Say whether nobody else holds a block or could hit it."""
        return self._blocks.num_references(block_id) == 1 and self._blocks.can_be_cached(block_id)


class StateTables(StateColumns):
    """Tables of states on any pool, without a word of what is cached."""

    def __init__(self, spec: KVCacheSpec, pool: TablePool, group: int) -> None:
        """Keep the tables of a state group; raises ConfigurationError for one without states."""
        super().__init__(spec, pool, group)
        self.keep_states()
