"""Forgetting: drops contents of failed steps, and of blocks that are evicted by name.

This is rare and walks over all nodes. It marks the nodes to be forgotten, spreads the marks down
the tree, rewinds rows to the last node without a mark, and then drops the contents.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.core.columns import columns_of, search_of
from kvcache.core.kinds.rule import FULL, KIND, LENGTH
from kvcache.core.machine import CORE, INT, INTS, NEW_INTS, NOTHING, kernel, routine
from kvcache.core.names import *
from kvcache.core.pool import make_blank, note_move
from kvcache.core.prefix_tree import forget_content, is_sealed
from kvcache.core.rows import rewind

GONE, STAYS, REWOUND = 1, 2, 4
"""Marks of a node: it is forgotten with all that continues it; it stays; its rows are rewound."""


@routine
def forget_block(core: Any, b: int, is_lost: Any) -> None:
    """Drop a block's content. Its references stay."""
    c = columns_of(core)
    is_lost[b] = 1
    if c.block[b, REF] == 0 and c.number[HAS_POLICY]:
        note_move(core, DISCARDED, b)
    forget_content(core, b)
    if c.block[b, REF] == 0:
        make_blank(core, b)


@routine
def rewind_marked(core: Any) -> None:
    """Rewind rows that continue marked nodes, and clear the REWOUND marks."""
    c = columns_of(core)
    s = search_of(core)
    for r in range(len(c.row)):
        if c.row[r, FLAGS] & IS_OPEN == 0:
            continue
        n, u, cut = np.int64(c.row[r, LAST]), np.int64(c.row[r, UNITS]), np.int64(-1)
        while u > 0:
            # A row with duplicate blocks stays: what it made hittable continues cached blocks, and
            # a rewind would drop its references to them.
            if s.mark[n] == GONE or (s.mark[n] and c.row[r, DUPLICATES] == 0):
                cut = u - 1
            n = np.int64(c.node[n, PARENT])
            u -= 1
        if cut >= 0:
            rewind(core, r, cut)
    for n in range(1, c.number[NEXT_NODE]):
        if s.mark[n] == REWOUND:
            s.mark[n] = 0


@routine
def node_above(core: Any, n: int, g: int) -> int:
    """Return the node before node `n`, or with a group (not -1) the one that has the block before
    that of `n`, which has one; 0 if there is none."""
    c = columns_of(core)
    if g < 0:
        return np.int64(c.node[n, PARENT])
    for _ in range(c.group[g, LENGTH]):
        n = np.int64(c.node[n, PARENT])
    return n if c.node[n, BLOCK + 2 * g] else np.int64(0)


@routine
def forget_marked(core: Any, g: int, is_lost: Any) -> None:
    """Forget the blocks of GONE nodes and all that continues them; with a group (not -1) only its
    blocks, and those that continue them without a gap. Clear all marks."""
    c = columns_of(core)
    s = search_of(core)
    end = c.number[NEXT_NODE]
    for n in range(1, end):
        if g >= 0 and c.node[n, BLOCK + 2 * g] == 0:
            continue
        m = np.int64(n)
        while m and s.mark[m] == 0:
            m = node_above(core, m, g)
        found = GONE if m and s.mark[m] == GONE else STAYS
        m = np.int64(n)
        while m and s.mark[m] == 0:
            s.mark[m] = found
            m = node_above(core, m, g)
    for n in range(1, end):
        for k in range(len(c.group) if s.mark[n] == GONE else 0):
            b = np.int64(c.node[n, BLOCK + 2 * k])
            if b and (g < 0 or g == k):
                forget_block(core, b, is_lost)
    for n in range(end):
        s.mark[n] = 0


@kernel(NOTHING, CORE, INT, INT, NEW_INTS)
def forget_steps(core: Any, client: int, serial: int, is_lost: Any) -> None:
    """Forget what a client's open steps from `serial` on made hittable, and what continues it. Set
    `is_lost` of forgotten blocks to 1."""
    c = columns_of(core)
    s = search_of(core)
    for n in range(1, c.number[NEXT_NODE]):
        for g in range(len(c.group)):
            b, owner = np.int64(c.node[n, BLOCK + 2 * g]), np.int64(c.node[n, OWNER + 2 * g])
            if b and owner >= serial and s.client[owner & (NUM_STEPS - 1)] == client:
                if c.group[g, KIND] == FULL:
                    s.mark[n] = GONE
                elif s.mark[n] == 0:
                    s.mark[n] = REWOUND
    for n in range(1, c.number[NEXT_NODE]):
        for g in range(len(c.group) if s.mark[n] == REWOUND else 0):
            b, owner = np.int64(c.node[n, BLOCK + 2 * g]), np.int64(c.node[n, OWNER + 2 * g])
            if b and owner >= serial and s.client[owner & (NUM_STEPS - 1)] == client:
                forget_block(core, b, is_lost)
    rewind_marked(core)
    forget_marked(core, np.int64(-1), is_lost)


@kernel(NOTHING, CORE, INTS, NEW_INTS)
def forget(core: Any, ids: Any, is_lost: Any) -> None:
    """Forget the contents of blocks, and what continues them: after a block of a prefix group
    everything that is cached, after any other block those of the same group. Rows with a forgotten
    block cache nothing more. Set `is_lost` of forgotten blocks to 1."""
    c = columns_of(core)
    s = search_of(core)
    for is_prefix_group in range(2):
        for g in range(len(c.group)):
            if (c.group[g, KIND] == FULL) != (is_prefix_group == 1):
                continue
            is_any = False
            for k in range(len(ids)):
                n = np.int64(c.block[ids[k], NODE])
                if n and c.node[n, BLOCK + 2 * g] == ids[k]:
                    s.mark[n] = GONE
                    is_any = True
            if is_any and is_prefix_group:
                rewind_marked(core)
                forget_marked(core, np.int64(-1), is_lost)
            elif is_any:
                forget_marked(core, np.int64(g), is_lost)
    for r in range(len(c.row)):
        if c.row[r, FLAGS] & IS_OPEN:
            for g in range(len(c.group)):
                for i in range(c.row[r, KEPT + 2 * g], c.row[r, COLUMNS + 2 * g]):
                    if is_lost[c.table[r * len(c.group) + g, i]]:
                        c.row[r, FLAGS] |= NO_CACHING


@kernel(INT, CORE)
def count_sealed(core: Any) -> int:
    """Return the number of sealed blocks."""
    c = columns_of(core)
    count = np.int64(0)
    for n in range(1, c.number[NEXT_NODE]):
        for g in range(len(c.group)):
            if c.node[n, BLOCK + 2 * g] and is_sealed(core, c.node[n, OWNER + 2 * g]):
                count += 1
    return count
