"""The one progress bar of commands: how much, how fast, how long still. On a terminal only."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def progress_bar(console: Console, note: str, *, is_shown: bool) -> Progress:
    """Return a bar that shows a task's field `note` next to its share; nothing unless shown."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn(f"{{task.fields[{note}]}}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not (is_shown and console.is_terminal),
        transient=True,
    )
