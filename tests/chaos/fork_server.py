"""A process that has imported everything and forks others in milliseconds instead of seconds.

    supervisor ──{"id", "kind", ...} and a socket──▶ fork server ──fork──▶ process
               ◀──born, stopped, ended──────────────

Each process is its child, so that it reports every exit and its status. The processes die with the
fork server, which ends when its socket closes: so nothing is left, whatever happens to the test.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.chaos.control import Control

ROOT = Path(__file__).absolute().parents[2]
END_S = 20.0
START_S = 120.0
"""Time to import torch on a busy machine."""

_PR_SET_PDEATHSIG = 1


class ForkServer:
    """The fork server as the test sees it. Schedules use `control` one after the other."""

    def __init__(self) -> None:
        """Start the process; return when it has imported everything."""
        self.control, theirs = Control.pair()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.fork_server", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            cwd=ROOT,
            env=environment,
        )
        theirs.close()
        give_up_s = time.monotonic() + START_S
        while not self.control.receive():
            if self.control.is_over or time.monotonic() > give_up_s:
                self.close()
                raise RuntimeError("the fork server did not start")
            select.select([self.control], [], [], 1.0)

    def close(self) -> None:
        """End the process and all its children."""
        self.control.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve(control: Control) -> None:
    """Fork processes until the other end is closed."""
    wake, signalled = os.pipe()
    for end in (wake, signalled):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    living: set[int] = set()
    control.send({"ready": True})
    while not control.is_over:
        select.select([control, wake], [], [])
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 4096)
        for message, descriptors in control.receive_with_descriptors():
            if message.get("do") == "count":
                control.send({"living": len(living)})
                continue
            process_id = _fork(message, descriptors, control)
            living.add(process_id)
            control.send({"born": message["id"], "pid": process_id})
            for descriptor in descriptors:
                os.close(descriptor)
        _tell_of_changes(control, living)
    for process_id in living:
        os.kill(process_id, signal.SIGKILL)
    for process_id in living:
        os.waitpid(process_id, 0)


def _tell_of_changes(control: Control, living: set[int]) -> None:
    while living:
        process_id, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if not process_id:
            return
        if os.WIFSTOPPED(status):
            control.send({"stopped": process_id})
            continue
        living.discard(process_id)
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        control.send({"ended": process_id, "code": code})


def _fork(message: dict[str, Any], descriptors: list[int], control: Control) -> int:
    parent_id = os.getpid()
    process_id = os.fork()
    if process_id:
        return process_id
    code = 1
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_id:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        from tests.chaos.roles import play

        code = play(message, Control(socket.socket(fileno=descriptors[0])))
    finally:
        os._exit(code)


def main() -> None:
    """Import what processes need, then serve."""
    import torch

    from tests.chaos import roles

    torch.set_num_threads(1)
    torch.zeros(1)
    assert roles
    gc.collect()
    gc.freeze()
    serve(Control(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
