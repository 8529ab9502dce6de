"""The page's server against pages that stop reading, and against invalid requests."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from actors.dashboard.server import MAX_STREAMS, DashboardServer

DEADLINE_S = 60.0
STREAM = b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n"


class BusyObserver:
    """A new picture of a megabyte, whenever one is asked for."""

    def newest(self) -> tuple[int, str]:
        return 1, "{}"

    def wait_newer(self, number: int, timeout_s: float) -> tuple[int, str]:
        return number + 1, "x" * (1 << 20)


@pytest.fixture
def port() -> Iterator[int]:
    """The address of a server in a thread of its own, with short timeouts."""
    observer: Any = BusyObserver()
    server = DashboardServer(observer, "127.0.0.1", 0)
    server.stalled_s = 0.2
    loop, told = asyncio.new_event_loop(), threading.Event()
    addresses: list[str] = []

    def tell(address: str) -> None:
        addresses.append(address)
        told.set()

    serving = loop.create_task(server.serve(tell))

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(serving)

    thread = threading.Thread(target=run)
    thread.start()
    assert told.wait(DEADLINE_S)
    yield int(addresses[0].rstrip("/").rpartition(":")[2])
    loop.call_soon_threadsafe(serving.cancel)
    thread.join(DEADLINE_S)
    loop.close()


def ask(port: int, request: bytes) -> socket.socket:
    asking = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
    asking.sendall(request)
    return asking


def status(asking: socket.socket) -> str:
    return asking.recv(12).decode().partition(" ")[2]


def test_pages_that_read_nothing_make_room_for_others(port: int) -> None:
    idle = [ask(port, STREAM) for _ in range(MAX_STREAMS)]
    give_up_s = time.monotonic() + DEADLINE_S
    while True:
        with ask(port, STREAM) as other:
            if status(other) == "200":
                break
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    for asking in idle:
        asking.close()


@pytest.mark.parametrize(
    "request_bytes",
    [b"\0\1\2 / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n"],
    ids=["bytes", "long header"],
)
def test_invalid_requests_are_answered_without_a_traceback(
    port: int, request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with ask(port, request_bytes) as asking:
        assert status(asking) == "400"
    with ask(port, b"GET /state.json HTTP/1.1\r\nHost: localhost\r\n\r\n") as asking:
        assert status(asking) == "200"
    assert not caplog.records
