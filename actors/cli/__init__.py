"""The command line `kvcache`: plan, doctor, launch, status, watch, events, replay, stop and more.

app.py lists the commands. Each is a function in the module of its noun: the signature declares its
options, the body does the work. Modules of commands import nothing slow until a command runs.
"""

from __future__ import annotations

from actors.cli.app import app, main

__all__ = ["app", "main"]
