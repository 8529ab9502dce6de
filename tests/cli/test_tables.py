"""Tables of names that clients chose: no markup, no control sequences, no lost ends."""

from __future__ import annotations

import pytest
from rich.table import Table

from actors.cli.command import print_facts, print_table
from actors.cli.status import refusal_lines
from kvcache.config.tenants import TenantConfig, TenantsConfig
from kvcache.requests.request import Request
from tests.manager.managers_under_test import make_manager

HOSTILE = "[/red] [bold]all is well\x1b[2J\n"
LEGIBLE = r"[/red] [bold]all is well\x1b[2J\n"


def test_names_in_tables_are_shown_as_they_are_and_legible(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = Table("tenant")
    table.add_row(HOSTILE)
    for show in (
        lambda: print_table(HOSTILE, table),
        lambda: print_facts(HOSTILE, {HOSTILE: "value"}),
    ):
        show()
        title, *rest = capsys.readouterr().out.splitlines()
        assert title == LEGIBLE
        assert sum(LEGIBLE in line for line in rest) == 1


def test_a_tenant_that_is_refused_cannot_forge_a_line() -> None:
    tenants = TenantsConfig(named={HOSTILE: TenantConfig(limit=12)})
    manager = make_manager(num_blocks=41, tenants=tenants, has_workers=False)
    for name, token in (("first", 8), ("second", 9)):
        manager.allocate_slots(Request(name, [token] * 28, tenant=HOSTILE), 28)
    (line,) = refusal_lines(manager.statistics().tenants)
    assert line.startswith(LEGIBLE) and line.isprintable()
