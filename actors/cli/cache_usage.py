"""`kvcache usage`: whose the blocks are: by state, group, tenant and tier."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from actors.cli.clusters import open_cluster
from actors.cli.prefix_tree import blocks_by_group, blocks_by_namespace
from actors.cli.tables import bytes_text, print_facts, print_json, print_table
from actors.cli.tenant_facts import tenant_usage_table, tenants_of
from kvcache.base.errors import NotRunningError, legible
from kvcache.coordinator.settings import CoordinatorStatistics
from kvcache.metrics.inspection import CacheInspection
from kvcache.offload.statistics import TierStatistics
from kvcache.protocol.labels import LabelSet
from kvcache.requests.request import Namespace
from kvcache.tenants import TenantStatistics

MAX_NAMESPACES = 20


@dataclass(frozen=True)
class NamespaceUse:
    """Sealed device blocks of one namespace."""

    namespace: Namespace
    num_blocks: int


@dataclass(frozen=True)
class Usage:
    """Blocks by what they are. `states`: device blocks; those in use are apart by who uses them.
    `groups` and `namespaces`: sealed device blocks."""

    states: dict[str, int]
    groups: dict[int, int]
    namespaces: tuple[NamespaceUse, ...]
    tiers: dict[str, TierStatistics]
    tenants: tuple[TenantStatistics, ...] = ()


def show_usage(name: str | None, as_json: bool) -> None:
    """Print what the blocks of a running cluster are. Raises NotRunningError if there is none."""
    with open_cluster(name) as cluster:
        statistics = cluster.coordinator_statistics()
        inspection, labels = cluster.inspect(), cluster.collect_labels(0)
    if statistics is None:
        raise NotRunningError(f"{cluster.name} has just begun: wait until it is ready")
    usage = usage_of(statistics, inspection, labels)
    if as_json:
        print_json(json.dumps({"name": cluster.name, **_plain(usage)}, indent=2))
        return
    console = Console(file=sys.stdout)
    print_facts(console, f"{cluster.name}: device blocks", _texts(usage.states))
    print_table(console, "sealed blocks by group", _groups(usage))
    print_table(console, "sealed blocks by namespace", _namespaces(usage))
    if usage.tiers:
        print_table(console, "tiers below the device", _tiers(usage))
    if usage.tenants:
        print_table(console, "tenants", tenant_usage_table(usage.tenants))


def usage_of(
    statistics: CoordinatorStatistics, inspection: CacheInspection, labels: LabelSet
) -> Usage:
    """Return what the blocks are, from the statistics of one moment or of moments close together.

    Raises NotRunningError while there is no cache: an epoch is about to begin.
    """
    manager, offload = statistics.manager, statistics.offload
    if manager is None:
        raise NotRunningError("the coordinator has no cache just now: wait until it is ready")
    core = manager.core
    num_shared = int((inspection.holders > 1).sum())
    states = {
        "all": core.num_blocks,
        "in use": core.num_blocks - core.num_free_blocks,
        "in use, shared": num_shared,
        "pinned": core.num_pinned_blocks,
        "free": core.num_free_blocks,
        "cached": core.num_cached_blocks,
        "sealed": core.num_sealed_blocks,
        "in flight": core.num_in_flight_blocks,
        "quarantined": core.num_quarantined_blocks,
    }
    namespaces = tuple(
        NamespaceUse(namespace, count) for namespace, count in blocks_by_namespace(labels).items()
    )
    tiers = {} if offload is None else {"host": offload.tiers.host}
    if offload is not None and offload.tiers.disk is not None:
        tiers["disk"] = offload.tiers.disk
    tenants = tenants_of(statistics)
    return Usage(states, blocks_by_group(labels), namespaces, tiers, tenants)


def namespace_text(namespace: Namespace) -> str:
    """Return what tells a namespace apart, in words."""
    parts = {
        "tenant": namespace.tenant,
        "adapter": namespace.lora,
        "salt": None if namespace.salt is None else "set",  # a salt may be a secret
    }
    told = ", ".join(f"{what} {value}" for what, value in parts.items() if value is not None)
    return legible(told) or "-"


def namespace_fields(namespace: Namespace) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        "model_epoch": namespace.model_epoch,
        "tenant": namespace.tenant,
        "lora": namespace.lora,
        "has_salt": namespace.salt is not None,
    }


def _texts(states: dict[str, int]) -> dict[str, str]:
    num_all = max(1, states["all"])
    return {name: f"{count:,} ({count / num_all:.1%})" for name, count in states.items()}


def _groups(usage: Usage) -> Table:
    table = Table("group", "blocks")
    for group, count in usage.groups.items():
        table.add_row(str(group), f"{count:,}")
    return table


def _namespaces(usage: Usage) -> Table:
    table = Table("namespace", "model epoch", "blocks")
    for use in usage.namespaces[:MAX_NAMESPACES]:
        namespace = use.namespace
        table.add_row(namespace_text(namespace), str(namespace.model_epoch), f"{use.num_blocks:,}")
    rest = usage.namespaces[MAX_NAMESPACES:]
    if rest:
        table.add_row(f"{len(rest):,} others", "", f"{sum(use.num_blocks for use in rest):,}")
    return table


def _tiers(usage: Usage) -> Table:
    table = Table("tier", "blocks", "ready", "being stored", "being read", "stored", "loaded")
    for name, tier in usage.tiers.items():
        capacity = tier.num_slots * tier.blocks_per_slot
        counts = (capacity, tier.num_ready, tier.num_pending, tier.num_held)
        moved = (bytes_text(tier.stored_bytes), bytes_text(tier.loaded_bytes))
        table.add_row(name, *(f"{count:,}" for count in counts), *moved)
    return table


def _plain(usage: Usage) -> dict[str, Any]:
    return {
        "states": {
            name.replace(", ", "_").replace(" ", "_"): n for name, n in usage.states.items()
        },
        "groups": {str(group): count for group, count in usage.groups.items()},
        "namespaces": [
            {**namespace_fields(use.namespace), "num_blocks": use.num_blocks}
            for use in usage.namespaces
        ],
        "tiers": {name: asdict(tier) for name, tier in usage.tiers.items()},
        "tenants": [asdict(tenant) for tenant in usage.tenants],
    }
