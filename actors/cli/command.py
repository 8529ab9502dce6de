"""What all commands share: their options, their exit codes, and one line for an error.

Every module that declares commands imports nothing slow at its top, so that `--help` is there at
once: no numpy, torch or ray, and nothing of `kvcache`. A command imports its work when it runs.

Scripts tell by the exit code whether bytes are wrong, the input is wrong, or the cluster is gone.
`EXIT_CODES` is the table that `--help` shows. `--verbose` shows the traceback of an error, with the
same exit code. Only what was found wrong ends with 1.
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

EXIT_WRONG_BYTES = 1
EXIT_DIFFERENT = 1
EXIT_STUCK = 1
EXIT_PREVENTED = 1
EXIT_INPUT = 2
EXIT_CLUSTER = 3
EXIT_BUG = 4
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141
"""As of a process that SIGPIPE ends: its output is no longer read."""

EXIT_CODES = (
    "Exit codes: 0 done; 1 something is wrong: wrong bytes, a recording that replays differently, "
    "work that is stuck, a machine on which a launch would fail; 2 bad input: an option, a "
    "configuration, a workload, or more than there is room for; 3 the cluster: not running, not "
    "started, lost, or without an answer; 4 a bug; 130 interrupted."
)

_CONFIG = typer.Option(
    "--config",
    "-c",
    help="The cluster's configuration: a YAML file, or one that comes with the package by its "
    "name, such as cpu_tp2.",
)
ConfigOption = Annotated[Path, _CONFIG]
OptionalConfigOption = Annotated[Path | None, _CONFIG]
NameOption = Annotated[
    str | None,
    typer.Option("--name", "-n", help="Name of the cluster; default: the only one that runs."),
]
SecondsOption = Annotated[
    float | None, typer.Option("--for", help="End after so many seconds.", min=0)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
NoProgressOption = Annotated[bool, typer.Option("--no-progress", help="Show no progress bar.")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")
]


def command(work: Callable[..., None]) -> Callable[..., None]:
    """Return `work` as a command: it has `--verbose`, too, and its errors become exit codes."""

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


def run_command(work: Callable[[], None], verbose: bool) -> None:
    """Do a command's work; every error becomes one line and an exit code, a bug its traceback."""
    try:
        work()
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        print("kvcache: interrupted", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (BrokenPipeError, SystemExit):  # rich makes the one into the other
        # Python flushes stdout once more when it ends, and would complain.
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
    from kvcache.base.errors import ClusterError, ExhaustedError, InvalidInputError, WrongBytesError

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
    """Say whether Ray raised it: a process that has not imported Ray asks without importing it."""
    exceptions = sys.modules.get("ray.exceptions")
    return exceptions is not None and isinstance(error, exceptions.RayError)
