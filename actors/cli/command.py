"""What all commands share: options, exit codes, signals, what they print, one line per error.

Modules that declare commands import nothing slow at the top (numpy, torch, ray, pydantic), so
`--help` appears at once. A command imports what it needs when it runs.

The exit code tells scripts whether bytes are wrong, the input is wrong, or the cluster is gone.
`EXIT_CODES` is the table that `--help` shows. `--verbose` shows the traceback of an error, with the
same exit code. Exit code 1 is only for a check that found something wrong.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvcache.base.errors import (
    ClusterError,
    ConfigurationError,
    ExhaustedError,
    InvalidInputError,
    WrongBytesError,
    legible,
)

EXIT_WRONG_BYTES = 1
EXIT_DIFFERENT = 1
EXIT_STUCK = 1
EXIT_PREVENTED = 1
EXIT_INPUT = 2
EXIT_CLUSTER = 3
EXIT_BUG = 4
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141
"""The code of a process that SIGPIPE ended: its output is no longer read."""

EXIT_CODES = (
    "Exit codes: 0 done; 1 something is wrong: wrong bytes, a recording that replays differently, "
    "work that is stuck, a machine on which a launch would fail; 2 bad input: an option, a "
    "configuration, a workload, or more than there is room for; 3 the cluster: not running, not "
    "started, lost, or without an answer; 4 a bug; 130 interrupted."
)

_BYTE_UNITS = ("KiB", "MiB", "GiB", "TiB")
_LINE_INTERVAL_S = 10.0

_CONFIG = typer.Option(
    "--config",
    "-c",
    help="The cluster's configuration: a YAML file, or the name of one in the package, "
    "such as cpu_tp2.",
)
ConfigOption = Annotated[Path, _CONFIG]
OptionalConfigOption = Annotated[Path | None, _CONFIG]
NameOption = Annotated[
    str | None,
    typer.Option("--name", "-n", help="Name of the cluster (default: the only running one)."),
]
VllmOption = Annotated[
    str | None,
    typer.Option(
        "--vllm",
        help="Instead of a cluster: the vLLM engine of this name on this node; NAME/1 is its "
        "replica 1.",
    ),
]
SecondsOption = Annotated[
    float | None, typer.Option("--for", help="Stop after this many seconds.", min=0)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
NoProgressOption = Annotated[bool, typer.Option("--no-progress", help="Show no progress bar.")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")
]


def command(work: Callable[..., None]) -> Callable[..., None]:
    """Return `work` as a command that also has `--verbose` and turns errors into exit codes."""

    @wraps(work)
    def run(*, verbose: bool, **options: object) -> None:
        run_command(partial(work, **options), verbose)

    option = inspect.Parameter(
        "verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=VerboseOption
    )
    signature = inspect.signature(work, eval_str=True)
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]  # typer reads it
        parameters=[*signature.parameters.values(), option]
    )
    return run


def parse_size(option: str, text: str, example: str) -> int:
    """Return the bytes that the text of an option names; raises ConfigurationError."""
    from kvcache.config.sections import parse_bytes

    try:
        size_bytes = parse_bytes(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise ConfigurationError(f"{option} {text!r}: {error}") from error
    if not isinstance(size_bytes, int) or size_bytes < 1:
        raise ConfigurationError(f"{option} {text!r} is not a size: give one such as {example}")
    return size_bytes


def require_positive(**values: float | None) -> None:
    """Raise ConfigurationError, which names the option, for a value that is not above 0."""
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            option = name.replace("_", "-")
            raise ConfigurationError(f"--{option} is {value:g}: give a number above 0")


def run_command(work: Callable[[], None], verbose: bool) -> None:
    """Run a command. An error becomes one line and an exit code, a bug also its traceback."""
    try:
        work()
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        print("kvcache: interrupted", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (BrokenPipeError, SystemExit):  # rich turns the first into the second
        # Python flushes stdout again at exit, and would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_UNREAD) from None
    except Exception as error:
        code, line = outcome_of(error)
        if verbose or code == EXIT_BUG:
            traceback.print_exc()
        print(f"kvcache: {line}", file=sys.stderr)
        raise typer.Exit(code) from error


def outcome_of(error: Exception) -> tuple[int, str]:
    """Return the exit code for an error, and the line that says what happened."""
    if isinstance(error, WrongBytesError):
        return EXIT_WRONG_BYTES, str(error)
    if isinstance(error, (InvalidInputError, ExhaustedError)):
        return EXIT_INPUT, str(error)
    if isinstance(error, ClusterError):
        return EXIT_CLUSTER, str(error)
    if _is_rays(error):
        from actors.clusters.launch import first_line

        line = f"Ray failed: {first_line(error)}: look at `ray status` and `kvcache status`"
        return EXIT_CLUSTER, line
    return EXIT_BUG, f"unexpected {type(error).__name__}: {error}: this is a bug, please report it"


def _is_rays(error: Exception) -> bool:
    """Say whether Ray raised the error, without importing Ray."""
    exceptions = sys.modules.get("ray.exceptions")
    return exceptions is not None and isinstance(error, exceptions.RayError)


def interrupted_by_sigterm() -> AbstractContextManager[None]:
    """Make SIGTERM raise KeyboardInterrupt, as Ctrl-C does. Use it inside `ray_session`, which sets
    its own handler."""
    return handling(signal.default_int_handler, signal.SIGTERM)


@contextmanager
def handling(handler: Any, *numbers: int) -> Iterator[None]:
    """Handle these signals with `handler` during the `with` block. Main thread only."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def print_facts(title: str, facts: Mapping[str, str]) -> None:
    """Print a table of names and values."""
    print_table(title, facts_table(facts))


def facts_table(facts: Mapping[str, str]) -> Table:
    """Return a table of two columns without headings."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def print_note(text: str, style: str | None = None) -> None:
    """Print a line of text as it is: no markup, and only the terminal wraps it."""
    Console().print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_table(title: str, table: Table) -> None:
    """Print a table below its title, which may be wider. In a narrow terminal cells wrap, so that
    no number is cut off. Names in cells are printed literally and `legible`, not as markup."""
    for column in table.columns:
        if not column.no_wrap:
            column.overflow = "fold"
        column._cells = [legible(c) if isinstance(c, str) else c for c in column._cells]
    print_note(legible(title), "italic")
    Console().print(table, markup=False)


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
        if not self._bar.disable:
            self._bar.update(self._task, completed=done, rate=rate)
        now_s = time.monotonic()
        if self._has_lines and now_s - self._line_s >= _LINE_INTERVAL_S:
            self._line_s = now_s
            share = done / max(1, self._total)
            left_s = (now_s - self._start_s) * (1 - share) / share if share else 0.0
            say(f"{self._title}: {share:.0%}  {rate}  {left_s:.0f} s left")
