"""Both ends of every transport: admission, counts, and bounded waits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import zmq

from actors.transport import Endpoint, Inbound, Peer, PeerTransport, client_peer, worker_peer
from actors.transport.mailbox import Mailbox
from actors.transport.node_server import NodeServer
from actors.transport.protocol import TransportLimits, parse_identity
from actors.transport.ray import RayServer
from actors.transport.unix_channel import UNIX_SCHEME, socket_name
from actors.transport.unix_peer import UnixPeer
from actors.transport.unix_server import unix_address
from actors.transport.zmq_peer import ZmqPeer
from actors.transport.zmq_server import local_address, network_address
from kvcache.base.curve import CurveKeys, generate_curve_keys
from kvcache.base.errors import ClusterError, ConfigurationError, MalformedMessageError
from kvcache.protocol.messages import Address, ClientAddress, WorkerAddress

LIMITS = TransportLimits(max_message_bytes=1000)
DEADLINE_S = 10.0


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


MakeAddress = Callable[[], str]


@pytest.fixture(params=[unix_address, local_address], ids=["unix", "zmq"])
def near(request: pytest.FixtureRequest) -> MakeAddress:
    """Makes addresses for peers on the same node, over each kind of socket."""
    make: MakeAddress = request.param
    return make


def make_server(cleanup: ExitStack, keys: CurveKeys | None = None) -> NodeServer:
    server = NodeServer(LIMITS, keys)
    cleanup.callback(server.close)
    return server


def make_peer(
    cleanup: ExitStack, endpoint: Endpoint, peer: Peer, limits: TransportLimits = LIMITS
) -> PeerTransport:
    is_near = endpoint.address.startswith(UNIX_SCHEME)
    made = UnixPeer(endpoint, peer, limits) if is_near else ZmqPeer(endpoint, peer, limits)
    cleanup.callback(made.close)
    return made


def receive_until(server: NodeServer, is_enough: Callable[[list[Inbound]], bool]) -> list[Inbound]:
    """Return the messages until `is_enough`; fails at the deadline."""
    inbound: list[Inbound] = []
    give_up_s = time.monotonic() + DEADLINE_S
    while not is_enough(inbound):
        assert time.monotonic() < give_up_s, (inbound, server.statistics())
        inbound.extend(server.receive(0.05))
    return inbound


def receive_one(peer: PeerTransport) -> bytes:
    give_up_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up_s:
        payloads = peer.receive(0.1)
        if payloads:
            assert len(payloads) == 1
            return payloads[0]
    raise AssertionError("nothing arrived")


every_kind = pytest.mark.parametrize(
    ("address", "is_guarded"),
    [
        (unix_address(), False),
        (local_address(), False),
        (local_address(), True),
        (network_address("127.0.0.1"), False),
        (network_address("127.0.0.1"), True),
    ],
    ids=["unix", "ipc", "ipc with keys", "tcp", "tcp with keys"],
)


@every_kind
def test_payloads_travel_both_ways_over_every_kind_of_endpoint(
    cleanup: ExitStack, address: str, is_guarded: bool
) -> None:
    keys = generate_curve_keys()
    server = make_server(cleanup, keys)
    bound = server.bind(address, is_guarded)
    endpoint = Endpoint(bound, keys.for_peers() if is_guarded else None)
    worker = make_peer(cleanup, endpoint, worker_peer(3, "abc"))
    client = make_peer(cleanup, endpoint, client_peer("engine-1"))
    worker.send(b"from worker")
    client.send(b"from client")
    arrived = receive_until(server, lambda inbound: len(inbound) == 2)
    assert {(i.peer, i.payload) for i in arrived} == {
        (Peer(WorkerAddress(3), "abc"), b"from worker"),
        (Peer(ClientAddress("engine-1")), b"from client"),
    }
    server.send([WorkerAddress(3), ClientAddress("engine-1")], b"to both")
    assert (receive_one(worker), receive_one(client)) == (b"to both", b"to both")


@every_kind
def test_a_client_whose_connection_ends_is_named_once_and_after_its_last_words(
    cleanup: ExitStack, address: str, is_guarded: bool
) -> None:
    keys = generate_curve_keys()
    server = make_server(cleanup, keys)
    bound = server.bind(address, is_guarded)
    endpoint = Endpoint(bound, keys.for_peers() if is_guarded else None)
    gone, there = (make_peer(cleanup, endpoint, client_peer(name)) for name in ("gone", "there"))
    worker = make_peer(cleanup, endpoint, worker_peer(0, "a"))
    for peer in (gone, there, worker):
        peer.send(b"hello")
    receive_until(server, lambda inbound: len(inbound) == 3)
    assert server.take_lost_clients() == []
    gone.send(b"goodbye")
    gone.close(linger_s=DEADLINE_S)
    worker.close()
    lost: list[str] = []

    def is_lost(inbound: list[Inbound]) -> bool:
        server.send([ClientAddress("gone")], b"news")
        lost.extend(server.take_lost_clients())
        assert not lost or [i.payload for i in inbound] == [b"goodbye"]
        return lost == ["gone"]

    receive_until(server, is_lost)
    receive_until(server, lambda _: server.statistics().disconnections == 2)
    server.send([ClientAddress("there")], b"last")
    assert receive_one(there) == b"last"
    assert server.take_lost_clients() == []


def receive_while_somebody_is_lost(server: NodeServer) -> list[Inbound]:
    """Return the messages until a client is found lost, without taking its name."""
    ends = [server._near] if server._far is None else [server._near, server._far]
    return receive_until(server, lambda _: any(end._lost_clients for end in ends))


def test_a_client_that_has_connected_again_is_not_lost(
    cleanup: ExitStack, near: MakeAddress
) -> None:
    server = make_server(cleanup)
    endpoint = Endpoint(server.bind(near(), False))
    for _ in range(3):
        peer = make_peer(cleanup, endpoint, client_peer("c"))
        peer.send(b"hello")
        receive_until(server, bool)
        assert server.take_lost_clients() == []
        peer.close()
        receive_while_somebody_is_lost(server)
    assert server.take_lost_clients() == ["c"]


def test_one_server_listens_locally_without_keys_and_elsewhere_with_them(
    cleanup: ExitStack,
) -> None:
    keys = generate_curve_keys()
    server = make_server(cleanup, keys)
    near = Endpoint(server.bind(unix_address(), False))
    local = Endpoint(server.bind(local_address(), False))
    remote = Endpoint(server.bind(network_address("127.0.0.1"), True), keys.for_peers())
    for name, endpoint in (("near", near), ("local", local), ("far", remote)):
        peer = make_peer(cleanup, endpoint, client_peer(name))
        peer.send(name.encode())
        assert receive_until(server, bool)[0].payload == name.encode()


@pytest.mark.parametrize("kind", ["no keys", "keys of another cluster", "own keys"])
def test_connections_without_the_keys_are_refused(cleanup: ExitStack, kind: str) -> None:
    keys, other = generate_curve_keys(), generate_curve_keys()
    server = make_server(cleanup, keys)
    address = server.bind(network_address("127.0.0.1"), True)
    wrong = {
        "no keys": None,
        "keys of another cluster": other.for_peers(),
        "own keys": CurveKeys(keys.server_public, b"", other.peer_public, other.peer_secret),
    }[kind]
    stranger = make_peer(cleanup, Endpoint(address, wrong), client_peer("stranger"))
    stranger.send(b"let me in")
    receive_until(server, lambda _: server.statistics().refused_connections > 0)
    friend = make_peer(cleanup, Endpoint(address, keys.for_peers()), client_peer("friend"))
    friend.send(b"hello")
    assert [i.payload for i in receive_until(server, bool)] == [b"hello"]


def test_foreign_payloads_are_counted_and_the_next_message_arrives(cleanup: ExitStack) -> None:
    server = make_server(cleanup)
    endpoint = Endpoint(server.bind(local_address(), False))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    cleanup.callback(context.destroy, 0)
    foreign = [
        (b"nobody", [b"x"]),
        (b"w:one:abc", [b"x"]),
        (b"w:1:", [b"x"]),
        (b"c:", [b"x"]),
        (b"c:two-frames", [b"x", b"y"]),
        (b"\xff\xfe", [b"x"]),
    ]
    for identity, frames in foreign:
        dealer = context.socket(zmq.DEALER)
        dealer.identity = identity
        dealer.connect(endpoint.address)
        cleanup.callback(dealer.close, 0)
        dealer.send_multipart(frames)
    receive_until(server, lambda _: server.statistics().foreign == len(foreign))
    friend = make_peer(cleanup, endpoint, client_peer("friend"))
    friend.send(b"hello")
    assert [i.payload for i in receive_until(server, bool)] == [b"hello"]


def test_payloads_over_the_limit_are_counted_and_much_longer_ones_cost_the_connection(
    cleanup: ExitStack, near: MakeAddress
) -> None:
    server = make_server(cleanup)
    endpoint = Endpoint(server.bind(near(), False))
    careless = make_peer(cleanup, endpoint, client_peer("careless"), TransportLimits(10**6))
    careless.send(b"x" * 1001)
    receive_until(server, lambda _: server.statistics().oversized == 1)
    careless.send(b"x" * 100_000)
    careless.send(b"still here")
    friend = make_peer(cleanup, endpoint, client_peer("friend"))
    friend.send(b"hello")
    arrived = receive_until(server, lambda inbound: any(i.payload == b"hello" for i in inbound))
    assert all(len(i.payload) <= 1000 for i in arrived)


def test_garbage_on_a_tcp_port_never_becomes_a_message(cleanup: ExitStack) -> None:
    server = make_server(cleanup)
    address = server.bind(network_address("127.0.0.1"), False)
    host, _, port = address.removeprefix("tcp://").partition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n" * 4)
    assert receive_until(server, lambda _: server.statistics().disconnections > 0) == []


def test_what_cannot_be_delivered_is_counted(cleanup: ExitStack, near: MakeAddress) -> None:
    server = make_server(cleanup)
    endpoint = Endpoint(server.bind(near(), False))
    server.send([WorkerAddress(0), ClientAddress("nobody")], b"x")
    assert server.statistics().undeliverable == 2
    worker = make_peer(cleanup, endpoint, worker_peer(0, "a"))
    worker.send(b"hello")
    receive_until(server, bool)
    worker.close()
    give_up_s = time.monotonic() + DEADLINE_S
    while server.statistics().undeliverable == 2:
        assert time.monotonic() < give_up_s
        server.send([WorkerAddress(0)], b"anybody?")


def test_all_processes_of_a_rank_get_the_ranks_messages(
    cleanup: ExitStack, near: MakeAddress
) -> None:
    server = make_server(cleanup)
    endpoint = Endpoint(server.bind(near(), False))
    processes = [make_peer(cleanup, endpoint, worker_peer(0, name)) for name in "ab"]
    for process in processes:
        process.send(b"hello")
    receive_until(server, lambda inbound: len(inbound) == 2)
    server.send([WorkerAddress(0)], b"grant")
    assert [receive_one(process) for process in processes] == [b"grant", b"grant"]


def test_a_message_over_the_limit_is_refused_before_it_is_sent(
    cleanup: ExitStack, near: MakeAddress
) -> None:
    server = make_server(cleanup)
    endpoint = Endpoint(server.bind(near(), False))
    peer = make_peer(cleanup, endpoint, client_peer("c"))
    message = (
        "a message of 1001 bytes exceeds the limit of 1000: schedule less per step or raise the "
        "limit"
    )
    with pytest.raises(MalformedMessageError) as caught:
        peer.send(b"x" * 1001)
    assert str(caught.value) == message
    with pytest.raises(MalformedMessageError):
        server.send([ClientAddress("c")], b"x" * 1001)


def test_an_address_in_use_is_an_error_that_names_it(cleanup: ExitStack, near: MakeAddress) -> None:
    taken = make_server(cleanup).bind(near(), False)
    with pytest.raises(ClusterError, match=f"cannot listen on {taken}"):
        make_server(cleanup).bind(taken, False)


@pytest.mark.parametrize("end", ["server", "peer", "mailbox"])
def test_a_waiting_receive_is_woken_from_another_thread(
    cleanup: ExitStack, near: MakeAddress, end: str
) -> None:
    server = make_server(cleanup)
    endpoint = Endpoint(server.bind(near(), False))
    peer = make_peer(cleanup, endpoint, client_peer("c"))
    waiting: dict[str, Callable[[float], list[object]]] = {
        "server": lambda s: list(server.receive(s)),
        "peer": lambda s: list(peer.receive_or_wake(s)),
        "mailbox": (box := Mailbox(4)).take,
    }
    wake = {"server": server.wake, "peer": peer.wake, "mailbox": box.wake}[end]
    waker = threading.Timer(0.05, wake)
    waker.start()
    started_s = time.monotonic()
    assert waiting[end](DEADLINE_S) == []
    assert time.monotonic() - started_s < DEADLINE_S
    waker.join()


def test_the_descriptor_of_a_peer_becomes_readable(cleanup: ExitStack, near: MakeAddress) -> None:
    server = make_server(cleanup)
    peer = make_peer(cleanup, Endpoint(server.bind(near(), False)), client_peer("c"))
    peer.send(b"hello")
    receive_until(server, bool)
    while peer.receive(0.0):
        pass
    server.send([ClientAddress("c")], b"answer")
    assert zmq.zmq_poll([(peer.fileno(), zmq.POLLIN)], int(DEADLINE_S * 1000))
    assert receive_one(peer) == b"answer"


def raw_connection(cleanup: ExitStack, address: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    cleanup.callback(connected.close)
    connected.settimeout(DEADLINE_S)
    connected.connect(socket_name(address))
    return connected


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


@pytest.mark.parametrize("identity", [b"", b"nobody", b"w:one:abc", b"w:1:", b"c:", b"\xff\xfe"])
def test_who_does_not_say_who_it_is_is_cut_off(cleanup: ExitStack, identity: bytes) -> None:
    server = make_server(cleanup)
    address = server.bind(unix_address(), False)
    stranger = raw_connection(cleanup, address)
    stranger.sendall(framed(identity) + framed(b"step"))
    receive_until(server, lambda _: server.statistics().foreign == 1)
    assert stranger.recv(1) == b""
    assert server.statistics().received == 0
    friend = make_peer(cleanup, Endpoint(address), client_peer("friend"))
    friend.send(b"hello")
    assert [i.payload for i in receive_until(server, bool)] == [b"hello"]


def test_a_frame_that_no_honest_end_sends_costs_the_connection(cleanup: ExitStack) -> None:
    server = make_server(cleanup)
    stranger = raw_connection(cleanup, server.bind(unix_address(), False))
    stranger.sendall(framed(b"c:stranger") + (2001).to_bytes(4, "little") + b"x")
    assert receive_until(server, lambda _: server.statistics().disconnections > 0) == []
    assert stranger.recv(1) == b""


def test_a_payload_arrives_whole_however_it_is_cut(cleanup: ExitStack) -> None:
    server = make_server(cleanup)
    sender = raw_connection(cleanup, server.bind(unix_address(), False))
    payloads = [b"", b"a", b"bc" * 100, b"d" * 1000]
    inbound: list[Inbound] = []
    for byte in framed(b"c:slow") + b"".join(framed(payload) for payload in payloads):
        sender.sendall(bytes([byte]))
        inbound += server.receive(0.0)
    inbound += receive_until(server, lambda more: len(inbound) + len(more) == len(payloads))
    assert [i.payload for i in inbound] == payloads
    sender.sendall(b"".join(framed(payload) for payload in payloads))
    arrived = receive_until(server, lambda more: len(more) == len(payloads))
    assert [i.payload for i in arrived] == payloads


def test_a_peer_that_connects_again_takes_its_own_place(cleanup: ExitStack) -> None:
    server = make_server(cleanup)
    endpoint = Endpoint(server.bind(unix_address(), False))
    before, after = (make_peer(cleanup, endpoint, worker_peer(0, "a")) for _ in range(2))
    before.send(b"before")
    receive_until(server, bool)
    after.send(b"after")
    receive_until(server, bool)
    server.send([WorkerAddress(0)], b"answer")
    assert receive_one(after) == b"answer"
    assert server.statistics().undeliverable == 0


def test_a_peer_that_is_cut_off_connects_again(cleanup: ExitStack) -> None:
    server = make_server(cleanup)
    endpoint = Endpoint(server.bind(unix_address(), False))
    peer = make_peer(cleanup, endpoint, client_peer("c"), TransportLimits(10**6))
    peer.send(b"x" * 100_000)
    receive_until(server, lambda _: server.statistics().disconnections > 0)
    give_up_s = time.monotonic() + DEADLINE_S
    arrived: list[Inbound] = []
    while not arrived:
        assert time.monotonic() < give_up_s
        peer.receive(0.01)
        peer.send(b"again")
        arrived = server.receive(0.01)
    server.send([ClientAddress("c")], b"welcome back")
    assert receive_one(peer) == b"welcome back"


def test_messages_for_a_slow_peer_wait_up_to_a_limit_and_delay_no_other(
    cleanup: ExitStack,
) -> None:
    limits = TransportLimits(10**6, high_water_mark=8)
    server = NodeServer(limits)
    cleanup.callback(server.close)
    endpoint = Endpoint(server.bind(unix_address(), False))
    slow, other = (make_peer(cleanup, endpoint, client_peer(name), limits) for name in "so")
    for peer in (slow, other):
        peer.send(b"hello")
    receive_until(server, lambda inbound: len(inbound) == 2)
    payloads = [bytes([number]) * 10**6 for number in range(20)]
    for payload in payloads:
        server.send([ClientAddress("s")], payload)
    num_kept = len(payloads) - server.statistics().undeliverable
    assert 1 <= num_kept < len(payloads)
    server.send([ClientAddress("o")], b"news")
    assert receive_one(other) == b"news"
    arrived: list[bytes] = []
    give_up_s = time.monotonic() + DEADLINE_S
    while len(arrived) < num_kept:
        assert time.monotonic() < give_up_s
        server.receive(0.0)
        arrived += slow.receive(0.0)
    assert arrived == payloads[:num_kept]


def test_a_large_message_leaves_a_peer_that_turns_to_other_things(cleanup: ExitStack) -> None:
    limits = TransportLimits(10**7)
    server = NodeServer(limits)
    cleanup.callback(server.close)
    peer = make_peer(
        cleanup, Endpoint(server.bind(unix_address(), False)), client_peer("c"), limits
    )
    arrived: list[Inbound] = []
    reader = threading.Thread(target=lambda: arrived.extend(receive_until(server, bool)))
    reader.start()
    peer.send(b"x" * 10**7)
    reader.join(DEADLINE_S)
    assert [len(inbound.payload) for inbound in arrived] == [10**7]


def test_a_unix_socket_cannot_be_guarded(cleanup: ExitStack) -> None:
    server = make_server(cleanup, generate_curve_keys())
    with pytest.raises(ClusterError, match="bind an ipc:// or tcp:// address"):
        server.bind(unix_address(), True)


@pytest.mark.parametrize("peer", [worker_peer(0, "a"), worker_peer(12, "x:y"), client_peer("c:1")])
def test_identities_name_their_peers(peer: Peer) -> None:
    assert parse_identity(peer.identity) == peer


@pytest.mark.parametrize("client_id", ["", "x" * 254])
def test_a_client_id_that_no_identity_can_hold_is_refused(client_id: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be a peer"):
        client_peer(client_id)


def test_a_full_mailbox_refuses_and_counts() -> None:
    box = Mailbox(2)
    assert [box.put(i) for i in range(3)] == [True, True, False]
    assert (box.take(0.0), box.num_refused) == ([0, 1], 1)


def test_the_fallback_server_counts_what_it_refuses_and_never_calls_twice() -> None:
    calls: list[bytes] = []

    class Handle:
        class kvcache_deliver:
            remote = staticmethod(calls.append)

    workers: dict[int, object] = {0: Handle}
    server = RayServer(workers.get, LIMITS)
    server.post(b"c:me", b"step")
    server.post(b"nobody", b"step")
    server.post(b"c:me", b"x" * 1001)
    assert server.receive(0.0) == [Inbound(Peer(ClientAddress("me")), b"step")]
    to: list[Address] = [WorkerAddress(0), WorkerAddress(1), ClientAddress("me")]
    server.send(to, b"answer")
    assert (calls, server.collect("me", 0.0)) == ([b"answer"], [b"answer"])
    statistics = server.statistics()
    assert (statistics.foreign, statistics.oversized, statistics.undeliverable) == (1, 1, 1)
