"""Threads of one client and its one socket."""

from __future__ import annotations

import asyncio
import inspect
import select
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors import KVCacheCluster
from actors.async_client import AsyncKVCacheClient
from actors.client import KVCacheClient
from actors.clusters.cluster import Dialer as ClusterDialer
from actors.clusters.shutdown import ClusterParts
from actors.connection import LOOK_S, STALL_BEFORE_REDIAL, ClientConnection
from actors.transport import Endpoint, Peer, PeerTransport, TransportStatistics
from kvcache.base.clock import VirtualClock
from kvcache.base.errors import ConfigurationError, DeadlineError, NotRunningError
from kvcache.config import ClusterConfig
from kvcache.protocol.messages import Attach, Attached, Detach, Detached, Progress
from kvcache.protocol.step import StepRequest, StepResult
from kvcache.protocol.wire import decode, encode

MakeConfig = Callable[..., ClusterConfig]

LONG_S = 0.5
"""Many times the interval of a client's heartbeats."""


def test_both_clients_have_the_same_calls() -> None:
    """The asyncio client's are coroutines."""
    calls = [name for name, value in vars(KVCacheClient).items() if inspect.isfunction(value)]
    assert "allocate_slots" in calls
    for name in calls:
        awaited = getattr(AsyncKVCacheClient, name)
        assert inspect.iscoroutinefunction(awaited), name
        assert inspect.signature(awaited) == inspect.signature(getattr(KVCacheClient, name))
        assert awaited.__doc__ == getattr(KVCacheClient, name).__doc__


class Listener:
    """A `PeerTransport` that answers only `Attach`, and `Detach` if it `confirms`. It notices
    concurrent use."""

    def __init__(self, confirms: bool = False) -> None:
        self.sent: list[bytes] = []
        self._confirms = confirms
        self.is_disturbed = threading.Event()
        self.is_reading = threading.Event()
        self.num_disconnections = 0
        self._answers: list[bytes] = []
        self._readable = select.epoll()  # never readable: messages are found at ticks

    def send(self, payload: bytes) -> None:
        if self.is_reading.is_set():
            self.is_disturbed.set()
        self.sent.append(payload)
        message = decode(payload)
        if isinstance(message, Detach) and self._confirms:
            self._answers.append(encode(Detached(message.client_id, 1)))
        if isinstance(message, Attach):
            self._answers.append(encode(Attached(message.client_id, 1, 0, "plan", 1, True, "n")))

    def receive(self, timeout_s: float) -> list[bytes]:
        answers, self._answers = self._answers, []
        if not answers and timeout_s > 0:
            self.is_reading.set()
            self.is_disturbed.wait(LONG_S)
            self.is_reading.clear()
        return answers

    def receive_or_wake(self, timeout_s: float) -> list[bytes]:
        return self.receive(timeout_s)

    def fileno(self) -> int:
        return self._readable.fileno()

    def wake(self) -> None:
        pass

    def statistics(self) -> TransportStatistics:
        return TransportStatistics(disconnections=self.num_disconnections)

    def close(self, linger_s: float = 0.0) -> None:
        pass


class Dialer:
    """Leads to a `Listener`."""

    needs_keeping_alive = True

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.listener = Listener()
        self.note: Endpoint | None = None
        self.place = Endpoint("nowhere")
        self.is_gone = False

    def endpoint(self) -> Endpoint:
        if self.is_gone:
            raise NotRunningError("the cluster is gone")
        return self.place

    def noted(self) -> Endpoint | None:
        return self.note

    def open(self, endpoint: Endpoint, peer: Peer) -> PeerTransport:
        return self.listener

    def lost_workers(self) -> str:
        return ""


def test_who_keeps_an_idle_client_alive_leaves_the_socket_to_who_reads_it(
    make_config: MakeConfig,
) -> None:
    dialer = Dialer(make_config(transport={"resend_s": 0.02, "heartbeat_s": 0.04}))
    with KVCacheClient(dialer) as client:
        number = client.submit(StepRequest())
        with pytest.raises(DeadlineError):
            client.wait_result(number, timeout_s=LONG_S)
        assert not dialer.listener.is_disturbed.is_set()


UNCONFIRMED = "the coordinator has not confirmed that it is detached"


