"""What a tier has done since the start, and how its statistics are read from its tables.

A tier counts in it. It does not change the tier's tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcache.offload.options import TierOptions
from kvcache.offload.slot_table import FORGOTTEN, READY, STORING, SlotTable
from kvcache.offload.statistics import TierStatistics
from kvcache.tenants import TenantStatistics


@dataclass(slots=True)
class TierCounts:
    """Counters, in keys. What they count is said in `TierStatistics`."""

    num_hits: int = 0
    num_misses: int = 0
    num_stored: int = 0
    num_failed_stores: int = 0
    num_loaded: int = 0
    num_evicted: int = 0
    num_forgotten: int = 0
    num_skipped: int = 0
    num_refused: int = 0

    def statistics(
        self,
        options: TierOptions,
        table: SlotTable,
        tenants: tuple[TenantStatistics, ...] = (),
    ) -> TierStatistics:
        """Return frozen statistics. Reads the whole table."""
        is_ready = table.states == READY
        is_held = (table.num_loads > 0) | (table.num_spills > 0)
        is_forgotten = (table.states == FORGOTTEN).reshape(-1, table.blocks_per_slot)
        return TierStatistics(
            medium=options.medium,
            num_slots=table.num_slots,
            blocks_per_slot=table.blocks_per_slot,
            num_free_slots=len(table.free_slots),
            num_ready=int(np.count_nonzero(is_ready)),
            num_pending=int(np.count_nonzero(table.states == STORING)),
            num_held=int(np.count_nonzero(is_ready & is_held)),
            num_dirty=int(np.count_nonzero(table.is_dirty)),
            num_quarantined_slots=int(np.count_nonzero(is_forgotten.any(axis=1))),
            num_hits=self.num_hits,
            num_misses=self.num_misses,
            num_stored=self.num_stored,
            num_failed_stores=self.num_failed_stores,
            num_loaded=self.num_loaded,
            num_evicted=self.num_evicted,
            num_forgotten=self.num_forgotten,
            num_skipped=self.num_skipped,
            num_refused=self.num_refused,
            stored_bytes=self.num_stored * options.block_bytes,
            loaded_bytes=self.num_loaded * options.block_bytes,
            tenants=tenants,
        )
