"""Rows that fill a unit: which of them grow their own leaf by it, and which are to be looked at."""

from __future__ import annotations

import numpy as np

from kvcache.extents.row_columns import (
    CACHED,
    FILLED,
    NUM_FOUND,
    NUM_LIMITS,
    PLACES,
    PUBLISHED,
    ROWS,
    gather_units,
)

UNIT_TOKENS, MAX_UNITS = 4, 3


def test_rows_with_more_units_shared_blocks_or_full_tails_are_marked() -> None:
    # Four rows have published two units and fill the third, whose blocks are 13, 23, 33 and 43.
    table = np.array([[10 * row + k for k in (1, 2, 3, 4)] for row in (1, 2, 3, 4)], dtype=np.int32)
    figures = np.zeros((2 + NUM_LIMITS, 4), dtype=np.int64)
    figures[PUBLISHED] = 2
    references = np.ones(50, dtype=np.int32)
    references[23] = 2  # a copy holds it
    tail_counts = np.array([0, 1, 2, MAX_UNITS], dtype=np.intp)
    found = np.zeros((NUM_FOUND, 4), dtype=np.int64)
    found[PLACES], found[ROWS], found[FILLED] = (3, 2, 1, 0), range(4), range(4)
    found[CACHED] = 3 * UNIT_TOKENS
    found[CACHED, 2] = 4 * UNIT_TOKENS  # fills the fourth, too
    growing, blocks = np.zeros((3, 4), dtype=np.intp), np.zeros((1, 4), dtype=np.intp)
    marks = np.zeros((2, 4), dtype=np.bool_)
    sizes = (0, 1, 1, UNIT_TOKENS, MAX_UNITS)
    counts = gather_units(
        table, figures, references, tail_counts, found, sizes, growing, blocks, marks
    )
    assert counts == (2, 1)
    assert marks.tolist() == [[False, True, True, False], [False, False, False, True]]
    assert growing.tolist() == [[3, 2, 1, 0], [0, 1, 2, 3], [2, 2, 2, 2]]
    assert blocks.tolist() == [[13, 23, 33, 43]]


def test_a_block_of_several_units_ends_with_the_last_of_them_only() -> None:
    table = np.array([[11, 12], [21, 22]], dtype=np.int32)
    figures = np.zeros((2 + NUM_LIMITS, 2), dtype=np.int64)
    figures[PUBLISHED] = (2, 3)
    references = np.ones(30, dtype=np.int32)
    found = np.zeros((NUM_FOUND, 2), dtype=np.int64)
    found[ROWS], found[FILLED] = range(2), range(2)
    found[CACHED] = (3 * UNIT_TOKENS, 4 * UNIT_TOKENS)
    growing, blocks = np.zeros((3, 2), dtype=np.intp), np.ones((1, 2), dtype=np.intp)
    marks = np.zeros((2, 2), dtype=np.bool_)
    tail_counts = np.zeros(2, dtype=np.intp)
    sizes = (0, 2, 1, UNIT_TOKENS, MAX_UNITS)
    counts = gather_units(
        table, figures, references, tail_counts, found, sizes, growing, blocks, marks
    )
    assert counts == (0, 0)
    assert blocks.tolist() == [[0, 22]]
