"""Shows how far simulations have got, on stderr: a bar, or a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console

from actors.cli.bars import progress_bar
from kvcache.base.clock import Clock

_LINE_INTERVAL_S = 10.0


class SimulationProgress:
    """Shows tasks of so many requests each while the `with` block runs; nothing unless shown."""

    def __init__(
        self, title: str, num_requests: Sequence[int], clock: Clock, *, is_shown: bool
    ) -> None:
        console = Console(file=sys.stderr)
        self._title = title
        self._clock = clock
        self._total = sum(num_requests)
        self._played = [0] * len(num_requests)
        self._has_lines = is_shown and not console.is_terminal
        self._start_s = self._line_s = clock.now()
        self._bar = progress_bar(console, "rate", is_shown=is_shown)
        self._task = self._bar.add_task(title, total=self._total, rate="")

    def __enter__(self) -> SimulationProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, task_index: int, num_requests: int) -> None:
        """Take note that so many requests of a task have been played."""
        self._played[task_index] = num_requests
        num_played = sum(self._played)
        now_s = self._clock.now()
        elapsed_s = now_s - self._start_s
        rate = f"{num_played / elapsed_s:,.0f} requests/s" if elapsed_s else ""
        self._bar.update(self._task, completed=num_played, rate=rate)
        if self._has_lines and num_played and now_s - self._line_s >= _LINE_INTERVAL_S:
            self._line_s = now_s
            left_s = elapsed_s * (self._total - num_played) / num_played
            share = num_played / self._total
            print(f"{self._title}: {share:.0%}  {rate}  {left_s:.0f} s left", file=sys.stderr)
