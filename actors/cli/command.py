"""What all commands share: options, exit codes, and one line per error.

Modules that declare commands import nothing slow at the top (numpy, torch, ray, pydantic), so
`--help` appears at once. A command imports what it needs when it runs.

The exit code tells scripts whether bytes are wrong, the input is wrong, or the cluster is gone.
`EXIT_CODES` is the table that `--help` shows. `--verbose` shows the traceback of an error, with the
same exit code. Exit code 1 is only for a check that found something wrong.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Annotated

import typer

from kvcache.base.errors import (
    ClusterError,
    ConfigurationError,
    ExhaustedError,
    InvalidInputError,
    WrongBytesError,
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
