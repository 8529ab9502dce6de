"""Labelled blocks of the device go down into the tiers.

The commands of a step say what can be stored: a `Label` says that a block is sealed, and its
content; an `Unlabel` says that it will be written. Blocks that find no room are tried again when
something has been written to files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcache.base.arrays import Int32Array, int32_array
from kvcache.coordinator.tier_hits import rows_by_tenant
from kvcache.manager import KVCacheManager
from kvcache.offload.events import parents_first
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.offload.keys import label_keys
from kvcache.offload.specs import HOST_MEDIUM
from kvcache.protocol.commands import Label, Store
from kvcache.protocol.labels import LabelTable, label_rows

MAX_STORED_AGAIN = 4096
"""Blocks that are reconsidered at a time when there is room again."""


class BlockStoring:
    """The labels of one epoch's device blocks, and which of them found no room.

    The caller sends the stores and reports how they ended.
    """

    def __init__(self, tiers: TierHierarchy, manager: KVCacheManager) -> None:
        link = manager.tiers
        self._tiers = tiers
        self._manager = manager
        self._block_sizes = link.block_sizes
        self.labels = LabelTable(
            manager.statistics().core.num_blocks + 1, len(link.none_hash), max(link.block_sizes)
        )
        """The labels of the device's blocks. A block that is written has none."""
        self._is_confirmed = np.ones(self.labels.num_blocks, dtype=np.bool_)
        self._is_unstored = np.zeros(self.labels.num_blocks, dtype=np.bool_)
        self.may_store_more = False
        """Whether `store_more` may store something."""

    def know(self, labels: Label) -> None:
        """Note that these blocks have labels from before the epoch."""
        self.labels.validate(labels)
        self.labels.apply(labels)

    def on_labelled(self, labels: Label, *, is_confirmed: bool) -> None:
        """Note labels. Blocks whose bytes may be incomplete are not `is_confirmed`: they are never
        stored."""
        self.labels.apply(labels)
        self._is_confirmed[labels.block_ids] = is_confirmed

    def suspect(self, block_ids: Sequence[int]) -> None:
        """Forget stored copies of these blocks, because a rank holds something else."""
        ids = int32_array([b for b in block_ids if 0 < b < self.labels.num_blocks])
        ids = ids[self.labels.are_labelled(ids)]
        if len(ids):
            self._tiers.forget(label_keys(self.labels.labels_of(ids)))

    def restore(self, request_id: str, num_hit_tokens: int, now_s: float) -> list[Store]:
        """Store the parts of a hit that the tiers do not have; touch those that they have."""
        tables = self._manager.get_block_ids(request_id)
        stores: list[Store] = []
        for table, size in zip(tables, self._block_sizes, strict=True):
            stores += self.store(int32_array(table[: num_hit_tokens // size]), now_s)
        return stores

    def on_room(self) -> None:
        """Note that there may be room again for blocks that found none."""
        self.may_store_more = bool(self._is_unstored.any())

    def store_more(self, now_s: float) -> list[Store]:
        """Store blocks that found no room when they were sealed, if they are still there: parents
        first, because the beginnings of prefixes are of use without their ends."""
        self.may_store_more = False
        ids = int32_array(np.flatnonzero(self._is_unstored)[:MAX_STORED_AGAIN])
        self._is_unstored[ids] = False
        ids = ids[self.labels.are_labelled(ids)]
        ids = ids[parents_first(self.labels.labels_of(ids))]
        return self.store(ids, now_s, is_new=False)

    def store(self, block_ids: Int32Array, now_s: float, *, is_new: bool = True) -> list[Store]:
        """Store those of the blocks that have a label and are not in the tiers.

        Counts a sighting of each if `is_new`.
        """
        block_ids = block_ids[self.labels.are_labelled(block_ids) & self._is_confirmed[block_ids]]
        if not len(block_ids):
            return []
        all_labels = self.labels.labels_of(block_ids)
        all_keys = label_keys(all_labels)
        if is_new:
            self._tiers.host.sightings.see(all_keys)
        stores: list[Store] = []
        for rows, namespace in rows_by_tenant(all_labels, self._tiers.host.tenants):
            ids, labels = block_ids[rows], label_rows(all_labels, rows)
            keys = [all_keys[row] for row in rows.tolist()]
            job = self._tiers.plan_store(keys, now_s, labels=labels, namespace=namespace)
            if self._tiers.num_without_room:
                first = 0 if job is None else int(job.positions[-1]) + 1
                self._is_unstored[ids[first:]] = True
            if job is not None:
                stores.append(Store(job.job_id, HOST_MEDIUM, ids[job.positions], job.addresses))
        return stores
