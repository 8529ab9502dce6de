"""Chunked local attention: a token reads itself and the tokens before it in its own chunk.

chunk 8, block 4       tokens  0..3 | 4..7 | 8..11 | 12..15      12 reads 8..12: the first
12 tokens computed             null   null    b7       b3        chunk is skipped

Chunks before the last one count as computed whether or not they are cached. So EAGLE cannot be
used: if a hit that ends at the begin of a chunk dropped its last block, it would end in a chunk
that was never looked up.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.core.kinds.rule import NEVER, SIZE, SPAN
from kvcache.core.machine import inner


@inner
def longest(rule: Any, is_cached: Any, blocks: Any, limit: int, step: int) -> int:
    """Return the end of the longest hit, in blocks: its last chunk's blocks before the first miss.

    If the chunk has no multiple of `step` left, the search continues in the previous chunk.
    """
    end = limit - limit % step
    while end > 0:
        start = first_read(rule, end)
        i = start
        while i < end and is_cached(blocks, i):
            i += 1
        end = i - i % step
        if end >= start:
            return end
    return end


@inner
def first_read(rule: Any, end: int) -> int:
    """Return the first block that a hit with this end reads."""
    return end - end % (rule[SPAN] // rule[SIZE])


@inner
def num_skipped(rule: Any, num_computed: int) -> int:
    """Return how many leading blocks no token after `num_computed` reads."""
    return num_computed // rule[SPAN] * rule[SPAN] // rule[SIZE]


@inner
def next_skip(rule: Any, num_kept: int) -> int:
    """Return the number of computed tokens at which the next block after `num_kept` is skipped."""
    return min(np.int64(NEVER), (num_kept * rule[SIZE] // rule[SPAN] + 1) * rule[SPAN])
