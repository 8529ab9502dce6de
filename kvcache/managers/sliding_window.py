"""Sliding window: a token reads itself and the `window - 1` tokens before it.

window 5, block 2      tokens  0 1 | 2 3 | 4 5 | 6 7 | 8      8 reads 4..8: the first two
8 tokens computed              null  null   b5    b9           blocks are skipped
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.blocks.contents import Finder
from kvcache.blocks.pool import BlockPool
from kvcache.blocks.references import NULL_ID
from kvcache.core.kinds.sliding_window import window_tokens
from kvcache.hashing import BlockHash
from kvcache.managers.base import MatchLimits, SingleTypeKVCacheManager
from kvcache.specs import KVCacheSpec, ceil_div


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Hits are the rightmost run of blocks that covers a window; blocks before it are null."""

    def __init__(
        self, spec: KVCacheSpec, pool: BlockPool, group: int, hash_block_size: int
    ) -> None:
        """Manage a window group; raises ConfigurationError for a spec without a window."""
        super().__init__(spec, pool, group, hash_block_size)
        self._window = window_tokens(spec)

    @classmethod
    def longest_match(
        cls,
        find: Finder,
        digests: Sequence[BlockHash],
        spec: KVCacheSpec,
        limits: MatchLimits,
    ) -> list[int]:
        """Search the rightmost run of `max(1, ceil((window - 1) / block_size))` hits and the extra.

        A run is tried from its left: a miss rules out every end behind it, so on a cold cache one
        probe per window suffices, and no position is probed twice. Near the start the run is as
        short as the prefix: then it is the leading run.
        """
        needed = (
            max(1, ceil_div(window_tokens(spec) - 1, spec.block_size)) + limits.num_extra_blocks
        )
        end = limits.max_blocks - limits.max_blocks % limits.alignment_blocks
        found: dict[int, int] = {}
        while end > 0:
            start = position = max(0, end - needed)
            while position < end:
                if position not in found:
                    block_id = find(digests[position])
                    if block_id is None:
                        break
                    found[position] = block_id
                position += 1
            if position == end:
                return [NULL_ID] * start + [found[i] for i in range(start, end)]
            end = position - position % limits.alignment_blocks
        return []

    def next_skip_tokens(self, request_id: str) -> int:
        return (self._first_kept.get(request_id, 0) + 1) * self.block_size + self._window - 1
