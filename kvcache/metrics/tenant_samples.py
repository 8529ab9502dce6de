"""Statistics of tenants as samples, with a bounded number of labels.

The first tenants keep labels of their own, so that counters do not move between labels; all others
are "other" together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from kvcache.metrics import declarations as known
from kvcache.metrics.metric import Metric, Sample
from kvcache.tenants import TenantStatistics
from kvcache.tenants.shares import DEVICE_TIER

OTHER = "other"


class TenantLabels:
    """The tenants with labels of their own. One user, one thread."""

    def __init__(self, max_labels: int) -> None:
        """Give labels to the first `max_labels` tenants."""
        self._max_labels = max_labels
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        """Return a tenant's label."""
        if name not in self._names:
            if len(self._names) >= self._max_labels:
                return OTHER
            self._names.add(name)
        return name


def tenant_samples(
    cluster: str, tenants: Sequence[TenantStatistics], labels: TenantLabels
) -> Iterator[Sample]:
    """Yield the samples of all tenants, added up for tenants that share a label."""
    sums: Counter[tuple[Metric, tuple[str, ...]]] = Counter()
    for tenant in tenants:
        own, tier = labels.label(tenant.name), tenant.tier
        for state, count in {
            "held": tenant.num_held_blocks,
            "cached": tenant.num_cached_blocks,
            "pinned": tenant.num_pinned_blocks,
            "guaranteed": tenant.guaranteed_blocks,
            "limit": tenant.limit_blocks,
        }.items():
            sums[known.TENANT_BLOCKS, (own, tier, state)] += count
        asked, hit = tenant.num_asked_tokens, tenant.num_hit_tokens
        if tier == DEVICE_TIER:
            sums[known.TENANT_QUERIED_TOKENS, (own,)] += asked
            sums[known.TENANT_HIT_TOKENS, (own,)] += hit
        else:
            sums[known.TENANT_TIER_QUERIED_TOKENS, (own, tier)] += asked
            sums[known.TENANT_TIER_HIT_TOKENS, (own, tier)] += hit
        sums[known.TENANT_EVICTIONS, (own, tier)] += tenant.num_evicted_blocks
        sums[known.TENANT_REFUSALS, (own, tier)] += tenant.num_refusals
    for (metric, values), count in sums.items():
        yield Sample(metric, float(count), (cluster, *values))
