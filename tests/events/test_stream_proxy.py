"""Several publishers behind one proxy: each follower knows exactly what its node holds."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import zmq

from kvcache.base.clock import SystemClock
from kvcache.base.curve import generate_curve_keys
from kvcache.base.errors import ConfigurationError
from kvcache.core import BlocksRemoved, BlocksStored
from kvcache.events import KVEventSubscriber, StoredEvent, SubscriptionSettings, stream_proxy
from kvcache.events.feed_frames import pack_state
from kvcache.events.feed_sender import FeedSender
from kvcache.events.process_link import ProcessLink
from kvcache.events.publisher import END_MARK, SEQUENCE, PublisherSettings
from kvcache.events.publisher_process import SocketSettings
from kvcache.events.stream_proxy import StreamProxy
from kvcache.events.translation import GroupKind
from kvcache.requests.digests import PackedDigests
from kvcache.requests.request_content import DEFAULT_NAMESPACE
from tests.waiting import wait_until

KEYS = generate_curve_keys()
ANYWHERE = "tcp://127.0.0.1:*"
BLOCK = 4
DEADLINE_S = 60.0


class Node:
    """A publisher in a process of its own, and what it holds."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.held: set[int] = set()
        self.link = ProcessLink(
            PublisherSettings(topic, heartbeat_s=0.2, history_batches=3),
            [GroupKind("full")],
            SocketSettings(ANYWHERE, ANYWHERE, curve_keys=astuple(KEYS)),
            SystemClock(),
        )
        self.link.open(DEADLINE_S)
        self.sender = FeedSender(self.link, time.time)
        self.sender.send_state(pack_state((), (BLOCK,), b""))

    def change(self, block: int) -> None:
        digests = PackedDigests(block.to_bytes(32, "big"), 32)
        if block in self.held:
            self.sender.send_events([BlocksRemoved(0, "host", digests)])
        else:
            tokens = np.full(BLOCK, block, np.int32)
            space = DEFAULT_NAMESPACE
            stored = BlocksStored(0, "host", digests, None, tokens, BLOCK, space)
            self.sender.send_events([stored])
        self.held ^= {block}


class World:
    """A proxy, its nodes, and what followers know."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.places = (ANYWHERE, ANYWHERE)
        self.start_proxy()

    def start_proxy(self) -> None:
        self.proxy = StreamProxy(*self.places, KEYS)
        self.places = self.proxy.endpoints
        self.tell()
        self.proxy.start()

    def start(self, topic: str) -> Node:
        self.nodes[topic] = Node(topic)
        self.tell()
        return self.nodes[topic]

    def end(self, topic: str) -> None:
        self.nodes.pop(topic).link.close()
        self.tell()

    def tell(self) -> None:
        self.proxy.follow({name: each.link.endpoints for name, each in self.nodes.items()})

    def follow(self, topic: str) -> KVEventSubscriber:
        settings = SubscriptionSettings(reply_s=0.3, silence_s=1.0, is_shared=True)
        return KVEventSubscriber(*self.places, topic=topic, settings=settings)

    def agree(self, followers: list[tuple[str, KVEventSubscriber]]) -> None:
        """Wait until each follower knows what its node holds."""

        def differences() -> list[str]:
            wrong = []
            for topic, follower in followers:
                follower.poll(0.01)
                node = self.nodes.get(topic)
                if hashes_of(follower) != (set() if node is None else node.held):
                    wrong.append(topic)
            return wrong

        wait_until(lambda: not differences(), differences)

    def close(self) -> None:
        self.proxy.close()
        for node in self.nodes.values():
            node.link.close()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(stream_proxy, "UNKNOWN_S", 0.5)
    made = World()
    yield made
    made.close()


def hashes_of(follower: KVEventSubscriber) -> set[int]:
    events = follower._subscription.mirror.state()
    return {
        value
        for event in events
        if isinstance(event, StoredEvent) and event.medium == "CPU"
        for value in event.block_hashes.tolist()
    }


def test_followers_know_each_node_apart_through_joins_ends_and_restarts(world: World) -> None:
    draw = random.Random(5)
    topics = ["kv@a@m", "kv@b@m", "kv@b@m2"]  # one begins with another
    followers = []
    for _ in range(40):
        action, topic = draw.random(), draw.choice(topics)
        if topic not in world.nodes:
            world.start(topic)
        elif action < 0.08:
            world.end(topic)
        elif action < 0.16:
            world.proxy.close()
            world.start_proxy()
        elif action < 0.3 and len(followers) < 12:
            followers.append((topic, world.follow(topic)))
        elif action < 0.36 and followers:
            world.agree([draw.choice(followers)])
        else:
            for _ in range(draw.randrange(1, 8)):
                world.nodes[topic].change(draw.randrange(1, 30))
    world.agree(followers)
    assert any(node.held for node in world.nodes.values()) and len(followers) > 3
    for _, follower in followers:
        assert not follower.statistics().num_malformed
        follower.close()


def test_a_node_that_ends_leaves_no_block_behind(world: World) -> None:
    for topic in ("kv@a@m", "kv@b@m"):
        world.start(topic).change(7)
    early = [(topic, world.follow(topic)) for topic in world.nodes]
    world.agree(early)
    world.end("kv@a@m")
    world.agree(early)
    world.proxy.close()  # the next one never hears of this node
    world.end("kv@b@m")
    world.start_proxy()
    world.agree(early)
    for _, follower in early:
        follower.close()


def test_a_node_that_was_away_for_a_moment_is_known_again(world: World) -> None:
    node = world.start("kv@a@m")
    node.change(7)
    follower = world.follow("kv@a@m")
    world.agree([("kv@a@m", follower)])
    world.proxy.follow({})
    wait_until(lambda: bool(follower.poll(0.01)) and not hashes_of(follower))
    world.tell()
    world.agree([("kv@a@m", follower)])
    follower.close()


def test_wrong_requests_cost_a_count(world: World) -> None:
    world.start("kv@a@m")
    number = SEQUENCE.pack(0)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(world.places[1])
        wrong = [[b"", number], [b"", b"1", b"kv@a@m"], [b"x", number, b"kv@a@m"], [b"x"]]
        for frames in wrong:
            dealer.send_multipart(frames)
        wait_until(lambda: world.proxy.statistics().get("num_malformed_requests") == len(wrong))
        dealer.send_multipart([b"", number, b"\xff"])
        dealer.send_multipart([b"", number, b"kv@a@m"])
        assert dealer.poll(10_000)
    assert world.proxy.statistics()["topics"] == ["kv@a@m"]


class FakePublisher:
    """The sockets of a publisher, without one behind them."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.live, self.replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        for each in (self.live, self.replay):
            each.linger = 0
            each.bind(ANYWHERE)

    @property
    def places(self) -> tuple[str, str]:
        live, replay = self.live, self.replay
        return tuple(each.getsockopt_string(zmq.LAST_ENDPOINT) for each in (live, replay))  # type: ignore[return-value]

    def say(self, topic: bytes, number: bytes) -> None:
        self.live.send_multipart([topic, number, b"payload"])


