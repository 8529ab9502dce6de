"""The sealed blocks of a fast core with their digests, gathered from all runs.

For audits, which compare them with the labels of the ranks. Reads only. Refuses to decide which of
two blocks of one content is right: the tree knows one.
"""

from __future__ import annotations

import numpy as np

from kvcache.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.extents.block_store import SEALED
from kvcache.extents.parts import CoreParts
from kvcache.sealed_contents import SealedContents, sorted_contents


def sealed_contents(parts: CoreParts) -> SealedContents:
    """Return every block that all ranks have a label for. O(units)."""
    shape, store = parts.shape, parts.store
    size = shape.digest_bytes
    ids: list[Int32Array] = []
    groups: list[Int32Array] = []
    digests: list[bytes] = []
    for run in parts.tree.runs():
        run.settle()
        packed = np.frombuffer(run.digests, np.uint8).reshape(-1, size)
        for group in shape.groups:
            if group.is_ordered:
                here = run.ids[group.place, : run.num_units]
            else:
                handles = run.handles[group.place, : run.num_units]
                here = int32_array(np.where(store.are_valid(handles), store.ids_of(handles), 0))
            units = np.flatnonzero((here != 0) & (store.seals[here] == SEALED))
            if len(units):
                ids.append(here[units])
                groups.append(np.full(len(units), group.index, dtype=np.int32))
                digests.append(packed[units].tobytes())
    if not ids:
        return SealedContents(EMPTY_INT32, EMPTY_INT32, b"")
    return sorted_contents(np.concatenate(ids), np.concatenate(groups), b"".join(digests), size)
