"""How far a replay has got, while it runs: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console

from actors.cli.bars import progress_bar
from kvcache.base.clock import Clock
from kvcache.base.errors import TraceError
from kvcache.replay.report import ReplayReport
from kvcache.simulate.counting import PrefillCount
from kvcache.simulate.workload import Workload, WorkloadRequest

_LINE_INTERVAL_S = 10.0


@dataclass(frozen=True)
class WorkloadSize:
    """How much there is to play."""

    num_requests: int
    num_input_tokens: int
    num_output_tokens: int
    longest: WorkloadRequest

    @property
    def num_tokens(self) -> int:
        """Input and output."""
        return self.num_input_tokens + self.num_output_tokens


def measure_workload(workload: Workload, max_num_tokens: int | None = None) -> WorkloadSize:
    """Read all of a workload once, without making its tokens. With `max_num_tokens`, longer
    requests do not count.

    Whatever is broken in it is found here, before anything has been started. Raises TraceError
    when there is nothing to play.
    """
    num_requests = num_input_tokens = num_output_tokens = num_skipped = 0
    longest: WorkloadRequest | None = None
    for request in workload:
        if max_num_tokens is not None and request.num_tokens > max_num_tokens:
            num_skipped += 1
            continue
        if longest is None or request.num_tokens > longest.num_tokens:
            longest = request
        num_requests += 1
        num_input_tokens += request.num_prompt_tokens
        num_output_tokens += request.num_output_tokens
    if longest is None and num_skipped:
        raise TraceError(
            f"every request of {workload.name} ({num_skipped:,}) is longer than max_model_len "
            f"({max_num_tokens}): raise it, or give another workload"
        )
    if longest is None:
        raise TraceError(f"{workload.name} holds no request: give a workload with at least one")
    return WorkloadSize(num_requests, num_input_tokens, num_output_tokens, longest)


class ReplayProgress:
    """Shows a replay of `size` on stderr while the `with` block runs; nothing unless `is_shown`."""

    def __init__(self, title: str, size: WorkloadSize, clock: Clock, *, is_shown: bool) -> None:
        console = Console(file=sys.stderr)
        self._size = size
        self._clock = clock
        self._title = title
        self._has_bar = is_shown and console.is_terminal
        self._has_lines = is_shown and not console.is_terminal
        self._start_s = self._line_s = clock.now()
        self._bar = progress_bar(console, "rate", is_shown=self._has_bar)
        self._task = self._bar.add_task(title, total=size.num_tokens, rate="")

    def __enter__(self) -> ReplayProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show_replay(self, report: ReplayReport) -> None:
        """Show how far a replay on a cluster has got."""
        rate = f"{report.steps_per_s:,.0f} steps/s  hit rate {report.hit_rate:.1%}"
        self._show(report.num_prompt_tokens + report.num_output_tokens, rate)

    def show_count(self, count: PrefillCount) -> None:
        """Show how far the counting rule has got."""
        per_s = count.num_input_tokens / count.wall_time_s if count.wall_time_s else 0.0
        rate = f"{per_s / 1e6:,.1f}M tokens/s  hit rate {count.hit_rate:.1%}"
        self._show(count.num_input_tokens, rate)

    def _show(self, num_tokens: int, rate: str) -> None:
        if self._has_bar:
            self._bar.update(self._task, completed=num_tokens, rate=rate)
        now_s = self._clock.now()
        if self._has_lines and now_s - self._line_s >= _LINE_INTERVAL_S:
            self._line_s = now_s
            share = num_tokens / max(1, self._size.num_tokens)
            left_s = (now_s - self._start_s) * (1 - share) / share if share else 0.0
            print(f"{self._title}: {share:.0%}  {rate}  {left_s:.0f} s left", file=sys.stderr)
