"""Tenants in `kvcache status` and `kvcache usage`: what each has in every tier, asked and hit."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvcache.base.errors import legible
from kvcache.coordinator.settings import CoordinatorStatistics
from kvcache.tenants import TenantStatistics

_UNNAMED = "(none)"


def tenants_of(statistics: CoordinatorStatistics | None) -> tuple[TenantStatistics, ...]:
    """Return the statistics of all tenants in all tiers; none where none are configured."""
    if statistics is None or statistics.manager is None:
        return ()
    found = statistics.manager.tenants
    if statistics.offload is not None:
        tiers = (statistics.offload.tiers.host, statistics.offload.tiers.disk)
        for tier in tiers:
            found += () if tier is None else tier.tenants
    return found


def tenant_table(tenants: Sequence[TenantStatistics]) -> Table:
    """Return a table with a row for each tenant in each tier. Below the device slots are counted.

    `evicted`: of the tenant, and for what it asked.
    """
    table = Table()
    for heading in ("tenant", "tier", "held", "cached", "pinned", "share"):
        table.add_column(heading)
    for heading in ("hit rate", "evicted", "refused"):
        table.add_column(heading)
    for each in tenants:
        asked = each.num_asked_tokens
        table.add_row(
            each.name or _UNNAMED,
            each.tier,
            f"{each.num_held_blocks:,}",
            f"{each.num_cached_blocks:,}",
            f"{each.num_pinned_blocks:,}",
            f"{each.guaranteed_blocks:,} to {each.limit_blocks:,}",
            f"{each.num_hit_tokens / asked:.1%}" if asked else "-",
            f"{each.num_evicted_blocks:,}, {each.num_evicted_for_blocks:,}",
            f"{each.num_refusals:,}",
        )
    return table


def tenant_usage_table(tenants: Sequence[TenantStatistics]) -> Table:
    """Return a table of what tenants have of each tier, asked of it in tokens, and hit."""
    table = Table("tenant", "tier", "held", "of at most", "tokens asked", "hit")
    for each in tenants:
        counts = (each.num_held_blocks, each.limit_blocks, each.num_asked_tokens)
        rate = each.num_hit_tokens / max(1, each.num_asked_tokens)
        table.add_row(
            each.name or _UNNAMED,
            each.tier,
            *(f"{count:,}" for count in counts),
            f"{each.num_hit_tokens:,} ({rate:.1%})",
        )
    return table


def refusal_lines(tenants: Sequence[TenantStatistics]) -> list[str]:
    """Return, for tenants that were refused, the last reason, with its numbers and the remedy."""
    return [
        legible(f"{each.name or _UNNAMED} ({each.tier}): {each.last_refusal}")
        for each in tenants
        if each.last_refusal
    ]
