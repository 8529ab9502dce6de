"""Cross attention: decoder tokens read the keys and values of an encoder's tokens.

They belong to one request alone: its table is allocated whole when it is admitted, and neither
grows nor shrinks until it is freed. Nothing of it is ever cached.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.blocks.contents import Finder
from kvcache.blocks.pool import BlockPool
from kvcache.core import ForkOrigin, Reservation
from kvcache.hashing import BlockHash
from kvcache.managers.base import (
    UNBOUNDED_TOKENS,
    MatchLimits,
    SharedColumn,
    SingleTypeKVCacheManager,
)
from kvcache.specs import KVCacheSpec, ceil_div


class CrossAttentionManager(SingleTypeKVCacheManager):
    """Tables of as many blocks as a request's encoder tokens fill, none where it has none."""

    def __init__(
        self, spec: KVCacheSpec, pool: BlockPool, group: int, hash_block_size: int
    ) -> None:
        """Manage a cross-attention group."""
        super().__init__(spec, pool, group, hash_block_size)
        # However many tokens the request has itself, they want no column: one less than one.
        self.tokens_per_column = UNBOUNDED_TOKENS
        self.num_extra_columns = -1

    @classmethod
    def longest_match(
        cls,
        find: Finder,
        digests: Sequence[BlockHash],
        spec: KVCacheSpec,
        limits: MatchLimits,
    ) -> list[int]:
        """Return nothing: what an encoder made of one input is of no use for another."""
        return []

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        reservation: Reservation,
        new_computed_blocks: Sequence[int] = (),
    ) -> int:
        """Return what the encoder tokens of a request take that has no table yet."""
        if request_id in self._tables:
            return 0
        return ceil_div(reservation.num_encoder_tokens, self.block_size)

    def save_new_computed_blocks(
        self, request_id: str, block_ids: Sequence[int], num_computed_tokens: int = 0
    ) -> None:
        """Adopt nothing: there is no hit."""

    def allocate_new_blocks(self, request_id: str, reservation: Reservation) -> list[int]:
        """Make the table of a request that has none yet; return its blocks.

        Raises:
            OutOfBlocksError: too few are free; nothing was changed.
        """
        if request_id in self._tables:
            return []
        num_blocks = ceil_div(reservation.num_encoder_tokens, self.block_size)
        table = self._pool.get_new_blocks(num_blocks)
        self._tables[request_id] = table
        return list(table)

    def fork(self, parent_id: str, child_id: str, origin: ForkOrigin) -> SharedColumn | None:
        """Let a child share all of the encoder's tokens: nobody writes them again."""
        self._share(parent_id, child_id, list(self._tables.get(parent_id, ())))
        return None

    def get_num_common_prefix_blocks(self, request_id: str, num_running_requests: int) -> int:
        """Return 0: nothing is shared."""
        return 0
