"""The service of an embedded coordinator: which threads serve, and how its end is reported."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator

import pytest

from actors.embedded.shared_service import SharedService
from actors.transport import Endpoint, PeerTransport, client_peer, worker_peer
from actors.transport.inprocess import InProcessPeer, InProcessServer
from actors.transport.protocol import TransportLimits
from actors.transport.unix_peer import UnixPeer
from actors.transport.unix_server import unix_address
from kvcache.base.clock import VirtualClock
from kvcache.base.errors import (
    ClusterError,
    MalformedMessageError,
    NotRunningError,
    SupersededError,
)
from kvcache.protocol.messages import (
    Acknowledge,
    Address,
    Attach,
    ClientAddress,
    Detach,
    Detached,
    FromClient,
    FromWorker,
    Heartbeat,
    Message,
    Outgoing,
    Ping,
    Unattached,
    WorkerAddress,
)
from kvcache.protocol.wire import decode, encode

LIMITS = TransportLimits(max_message_bytes=1000, high_water_mark=4)
STALL_S = 1.0
TICK_S = 0.01


class Rule:
    """Answers clients and pings ranks; reports its thread."""

    epoch = 7

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.lost: list[str] = []
        self.error: BaseException | None = None

    def on_worker_message(self, rank: int, message: FromWorker) -> list[Outgoing]:
        self.threads.append(threading.current_thread().name)
        return [Outgoing((ClientAddress("a"),), Unattached("a", rank, "heard"))]

    def on_plain_applied(self, rank: int, payload: bytes) -> bool:
        return False

    def settle(self) -> list[Outgoing]:
        return []

    def on_client_message(self, message: FromClient) -> list[Outgoing]:
        self.threads.append(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        answer = Unattached(message.client_id, 1, "answered")
        return [
            Outgoing((ClientAddress(message.client_id),), answer),
            Outgoing((WorkerAddress(0),), Ping("nonce", 1)),
        ]

    def on_unreadable(self, sender: Address, payload: bytes, reason: str) -> list[Outgoing]:
        return [Outgoing((sender,), Unattached("a", 7, f"unreadable: {reason}"))]

    def on_unsendable(self, item: Outgoing, reason: str) -> list[Outgoing]:
        return []

    def on_client_lost(self, client_id: str) -> None:
        self.lost.append(client_id)

    def on_tick(self) -> list[Outgoing]:
        return []

    def on_error(self, reason: str) -> list[Outgoing]:
        return [Outgoing((ClientAddress("a"),), Unattached("a", 8, f"error: {reason}"))]


class Site:
    """A service with a coordinator, and the socket that workers connect to."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.rule = Rule()
        self.check_takeover: Callable[[], None] = lambda: None
        self.sockets = InProcessServer(LIMITS)
        self.endpoint = Endpoint(self.sockets.bind(unix_address(), is_guarded=False))
        self.service = SharedService(
            self.sockets,
            self.clock,
            LIMITS.max_message_bytes,
            tick_s=TICK_S,
            stall_s=STALL_S,
            check_takeover=self._doubt,
        )
        self.service.open(self.rule, list)

    def _doubt(self) -> None:
        self.check_takeover()

    def client(self, name: str) -> InProcessPeer:
        return self.service.connect(client_peer(name))


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.sockets.close()


def heard(peer: PeerTransport) -> list[Message]:
    return [decode(payload, 10_000) for payload in peer.receive(0.0)]


def reasons(peer: PeerTransport) -> list[tuple[int, str]]:
    """Return epoch and reason of every message; all of them detach the client."""
    messages = heard(peer)
    assert all(isinstance(message, Unattached) for message in messages)
    return [(m.epoch, m.reason) for m in messages if isinstance(m, Unattached)]


def test_a_client_is_served_in_its_own_thread_before_send_returns(site: Site) -> None:
    client, other = site.client("a"), site.client("b")
    client.send(encode(Attach("a", 1)))
    assert reasons(client) == [(1, "answered")]
    assert heard(other) == []
    assert site.rule.threads == [threading.current_thread().name]


def test_workers_are_served_by_turns_and_their_news_reach_clients(site: Site) -> None:
    client = site.client("a")
    worker = UnixPeer(site.endpoint, worker_peer(0, "w"), LIMITS)
    worker.send(encode(Heartbeat("nonce", "w", 0, 1, 1)))
    while not site.rule.threads:
        site.service.turn()
    assert reasons(client) == [(0, "heard")]
    client.send(encode(Attach("a", 1)))
    assert [type(decode(payload, 1000)) for payload in worker.receive(5.0)] == [Ping]
    worker.close()


def test_messages_that_are_not_the_clients_are_counted_and_dropped(site: Site) -> None:
    client = site.client("a")
    client.send(b"\xc1 no message")
    client.send(encode(Attach("somebody-else", 1)))
    with pytest.raises(MalformedMessageError, match="a message of 1001 bytes exceeds the limit of"):
        client.send(bytes(1001))
    statistics = site.service.statistics()
    assert (statistics.malformed, statistics.impersonated, site.rule.threads) == (1, 1, [])


def test_a_queue_that_is_full_refuses_and_counts(site: Site) -> None:
    client = site.client("a")
    for _ in range(LIMITS.high_water_mark + 2):
        client.send(encode(Attach("a", 1)))
    assert len(heard(client)) == LIMITS.high_water_mark
    # Both answers that did not fit, and the message for a missing rank.
    assert site.service.statistics().transport.undeliverable == 2 + 6


