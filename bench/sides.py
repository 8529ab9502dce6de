"""The processes of the sides: this revision and, if given, an earlier one and the peer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.cores import BEFORE, OURS, PEER
from bench.side_setup import Setup

ROOT = Path(__file__).resolve().parents[1]


class Side:
    """A process that runs workloads of one side, one setup after the other."""

    def __init__(self, name: str, python: Path, checkout: Path = ROOT) -> None:
        """Start a side with what `checkout` has in `bench/`, and its package unless it is the
        peer's."""
        self.name = name
        package = {} if name == PEER else {"PYTHONPATH": str(checkout)}
        self._process = subprocess.Popen(
            [str(python), str(checkout / "bench" / "side.py"), PEER if name == PEER else OURS],
            env=os.environ | package,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if name == PEER else None,
            text=True,
        )

    def begin(self, setup: Setup) -> None:
        """Start to make and fill the manager; `wait_until_ready` waits for it."""
        self._write(setup.to_json())

    def wait_until_ready(self) -> None:
        """Wait until the manager is made and filled."""
        self._expect("ready")

    def call(self, function: str, *arguments: Any) -> Any:
        """Run one function of the suite and return its answer."""
        self._write([function, arguments])
        return json.loads(self._read())

    def caller(self, function: str, *arguments: Any) -> Callable[[], Any]:
        """Return a caller of the function."""
        return lambda: self.call(function, *arguments)

    def end(self) -> None:
        """Drop the manager."""
        self._write(None)
        self._expect("ended")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def _expect(self, word: str) -> None:
        got = self._read()
        if got != word:
            raise RuntimeError(f"the side '{self.name}' said {got!r} instead of {word!r}")

    def _write(self, message: object) -> None:
        assert self._process.stdin is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the side '{self.name}' has died: see its message above")
        return line.strip()


class SidePool:
    """Keeps processes for the next setup. A context manager that ends them all."""

    def __init__(self, peer: Path | None, before: Path | None = None) -> None:
        """Use the peer's environment, and a checkout of an earlier revision, if given."""
        self.has_peer = peer is not None
        self.has_before = before is not None
        self._peer = peer
        self._checkouts = {BEFORE: before.resolve()} if before is not None else {}
        self._idle: dict[str, list[Side]] = {}
        self._all: list[Side] = []

    def __enter__(self) -> SidePool:
        return self

    def __exit__(self, *exception: object) -> None:
        for side in self._all:
            side.close()

    def take(self, name: str) -> Side:
        """Return an idle process of that side."""
        if self._idle.get(name):
            return self._idle[name].pop()
        is_peer = name == PEER and self._peer is not None
        python = Path(self._peer or "", "bin", "python") if is_peer else Path(sys.executable)
        side = Side(name, python, self._checkouts.get(name, ROOT))
        self._all.append(side)
        return side

    def give_back(self, side: Side) -> None:
        """Take a process back that has ended its setup."""
        self._idle.setdefault(side.name, []).append(side)


class Sides:
    """All sides on one setup, by name, in the order in which they take turns. A context manager."""

    def __init__(self, pool: SidePool, setup: Setup, *, has_peer: bool = True) -> None:
        names = [OURS, *([BEFORE] if pool.has_before else [])]
        names += [PEER] if pool.has_peer and has_peer else []
        self._pool = pool
        self.by_name = {name: pool.take(name) for name in names}
        for side in self.by_name.values():
            side.begin(setup)
        for side in self.by_name.values():
            side.wait_until_ready()

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            for side in self.by_name.values():
                side.end()
                self._pool.give_back(side)

    def callers(self, function: str, *arguments: Any) -> dict[str, Callable[[], Any]]:
        """Return a caller of the function for each side."""
        return {name: side.caller(function, *arguments) for name, side in self.by_name.items()}

    def ask(self, function: str, *arguments: Any) -> dict[str, Any]:
        """Call the function on each side once and return the answers."""
        return {name: call() for name, call in self.callers(function, *arguments).items()}
