"""Statistics of a sequence allocator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AllocatorStatistics:
    """Statistics at one moment. Queried and hit blocks are counted since the last reset, evicted
    and merged ones since the start.

    `num_merged_blocks` were replaced by a block of equal content, which saved `merged_bytes`.
    `num_duplicate_blocks` are held now although another block has their content: merging is off.
    """

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_evictions: int
    num_queried_blocks: int
    num_hit_blocks: int
    num_pending_copies: int
    num_merged_blocks: int
    merged_bytes: int
    num_duplicate_blocks: int
    duplicate_bytes: int
