"""Garbage on every socket, then broken messages: honest peers are served, and nothing ends."""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import msgpack
import pytest

from actors.loop import ServiceLoop
from actors.service import CoordinatorService
from actors.transport import Endpoint, client_peer
from actors.transport.node_server import NodeServer
from actors.transport.protocol import TransportLimits
from actors.transport.unix_peer import UnixPeer
from actors.transport.unix_server import unix_address
from actors.transport.zmq_peer import ZmqPeer
from actors.transport.zmq_server import network_address
from kvcache.base.clock import SystemClock
from kvcache.coordinator import Coordinator
from kvcache.events.subscriber import KVEventSubscriber
from kvcache.memory_service import HostMemoryService, MemoryServiceClient
from kvcache.protocol.messages import (
    Address,
    Attach,
    ClientAddress,
    FromClient,
    FromWorker,
    Outgoing,
    Unattached,
)
from kvcache.protocol.wire import decode, encode
from kvcache.worker.host_memory.shared_memory import make_memory
from tests.actors.conftest import build_config
from tests.attack.messages import Storm
from tests.attack.sockets import Attacker, tcp_connector, unix_connector
from tests.fuzz.targets import Target, make_targets
from tests.routing.replica import Replica
from tests.waiting import wait_until

NUM_ATTACKS = 150
DEADLINE_S = 60.0
LIMITS = TransportLimits(max_message_bytes=100_000)
NUMBERS = itertools.count()


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@cache
def targets() -> dict[str, Target]:
    return make_targets()


def attacker(cleanup: ExitStack, seed: int, target: str) -> Attacker:
    made = Attacker(random.Random(seed), targets()[target].good)
    cleanup.callback(made.close)
    return made


def test_a_memory_service_keeps_what_it_has_under_garbage(cleanup: ExitStack) -> None:
    name = f"kvcache-test-attack-{os.getpid()}-{next(NUMBERS)}"
    service = HostMemoryService(f"unix:@{name}", max_segments=20, max_bytes=2**20)
    cleanup.callback(service.close)
    service.serve()
    client = MemoryServiceClient(f"unix:@{name}", DEADLINE_S)
    memory = make_memory("test", 4096)
    cleanup.callback(os.close, memory)
    os.pwrite(memory, b"precious", 0)
    client.put("mine", memory)
    evil = attacker(cleanup, 1, "memory service")
    connect = unix_connector(name, socket.SOCK_SEQPACKET)
    for number in range(NUM_ATTACKS):
        evil.attack_packets(connect)
        if number % 10 == 0:
            found = client.attach("mine")
            assert found is not None
            assert os.pread(found, 8, 0) == b"precious"
            os.close(found)
    told = service.statistics()
    assert told.loop.is_running
    assert (told.loop.num_faults, told.loop.last_fault) == (0, "")
    assert told.num_refused > 0


class Answers:
    """Answers clients, and accepts no worker."""

    def on_worker_message(self, rank: int, message: FromWorker) -> list[Outgoing]:
        return []

    def on_plain_applied(self, rank: int, payload: bytes) -> bool:
        return False

    def settle(self) -> list[Outgoing]:
        return []

    def on_client_message(self, message: FromClient) -> list[Outgoing]:
        answer = Unattached(message.client_id, 1, "answered")
        return [Outgoing((ClientAddress(message.client_id),), answer)]

    def on_unreadable(self, sender: Address, payload: bytes, reason: str) -> list[Outgoing]:
        return []

    def on_unsendable(self, item: Outgoing, reason: str) -> list[Outgoing]:
        return []

    def on_client_lost(self, client_id: str) -> None:
        """A client is answered again when it sends again."""

    def on_tick(self) -> list[Outgoing]:
        return []

    def on_error(self, reason: str) -> list[Outgoing]:
        return []


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_coordinators_sockets_serve_under_garbage(cleanup: ExitStack, kind: str) -> None:
    server = NodeServer(LIMITS)
    service = CoordinatorService(server, SystemClock(), LIMITS.max_message_bytes, tick_s=0.01)
    service.open(Answers(), [])
    loop = ServiceLoop("coordinator", service.turn, server.wake)
    is_near = kind == "unix"
    address = server.bind(unix_address() if is_near else network_address("127.0.0.1"), False)
    loop.start()
    cleanup.callback(server.close)
    cleanup.callback(loop.end, DEADLINE_S)
    peer_class = UnixPeer if is_near else ZmqPeer
    friend = peer_class(Endpoint(address), client_peer("friend"), LIMITS)
    cleanup.callback(friend.close)
    evil = attacker(cleanup, 2, "messages")
    near = unix_connector(address.removeprefix("unix:@"), socket.SOCK_STREAM) if is_near else None
    for number in range(NUM_ATTACKS):
        if near is None:
            evil.attack_zmq(tcp_connector(address), address)
        else:
            evil.attack_stream(near)
        if number % 10 == 0:
            assert ask(friend) == Unattached("friend", 1, "answered")
    told = service.statistics()
    assert (told.faults, told.last_fault, told.transport.faults) == (0, "", 0)
    assert loop.statistics().num_faults == 0
    assert loop.is_running