def test_a_forked_process_cannot_use_the_client_that_it_inherits(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialer = Dialer(make_config())
    dialer.listener = Listener(confirms=True)
    client = KVCacheClient(dialer)
    num_sent = len(dialer.listener.sent)
    with monkeypatch.context() as child:
        child.setattr("actors.connection.os.getpid", lambda: -1)
        for use in (lambda: client.submit(StepRequest()), client.attach):
            with pytest.raises(NotRunningError, match="forked: make a client in this process"):
                use()
        client.close()
    assert len(dialer.listener.sent) == num_sent
    client.submit(StepRequest())
    client.close()


@pytest.mark.parametrize("name", ["", "\ud800", 7, "n" * 201], ids=repr)
def test_a_name_that_makes_no_valid_client_id_is_refused(
    make_config: MakeConfig, name: Any
) -> None:
    with pytest.raises(ConfigurationError, match="client_name is "):
        KVCacheClient(Dialer(make_config()), name)


def test_a_client_without_answers_closes_after_a_while_and_says_so(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    dialer = Dialer(make_config(transport={"resend_s": 0.02, "heartbeat_s": 0.04}))
    KVCacheClient(dialer).close()
    sent = [decode(payload) for payload in dialer.listener.sent]
    assert sum(isinstance(message, Detach) for message in sent) > 1
    assert caplog.text.count(UNCONFIRMED) == 1

    async def come_and_go() -> None:
        client = await AsyncKVCacheClient.connect(dialer)
        await asyncio.gather(client.close(), client.close())
        await client.close()

    asyncio.run(come_and_go())
    assert caplog.text.count(UNCONFIRMED) == 2


def test_a_client_whose_cluster_is_gone_waits_for_no_confirmation(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    dialer = Dialer(
        make_config(
            transport={"resend_s": 1000.0}, deadlines={"worker_silence_s": 2000.0, "step_s": 3000.0}
        )
    )
    connection = ClientConnection(dialer, "c")
    client = KVCacheClient(dialer)
    dialer.listener.num_disconnections = 1
    dialer.is_gone = True
    client.close()
    client.close()
    assert UNCONFIRMED not in caplog.text
    assert connection.session.detach() == []  # it has never said that it is there


def test_closing_follows_a_coordinator_that_moves(make_config: MakeConfig) -> None:
    dialer = Dialer(make_config(transport={"resend_s": 1.0}))
    client = KVCacheClient(dialer)
    before = dialer.listener
    before.num_disconnections = 1
    dialer.listener = Listener(confirms=True)
    dialer.place = Endpoint("elsewhere")
    client.close()
    assert [type(decode(payload)) for payload in before.sent] == [Attach, Detach]
    assert [type(decode(payload)) for payload in dialer.listener.sent] == [Detach]


def test_a_silent_coordinator_is_looked_for_in_writing_before_anybody_is_asked(
    make_config: MakeConfig,
) -> None:
    clock, dialer = VirtualClock(100.0), Dialer(make_config(transport={"resend_s": 0.5}))
    connection = ClientConnection(dialer, "c", clock)
    assert not connection.is_time_to_look

    clock.advance(0.6)
    assert connection.is_time_to_look
    assert connection.look_for_move() is None  # nothing is written
    assert not connection.is_time_to_look  # not all the time
    assert not connection.may_have_moved

    clock.advance(LOOK_S + 0.01)
    dialer.note = Endpoint("nowhere")
    assert connection.is_time_to_look
    assert connection.look_for_move() is None  # it has not moved
    dialer.note = Endpoint("elsewhere")
    moved_to = connection.look_for_move()
    assert moved_to == Endpoint("elsewhere")
    connection.redial(moved_to)
    assert connection.look_for_move() is None
    assert not connection.is_time_to_look


def test_an_ended_connection_is_reason_enough_to_look(make_config: MakeConfig) -> None:
    clock, dialer = VirtualClock(100.0), Dialer(make_config(transport={"resend_s": 0.5}))
    connection = ClientConnection(dialer, "c", clock)
    clock.advance(LOOK_S + 0.01)
    assert not connection.is_time_to_look
    dialer.listener.num_disconnections = 1
    assert connection.is_time_to_look
    dialer.note = Endpoint("elsewhere")
    connection.redial(Endpoint("elsewhere"))
    clock.advance(LOOK_S + 0.01)
    assert not connection.is_time_to_look


def test_a_coordinator_that_answers_and_gets_nowhere_may_have_been_taken_over_from(
    make_config: MakeConfig,
) -> None:
    clock, dialer = VirtualClock(100.0), Dialer(make_config(transport={"resend_s": 0.5}))
    connection = ClientConnection(dialer, "c", clock)
    session = connection.session
    connection.send(session.attach())
    connection.take(connection.transport.receive(0.0))
    step = connection.send_step(session.submit(StepRequest()))
    patience_s = STALL_BEFORE_REDIAL * 0.5

    def hear(seconds: float, applied_step: int = 0) -> bool:
        """Receive the same message repeatedly for a while; return whether it is time to look."""
        for _ in range(round(seconds)):
            clock.advance(1.0)
            progress = Progress(session.client_id, 1, applied_step, applied_step)
            connection.take([encode(progress)])
        return connection.may_have_moved

    assert not hear(patience_s)
    assert hear(1.0)
    connection.put_off_redial()
    assert not hear(patience_s)
    assert hear(1.0)
    assert not hear(1.0, applied_step=step)  # it gets on
    connection.take([encode(StepResult(session.client_id, step, 1, 1))])
    assert not hear(10 * patience_s, applied_step=step)  # nothing is under way


def test_a_cluster_cannot_be_asked_after_ray_was_left(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    coordinator = ray.remote(int)  # none of its methods can be called
    parts = ClusterParts(config.name, config.deadlines, coordinator)
    cluster = KVCacheCluster(config, parts, is_own=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for ask in (cluster.status, cluster.statistics, cluster.pending, cluster.client, cluster.stop):
        with pytest.raises(NotRunningError, match="close clients and clusters"):
            ask()


def test_a_client_does_not_look_for_its_coordinator_in_a_process_that_left_ray(
    make_config: MakeConfig,
) -> None:
    if ray.is_initialized():
        pytest.skip("this process has a cluster")
    coordinator = SimpleNamespace(endpoint_for=SimpleNamespace(remote=lambda node: node))
    dialer = ClusterDialer(coordinator, make_config())
    assert dialer.noted() is None
    with pytest.raises(NotRunningError) as left:
        dialer.endpoint()
    assert str(left.value) == (
        "this process is not connected to Ray: close clients and clusters before ray.shutdown()"
    )
