"""Cross attention: decoder tokens read the keys and values of an encoder's tokens.

They belong to one request alone: its table is allocated whole when it is admitted, and neither
grows nor shrinks until it is freed. Nothing of it is ever cached.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.blocks.contents import Finder
from kvcache.blocks.pool import BlockPool
from kvcache.hashing import BlockHash
from kvcache.managers.base import MatchLimits, SingleTypeKVCacheManager
from kvcache.managers.encoder_tables import EncoderColumns
from kvcache.specs import KVCacheSpec


class CrossAttentionManager(EncoderColumns, SingleTypeKVCacheManager):
    """Tables of as many blocks as a request's encoder tokens fill, none where it has none."""

    def __init__(
        self, spec: KVCacheSpec, pool: BlockPool, group: int, hash_block_size: int
    ) -> None:
        """Manage a cross-attention group."""
        super().__init__(spec, pool, group, hash_block_size)
        self.keep_encoder_tokens()

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
