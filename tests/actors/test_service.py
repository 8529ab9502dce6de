"""The coordinator's message loop: what one turn sends, and that one bad message costs no other."""

from __future__ import annotations

from actors.service import CoordinatorService
from actors.transport import Inbound, client_peer, worker_peer
from actors.transport.local import LocalServer
from kvcache.clock import VirtualClock
from kvcache.errors import MalformedMessageError
from kvcache.messages import (
    Address,
    Applied,
    Attach,
    ClientAddress,
    FromClient,
    FromWorker,
    Outgoing,
    Ping,
    Unattached,
    WorkerAddress,
)
from kvcache.wire import encode

MAX_BYTES = 1000
RANKS = (WorkerAddress(0), WorkerAddress(1))


class Recorder(LocalServer):
    """Keeps what is sent, call by call; refuses what is too long, as sockets do."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[tuple[Address, ...], tuple[bytes, ...]]] = []

    def send(self, addresses: object, *payloads: bytes) -> None:
        assert isinstance(addresses, tuple)
        if any(len(payload) > MAX_BYTES for payload in payloads):
            raise MalformedMessageError("too long")
        self.sent.append((addresses, payloads))


class Decider:
    """Answers every client and tells all ranks; takes every acknowledgement the short way."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        self.taken: list[int] = []

    def on_worker_message(self, rank: int, message: FromWorker) -> list[Outgoing]:
        return []

    def on_plain_applied(self, rank: int, payload: bytes) -> bool:
        self.taken.append(rank)
        return True

    def settle(self) -> list[Outgoing]:
        return [Outgoing((ClientAddress("a"),), Unattached("a", 0, f"settled {self.taken}"))]

    def on_client_message(self, message: FromClient) -> list[Outgoing]:
        answer = Unattached(message.client_id, 0, self.reason)
        answers = [answer, Unattached(message.client_id, 1, "short")]
        return [
            Outgoing(RANKS, Ping("nonce", 1)),
            *[Outgoing((ClientAddress(message.client_id),), one) for one in answers],
        ]

    def on_tick(self) -> list[Outgoing]:
        return []


def make_service(decider: Decider) -> tuple[CoordinatorService, Recorder]:
    transport = Recorder()
    service = CoordinatorService(transport, VirtualClock(), MAX_BYTES, tick_s=1.0)
    service.open(decider, [])
    return service, transport


def test_what_goes_to_the_same_receivers_in_one_turn_goes_together_and_in_order() -> None:
    service, transport = make_service(Decider("why"))
    for client_id in "ab":
        transport.put(Inbound(client_peer(client_id), encode(Attach(client_id))))
    service.turn()
    ping = encode(Ping("nonce", 1))
    assert transport.sent == [
        (RANKS, (ping, ping)),
        *[
            (
                (ClientAddress(name),),
                (encode(Unattached(name, 0, "why")), encode(Unattached(name, 1, "short"))),
            )
            for name in "ab"
        ],
    ]


def test_acknowledgements_that_arrive_together_are_settled_once() -> None:
    service, transport = make_service(Decider())
    for rank in range(3):
        payload = encode(Applied("nonce", "process", rank, 1, 1))
        transport.put(Inbound(worker_peer(rank, "process"), payload))
    service.turn()
    settled = encode(Unattached("a", 0, "settled [0, 1, 2]"))
    assert transport.sent == [((ClientAddress("a"),), (settled,))]


def test_a_message_that_is_too_long_is_counted_and_the_others_of_its_turn_are_sent() -> None:
    service, transport = make_service(Decider("x" * MAX_BYTES))
    transport.put(Inbound(client_peer("a"), encode(Attach("a"))))
    service.turn()
    short = encode(Unattached("a", 1, "short"))
    assert transport.sent == [
        (RANKS, (encode(Ping("nonce", 1)),)),
        ((ClientAddress("a"),), (short,)),
    ]
    assert service.statistics().refused == 1


def test_a_message_that_cannot_be_encoded_is_counted_and_the_others_are_sent() -> None:
    service, transport = make_service(Decider())
    impossible = Ping("nonce", 2**64)
    service.send([Outgoing(RANKS, impossible), Outgoing(RANKS, Ping("nonce", 1))])
    assert transport.sent == [(RANKS, (encode(Ping("nonce", 1)),))]
    assert service.statistics().refused == 1
