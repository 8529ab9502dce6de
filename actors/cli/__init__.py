"""The command line `kvcache`: plan, doctor, launch, status, watch, events, replay, stop and more.

app.py says what can be typed and imports nothing slow; the work of each command is in a module of
its own, imported when the command runs.
"""

from __future__ import annotations

from actors.cli.app import app, main

__all__ = ["app", "main"]