def ask(friend: UnixPeer | ZmqPeer) -> object:
    """Return the answer to a message, which is repeated if it was lost."""
    answers: list[object] = []

    def is_answered() -> bool:
        friend.send(encode(Attach("friend", 1)))
        answers.extend(decode(payload) for payload in friend.receive(0.2))
        return bool(answers)

    wait_until(is_answered)
    return answers[0]


def test_an_event_publisher_is_followed_exactly_under_garbage(cleanup: ExitStack) -> None:
    replica = Replica(3)
    cleanup.callback(replica.close)
    evil = attacker(cleanup, 3, "feed")
    subscriber = KVEventSubscriber(replica.endpoint, replica.replay_endpoint)
    cleanup.callback(subscriber.close)
    for _ in range(NUM_ATTACKS // 10):
        for endpoint in (replica.endpoint, replica.replay_endpoint):
            for _ in range(5):
                evil.attack_zmq(tcp_connector(endpoint), endpoint)
        replica.tell(replica.cache.act())
        wait_until(
            lambda: (
                subscriber.poll(0.01) is not None
                and subscriber.is_exact
                and subscriber.checksum == replica.checksum()
            )
        )
    with KVEventSubscriber(replica.endpoint, replica.replay_endpoint) as late:
        wait_until(lambda: late.poll(0.01) is not None and late.is_exact)
        assert late.checksum == replica.checksum()


@pytest.fixture
def storm() -> Iterator[Storm]:
    made = Storm(storm_config(), seed=4)
    yield made
    made.close()


def storm_config() -> Any:
    return build_config(
        offload={"host_memory_per_rank": "80KiB"},
        transport={"resend_s": 0.05, "heartbeat_s": 0.1},
    )


@pytest.mark.parametrize("who", ["clients", "workers", "coordinator"])
def test_broken_messages_cost_their_sender_only(storm: Storm, who: str) -> None:
    epoch = storm.cluster.coordinator.epoch
    getattr(storm, f"break_{who}")(300)
    storm.check()
    if who == "clients":
        assert storm.cluster.coordinator.epoch == epoch


def test_a_message_that_causes_an_error_is_found(
    storm: Storm, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Coordinator.on_client_message

    def take_carelessly(coordinator: Coordinator, message: FromClient) -> list[Outgoing]:
        if getattr(message, "num_lookahead_tokens", 0) not in (0, 1):
            raise KeyError("never thought of")
        return take(coordinator, message)

    monkeypatch.setattr(Coordinator, "on_client_message", take_carelessly)
    storm.break_clients(300)
    assert storm.num_faults > 0
    with pytest.raises(AssertionError, match="never thought of"):
        storm.check()


def test_good_packets_are_good() -> None:
    """Broken payloads were valid before: attacks start from honest messages."""
    assert all(msgpack.unpackb(good)[0] == 1 for good in targets()["memory service"].good)
    assert all(decode(good) is not None for good in targets()["messages"].good)
