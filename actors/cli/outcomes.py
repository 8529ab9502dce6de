"""What becomes of a command: its exit code, and one line for an error of ours.

Exit codes: 0 done, 1 wrong bytes, a recording that does not replay to the same, something stuck, or
a machine on which a launch would fail, 2 an error of ours (one line on stderr; `--verbose` shows
the traceback), 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

EXIT_WRONG_BYTES = 1
EXIT_DIFFERENT = 1
EXIT_STUCK = 1
EXIT_PREVENTED = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


def run_command(work: Callable[[], None], verbose: bool) -> None:
    """Do a command's work; errors of ours become one line and an exit code."""
    from kvcache.errors import KVCacheError, WrongBytesError

    try:
        work()
    except KVCacheError as error:
        if verbose:
            raise
        print(f"kvcache: {error}", file=sys.stderr)
        is_wrong = isinstance(error, WrongBytesError)
        raise typer.Exit(EXIT_WRONG_BYTES if is_wrong else EXIT_ERROR) from error
    except KeyboardInterrupt:
        print("kvcache: interrupted", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
