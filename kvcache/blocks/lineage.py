"""Which block continues which, in tables where a block is of no use without all before it.

Under the content index, which owns the arrays: loops over them, block after block. Refuses to know
digests: which block holds one is a table's answer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from kvcache.arrays import IndexArray, Int32Array
from kvcache.compiled import array_type, compiled

BoolArray = npt.NDArray[np.bool_]

# Spelled out: what is compiled is kept until this file changes, whatever others do.
_NULL_ID = 0

_FIGURES = array_type("int32")
_READ = array_type("int32", is_read=True)
_IDS = array_type("intp", is_read=True)


@compiled(types.int32[::1](_READ, types.intp, types.intp))
def way_to(parent_blocks: Int32Array, block_id: int, num_blocks: int) -> Int32Array:
    """Return the blocks that lead to `block_id`, the last of `num_blocks`. There are so many."""
    way = np.empty(num_blocks, np.int32)
    for index in range(num_blocks - 1, -1, -1):
        way[index] = block_id
        block_id = parent_blocks[block_id]
    return way


@compiled(types.void(_FIGURES, _FIGURES, _IDS, _IDS, _IDS, _IDS))
def enter_runs(  # noqa: PLR0917 - what is written, then what
    parent_blocks: Int32Array,
    num_children: Int32Array,
    block_ids: IndexArray,
    first_blocks: IndexArray,
    ends: IndexArray,
    above: IndexArray,
) -> None:
    """Note of blocks in which block their parent is found, and count them as its children.

    Run `r` ends before `ends[r]`, and its first block continues block `above[r]`, or none.
    `first_blocks` are those in which look-ups find the blocks' contents: mostly they themselves. A
    block whose content another one had already is no child, and its own child is the other's.
    """
    start = 0
    for run in range(len(ends)):
        parent = above[run]
        for index in range(start, ends[run]):
            block_id, first = block_ids[index], first_blocks[index]
            parent_blocks[block_id] = parent
            if first == block_id and parent != _NULL_ID:
                num_children[parent] += 1
            parent = first
        start = ends[run]
