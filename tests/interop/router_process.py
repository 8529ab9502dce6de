"""Our end of `router_host.py`: a process in the routers' environment, controlled line by line."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

HOST = Path(__file__).with_name("router_host.py")


class RouterProcess:
    """A running host. Each command is answered before the next one."""

    def __init__(self, python: Path, log: Path) -> None:
        """Start it; `log` is a file for its output."""
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [python, HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file
            )
        assert self._read() == "ready"

    def __enter__(self) -> RouterProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, command: str, **arguments: Any) -> Any:
        """Return the answer; raises AssertionError if there is none."""
        self._process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
        self._process.stdin.flush()
        found = self._read()
        assert "answer" in found, f"{command}: {found}\n{self.said()}"
        return found["answer"]

    def said(self) -> str:
        """Return the end of its log."""
        return self._log.read_text(errors="replace")[-4000:]

    def _read(self) -> Any:
        line = self._process.stdout.readline()
        assert line, f"the host has ended: {self.said()}"
        return json.loads(line)
