"""The command line `kvcache`: plan, launch, status, replay, replay-record, stop.

app.py says what can be typed and imports nothing slow; the work of each command is in a module of
its own, imported when the command runs.
"""

from __future__ import annotations

from actors.cli.app import app, main

__all__ = ["app", "main"]
