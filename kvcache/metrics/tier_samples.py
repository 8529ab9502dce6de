"""Samples of the tiers below the device."""

from __future__ import annotations

from collections.abc import Iterator

from kvcache.metrics import declarations as known
from kvcache.metrics.metric import Sample
from kvcache.offload.statistics import HierarchyStatistics, TierStatistics


def tier_samples(cluster: str, tiers: HierarchyStatistics) -> Iterator[Sample]:
    """Yield all samples of the tiers of `cluster`."""
    for kind, count in tiers.open_jobs.items():
        yield Sample(known.TIER_JOBS, float(count), (cluster, kind))
    yield from _tier(cluster, "host", tiers.host)
    if tiers.disk is not None:
        yield from _tier(cluster, "disk", tiers.disk)


def _tier(cluster: str, name: str, tier: TierStatistics) -> Iterator[Sample]:
    states = {
        "capacity": tier.num_slots * tier.blocks_per_slot,
        "ready": tier.num_ready,
        "pending": tier.num_pending,
        "held": tier.num_held,
    }
    operations = {
        "stored": tier.num_stored,
        "failed": tier.num_failed_stores,
        "loaded": tier.num_loaded,
        "evicted": tier.num_evicted,
        "forgotten": tier.num_forgotten,
        "skipped": tier.num_skipped,
        "refused": tier.num_refused,
    }
    for metric, values in (
        (known.TIER_BLOCKS, states),
        (known.TIER_LOOKUPS, {"hit": tier.num_hits, "miss": tier.num_misses}),
        (known.TIER_OPERATIONS, operations),
        (known.TIER_BYTES, {"stored": tier.stored_bytes, "loaded": tier.loaded_bytes}),
    ):
        for label, value in values.items():
            yield Sample(metric, float(value), (cluster, name, label))
