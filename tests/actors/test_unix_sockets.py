"""Unix sockets under attack, or without resources: the cost for attackers, and for us."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import zmq

from actors.transport import Endpoint, Inbound, client_peer
from actors.transport.mailbox import WakePipe
from actors.transport.node_server import NodeServer
from actors.transport.protocol import TransportLimits
from actors.transport.unix_channel import UnixChannel, framed, socket_name
from actors.transport.unix_peer import UnixPeer
from actors.transport.unix_server import MAX_STRANGERS, unix_address
from actors.transport.zmq_server import local_address
from kvcache.protocol.messages import ClientAddress
from tests.waiting import wait_until

LIMITS = TransportLimits(max_message_bytes=1000)
DEADLINE_S = 10.0


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def server(cleanup: ExitStack) -> NodeServer:
    made = NodeServer(LIMITS)
    cleanup.callback(made.close)
    return made


@contextmanager
def user(user_id: int) -> Iterator[None]:
    """Be another user for a while; only root can."""
    before = os.geteuid()
    os.seteuid(user_id)
    try:
        yield
    finally:
        os.seteuid(before)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def make_peer(cleanup: ExitStack, address: str, name: str = "friend") -> UnixPeer:
    peer = UnixPeer(Endpoint(address), client_peer(name), LIMITS)
    cleanup.callback(peer.close)
    return peer


def raw_connection(cleanup: ExitStack, address: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    cleanup.callback(connected.close)
    connected.settimeout(DEADLINE_S)
    connected.connect(socket_name(address))
    return connected


def hear(server: NodeServer, peer: UnixPeer) -> list[Inbound]:
    """Let `peer` send hello until the server receives it; return what arrived."""
    give_up_s = time.monotonic() + DEADLINE_S
    inbound: list[Inbound] = []
    while not inbound:
        assert time.monotonic() < give_up_s, server.statistics()
        peer.send(b"hello")
        peer.receive(0.01)
        inbound = server.receive(0.01)
    return inbound


def wait_for_disconnections(server: NodeServer, count: int) -> None:
    wait_until(
        lambda: server.statistics().disconnections >= count,
        server.statistics,
        meanwhile=lambda: server.receive(0.01),
    )


def test_who_begins_with_more_than_a_name_is_cut_off_before_it_is_read(
    cleanup: ExitStack, server: NodeServer
) -> None:
    address = server.bind(unix_address(), False)
    stranger = raw_connection(cleanup, address)
    stranger.sendall((1500).to_bytes(4, "little") + b"x")
    wait_for_disconnections(server, 1)
    assert stranger.recv(1) == b""
    assert hear(server, make_peer(cleanup, address))[0].payload == b"hello"


def test_what_follows_a_name_may_be_long_and_in_pieces(
    cleanup: ExitStack, server: NodeServer
) -> None:
    sender = raw_connection(cleanup, server.bind(unix_address(), False))
    frames = framed((b"c:friend", b"x" * 1000))
    for piece in (frames[:400], frames[400:700], frames[700:]):
        assert server.receive(0.0) == []
        sender.sendall(piece)
    inbound: list[Inbound] = []
    give_up_s = time.monotonic() + DEADLINE_S
    while not inbound:
        assert time.monotonic() < give_up_s
        inbound = server.receive(0.01)
    assert inbound == [Inbound(client_peer("friend"), b"x" * 1000)]


def test_of_those_who_say_nothing_the_first_make_room_for_others(
    cleanup: ExitStack, server: NodeServer
) -> None:
    address = server.bind(unix_address(), False)
    friend = make_peer(cleanup, address)
    hear(server, friend)
    silent = [raw_connection(cleanup, address) for _ in range(MAX_STRANGERS + 3)]
    wait_for_disconnections(server, 3)
    assert [connected.recv(1) for connected in silent[:3]] == [b""] * 3
    hear(server, friend)
    hear(server, make_peer(cleanup, address, "another"))
    assert server.statistics().disconnections <= 4


def test_without_descriptors_the_server_waits_instead_of_trying_all_the_time(
    cleanup: ExitStack, server: NodeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tried = 0

    def no_descriptor(_: socket.socket) -> None:
        nonlocal num_tried
        num_tried += 1
        raise OSError(errno.EMFILE, "Too many open files")

    address = server.bind(unix_address(), False)
    peer = make_peer(cleanup, address)
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", no_descriptor)
        for _ in range(1000):
            server.receive(0.0)
    assert 1 <= num_tried < 100
    assert server.statistics().refused_connections == num_tried
    assert hear(server, peer)[0].payload == b"hello"


def test_without_descriptors_a_peer_loses_messages_and_nothing_else(
    cleanup: ExitStack, server: NodeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    address = server.bind(unix_address(), False)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", no_descriptor)
        peer = make_peer(cleanup, address)
        peer.send(b"lost")
    assert peer.statistics().undeliverable == 1
    assert hear(server, peer)[0].payload == b"hello"


def test_an_error_of_any_kind_costs_the_connection_that_caused_it(
    cleanup: ExitStack, server: NodeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = server.bind(unix_address(), False)
    friend = make_peer(cleanup, address)
    hear(server, friend)
    receive = UnixChannel.receive

    def receive_or_fail(channel: UnixChannel, timeout_s: float = 0.0) -> list[bytes]:
        payloads = receive(channel, timeout_s)
        if b"poison" in payloads:
            raise MemoryError("far too much")
        return payloads

    with monkeypatch.context() as patch:
        patch.setattr(UnixChannel, "receive", receive_or_fail)
        stranger = raw_connection(cleanup, address)
        stranger.sendall(framed((b"poison",)))
        wait_for_disconnections(server, 1)
        assert stranger.recv(1) == b""
        assert server.statistics().faults == 1
    assert hear(server, friend)[0].payload == b"hello"


@needs_root
def test_processes_of_other_users_are_not_let_in(cleanup: ExitStack, server: NodeServer) -> None:
    address = server.bind(unix_address(), False)
    with user(65534):
        stranger = raw_connection(cleanup, address)
    stranger.sendall(framed((b"c:stranger", b"step")))
    give_up_s = time.monotonic() + DEADLINE_S
    while not server.statistics().refused_connections:
        assert time.monotonic() < give_up_s
        assert server.receive(0.01) == []
    assert hear(server, make_peer(cleanup, address))[0].payload == b"hello"


@needs_root
def test_a_peer_tells_nothing_to_another_user_that_has_taken_the_address(
    cleanup: ExitStack,
) -> None:
    address = unix_address()
    squatter = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    cleanup.callback(squatter.close)
    with user(65534):
        squatter.bind(socket_name(address))
        squatter.listen()
    with user(65533):
        peer = make_peer(cleanup, address)
        peer.send(b"secret")
    squatter.settimeout(DEADLINE_S)
    accepted, _ = squatter.accept()
    cleanup.callback(accepted.close)
    assert accepted.recv(100) == b""
    statistics = peer.statistics()
    assert (statistics.refused_connections, statistics.sent, statistics.undeliverable) == (1, 0, 1)


class Trickle:
    """A socket that accepts a few bytes at a time."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def settimeout(self, timeout_s: float | None) -> None:
        pass

    def fileno(self) -> int:
        return 0

    def send(self, data: Any, flags: int) -> int:
        self.taken.append(data)
        if len(self.taken) % 2 == 0:
            raise BlockingIOError
        return min(7, len(data))


