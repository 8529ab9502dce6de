"""Mamba and other recurrences: a token reads the state that all tokens before it have left.

    mode none                    [s0 | s1 .. sk]     one state, and one per draft token

    mode align, block 4          column i stands for the tokens [4i, 4i + 4)
    10 tokens                    [null null s2 | s3 .. ]   the state after them is in column 2
    then 9 more in one chunk     [null null s2 null s4 | s5 .. ]   reads column 2, writes column 4

The state after `n` own tokens of a forward is in column `(n - 1) // block_size`; the states after
its drafts are in the next columns. Drafts and lookahead need no columns for their tokens. A forward
writes no other state, so the columns that a chunk passes stay null. Only a column whose last token
ends a forward has the state at its boundary, and only such a column can be hit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.core.kinds.rule import COLUMN, EXTRA, NEVER
from kvcache.core.machine import inner


@inner
def longest(is_cached: Any, blocks: Any, limit: int, step: int) -> int:
    """Return the end of the longest hit, in blocks: after the rightmost cached block."""
    end = limit - limit % step
    while end > 0 and not is_cached(blocks, end - 1):
        end -= step
    return end


@inner
def first_read(end: int) -> int:
    """Return the first block that a hit with this end reads: the last one."""
    return max(np.int64(0), end - 1)


@inner
def num_skipped(rule: Any, num_computed: int) -> int:
    """Return how many leading blocks no token after `num_computed` reads."""
    return max(np.int64(0), column_of(rule, num_computed))


@inner
def next_skip(rule: Any, num_kept: int) -> int:
    """Return the number of computed tokens at which the next block after `num_kept` is skipped."""
    return min(np.int64(NEVER), (num_kept + 1) * np.int64(rule[COLUMN]) + 1)


@inner
def column_of(rule: Any, num_tokens: int) -> int:
    """Return the column of the state after `num_tokens` tokens, -1 for the initial state."""
    return (np.int64(num_tokens) - 1) // np.int64(rule[COLUMN])


@inner
def num_columns(rule: Any, num_own: int) -> int:
    """Return the length of a table when a forward ends after `num_own` own tokens."""
    return column_of(rule, num_own) + 1 + rule[EXTRA]
