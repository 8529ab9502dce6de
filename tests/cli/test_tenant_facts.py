"""Tenants in `kvcache status`, from a manager that has served and refused them."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from actors.cli.status import refusal_lines, tenant_table, tenant_usage_table
from kvcache.config.tenants import TenantConfig, TenantsConfig
from kvcache.coordinator.settings import CoordinatorStatistics
from kvcache.manager import KVCacheManager
from kvcache.metrics.samples import tenants_of
from kvcache.requests.request import Request
from tests.manager.managers_under_test import make_manager

TENANTS = TenantsConfig(named={"alice": TenantConfig(guaranteed=0.25, limit=12)})


def served() -> KVCacheManager:
    manager = make_manager(num_blocks=41, tenants=TENANTS, log_stats=True, has_workers=False)
    for number in range(3):
        request = Request(f"r{number}", list(range(20)), tenant="alice")
        hit, num_hit = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, 20 - num_hit, num_hit, hit) is not None
    return manager


def cells(table: Table) -> list[str]:
    """Return the cells of the row of alice."""
    console = Console(width=120, record=True, force_terminal=False)
    console.print(table)
    row = next(line for line in console.export_text().splitlines() if "alice" in line)
    return [cell.strip() for cell in row.replace("│", "|").split("|")][1:-1]


def test_a_row_for_each_tenant_and_the_reason_of_the_last_refusal() -> None:
    manager = served()
    big = Request("big", [9] * 28, tenant="alice")
    assert manager.allocate_slots(big, 28) is None
    statistics = CoordinatorStatistics(manager=manager.statistics())
    tenants = tenants_of(statistics)
    assert [(each.name, each.tier) for each in tenants] == [("alice", "device")]
    assert cells(tenant_table(tenants))[:6] == ["alice", "device", "7", "0", "0", "10 to 12"]
    used = ["alice", "device", "7", "12", "60", "32 (53.3%)"]
    assert cells(tenant_usage_table(tenants)) == used
    assert refusal_lines(tenants) == [f"alice (device): {tenants[0].last_refusal}"]
    assert "raise its limit" in tenants[0].last_refusal


def test_without_tenants_there_is_nothing_to_say() -> None:
    statistics = CoordinatorStatistics(manager=make_manager().statistics())
    assert tenants_of(statistics) == ()
    assert tenants_of(replace(statistics, manager=None)) == ()
    assert tenants_of(None) == ()
