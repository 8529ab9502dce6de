"""Sliding window: a token reads itself and the `window - 1` tokens before it.

window 5, block 2      tokens  0 1 | 2 3 | 4 5 | 6 7 | 8      8 reads 4..8: the first two
8 tokens computed              null  null   b5    b9           blocks are skipped
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.core.kinds.rule import NEVER, SIZE, SPAN
from kvcache.core.machine import inner


@inner
def longest(rule: Any, is_cached: Any, blocks: Any, limit: int, step: int, extra: int) -> int:
    """Return the end of the longest hit, in blocks: after the rightmost run that covers a window.

    Each run is checked from its right end; a miss rules out every end after it. Near the start of
    the prompt, the run is all blocks from block 0 on.
    """
    end = limit - limit % step
    needed = _num_blocks(rule) + extra
    while end > 0:
        i = end - 1
        start = max(np.int64(0), end - needed)
        while i >= start and is_cached(blocks, i):
            i -= 1
        if i < start:
            return end
        end = i - i % step
    return end


@inner
def first_read(rule: Any, end: int, extra: int) -> int:
    """Return the first block that a hit with this end reads."""
    return max(np.int64(0), end - _num_blocks(rule) - extra)


@inner
def num_skipped(rule: Any, num_computed: int) -> int:
    """Return how many leading blocks no token after `num_computed` reads."""
    return max(np.int64(0), num_computed - rule[SPAN] + 1) // rule[SIZE]


@inner
def next_skip(rule: Any, num_kept: int) -> int:
    """Return the number of computed tokens at which the next block after `num_kept` is skipped."""
    return min(np.int64(NEVER), (num_kept + 1) * rule[SIZE] + rule[SPAN] - 1)


@inner
def _num_blocks(rule: Any) -> int:
    """Return how many cached blocks a hit must end with."""
    return max(np.int64(1), (np.int64(rule[SPAN]) - 1 + rule[SIZE] - 1) // rule[SIZE])