@pytest.fixture
def fakes() -> Iterator[tuple[StreamProxy, zmq.Context[Any], FakePublisher, FakePublisher]]:
    """A proxy that follows topics a and b."""
    context: zmq.Context[Any] = zmq.Context()
    a, b = FakePublisher(context), FakePublisher(context)
    proxy = StreamProxy(ANYWHERE, ANYWHERE)
    proxy.follow({"a": a.places, "b": b.places})
    proxy.start()
    yield proxy, context, a, b
    proxy.close()
    context.destroy(0)


def until_passed_on(proxy: StreamProxy, publisher: FakePublisher, topic: bytes) -> None:
    """Publish numbers from 1 on until the proxy, which may not be connected yet, has got one."""
    number, before = 0, proxy.statistics()["num_batches"]

    def is_passed_on() -> bool:
        nonlocal number
        number += 1
        publisher.say(topic, SEQUENCE.pack(number))
        return bool(proxy.statistics()["num_batches"] > before)

    wait_until(is_passed_on)


def test_a_publisher_with_wrong_numbers_delays_no_other(
    fakes: tuple[StreamProxy, zmq.Context[Any], FakePublisher, FakePublisher],
) -> None:
    proxy, _, a, b = fakes
    until_passed_on(proxy, a, b"a")
    until_passed_on(proxy, b, b"b")
    for number in (b"", b"short", b"\xff" * SEQUENCE.size):
        a.say(b"a", number)
    wait_until(lambda: proxy.statistics().get("num_malformed_batches") == 3)
    until_passed_on(proxy, b, b"b")
    assert not proxy._loop.faults.count


def test_a_repeated_request_does_not_begin_a_slow_answer_again(
    fakes: tuple[StreamProxy, zmq.Context[Any], FakePublisher, FakePublisher],
) -> None:
    proxy, context, a, _ = fakes
    until_passed_on(proxy, a, b"a")
    with context.socket(zmq.DEALER) as follower:
        follower.linger = 0
        follower.connect(proxy.endpoints[1])
        for _ in range(3):
            follower.send_multipart([b"", SEQUENCE.pack(0), b"a"])
        wait_until(lambda: proxy.statistics().get("num_requests") == 3)
        client, *_ = a.replay.recv_multipart()
        for number in (b"short", SEQUENCE.pack(1), END_MARK):
            a.replay.send_multipart([client, b"", b"a", number, b"payload"])
        assert follower.poll(10_000)
        assert follower.recv_multipart()[3] == b"payload"
        assert follower.recv_multipart()[2] == END_MARK


def test_an_address_that_is_taken_is_named(world: World) -> None:
    with pytest.raises(ConfigurationError, match="cannot be published at"):
        StreamProxy(world.places[0], ANYWHERE)
