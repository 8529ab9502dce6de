"""Figures of the fast core: what is held, cached, shared and saved at one moment.

Beside the core: looks, changes nothing. Refuses to judge; `audit` does.
"""

from __future__ import annotations

import numpy as np

from kvcache.arrays import index_array
from kvcache.core import CoreStatistics, ReferenceKind
from kvcache.extents.forks import RowForks
from kvcache.extents.parts import CoreParts
from kvcache.extents.pins import PinnedRuns
from kvcache.extents.rows import Row
from kvcache.extents.shape import GroupShape
from kvcache.specs import KVCacheConfig


def block_bytes_of(config: KVCacheConfig) -> int:
    """Return the bytes of a block in all layers of the group in which it has most."""
    return max(
        (
            len(group.layer_names) * group.kv_cache_spec.page_size_bytes
            for group in config.kv_cache_groups
        ),
        default=0,
    )


def statistics_of(
    parts: CoreParts, pins: PinnedRuns, forks: RowForks, *, num_merged: int, block_bytes: int
) -> CoreStatistics:
    """Return the core's figures; a block takes `block_bytes`. O(rows, pins)."""
    store, tables = parts.store, parts.tables
    pinned, held = pins.references(), forks.held_blocks()
    in_tables = sum(
        int(np.count_nonzero(parts.table_of(row, group.index)))
        for row in tables.by_id.values()
        for group in parts.shape.groups
    )
    return CoreStatistics(
        num_blocks=store.num_blocks - 1,
        num_free_blocks=store.num_free,
        num_cached_blocks=store.num_cached,
        num_sealed_blocks=store.num_cached - sum(store.num_unsealed.values()),
        num_pinned_blocks=len(pinned),
        num_in_flight_blocks=0,
        num_quarantined_blocks=0,
        num_evictions=store.num_evictions,
        references={
            ReferenceKind.PIN.value: pinned.total(),
            ReferenceKind.FORK.value: held.total(),
            ReferenceKind.TRANSFER.value: 0,
            ReferenceKind.REQUEST.value: in_tables,
        },
        num_merged_blocks=num_merged,
        merged_bytes=num_merged * block_bytes,
    )


def shared_prefix_blocks(parts: CoreParts, row: Row, group: GroupShape, num_running: int) -> int:
    """Return how many leading blocks of a row stand in exactly `num_running` rows. O(blocks)."""
    tables, g = parts.tables, group.index
    table = index_array(tables.columns(g, row.index))
    held = np.zeros(parts.store.num_blocks, dtype=np.int32)
    for each in tables.by_id.values():
        held[tables.columns(g, each.index)] += 1
    differs = held[table] != num_running
    return int(differs.argmax()) if differs.any() else len(table)
