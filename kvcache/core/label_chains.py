"""Which blocks continue which: chains of rows, found with whole arrays.

Between labels, which name their parents, and the rebuild of a core, which enters contents
parents first. Follows all ways up at once, each round twice as far. Refuses to know digests: rows
name the row before them by number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcache.base.arrays import IndexArray
from kvcache.core.group_labels import FIRST_BLOCK, NO_ROW

NO_CHAIN = -1
"""In place of a chain's number: there is none."""


@dataclass(frozen=True, eq=False)
class Chains:
    """Unbroken chains of rows. Each stands behind the one it continues.

        rows  0 ── 1 ──┬── 2 ── 3        `rows`    0 1 | 2 3 | 4 5
                       └── 4 ── 5        `starts`  0     2     4    6
                                         `above`   -1    0     0
                                         `depths`  0     2     2

    `rows` are those of all chains, each from its first to its last; those of chain `i` are
    `rows[starts[i]:starts[i + 1]]`. It continues the last row of chain `above[i]`, and `depths[i]`
    rows are before it. A chain ends where several rows or none continue it.
    """

    rows: IndexArray
    starts: IndexArray
    above: IndexArray
    depths: IndexArray

    def __len__(self) -> int:
        return len(self.above)

    def of_rows(self, num_rows: int) -> IndexArray:
        """Return which chain each of so many rows is in, `NO_CHAIN` for those in none."""
        chains = np.full(num_rows, NO_CHAIN, dtype=np.intp)
        chains[self.rows] = np.repeat(np.arange(len(self)), np.diff(self.starts))
        return chains


def depths_of(above: IndexArray) -> IndexArray:
    """Return how many rows stand above each one; `NO_ROW` for those without a first block above.

    `above` names the row before each one, `FIRST_BLOCK` or `NO_ROW`. Rows that go round in a
    circle have no first block above.
    """
    count = len(above)
    first, lost = count, count + 1
    target = np.concatenate((above, [first, lost]))
    target[target == FIRST_BLOCK] = first
    target[target == NO_ROW] = lost
    steps = np.ones(count + 2, dtype=np.intp)
    steps[first:] = 0
    for _ in range(count.bit_length() + 1):
        further = target[target]
        if np.array_equal(further, target):
            break
        steps += steps[target]
        target = further
    return np.where(target[:count] == first, steps[:count] - 1, NO_ROW)


def chains_of(above: IndexArray, depths: IndexArray) -> Chains:
    """Return the chains of all rows that have a depth, in order of depth of their first row."""
    count = len(above)
    is_kept = depths != NO_ROW
    has_row_above = is_kept & (above != FIRST_BLOCK)
    num_children = np.bincount(above[has_row_above], minlength=count)
    is_inside = has_row_above.copy()
    is_inside[has_row_above] = num_children[above[has_row_above]] == 1
    heads = np.where(is_inside, above, np.arange(count))
    while not np.array_equal(further := heads[heads], heads):
        heads = further
    firsts = np.flatnonzero(is_kept & ~is_inside)
    firsts = firsts[np.argsort(depths[firsts], kind="stable")]
    ranks = np.zeros(count, dtype=np.intp)
    ranks[firsts] = np.arange(len(firsts))
    kept = np.flatnonzero(is_kept)
    places = ranks[heads[kept]] * (count + 1) + depths[kept]
    order = np.argsort(places)
    lengths = np.bincount(ranks[heads[kept]], minlength=len(firsts))
    before = above[firsts]
    return Chains(
        kept[order],
        np.concatenate(([0], np.cumsum(lengths))).astype(np.intp),
        np.where(before == FIRST_BLOCK, NO_CHAIN, ranks[heads[np.maximum(before, 0)]]),
        depths[firsts],
    )
