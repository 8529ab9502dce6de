"""Full attention (MLA too): every token reads all tokens before it, so no block is ever skipped."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.core.kinds.rule import NEVER
from kvcache.core.machine import inner


@inner
def longest(rule: Any, is_cached: Any, blocks: Any, limit: int, step: int) -> int:
    """Return the end of the longest hit, in blocks: all blocks before the first miss."""
    end = np.int64(0)
    while end < limit and is_cached(blocks, end):
        end += 1
    return end - end % step


@inner
def first_read(rule: Any, end: int) -> int:
    """Return the first block that a hit with this end reads: block 0."""
    return np.int64(0)


@inner
def num_skipped(rule: Any, num_computed: int) -> int:
    """Return how many leading blocks no token after `num_computed` reads: none."""
    return np.int64(0)


@inner
def next_skip(rule: Any, num_kept: int) -> int:
    """Return the number of computed tokens at which the next block is skipped: never."""
    return np.int64(NEVER)
