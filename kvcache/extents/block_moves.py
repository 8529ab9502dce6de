"""What becomes of many blocks at once, each in one pass over the arrays that say what blocks are.

Under the block store and whoever gives blocks to a row. Compiled: a prompt has two thousand blocks
or twenty, and with numpy each array is a call, and a pass, of its own. Refuses to choose blocks and
to look whether ids exist: they come out of the books.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from kvcache.arrays import IndexArray, Int32Array
from kvcache.compiled import array_type, compiled, tuple_type

BoolArray = npt.NDArray[np.bool_]
Int16Array = npt.NDArray[np.int16]
Int64Array = npt.NDArray[np.int64]

_LIFE = 1 << 32
_NULL_BLOCK = 0
_NO_CONTENT = 0
_SEALED = 1
"""As in `BlockStore`: what is compiled sees its own file only."""

_ids = array_type("int32", is_read=True)
_indices = array_type("intp", is_read=True)
_int32 = array_type("int32")
_int64 = array_type("int64")
_seals = array_type("int16")
_bools = array_type("boolean")


@compiled(types.boolean(_indices, _int64, _seals, _bools, types.boolean))
def end_lives(
    block_ids: IndexArray,
    handles: Int64Array,
    seals: Int16Array,
    is_single: BoolArray,
    must_not_wait: bool,
) -> bool:
    """Begin the next life of these blocks, without content. `is_single` may be empty.

    False, and nothing was changed, if one of them waits for a step and `must_not_wait`.
    """
    if must_not_wait:
        for block_id in block_ids:
            if seals[block_id] > _SEALED:
                return False
    for block_id in block_ids:
        handles[block_id] += _LIFE
        seals[block_id] = _NO_CONTENT
    if len(is_single):
        for block_id in block_ids:
            is_single[block_id] = False
    return True


@compiled(
    types.intp(
        array_type("intp", 2, is_read=True), _indices, types.intp, _int32, _seals, _seals, _bools
    )
)
def fill_units(  # noqa: PLR0917 - all that is known of a block
    blocks: IndexArray,
    group_places: IndexArray,
    seal: int,
    references: Int32Array,
    seals: Int16Array,
    group_of: Int16Array,
    is_single: BoolArray,
) -> int:
    """Do `BlockStore.fill_units`; return how many blocks there are."""
    num_filled = 0
    for group in range(len(group_places)):
        is_ordered = group_places[group] >= 0
        for i in range(blocks.shape[1]):
            block_id = blocks[group, i]
            if not block_id:
                continue
            num_filled += 1
            seals[block_id] = seal
            if is_ordered:
                references[block_id] = 0
            else:
                group_of[block_id] = group
                is_single[block_id] = True
    return num_filled


@compiled(types.void(_ids, types.intp, _ids, types.intp, _int32, _int32, _int32))
def seat(  # noqa: PLR0917 - all that there is to write
    adopted: Int32Array,
    num_null: int,
    taken: Int32Array,
    num_bare: int,
    references: Int32Array,
    columns: Int32Array,
    table: Int32Array,
) -> None:
    """Fill the table of a new row: what it adopts, nulls, then blocks that it takes, of which all
    but the first `num_bare` get their reference. The row's `columns`, as many or more, get it too.
    """
    start = len(adopted)
    for i in range(start):
        table[i] = columns[i] = adopted[i]
    for i in range(start, start + num_null):
        table[i] = columns[i] = _NULL_BLOCK
    start += num_null
    for i in range(len(taken)):
        table[start + i] = columns[start + i] = taken[i]
    for i in range(num_bare, len(taken)):
        references[taken[i]] = 1


@compiled(types.intp(_ids, _int32, array_type("int16", is_read=True), array_type("intp")))
def touch(
    block_ids: Int32Array, references: Int32Array, seals: Int16Array, unheld: IndexArray
) -> int:
    """Give each of these distinct blocks but null ones a reference.

    Those that nobody held go to `unheld`, as long as `block_ids`, in order; returns how many these
    are. -1, and nothing was changed, if one of them has no content either.
    """
    for block_id in block_ids:
        if block_id != _NULL_BLOCK and not references[block_id] and seals[block_id] == _NO_CONTENT:
            return -1
    num_unheld = 0
    for block_id in block_ids:
        if block_id == _NULL_BLOCK:
            continue
        if not references[block_id]:
            unheld[num_unheld] = block_id
            num_unheld += 1
        references[block_id] += 1
    return num_unheld


@compiled(types.intp(_ids, _ids))
def num_unheld(block_ids: Int32Array, references: Int32Array) -> int:
    """Return how many of these blocks but null ones have no reference."""
    count = 0
    for block_id in block_ids:
        count += block_id != _NULL_BLOCK and references[block_id] == 0
    return count


@compiled(
    tuple_type(types.intp, 2)(
        _ids,
        _int32,
        array_type("int16", is_read=True),
        _bools,
        _int32,
        types.intp,
        array_type("intp"),
    )
)
def give_back(  # noqa: PLR0917 - all that blocks are
    block_ids: Int32Array,
    references: Int32Array,
    seals: Int16Array,
    is_single: BoolArray,
    fresh: Int32Array,
    num_fresh: int,
    cached: IndexArray,
) -> tuple[int, int]:
    """Take a reference from each of these blocks but null ones, from repeated ones several.

    Those that nobody holds any more are fresh if they have no content, the first of them on top.
    Single ones with a content go to `cached`, in order; others with a content are a run's. Returns
    how many are fresh then, and how many cached. `is_single` may be empty, and then `cached`.
    """
    empty = np.empty(len(block_ids), np.int32)
    num_cached = num_empty = 0
    for block_id in block_ids:
        if block_id == _NULL_BLOCK:
            continue
        references[block_id] -= 1
        if references[block_id]:
            continue
        if seals[block_id] == _NO_CONTENT:
            empty[num_empty] = block_id
            num_empty += 1
        elif len(is_single) and is_single[block_id]:
            cached[num_cached] = block_id
            num_cached += 1
    for i in range(num_empty):
        fresh[num_fresh + i] = empty[num_empty - 1 - i]
    return num_fresh + num_empty, num_cached
