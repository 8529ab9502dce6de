"""Block tables kept as lists by request, for the kinds whose tables are short: states, encoders.

Beside the dense rows, which every other kind lives in. A request has one state at a time, or as
many blocks as its encoder's tokens fill, so that there is nothing to gain from arrays. Refuses to
know rows: requests go by id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcache.arrays import Ids, Int32Array, index_array, int32_array
from kvcache.core import Reservation
from kvcache.extents.block_store import NO_CONTENT, BlockStore
from kvcache.extents.evictor import Evictor
from kvcache.extents.shape import GroupShape, TreeShape
from kvcache.managers.block_tables import BlockTables
from kvcache.managers.encoder_tables import EncoderTables
from kvcache.managers.state_tables import StateTables


class SingleBlocks:
    """The store as tables by request want a pool: ids in lists, one by one."""

    def __init__(self, store: BlockStore, evictor: Evictor) -> None:
        """Take from `evictor`, count in `store`."""
        self._store = store
        self._evictor = evictor

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        """Hand out blocks, each with one reference; raises OutOfBlocksError, unchanged."""
        taken: list[int] = self._evictor.take(num_blocks).tolist() if num_blocks > 0 else []
        return taken

    def touch(self, block_ids: Sequence[int]) -> None:
        """Take one reference more of each block."""
        if block_ids:
            self._store.touch(index_array(block_ids))

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Give one reference of each block back; the first is evicted first."""
        if block_ids:
            self._store.give_back(index_array(block_ids))

    def num_unheld(self, block_ids: Ids) -> int:
        """Return how many of these distinct blocks nobody holds, null blocks left out."""
        return self._store.num_unheld(index_array(block_ids))

    def num_references(self, block_id: int) -> int:
        """Return a block's references."""
        return int(self._store.references[block_id])

    def can_be_cached(self, block_id: int) -> bool:
        """Say whether a held block has no content and may get one."""
        is_empty = self._store.seals[block_id] == NO_CONTENT
        return bool(is_empty) and self._store.references[block_id] > 0 and block_id != 0


class ListTables:
    """The tables of all such groups, by group: `states` and `encoders` of them."""

    def __init__(self, shape: TreeShape, store: BlockStore, evictor: Evictor) -> None:
        """Make a table keeper for each group that has one."""
        pool = SingleBlocks(store, evictor)
        self.states = {
            group.index: StateTables(group.spec, pool, group.index)
            for group in shape.groups
            if group.spec.num_state_blocks is not None
        }
        encoders = {
            group.index: EncoderTables(group.spec, pool, group.index)
            for group in shape.groups
            if group.spec.keeps_encoder_tokens
        }
        self.by_group: dict[int, BlockTables] = {**self.states, **encoders}

    def table(self, group: int, request_id: str) -> Int32Array:
        """Return a request's table in one of these groups, as a new array."""
        return int32_array(self.by_group[group].table(request_id))

    def capacity_tokens(self, request_id: str) -> int:
        """Return for how many tokens all of these tables are long enough. There is one."""
        return min(tables.capacity_tokens(request_id) for tables in self.by_group.values())

    def next_skip_tokens(self, request_id: str) -> int:
        """Return the computed tokens from which on one more block is skipped. There is a table."""
        return min(tables.next_skip_tokens(request_id) for tables in self.by_group.values())

    def note_own_end(self, request_id: str, reservation: Reservation) -> None:
        """Tell the groups that keep states where a forward ends."""
        for tables in self.states.values():
            tables.note_own_end(request_id, reservation.own_end)

    def take_back(self, request_id: str, num_tokens: int) -> None:
        """The forwards behind so many tokens failed: they left no state at a boundary."""
        for tables in self.states.values():
            tables.take_back_boundaries(request_id, num_tokens // tables.block_size)

    def boundary_blocks(
        self, group: GroupShape, request_id: str, start: int, end: int
    ) -> Int32Array:
        """Return, per unit of `[start, end)`, the state that stands at its end; 0 if none does."""
        ids = np.zeros(end - start, dtype=np.int32)
        tables, length = self.states.get(group.index), group.num_units
        if tables is not None:
            table = tables.table(request_id)
            for column in tables.boundaries(request_id, start // length, end // length):
                ids[(column + 1) * length - 1 - start] = table[column]
        return ids
