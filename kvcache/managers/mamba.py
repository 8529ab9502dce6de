"""Mamba and other recurrences, cached: which states can be hit.

Tables of states are kept as `StateColumns` says; here is what of them is cached and found again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvcache.blocks.contents import Finder
from kvcache.blocks.pool import BlockPool
from kvcache.blocks.references import NULL_ID
from kvcache.core import Reservation
from kvcache.hashing import BlockHash
from kvcache.managers.base import MatchLimits, SingleTypeKVCacheManager
from kvcache.managers.block_tables import check_request_id
from kvcache.managers.run_maker import Part
from kvcache.managers.state_tables import StateColumns
from kvcache.specs import KVCacheSpec


class MambaManager(StateColumns, SingleTypeKVCacheManager):
    """Hits are the rightmost column that holds a state at its boundary; all before are null.

    No EAGLE: there is no state in front of the last one to fall back on. `_boundaries` are the
    columns, by request, whose last token ended a forward.
    """

    hits_open_step: ClassVar[bool] = False
    """No: a forward reads the states it begins with before any row of it writes one."""

    caches_every_block: ClassVar[bool] = False
    """No: only columns whose last token ended a forward hold a state."""

    def __init__(
        self, spec: KVCacheSpec, pool: BlockPool, group: int, hash_block_size: int
    ) -> None:
        """Manage a state group; raises ConfigurationError for a spec without states."""
        super().__init__(spec, pool, group, hash_block_size)
        self.keep_states()

    @classmethod
    def longest_match(
        cls,
        find: Finder,
        digests: Sequence[BlockHash],
        spec: KVCacheSpec,
        limits: MatchLimits,
    ) -> list[int]:
        step = limits.alignment_blocks
        for end in range(limits.max_blocks - limits.max_blocks % step, 0, -step):
            block_id = find(digests[end - 1])
            if block_id is not None:
                return [NULL_ID] * (end - 1) + [block_id]
        return []

    def allocate_new_blocks(self, request_id: str, reservation: Reservation) -> list[int]:
        check_request_id(request_id)
        self._leading.pop(request_id, None)  # states move from column to column
        return super().allocate_new_blocks(request_id, reservation)

    def take_back(self, request_id: str, num_cached_blocks: int) -> None:
        super().take_back(request_id, num_cached_blocks)
        self.take_back_boundaries(request_id, num_cached_blocks)

    def _uncached_parts(
        self, request_id: str, table: Sequence[int], start: int, end: int
    ) -> Sequence[Part]:
        return [Part(column, column + 1) for column in self.boundaries(request_id, start, end)]
