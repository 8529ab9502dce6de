"""Numbers as tables for people and JSON for programs, the same way in every command."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from kvcache.base.errors import legible

_BYTE_UNITS = ("KiB", "MiB", "GiB", "TiB")


def print_facts(console: Console, title: str, facts: Mapping[str, str]) -> None:
    """Print a table of two columns: what, and how much."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, value)
    print_table(console, title, table)


def print_table(console: Console, title: str, table: Table) -> None:
    """Print a table below its title, which may be wider than the table. Where the terminal is too
    narrow cells go on in the next line: no figure loses its end. Names in cells are shown as they
    are, and `legible`: they are no markup."""
    for column in table.columns:
        if not column.no_wrap:
            column.overflow = "fold"
        column._cells = [legible(c) if isinstance(c, str) else c for c in column._cells]
    console.print(legible(title), style="italic", markup=False, highlight=False, soft_wrap=True)
    console.print(table, markup=False)


def print_json(text: str) -> None:
    """Print JSON as it is: no colours, no wrapping."""
    print(text, file=sys.stdout)


def bytes_text(size_bytes: float) -> str:
    """Return a size with its unit, such as `1.5 MiB`."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    power = min(len(_BYTE_UNITS), int(math.log2(size_bytes) // 10))
    return f"{size_bytes / 1024**power:,.1f} {_BYTE_UNITS[power - 1]}"
