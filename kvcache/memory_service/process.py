"""The memory service in its own process, for engines without a cluster; and its start.

The first engine on a node starts it, in a separate session, so that signals that end the engine do
not reach it. It ends on `--end`, or when its memory has been unused for a time. Two services never
share an address: of two that start at once, one ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from kvcache.base.errors import AlreadyRunningError, ClusterError, StartupError
from kvcache.memory_service.client import MemoryServiceClient
from kvcache.memory_service.protocol import (
    connect,
    is_trusted,
    make_socket,
    peer_process,
    process_text,
    socket_name,
)
from kvcache.memory_service.service import HostMemoryService

START_S = 30.0
"""How long a memory service may take to answer after its start."""

MAX_SEGMENTS = 256
LOOK_S = 0.5
RETRY_S = 0.05


def ensure_service(address: str, idle_s: float) -> None:
    """Return when a memory service answers at `address`; start one if there is none.

    Raises StartupError when none answers within `START_S`.
    """
    client = MemoryServiceClient(address)
    if _answers(client):
        return
    command = [
        sys.executable,
        "-m",
        "kvcache.memory_service.process",
        address,
        "--idle-s",
        str(idle_s),
    ]
    nothing, environment = subprocess.DEVNULL, dict(os.environ)
    if path := environment.get("PYTHONPATH"):  # the service runs in another directory
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    started = subprocess.Popen(
        command,
        stdin=nothing,
        stdout=nothing,
        stderr=nothing,
        start_new_session=True,
        cwd="/",
        env=environment,
    )
    # Waited for, so that it does not become a zombie if it ends before this process.
    threading.Thread(target=started.wait, name="kvcache-memory-service", daemon=True).start()
    give_up_s = time.monotonic() + START_S
    while not _answers(client):
        if time.monotonic() > give_up_s:
            raise StartupError(
                f"the memory service at {address} does not answer after {START_S:g} s "
                f"({_why(address, started, command)}, or set offload.keeps_memory to false"
            )
        time.sleep(RETRY_S)


def _why(address: str, started: subprocess.Popen[bytes], command: Sequence[str]) -> str:
    """Return what keeps a memory service from answering, and the remedy."""
    try:
        process_id, is_own = _listener(address)
    except OSError:
        ended = f"its process {started.pid} ended with {started.returncode}"
        return f"{ended}): run '{shlex.join(command)}' to see why"
    who = process_text(process_id)
    if not is_own:
        return f"{who} of another user has the address): give the engine another name"
    return f"{who} has the address, and may be stopped): let it go on, or kill it"


def serve(address: str, idle_s: float) -> None:
    """Keep memory at `address` until it has been unused for `idle_s`.

    Raises AlreadyRunningError.
    """
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    service = HostMemoryService(address, max_segments=MAX_SEGMENTS, max_bytes=total_bytes)
    service.serve()
    used_s = time.monotonic()
    while time.monotonic() - used_s < idle_s:
        time.sleep(min(LOOK_S, idle_s))
        service.ensure_serving()
        if service.is_used():
            used_s = time.monotonic()
    service.close()


def end(address: str) -> int:
    """End the service at `address`, even if it is stopped; return its process.

    Raises ClusterError if there is none that this process can end.
    """
    try:
        process_id, is_own = _listener(address)
    except OSError as error:
        raise ClusterError(f"no memory service answers at {address} ({error.strerror})") from error
    if not is_own:
        raise ClusterError(f"the memory service at {address} is another user's")
    if process_id <= 0:
        raise ClusterError(
            f"the memory service at {address} is {process_text(process_id)}: end it there"
        )
    with contextlib.suppress(ProcessLookupError):  # it is gone
        os.kill(process_id, signal.SIGTERM)
        os.kill(process_id, signal.SIGCONT)
    return process_id


def _listener(address: str) -> tuple[int, bool]:
    """Return which process listens at `address`, and whether it is this user's; raises OSError."""
    with make_socket(5.0) as connected:
        connect(connected, socket_name(address), 5.0)
        return peer_process(connected), is_trusted(connected)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve, or end the running memory service; return the exit status."""
    parser = argparse.ArgumentParser(
        "python -m kvcache.memory_service.process", description=__doc__
    )
    parser.add_argument("address", help="unix:@ and a name")
    parser.add_argument("--idle-s", type=float, default=3600.0, help="end when unused so long")
    parser.add_argument("--end", action="store_true", help="end the one at the address")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.end:
            print(f"ended the memory service {end(chosen.address)}")
        else:
            serve(chosen.address, chosen.idle_s)
    except AlreadyRunningError:
        return 0  # another one serves
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _answers(client: MemoryServiceClient) -> bool:
    try:
        descriptor = client.attach("")
    except ClusterError:
        return False
    if descriptor is not None:
        os.close(descriptor)
    return True


if __name__ == "__main__":
    sys.exit(main())
