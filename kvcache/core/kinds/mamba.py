"""Mamba and other recurrences: a token reads the state that all tokens before it have left.

    mode none                    [s0 | s1 .. sk]     one state, and one per draft token

    mode align, block 4          column i stands for the tokens [4i, 4i + 4)
    10 tokens                    [null null s2 | s3 .. ]   the state after them is in column 2
    then 9 more in one chunk     [null null s2 null s4 | s5 .. ]   is read from 2, kept in 4

The state after `n` own tokens of a forward is in column `(n - 1) // block_size`, those after its
drafts in the columns behind; drafts and lookahead need no columns for their tokens. A forward
writes no state but these, so that the columns a chunk passes stay null, and only a column whose
last token ends a forward holds the state at its boundary: that one can be hit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.core.kinds.rule import COLUMN, EXTRA, NEVER
from kvcache.core.machine import inner


@inner
def longest(is_cached: Any, blocks: Any, limit: int, step: int) -> int:
    """Return the end of the longest hit, in blocks: the rightmost one that is there."""
    end = limit - limit % step
    while end > 0 and not is_cached(blocks, end - 1):
        end -= step
    return end


@inner
def first_read(end: int) -> int:
    """Return the first block that is read of a hit that ends so: the last one."""
    return max(np.int64(0), end - 1)


@inner
def num_skipped(rule: Any, num_computed: int) -> int:
    """Return how many leading blocks nobody reads after so many computed tokens."""
    return max(np.int64(0), column_of(rule, num_computed))


@inner
def next_skip(rule: Any, num_kept: int) -> int:
    """Return the computed tokens from which on one more block is skipped."""
    return min(np.int64(NEVER), (num_kept + 1) * np.int64(rule[COLUMN]) + 1)


@inner
def column_of(rule: Any, num_tokens: int) -> int:
    """Return the column of the state after so many tokens; -1 for the state before any."""
    return (np.int64(num_tokens) - 1) // np.int64(rule[COLUMN])


@inner
def num_columns(rule: Any, num_own: int) -> int:
    """Return how long a table is when a forward ends after so many own tokens."""
    return column_of(rule, num_own) + 1 + rule[EXTRA]
