"""What a sequence allocator says about itself at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AllocatorStatistics:
    """Statistics at one moment; queried, hit and evicted blocks are counted since the start (the
    first two since the last reset), merged ones since the start.

    `num_merged_blocks` gave way to a block of equal content, which saved `merged_bytes`;
    `num_duplicate_blocks` are held now, although another block has their content: merging is off.
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
