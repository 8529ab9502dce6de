"""Programs in vLLM's environment, each in a session of its own: engines, makers of models."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]

IMPORT_S = 300.0
RUN_S = 120.0

ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Program:
    """A running program. `wait` returns its status, after so many seconds at most."""

    pid: int
    stdin: IO[bytes]
    stdout: IO[bytes]
    wait: Callable[[float], int]


def spawn(python: str, module: str, arguments: Sequence[str], errors: IO[bytes]) -> Program:
    """Start one as its users do: a fresh interpreter imports everything."""
    process = subprocess.Popen(
        [python, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        start_new_session=True,
        bufsize=0,
    )
    assert process.stdin is not None and process.stdout is not None
    return Program(process.pid, process.stdin, process.stdout, process.wait)


class ForkServer:
    """Forks programs from one process that has imported what they need."""

    def __init__(self, python: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [python, "-m", "tests.vllm.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT},
            )

    def fork(self, module: str, arguments: Sequence[str], errors: IO[bytes]) -> Program:
        """Start one that calls `module.main(*arguments)`."""
        (their_stdin, stdin), (stdout, their_stdout) = os.pipe(), os.pipe()
        theirs = [their_stdin, their_stdout, errors.fileno()]
        environment = {**os.environ, **ENVIRONMENT}
        try:
            pid = self._ask(
                IMPORT_S, theirs, module=module, arguments=arguments, environment=environment
            )
        finally:
            os.close(their_stdin)
            os.close(their_stdout)
        return Program(
            pid,
            open(stdin, "wb", buffering=0),
            open(stdout, "rb", buffering=0),
            lambda timeout_s: self._ask(timeout_s, [], pid=pid),
        )

    def close(self) -> None:
        """End the server; programs go on."""
        self._socket.close()
        self._process.kill()
        self._process.wait(30)

    def _ask(self, timeout_s: float, descriptors: list[int], **request: object) -> int:
        self._socket.settimeout(timeout_s)
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        answer = self._socket.recv(64)
        assert answer, "the fork server has ended"
        return int(answer)


@cache
def fork_server(python: str) -> ForkServer:
    """Return the one server of this process."""
    return ForkServer(python)


def run(python: str, module: str, *arguments: str) -> None:
    """Fork a program and wait for its end; raises AssertionError with its output if it fails."""
    with Path(os.devnull).open("wb") as errors:
        program = fork_server(python).fork(module, arguments, errors)
    with program.stdin, program.stdout:
        assert program.wait(RUN_S) == 0, f"{module} {arguments} failed"
