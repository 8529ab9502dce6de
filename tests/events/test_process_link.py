"""The publisher's process: its addresses, its end, and independence of slow clients."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from kvcache.base.clock import SystemClock
from kvcache.core import BlocksStored
from kvcache.events.feed_frames import FeedReader, pack_events, pack_frame, pack_state
from kvcache.events.process_link import ProcessLink
from kvcache.events.publisher import SEQUENCE, PublisherSettings
from kvcache.events.publisher_process import SocketSettings
from kvcache.events.subscriber import KVEventSubscriber
from kvcache.events.subscription import SubscriptionSettings
from kvcache.events.translation import GroupKind
from kvcache.requests.digests import PackedDigests
from kvcache.requests.request_content import Namespace
from tests import waiting

ANYWHERE = "tcp://127.0.0.1:0"
PATIENCE_S = 30.0
BLOCK = 4


@pytest.fixture
def link() -> Iterator[ProcessLink]:
    made = opened()
    yield made
    made.close()


def opened(**changes: Any) -> ProcessLink:
    settings = PublisherSettings("kv@a@b", **{"heartbeat_s": 0.2, **changes})
    sockets = SocketSettings(ANYWHERE, ANYWHERE)
    made = ProcessLink(settings, [GroupKind("full")], sockets, SystemClock())
    made.open(PATIENCE_S)
    return made


def begin(link: ProcessLink, first_seq: int) -> None:
    link.send(pack_frame("begin", first_seq, 0.0, pack_state((), (BLOCK,), b"")), is_state=True)


def batch(low: int) -> bytes:
    digests = PackedDigests(low.to_bytes(32, "big"), 32)
    tokens = np.full(BLOCK, 7, np.int32)
    event = BlocksStored(0, "device", digests, None, tokens, BLOCK, Namespace(0, None, None, None))
    return pack_frame("batch", 0.0, pack_events([event]))


def follow_until(subscriber: KVEventSubscriber, num_blocks: int) -> None:
    waiting.wait_until(
        lambda: subscriber.statistics().num_blocks == {"GPU": num_blocks},
        meanwhile=lambda: subscriber.poll(0.1),
    )


def wait_until(link: ProcessLink, holds: Callable[[], bool]) -> None:
    waiting.wait_until(holds, link.statistics, meanwhile=link.poll)


def follow(link: ProcessLink, settings: SubscriptionSettings | None = None) -> KVEventSubscriber:
    return KVEventSubscriber(*link.endpoints, settings=settings)


def test_a_publisher_that_is_made_again_is_where_the_one_before_was(link: ProcessLink) -> None:
    begin(link, 100)
    places = link.endpoints
    with follow(link) as subscriber:
        subscriber.wait_for(100, PATIENCE_S)
        os.kill(link.statistics()["process_id"], signal.SIGKILL)
        wait_until(link, lambda: link.statistics()["num_publisher_restarts"] == 1)
        wait_until(link, lambda: link.needs_state)
        assert link.endpoints == places
        begin(link, 200)
        link.poll()
        subscriber.wait_for(200, PATIENCE_S)


def test_a_publisher_that_cannot_be_started_is_tried_again(
    link: ProcessLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", full)
        os.kill(link.statistics()["process_id"], signal.SIGKILL)
        wait_until(link, lambda: link.statistics()["num_publisher_restarts"] == 1)
        assert "cannot be started: [Errno 24]" in link.statistics()["problem"]
    wait_until(link, lambda: link.needs_state)


@pytest.mark.parametrize(
    "said",
    [
        [["statistics", {}]],
        pytest.param([["ready"]], marks=pytest.mark.long),
        pytest.param([["statistics", 7]], marks=pytest.mark.long),
    ],
)
def test_a_publisher_that_talks_nonsense_is_made_again(
    link: ProcessLink, monkeypatch: pytest.MonkeyPatch, said: list[list[Any]]
) -> None:
    before = link.statistics()["process_id"]
    with monkeypatch.context() as patch:
        patch.setattr(FeedReader, "feed", lambda reader, data: said)
        begin(link, 100)
        wait_until(link, lambda: not link.statistics()["is_alive"])
    assert link.statistics()["problem"].startswith("the event publisher cannot be understood: ")
    wait_until(link, lambda: link.needs_state)
    assert link.statistics()["process_id"] != before


@pytest.mark.long
def test_a_place_that_another_has_taken_meanwhile_is_given_up(link: ProcessLink) -> None:
    port = int(link.endpoints[0].rpartition(":")[2])
    process_id = link.statistics()["process_id"]
    os.kill(process_id, signal.SIGKILL)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bind_when_free(other, port)
        other.listen()
        wait_until(link, lambda: not link.statistics()["is_alive"])
        wait_until(link, lambda: bool(link.statistics()["is_alive"]))
        assert int(link.endpoints[0].rpartition(":")[2]) != port


def bind_when_free(other: socket.socket, port: int) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
        else:
            return


def test_what_was_said_last_is_published_before_the_end() -> None:
    link = opened()
    begin(link, 100)
    with follow(link) as subscriber:
        subscriber.wait_for(100, PATIENCE_S)
        seq = subscriber.last_seq
        assert seq is not None
        link.send(batch(1))
        link.close()
        follow_until(subscriber, 1)


def test_an_interrupt_of_the_terminal_ends_nothing(link: ProcessLink) -> None:
    os.kill(link.statistics()["process_id"], signal.SIGINT)
    begin(link, 100)
    with follow(link) as subscriber:
        subscriber.wait_for(101, PATIENCE_S)  # a heartbeat later
    link.poll()
    assert link.statistics()["num_publisher_restarts"] == 0


def test_a_publisher_ends_with_its_coordinator_however_that_ends() -> None:
    script = (
        "import sys, time; sys.path.insert(0, '.')\n"
        "from tests.events.test_process_link import opened\n"
        "print(opened().statistics()['process_id'], flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as owner:
        process_id = int(owner.stdout.readline())
        owner.kill()
    waiting.wait_until(lambda: not is_running(process_id))


def is_running(process_id: int) -> bool:
    try:
        with open(f"/proc/{process_id}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_requests_do_not_pile_up_without_a_publisher() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    settings = SubscriptionSettings(reply_s=0.001)
    router = context.socket(zmq.ROUTER)
    with KVEventSubscriber(place, place, settings=settings) as subscriber:
        while subscriber.statistics().num_requests < 20:
            subscriber.poll(0.01)
        router.bind(place)
        assert router.poll(int(1000 * PATIENCE_S))
        router.recv_multipart()
        assert not router.poll(200)
    router.close(0)
    context.term()


def test_answers_do_not_delay_what_happens(link: ProcessLink) -> None:
    """Clients that request everything at once wait; a new event overtakes them."""
    begin(link, 100)
    for low in range(1, 2001):
        link.send(batch(low))
        if low % 20 == 0:
            time.sleep(0.004)  # so that they make batches of their own
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with follow(link) as subscriber:
        wait_until(link, lambda: link.statistics().get("num_blocks") == {"GPU": 2000})
        subscriber.wait_for(link.last_seq, PATIENCE_S)
        clients = [context.socket(zmq.DEALER) for _ in range(8)]
        for client in clients:
            client.setsockopt(zmq.RCVHWM, 1)
            client.connect(link.endpoints[1])
            for _ in range(50):
                client.send_multipart([b"", SEQUENCE.pack(100)])
        link.send(batch(5000))
        follow_until(subscriber, 2001)
    for client in clients:
        client.close(0)
    context.term()
