"""Blocks for engines that manage sequences themselves: beam search, parallel sampling, swapping.

allocator.py         allocate, fork, copy, swap       sequence_cache.py  cached and computed tokens
block.py             a block as a sequence sees it    held_blocks.py     physical blocks
computed_tracker.py  cached tokens and accesses per sequence
"""

from kvcache.sequences.allocator import PrefixCachingBlockAllocator
from kvcache.sequences.block import ExtraHash, PrefixCachingBlock
from kvcache.sequences.computed_tracker import (
    ComputedBlocksTracker,
    LastAccessBlocksTracker,
    TrackedSequence,
)
from kvcache.sequences.held_blocks import BlockTracker
from kvcache.sequences.sequence_cache import AllocatorStatistics

__all__ = [
    "AllocatorStatistics",
    "BlockTracker",
    "ComputedBlocksTracker",
    "ExtraHash",
    "LastAccessBlocksTracker",
    "PrefixCachingBlock",
    "PrefixCachingBlockAllocator",
    "TrackedSequence",
]