def test_the_rest_of_a_large_message_is_not_copied_for_every_piece_that_is_taken() -> None:
    connected: Any = Trickle()
    channel = UnixChannel(connected, LIMITS)
    frames = framed((b"x" * 990,))
    assert channel.send(frames)
    while channel.has_waiting:
        channel.flush()
    assert len(connected.taken) > 100
    assert all(memoryview(data).obj is frames for data in connected.taken)


def test_nothing_arrives_at_a_peer_that_is_closed(cleanup: ExitStack, server: NodeServer) -> None:
    peer = make_peer(cleanup, server.bind(unix_address(), False))
    peer.close()
    assert (peer.receive(DEADLINE_S), peer.receive_or_wake(DEADLINE_S)) == ([], [])
    peer.send(b"x")
    assert peer.statistics().undeliverable == 1


def test_the_last_words_of_a_peer_are_read_although_it_takes_nothing_more(
    cleanup: ExitStack, server: NodeServer
) -> None:
    peer = make_peer(cleanup, server.bind(unix_address(), False))
    hear(server, peer)
    peer.send(b"goodbye")
    peer.close()
    server.send([ClientAddress("friend")], b"too late")
    assert server.statistics().undeliverable == 1
    assert [inbound.payload for inbound in server.receive(DEADLINE_S)] == [b"goodbye"]
    wait_for_disconnections(server, 1)
    assert not server._near.is_connected(ClientAddress("friend"))


