"""References of many blocks, taken and given back: loops over the arrays of a pool.

Under `ReferencedBlocks`, which owns the arrays and decides what becomes of blocks that nobody
holds. A block may be named several times: each time counts. Refuses to check ids of blocks, but
for `are_holdable`, which comes first.
"""

from __future__ import annotations

import numpy as np
from numba import types

from kvcache.arrays import IndexArray, Int32Array
from kvcache.compiled import array_type, compiled

# Spelled out: what is compiled is kept until this file changes, whatever others do.
_NO_TABLE = _NULL_ID = 0

_COUNTS = array_type("int32")
_READ = array_type("int32", is_read=True)
_IDS = array_type("intp", is_read=True)
_NEW_IDS = types.intp[::1]
_TWICE_NEW_IDS = types.Tuple((_NEW_IDS, _NEW_IDS))  # type: ignore[no-untyped-call]  # numba's


@compiled(types.boolean(_READ, _READ, _IDS))
def are_holdable(counts: Int32Array, table_numbers: Int32Array, block_ids: IndexArray) -> bool:
    """Say whether all blocks exist, and are held already or have a content, as the null block
    never does."""
    for block_id in block_ids:
        if not 0 <= block_id < len(counts):
            return False
        if not counts[block_id] and table_numbers[block_id] == _NO_TABLE:
            return False
    return True


@compiled(_NEW_IDS(_COUNTS, _IDS))
def take_references(counts: Int32Array, block_ids: IndexArray) -> IndexArray:
    """Take a reference of each block; return those that had none, in order."""
    unheld = np.empty(len(block_ids), np.intp)
    num_unheld = 0
    for block_id in block_ids:
        if not counts[block_id]:
            unheld[num_unheld] = block_id
            num_unheld += 1
        counts[block_id] += 1
    return unheld[:num_unheld]


@compiled(_TWICE_NEW_IDS(_COUNTS, _READ, _IDS))
def give_references(
    counts: Int32Array, table_numbers: Int32Array, block_ids: IndexArray
) -> tuple[IndexArray, IndexArray]:
    """Give a reference of each block back; return those that have none any more, in the order of
    their last ones: the empty ones, then those with a content."""
    empty, cached = np.empty(len(block_ids), np.intp), np.empty(len(block_ids), np.intp)
    num_empty = num_cached = 0
    for block_id in block_ids:
        counts[block_id] -= 1
        if counts[block_id]:
            continue
        if table_numbers[block_id] == _NO_TABLE:
            empty[num_empty] = block_id
            num_empty += 1
        else:
            cached[num_cached] = block_id
            num_cached += 1
    return empty[:num_empty], cached[:num_cached]


@compiled(types.intp(_READ, _IDS))
def count_unheld(counts: Int32Array, block_ids: IndexArray) -> int:
    """Return how many of these distinct blocks nobody holds, null blocks left out."""
    num_unheld = 0
    for block_id in block_ids:
        num_unheld += block_id != _NULL_ID and not counts[block_id]
    return num_unheld
