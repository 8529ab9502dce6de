"""The sealed blocks of a reference core with their digests.

For audits, which compare them with the labels of the ranks. Reads only.
"""

from __future__ import annotations

import numpy as np

from kvcache.arrays import EMPTY_INT32, int32_array
from kvcache.blocks.contents import NO_TABLE, ContentIndex
from kvcache.sealed_contents import SealedContents


def sealed_contents(contents: ContentIndex) -> SealedContents:
    """Return every block that all ranks have a label for. O(blocks)."""
    cached = np.flatnonzero(contents.table_numbers != NO_TABLE)
    if contents.unsealed:
        cached = cached[~np.isin(cached, list(contents.unsealed))]
    if not len(cached):
        return SealedContents(EMPTY_INT32, EMPTY_INT32, b"")
    numbers = contents.table_numbers[cached]
    group_of = np.zeros(int(numbers.max()) + 1, dtype=np.int32)
    for table in contents.all_tables():
        if table.number < len(group_of):
            group_of[table.number] = table.group
    digests = b"".join(contents.digests[cached].tolist())
    return SealedContents(int32_array(cached), group_of[numbers], digests)
