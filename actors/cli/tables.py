"""Figures as tables for people and JSON for programs, the same way in every command."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

from rich.table import Table

_BYTE_UNITS = ("KiB", "MiB", "GiB", "TiB")


def facts_table(title: str, facts: Mapping[str, str]) -> Table:
    """Return a table of two columns: what, and how much."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def print_json(text: str) -> None:
    """Print JSON as it is: no colours, no wrapping."""
    print(text, file=sys.stdout)


def bytes_text(size_bytes: float) -> str:
    """Return a size with its unit, such as `1.5 MiB`."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    power = min(len(_BYTE_UNITS), int(math.log2(size_bytes) // 10))
    return f"{size_bytes / 1024**power:,.1f} {_BYTE_UNITS[power - 1]}"
