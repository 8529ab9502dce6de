"""`kvcache replay-record`: a recording done again in this process, without cluster and workers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import TracebackType

from rich.console import Console

from actors.cli.bars import progress_bar
from actors.cli.tables import bytes_text, print_facts, print_json
from kvcache.base.clock import Clock, SystemClock
from kvcache.recorder import Recording, RecordReplay, RecordReplayReport, open_recording

_LINE_INTERVAL_S = 10.0


def replay_recording(path: Path, *, as_json: bool, has_progress: bool) -> bool:
    """Replay a file or directory and print what came of it; return whether it was identical.

    Raises RecordingError for a recording that cannot be read.
    """
    recording = open_recording(path)
    with _Progress(recording, SystemClock(), is_shown=has_progress) as progress:
        report = RecordReplay(recording, progress.show).run()
    if as_json:
        print_json(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report, path, recording)
    return report.is_identical


def _print(report: RecordReplayReport, path: Path, recording: Recording) -> None:
    head = recording.segments[0].head
    manager_config = head.manager_config
    facts = {
        "recorded": f"{len(recording.segments):,} segments, {bytes_text(recording.size_bytes)}",
        "manager": (
            f"{manager_config.kv_cache_config.num_blocks:,} blocks, plan {head.fingerprint[:16]}"
        ),
        "epochs": f"{report.num_epochs:,}",
        "records": f"{report.num_records:,} ({report.num_skipped_records:,} left out)",
        "steps": f"{report.num_steps:,}",
        "calls": f"{report.num_calls:,}",
        "refused": f"{report.num_refused:,}",
        "state at the end": f"{report.state_digest[:16]} ({_comparison(report)})",
        "outcome": "identical" if report.is_identical else "DIFFERENT",
    }
    console = Console()
    print_facts(console, f"recording {path}", facts)
    for note in report.notes:
        console.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)
    if report.difference is not None:
        told = f"first difference: {report.difference}"
        console.print(told, style="red", markup=False, soft_wrap=True)


def _comparison(report: RecordReplayReport) -> str:
    if not report.recorded_state_digest:
        return "none recorded: the coordinator was not closed"
    if report.state_digest == report.recorded_state_digest:
        return "as recorded"
    return f"recorded: {report.recorded_state_digest[:16]}"


class _Progress:
    """Shows how much of a recording is replayed, on stderr: a bar, or a line now and then."""

    def __init__(self, recording: Recording, clock: Clock, *, is_shown: bool) -> None:
        console = Console(file=sys.stderr)
        self._total_bytes = recording.size_bytes
        self._clock = clock
        self._has_lines = is_shown and not console.is_terminal
        self._line_s = clock.now()
        self._bar = progress_bar(console, "done", is_shown=is_shown)
        self._task = self._bar.add_task("replaying the recording", total=self._total_bytes, done="")

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, report: RecordReplayReport) -> None:
        """Show how far it has got."""
        done = f"{report.num_records:,} records"
        self._bar.update(self._task, completed=report.bytes_read, done=done)
        now_s = self._clock.now()
        if self._has_lines and now_s - self._line_s >= _LINE_INTERVAL_S:
            self._line_s = now_s
            share = report.bytes_read / max(1, self._total_bytes)
            print(f"replaying the recording: {share:.0%}  {done}", file=sys.stderr)