def test_a_client_that_is_dropped_without_a_word_leaves_nothing(site: Site) -> None:
    site.client("a")
    worker = UnixPeer(site.endpoint, worker_peer(0, "w"), LIMITS)
    worker.send(encode(Heartbeat("nonce", "w", 0, 1, 1)))
    while not site.rule.threads:
        site.service.turn()
    assert site.service.statistics().transport.undeliverable == 1
    worker.close()


def test_a_client_that_is_closed_or_dropped_is_lost_once(site: Site) -> None:
    clients = {name: site.client(name) for name in ("closed", "dropped", "there")}
    clients["closed"].close()
    clients["closed"].close()
    del clients["closed"], clients["dropped"]
    site.clock.advance(TICK_S)
    for _ in range(2):
        site.service.turn()
        site.clock.advance(TICK_S)
    assert sorted(site.rule.lost) == ["closed", "dropped"]


def test_a_wait_ends_with_a_message_with_a_wake_up_and_with_its_time(site: Site) -> None:
    client = site.client("a")
    assert client.receive(0.001) == []
    client.wake()
    assert client.receive_or_wake(60.0) == []
    client.send(encode(Attach("a", 1)))
    assert len(client.receive(60.0)) == 1


def test_an_event_loop_sees_what_has_arrived(site: Site) -> None:
    client = site.client("a")
    client.send(encode(Attach("a", 1)))
    poller = select.poll()
    poller.register(client.fileno(), select.POLLIN)
    assert poller.poll(0)
    assert len(client.receive(0.0)) == 1
    assert not poller.poll(0)
    client.send(encode(Attach("a", 1)))
    assert poller.poll(0)
    client.close()


def test_the_end_voids_what_clients_have_and_the_first_reason_counts(site: Site) -> None:
    client = site.client("a")
    site.service.end(SupersededError("taken over"))
    site.service.end(NotRunningError("closed"))
    assert reasons(client) == [(8, "taken over")]
    client.send(encode(Acknowledge("a", 7, 1)))
    assert reasons(client) == [(8, "taken over")]
    assert site.rule.threads == []
    client.send(encode(Detach("a", 7)))
    client.send(b"\xc1 no message")
    assert heard(client) == [Detached("a", 7)]
    with pytest.raises(SupersededError, match="taken over"):
        site.client("b")
    with pytest.raises(SupersededError, match="taken over"):
        site.service.ask(lambda: None)


def test_clients_are_told_of_the_end_when_the_sockets_are_gone(site: Site) -> None:
    client = site.client("a")
    site.service.end(NotRunningError("closed"))
    site.sockets.close()
    client.send(encode(Attach("a", 1)))
    assert reasons(client) == [(8, "closed")] * 2


def test_after_a_pause_the_state_store_is_read_before_anything_is_served(site: Site) -> None:
    client = site.client("a")
    site.check_takeover = lambda: site.service.end(SupersededError("taken over meanwhile"))
    site.clock.advance(STALL_S)
    client.send(encode(Attach("a", 1)))
    assert reasons(client) == [(1, "answered")]
    site.clock.advance(STALL_S + 0.01)
    client.send(encode(Attach("a", 1)))
    assert reasons(client) == [(8, "taken over meanwhile")] * 2  # the end, and the answer
    assert len(site.rule.threads) == 1


def test_a_worker_that_hangs_up_is_reason_to_look_around_once(site: Site) -> None:
    client = site.client("a")
    worker = UnixPeer(site.endpoint, worker_peer(0, "w"), LIMITS)
    worker.send(encode(Heartbeat("nonce", "w", 0, 1, 1)))
    while not site.rule.threads:
        site.service.turn()
    looks: list[int] = []
    site.check_takeover = lambda: looks.append(1)
    client.send(encode(Attach("a", 1)))
    assert looks == []
    worker.close()
    client.send(encode(Attach("a", 1)))  # not after a turn: what has arrived is seen first
    client.send(encode(Attach("a", 1)))
    assert looks == [1]


def test_turns_keep_the_service_from_having_stood_still(site: Site) -> None:
    client = site.client("a")
    site.check_takeover = lambda: site.service.end(SupersededError("taken over meanwhile"))
    for _ in range(4):
        site.clock.advance(STALL_S)
        site.service.turn()
    client.send(encode(Attach("a", 1)))
    assert reasons(client) == [(1, "answered")]


def test_an_error_in_the_middle_of_a_decision_ends_the_epoch(site: Site) -> None:
    client = site.client("a")
    site.rule.error = RuntimeError("a bug")
    client.send(encode(Attach("a", 1)))
    cause = "a message of ClientAddress(client_id='a'): RuntimeError: a bug"
    assert reasons(client) == [(8, f"error: {cause}")]
    told = site.service.statistics()
    assert (told.faults, told.last_fault) == (1, cause)
    site.rule.error = None
    client.send(encode(Attach("a", 1)))
    assert reasons(client) == [(1, "answered")]
    assert site.service.ended is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()])
def test_an_interruption_in_the_middle_of_a_decision_is_the_end(
    site: Site, error: BaseException
) -> None:
    client, other = site.client("a"), site.client("b")
    site.rule.error = error
    with pytest.raises(type(error)):
        client.send(encode(Attach("a", 1)))
    text = f"the coordinator in this process has ended by an error: {error!r}"
    assert reasons(client) == reasons(other) == [(8, text)]
    assert isinstance(site.service.ended, ClusterError)