@pytest.mark.parametrize("receives_slowly", [False, True])
def test_the_last_words_of_the_server_are_read_although_it_takes_nothing_more(
    cleanup: ExitStack, server: NodeServer, receives_slowly: bool
) -> None:
    peer = make_peer(cleanup, server.bind(unix_address(), False))
    hear(server, peer)
    while peer.receive(0.0):
        pass
    server.send([ClientAddress("friend")], b"goodbye")
    server.close()
    peer.send(b"too late")
    assert peer.statistics().undeliverable == 1
    receive = peer.receive_or_wake if receives_slowly else peer.receive
    assert receive(DEADLINE_S) == [b"goodbye"]
    assert receive(0.0) == []
    assert peer.statistics().disconnections == 1


def test_a_flood_of_refused_messages_is_not_waited_in(
    cleanup: ExitStack, server: NodeServer
) -> None:
    address = server.bind(local_address(), False)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    cleanup.callback(context.destroy, 0)
    stranger = context.socket(zmq.DEALER)
    cleanup.callback(stranger.close, 0)
    stranger.identity = b"nobody"
    stranger.connect(address)
    for _ in range(2000):
        stranger.send(b"x")
    give_up_s = time.monotonic() + DEADLINE_S
    while server.statistics().foreign < 1500:  # those after it may not be there yet
        server.receive(DEADLINE_S)
        assert time.monotonic() < give_up_s


def test_a_pipe_is_not_closed_while_another_thread_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = WakePipe()
    closer = threading.Thread(target=pipe.close)
    written: list[bool] = []

    def write(descriptor: int, data: bytes) -> int:
        closer.start()
        closer.join(0.05)
        written.append(closer.is_alive())
        return len(data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        pipe.signal()
    closer.join(DEADLINE_S)
    assert written == [True]
    pipe.signal()


def test_a_stalled_reader_does_not_make_the_server_turn_in_vain(
    cleanup: ExitStack, server: NodeServer
) -> None:
    address = server.bind(unix_address(), False)
    stalled = raw_connection(cleanup, address)
    stalled.sendall(framed((b"c:stalled", b"hello")))
    other = make_peer(cleanup, address)
    give_up_s = time.monotonic() + DEADLINE_S
    while not server.receive(0.01):
        assert time.monotonic() < give_up_s
    while not server.statistics().undeliverable:
        server.send([ClientAddress("stalled")], b"x" * 1000)
        assert time.monotonic() < give_up_s
    waker = threading.Timer(0.2, server.wake)
    waker.start()
    num_turns = 0
    while waker.is_alive():
        server.receive(DEADLINE_S)
        num_turns += 1
    assert num_turns < 20
    assert hear(server, other)[0].payload == b"hello"


def test_signals_do_not_put_off_the_end_of_a_wait(cleanup: ExitStack, server: NodeServer) -> None:
    peer = make_peer(cleanup, server.bind(unix_address(), False))
    hear(server, peer)
    give_up = threading.Timer(2.0, server.send, ([ClientAddress("friend")], b"too late"))
    cleanup.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, lambda *_: None))
    cleanup.callback(signal.setitimer, signal.ITIMER_REAL, 0.0)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    give_up.start()
    arrived = peer.receive(0.05)
    give_up.cancel()
    assert arrived == []
