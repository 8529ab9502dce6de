"""Chunked local attention: a token reads itself and the tokens before it in its own chunk.

chunk 8, block 4       tokens  0..3 | 4..7 | 8..11 | 12..15      12 reads 8..12: the first
12 tokens computed             null   null    b7       b3        chunk is skipped
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.blocks.contents import Finder
from kvcache.blocks.pool import BlockPool
from kvcache.blocks.references import NULL_ID
from kvcache.core.kinds.chunked_local_attention import chunk_tokens
from kvcache.hashing import BlockHash
from kvcache.managers.base import MatchLimits, SingleTypeKVCacheManager
from kvcache.specs import KVCacheSpec


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """Hits are the blocks from the start of the last chunk until the first miss.

    Chunks before it count as computed whether or not they are cached.
    """

    def __init__(
        self, spec: KVCacheSpec, pool: BlockPool, group: int, hash_block_size: int
    ) -> None:
        """Manage a chunked group; raises ConfigurationError for a spec without chunks."""
        super().__init__(spec, pool, group, hash_block_size)
        self._chunk = chunk_tokens(spec)

    @classmethod
    def longest_match(
        cls,
        find: Finder,
        digests: Sequence[BlockHash],
        spec: KVCacheSpec,
        limits: MatchLimits,
    ) -> list[int]:
        """Search the chunk that holds the first token behind the limit.

        What is found must end at a multiple of the alignment. Where no such end is left in the
        chunk, the search goes on in the one that holds the next lower multiple.
        """
        chunk_blocks = chunk_tokens(spec) // spec.block_size
        end = limits.max_blocks - limits.max_blocks % limits.alignment_blocks
        while end > 0:
            start = end - end % chunk_blocks
            found: list[int] = []
            for digest in digests[start:end]:
                block_id = find(digest)
                if block_id is None:
                    break
                found.append(block_id)
            reached = start + len(found)
            end = reached - reached % limits.alignment_blocks
            if end >= start:
                return [NULL_ID] * start + found[: end - start]
        return []

    def next_skip_tokens(self, request_id: str) -> int:
        kept_tokens = self._first_kept.get(request_id, 0) * self.block_size
        return (kept_tokens // self._chunk + 1) * self._chunk
