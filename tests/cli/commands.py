"""Runs the command line, in this process or in one of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from typer.testing import CliRunner

from actors.cli import app

# Where tests run in the background of a shell, Ctrl-C is ignored, and so it is in their children.
_MAIN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from actors.cli import main
main()
"""

KVCACHE = [sys.executable, "-c", _MAIN]
"""The command before the arguments."""


def run(*arguments: str | Path, exit_code: int = 0) -> tuple[str, str]:
    """Run a command, which must end with `exit_code`; return its stdout and stderr."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == exit_code, result.output
    return result.stdout, result.stderr
