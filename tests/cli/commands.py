"""Runs the command line in a process of its own."""

from __future__ import annotations

import sys

# Where tests run in the background of a shell, Ctrl-C is ignored, and so it is in their children.
_MAIN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from actors.cli import main
main()
"""

KVCACHE = [sys.executable, "-c", _MAIN]
"""The command before the arguments."""
