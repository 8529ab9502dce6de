"""The coordinator's message loop: the messages of one turn; and a bad message costs no other."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from actors import LocalCluster
from actors.loop import ServiceLoop
from actors.service import CoordinatorService
from actors.transport import Inbound, Peer, client_peer, worker_peer
from actors.transport.local import LocalServer
from kvcache.base.clock import VirtualClock
from kvcache.base.errors import ClusterError, MalformedMessageError, StaleEpochError
from kvcache.protocol.messages import (
    Ack,
    Address,
    Attach,
    ClientAddress,
    FromClient,
    FromWorker,
    Message,
    Outgoing,
    Ping,
    Unattached,
    WorkerAddress,
)
from kvcache.protocol.step import NewRequest, StepRequest
from kvcache.protocol.wire import encode
from tests.protocol.loose_sender import unchecked

MAX_BYTES = 1000
DEADLINE_S = 60.0
RANKS = (WorkerAddress(0), WorkerAddress(1))


class Recorder(LocalServer):
    """Keeps sent messages, call by call; refuses long ones, as sockets do."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[tuple[Address, ...], tuple[bytes, ...]]] = []

    def send(self, addresses: object, *payloads: bytes) -> None:
        assert isinstance(addresses, tuple)
        if any(len(payload) > MAX_BYTES for payload in payloads):
            raise MalformedMessageError("too long")
        self.sent.append((addresses, payloads))


