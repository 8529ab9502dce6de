"""What commands print: tables for people, JSON for programs, progress on stderr."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from kvcache.base.errors import legible

_BYTE_UNITS = ("KiB", "MiB", "GiB", "TiB")
_LINE_INTERVAL_S = 10.0


def print_facts(console: Console, title: str, facts: Mapping[str, str]) -> None:
    """Print a table of names and values."""
    print_table(console, title, facts_table(facts))


def facts_table(facts: Mapping[str, str]) -> Table:
    """Return a table of two columns without headings."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def print_note(console: Console, text: str, style: str | None = None) -> None:
    """Print a line of text as it is: no markup, and only the terminal wraps it."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_table(console: Console, title: str, table: Table) -> None:
    """Print a table below its title, which may be wider. In a narrow terminal cells wrap, so that
    no number is cut off. Names in cells are printed literally and `legible`, not as markup."""

    for column in table.columns:
        if not column.no_wrap:
            column.overflow = "fold"
        column._cells = [legible(c) if isinstance(c, str) else c for c in column._cells]
    console.print(legible(title), style="italic", markup=False, highlight=False, soft_wrap=True)
    console.print(table, markup=False)


def say(line: str) -> None:
    """Print a line to stderr; stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print a value as JSON, without colours and wrapping; without `indent` as one line."""
    print(json.dumps(value, indent=indent), file=sys.stdout)


def bytes_text(size_bytes: float) -> str:
    """Return a size with its unit, such as `1.5 MiB`."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    power = min(len(_BYTE_UNITS), int(math.log2(size_bytes) // 10))
    return f"{size_bytes / 1024**power:,.1f} {_BYTE_UNITS[power - 1]}"


class WorkProgress:
    """Shows progress towards `total` on stderr during the `with` block: a bar on a terminal,
    occasional lines elsewhere; nothing unless `is_shown`."""

    def __init__(self, title: str, total: int, *, is_shown: bool) -> None:
        from rich.progress import (
            BarColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        console = Console(file=sys.stderr)
        self._title = title
        self._total = total
        self._has_lines = is_shown and not console.is_terminal
        self._start_s = self._line_s = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not (is_shown and console.is_terminal),
            transient=True,
        )
        self._task = self._bar.add_task(title, total=total, rate="")

    def __enter__(self) -> WorkProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    @property
    def elapsed_s(self) -> float:
        """Seconds since construction."""
        return time.monotonic() - self._start_s

    def show(self, done: int, rate: str) -> None:
        """Show the progress and the rate."""
        if not self._bar.disable:
            self._bar.update(self._task, completed=done, rate=rate)
        now_s = time.monotonic()
        if self._has_lines and now_s - self._line_s >= _LINE_INTERVAL_S:
            self._line_s = now_s
            share = done / max(1, self._total)
            left_s = (now_s - self._start_s) * (1 - share) / share if share else 0.0
            say(f"{self._title}: {share:.0%}  {rate}  {left_s:.0f} s left")
