"""Full attention (MLA too): every token reads all tokens before it, so no block is ever skipped."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.core.kinds.rule import NEVER
from kvcache.core.machine import inner


@inner
def longest(rule: Any, is_cached: Any, blocks: Any, limit: int, step: int) -> int:
    """Return the end of the longest hit, in blocks: they are there from the left on."""
    end = np.int64(0)
    while end < limit and is_cached(blocks, end):
        end += 1
    return end - end % step


@inner
def first_read(rule: Any, end: int) -> int:
    """Return the first block that is read of a hit that ends so: all are."""
    return np.int64(0)


@inner
def num_skipped(rule: Any, num_computed: int) -> int:
    """Return how many leading blocks nobody reads after so many computed tokens: none."""
    return np.int64(0)


@inner
def next_skip(rule: Any, num_kept: int) -> int:
    """Return the computed tokens from which on one more block is skipped."""
    return np.int64(NEVER)