class Decider:
    """Answers every client and sends to all ranks; takes every acknowledgement undecoded."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        self.taken: list[int] = []
        self.errors: list[str] = []
        self.num_vain_drops = 0
        self.lost: list[str] = []
        self.takes_plain = True
        self.unreadable: list[tuple[Address, bytes, str]] = []
        self.unsendable: list[str] = []
        self.instead: Message = Unattached("a", 0, "instead")

    def on_worker_message(self, rank: int, message: FromWorker) -> list[Outgoing]:
        return []

    def on_plain_applied(self, rank: int, payload: bytes) -> bool:
        if self.takes_plain:
            self.taken.append(rank)
        return self.takes_plain

    def settle(self) -> list[Outgoing]:
        return [Outgoing((ClientAddress("a"),), Unattached("a", 0, f"settled {self.taken}"))]

    def on_client_message(self, message: FromClient) -> list[Outgoing]:
        answer = Unattached(message.client_id, 0, self.reason)
        answers = [answer, Unattached(message.client_id, 1, "short")]
        return [
            Outgoing(RANKS, Ping("nonce", 1)),
            *[Outgoing((ClientAddress(message.client_id),), one) for one in answers],
        ]

    def on_unreadable(self, sender: Address, payload: bytes, reason: str) -> list[Outgoing]:
        self.unreadable.append((sender, payload, reason))
        return [Outgoing((sender,), Unattached("a", 0, f"told {reason}"))]

    def on_unsendable(self, item: Outgoing, reason: str) -> list[Outgoing]:
        self.unsendable.append(reason)
        return [Outgoing(item.to, self.instead)]

    def on_client_lost(self, client_id: str) -> None:
        self.lost.append(client_id)

    def on_tick(self) -> list[Outgoing]:
        return []

    def on_error(self, reason: str) -> list[Outgoing]:
        self.errors.append(reason)
        if self.num_vain_drops:
            self.num_vain_drops -= 1
            raise RuntimeError("the state cannot be dropped")
        return []


def make_service(
    decider: Decider, clock: VirtualClock | None = None
) -> tuple[CoordinatorService, Recorder]:
    transport = Recorder()
    service = CoordinatorService(transport, clock or VirtualClock(), MAX_BYTES, tick_s=1.0)
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


def test_a_client_that_has_hung_up_is_named_with_the_next_tick() -> None:
    clock, decider = VirtualClock(), Decider()
    service, transport = make_service(decider, clock)
    ends = {name: transport.connect(client_peer(name)) for name in ("gone", "back", "there")}
    for name in ("gone", "back"):
        transport.disconnect(client_peer(name), ends[name])
    transport.connect(client_peer("back"))
    service.turn()
    assert decider.lost == []
    clock.advance(1.0)
    service.turn()
    service.turn()
    assert decider.lost == ["gone"]


def test_acknowledgements_that_arrive_together_are_settled_once() -> None:
    service, transport = make_service(Decider())
    for rank in range(3):
        payload = encode(Ack("nonce", "process", rank, 1, 1))
        transport.put(Inbound(worker_peer(rank, "process"), payload))
    service.turn()
    settled = encode(Unattached("a", 0, "settled [0, 1, 2]"))
    assert transport.sent == [((ClientAddress("a"),), (settled,))]


def test_something_else_is_sent_for_a_message_that_is_too_long() -> None:
    decider = Decider("x" * MAX_BYTES)
    service, transport = make_service(decider)
    transport.put(Inbound(client_peer("a"), encode(Attach("a"))))
    service.turn()
    assert transport.sent == [
        (RANKS, (encode(Ping("nonce", 1)),)),
        ((ClientAddress("a"),), (encode(Unattached("a", 0, "instead")),)),
        ((ClientAddress("a"),), (encode(Unattached("a", 1, "short")),)),
    ]
    size = len(encode(Unattached("a", 0, decider.reason)))
    assert decider.unsendable == [
        f"Unattached of {size} bytes, the limit is {MAX_BYTES}: send less at once, or raise "
        "transport.max_message_bytes"
    ]
    assert (service.statistics().unsendable, service.statistics().refused) == (1, 0)


def test_what_cannot_be_encoded_is_counted_and_logged_and_the_others_are_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    decider = Decider()
    decider.instead = Ping("nonce", 2**64)  # neither
    service, transport = make_service(decider)
    service.send([Outgoing(RANKS, Ping("nonce", 2**63)), Outgoing(RANKS, Ping("nonce", 1))])
    assert transport.sent == [(RANKS, (encode(Ping("nonce", 1)),))]
    assert service.statistics().unsendable == 2
    said = f"Ping.epoch is {2**63}: pass an integer of 64 bits"
    assert decider.unsendable == [said]
    assert f"not sent to {RANKS}: {said}" in caplog.messages


@pytest.mark.parametrize("peer", [client_peer("a"), worker_peer(0, "process")])
def test_who_sends_what_cannot_be_read_is_answered_counted_and_logged(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    decider = Decider()
    decider.takes_plain = False
    service, transport = make_service(decider)
    payload = unchecked(StepRequest("a", 1, 1, completed_step=2**63))
    transport.put(Inbound(peer, payload))
    service.turn()
    reason = f"StepRequest.completed_step is {2**63}: pass an integer of 64 bits"
    assert decider.unreadable == [(peer.address, payload, reason)]
    told = encode(Unattached("a", 0, f"told {reason}"))
    assert transport.sent == [((peer.address,), (told,))]
    statistics = service.statistics()
    assert (statistics.malformed, statistics.last_malformed) == (1, f"{peer.address}: {reason}")
    assert f"a message of {peer.address} cannot be read: {reason}" in caplog.messages


def test_no_message_is_answered_before_there_is_a_coordinator() -> None:
    transport = Recorder()
    service = CoordinatorService(transport, VirtualClock(), MAX_BYTES, tick_s=1.0)
    transport.put(Inbound(client_peer("a"), b"nothing"))
    service.turn()
    assert (service.statistics().malformed, transport.sent) == (1, [])


def broken(*_: object) -> list[Outgoing]:
    raise MemoryError("no room")


@pytest.mark.parametrize(
    ("method", "peer", "message", "what"),
    [
        (
            "on_plain_applied",
            worker_peer(0, "process"),
            Ack("nonce", "process", 0, 1, 1),
            "a message of WorkerAddress(rank=0)",
        ),
        (
            "settle",
            worker_peer(0, "process"),
            Ack("nonce", "process", 0, 1, 1),
            "an acknowledgement",
        ),
        (
            "on_client_message",
            client_peer("a"),
            Attach("a"),
            "a message of ClientAddress(client_id='a')",
        ),
    ],
)
def test_an_error_in_a_decision_costs_the_state_and_no_other_message(
    monkeypatch: pytest.MonkeyPatch, method: str, peer: Peer, message: Message, what: str
) -> None:
    decider = Decider("why")
    service, transport = make_service(decider)
    with monkeypatch.context() as patch:
        patch.setattr(decider, method, broken)
        transport.put(Inbound(peer, encode(message)))
        service.turn()
    reason = f"{what}: MemoryError: no room"
    assert decider.errors == [reason]
    assert (service.statistics().faults, service.statistics().last_fault) == (1, reason)
    transport.put(Inbound(client_peer("b"), encode(Attach("b"))))
    service.turn()
    assert transport.sent[-1][0] == (ClientAddress("b"),)
    assert decider.errors == [reason]


def test_an_error_in_a_tick_costs_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    decider, clock = Decider(), VirtualClock()
    service = CoordinatorService(Recorder(), clock, MAX_BYTES, tick_s=1.0)
    service.open(decider, [])
    monkeypatch.setattr(decider, "on_tick", broken)
    clock.advance(1.0)
    service.turn()
    assert decider.errors == ["a look at the clock: MemoryError: no room"]


def test_state_that_cannot_be_dropped_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    decider = Decider("why")
    decider.num_vain_drops = 2
    service, transport = make_service(decider)
    with monkeypatch.context() as patch:
        patch.setattr(decider, "on_client_message", broken)
        transport.put(Inbound(client_peer("a"), encode(Attach("a"))))
        with pytest.raises(RuntimeError, match="the state cannot be dropped"):
            service.turn()
    transport.put(Inbound(client_peer("a"), encode(Attach("a"))))
    with pytest.raises(RuntimeError, match="the state cannot be dropped"):
        service.turn()
    assert transport.sent == []
    service.turn()
    assert transport.sent != []
    assert len(decider.errors) == 3


def test_bytes_that_break_the_decoder_are_counted_and_cost_no_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decider = Decider("why")
    service, transport = make_service(decider)
    with monkeypatch.context() as patch:
        patch.setattr("actors.service.decode", broken)
        transport.put(Inbound(client_peer("a"), b"anything"))
        service.turn()
    assert decider.errors == []
    assert (service.statistics().malformed, service.statistics().faults) == (1, 1)


def test_an_error_costs_the_epoch_and_nothing_that_is_cached(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(make_config()) as cluster, cluster.client() as client:
        tokens = np.arange(40, dtype=np.int32)
        first = client.step(StepRequest(new=(NewRequest("a", tokens, max_new_tokens=40),)))
        client.wait_finished(first.step)
        client.wait_finished(client.submit(StepRequest(completed_step=first.step)))
        epoch, manager = cluster.coordinator.epoch, cluster.coordinator.manager
        assert manager is not None
        monkeypatch.setattr(manager, "step", broken)
        with pytest.raises(StaleEpochError, match="MemoryError: no room"):
            client.step(StepRequest())
        client.attach()
        assert cluster.coordinator.epoch == epoch + 1
        again = client.step(StepRequest(new=(NewRequest("b", tokens, max_new_tokens=40),)))
        assert again.num_hit_tokens.tolist() == [32]
        client.wait_finished(again.step)
        assert client.failures == ()
        cluster.coordinator.check()


def test_a_loop_survives_turns_that_fail_and_serves_the_calls_of_other_threads() -> None:
    num_turns = itertools.count()

    def turn() -> None:
        if next(num_turns) % 2:
            raise ValueError("a turn failed")

    loop = ServiceLoop("a loop", turn, lambda: None)
    loop.start()
    assert loop.call(lambda: 7, DEADLINE_S) == 7
    with pytest.raises(SystemExit):
        loop.call(sys.exit, DEADLINE_S)
    while not loop.statistics().num_faults:
        assert loop.call(lambda: 7, DEADLINE_S) == 7
    assert loop.is_running
    assert loop.failure is None
    assert loop.end(DEADLINE_S)
    with pytest.raises(ClusterError, match=r"^a loop has ended$"):
        loop.call(lambda: 7, DEADLINE_S)


def test_a_loop_whose_turns_all_fail_ends_and_says_so() -> None:
    has_failed = threading.Event()

    def turn() -> None:
        raise ValueError("a turn failed")

    def on_failure(failure: BaseException) -> None:
        with pytest.raises(
            ClusterError, match=r"^a loop has ended \(ValueError\('a turn failed'\)\)$"
        ):
            loop.call(lambda: 7, DEADLINE_S)
        has_failed.set()

    loop = ServiceLoop("a loop", turn, lambda: None, max_failures=2, on_failure=on_failure)
    loop.start()
    assert has_failed.wait(DEADLINE_S)
    assert loop.statistics().num_faults == 2


def test_the_process_of_a_loop_that_has_failed_ends() -> None:
    script = """
import threading
from actors.loop import ServiceLoop, end_this_process

def turn():
    raise ValueError("a turn failed")

ServiceLoop("a loop", turn, lambda: None, max_failures=1, on_failure=end_this_process).start()
threading.Event().wait()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 1
    assert "a loop: error in a turn: ValueError: a turn failed" in ended.stderr
