"""What a store says about itself at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoreStatistics:
    """Statistics of a `PagedCacheStore`; counters since it was made.

    Blocks without the null block: every one is in use by an open cache, or cached and evictable, or
    free and empty. `num_asked_tokens` were opened with, `num_hit_tokens` of these were not computed
    again. `num_computed_tokens`: of which keys and values were written.
    """

    num_blocks: int
    num_blocks_in_use: int
    num_blocks_cached: int
    num_evictions: int
    num_open_caches: int
    num_rows: int
    num_asked_tokens: int
    num_hit_tokens: int
    num_computed_tokens: int
    num_copied_blocks: int
