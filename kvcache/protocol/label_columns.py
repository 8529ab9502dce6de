"""Compiled functions that check and write the columns of label commands in one pass each.

Used by labels.py, which explains what is wrong with a command. Every rank does both for every step
that fills blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from kvcache.base.arrays import Int32Array
from kvcache.base.compiled import array_type, compiled

Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]

GROUP, SLOT, NAMESPACE, TOKEN_COUNT = range(4)
"""Numbers per label."""
NUM_FIGURES = 4

_MOST_COMPARED = 64
"""Up to this many unsorted ids, each is compared with each."""

_READ = array_type("int32", is_read=True)
_READ_BYTES = array_type("uint8", is_read=True)


@compiled(types.boolean(_READ, _READ, _READ, types.intp, types.intp, types.intp, types.intp))
def are_sound(  # noqa: PLR0917 - what is looked at, and the bounds of each
    block_ids: Int32Array,
    token_counts: Int32Array,
    namespaces: Int32Array,
    num_tokens: int,
    num_names: int,
    num_blocks: int,
    max_block_tokens: int,
) -> bool:
    """Return whether blocks are in `[1, num_blocks)` and different, with `num_tokens` in all, as
    many as a block may have, and with namespaces that exist. False: check in detail."""
    count, total = len(block_ids), 0
    if len(token_counts) != count or len(namespaces) != count:
        return False
    is_rising = True
    for i in range(count):
        block_id, num_of_block = block_ids[i], token_counts[i]
        if not (0 < block_id < num_blocks and 0 <= num_of_block <= max_block_tokens):
            return False
        if not 0 <= namespaces[i] < num_names:
            return False
        total += num_of_block
        is_rising &= i == 0 or block_ids[i - 1] < block_id
    if not is_rising:
        if count > _MOST_COMPARED:
            return False
        for i in range(count):
            for k in range(i):
                if block_ids[k] == block_ids[i]:
                    return False
    return bool(total == num_tokens)


@compiled(
    types.void(
        array_type("int32", 2),
        array_type("uint8", 2),
        array_type("uint8", 2),
        array_type("int32", 2),
        array_type("int64"),
        _READ,
        _READ,
        _READ,
        _READ_BYTES,
        _READ_BYTES,
        _READ,
        _READ,
        _READ,
        _READ,
    )
)
def write_labels(  # noqa: PLR0917 - the columns of a table, and those of a label
    figures: Int32Array,
    digests: ByteArray,
    parents: ByteArray,
    tokens: Int32Array,
    checksums: Int64Array,
    block_ids: Int32Array,
    groups: Int32Array,
    slots: Int32Array,
    new_digests: ByteArray,
    new_parents: ByteArray,
    token_counts: Int32Array,
    token_ids: Int32Array,
    namespaces: Int32Array,
    namespace_numbers: Int32Array,
) -> None:
    """Write labels whose columns were checked; their checksums are unknown.

    `namespace_numbers` are the table's numbers of the names that `namespaces` index.
    """
    size, start = digests.shape[1], 0
    for i in range(len(block_ids)):
        block_id, count = block_ids[i], token_counts[i]
        figures[GROUP, block_id] = groups[i]
        figures[SLOT, block_id] = slots[i]
        figures[NAMESPACE, block_id] = namespace_numbers[namespaces[i]]
        figures[TOKEN_COUNT, block_id] = count
        checksums[block_id] = -1
        for k in range(size):
            digests[block_id, k] = new_digests[i * size + k]
            parents[block_id, k] = new_parents[i * size + k]
        for k in range(count):
            tokens[block_id, k] = token_ids[start + k]
        start += count
