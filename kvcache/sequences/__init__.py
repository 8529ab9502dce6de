"""Blocks for engines that manage sequences themselves: beam search, parallel sampling, swapping.

allocator.py         allocate, fork, copy, swap       sequence_cache.py  what is cached and computed
block.py             a block as a sequence sees it    held_blocks.py     physical blocks
computed_tracker.py  cached tokens per sequence       access_order.py    who is evicted first
access_tracker.py    accesses per sequence
"""

from kvcache.sequences.access_tracker import LastAccessBlocksTracker
from kvcache.sequences.allocator import PrefixCachingBlockAllocator
from kvcache.sequences.allocator_statistics import AllocatorStatistics
from kvcache.sequences.block import ExtraHash, PrefixCachingBlock
from kvcache.sequences.block_tracker import BlockTracker
from kvcache.sequences.computed_tracker import ComputedBlocksTracker, TrackedSequence

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
