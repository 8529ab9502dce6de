"""One address for the event streams of several publishers, each under a topic of its own.

Followers connect to the proxy instead of to each publisher. The proxy passes messages on, so each
topic is as exact as its publisher. It keeps no state of any cache, and a new proxy needs none.

It shifts the numbers of each topic so that the first one it sees is the present time. Numbers of a
publisher grow more slowly than time, so those of a topic rise, whether the proxy, the publisher or
the way between them was away meanwhile. A follower that asks for a number before the first one
gets the whole state.

    publisher ══live══▶ SUB ── proxy ── PUB ══▶ followers of a topic
              ◀─request─ DEALER      ROUTER ◀── [number, topic]

If a publisher is gone, its topic gets a clear. A follower that misses it asks after a silence; the
topic is then unknown, and the answer is a clear again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import zmq

from kvcache.base.curve import CurveKeys, equip_peer
from kvcache.base.errors import ConfigurationError
from kvcache.base.logs import get_logger
from kvcache.base.serving_loop import ServingLoop
from kvcache.events.answers import Answers
from kvcache.events.codec import EventCodec
from kvcache.events.decoding import MAX_PAYLOAD_BYTES
from kvcache.events.feed_sender import MILLISECOND_NUMBERS
from kvcache.events.publisher import END_MARK, MAX_SEQUENCE, SEQUENCE
from kvcache.events.subscription import ASK_FOR_ALL
from kvcache.events.wire_events import ClearedEvent

logger = get_logger(__name__)

UNKNOWN_S: Final = 5.0
"""A new proxy says of no topic that it is gone before publishers had so much time to appear."""

FETCH_S: Final = 30.0
MAX_FETCHES: Final = 16
"""Requests that wait for their publisher; further ones wait at the followers."""

MAX_REQUEST_BYTES: Final = 1024
QUEUED_BATCHES: Final = 10_000
AT_ONCE: Final = 256
_WAIT_MS: Final = 50

Streams = Mapping[str, tuple[str, str]]
"""By topic, a publisher's endpoint and its endpoint for requests."""


class _Source:
    """A publisher's live stream. `first` is the number with which it was passed on first, None
    before; `offset` is added to its own numbers."""

    def __init__(self, places: tuple[str, str], socket: zmq.Socket[bytes]) -> None:
        self.places, self.socket = places, socket
        self.first: int | None = None
        self.offset = 0
        self._last = -1

    def shifted(self, own: int) -> bytes:
        """Return the followers' number for one of the live stream."""
        if self.first is None or own <= self._last:  # or another publisher at its address
            self.first = _present_number()
            self.offset = self.first - own
        self._last = own
        return SEQUENCE.pack(own + self.offset)

    def own(self, number: bytes) -> bytes:
        """Return the publisher's number for one that a follower asks for."""
        (asked,) = SEQUENCE.unpack(number)
        is_known = self.first is not None and asked > self.first
        return SEQUENCE.pack(asked - self.offset if is_known else ASK_FOR_ALL)


class _Fetch:
    """A follower's request, and what of the answer has come. `offset` is added to its numbers."""

    def __init__(self, socket: zmq.Socket[bytes], give_up_s: float, offset: int) -> None:
        self.socket, self.give_up_s, self.offset = socket, give_up_s, offset
        self.messages: list[list[bytes]] = []


class StreamProxy:
    """Passes on the streams that `follow` names. One thread; `follow` and `statistics` in any."""

    def __init__(self, endpoint: str, replay_endpoint: str, keys: CurveKeys | None = None) -> None:
        """Bind both sockets; `keys` are those of the publishers.

        Raises ConfigurationError if an address cannot be bound.
        """
        self._keys = keys
        self._wanted: Streams = {}
        self._sources: dict[str, _Source] = {}
        self._fetches: dict[tuple[bytes, str], _Fetch] = {}
        names = ("batches", "requests", "lost_answers", "malformed_batches", "malformed_requests")
        self._counts: Counter[str] = Counter(dict.fromkeys(names, 0))
        self._can_answer = False
        self._begun_s = time.monotonic()
        self._codec = EventCodec(())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._live = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._answers = Answers(self._replay)
        self._poller = zmq.Poller()
        self._poller.register(self._replay, zmq.POLLIN)
        self._live.sndhwm = QUEUED_BATCHES  # a follower that is slower misses batches, and asks
        self._loop = ServingLoop("kvcache-events", self._turn)
        places = []
        for each, place in ((self._live, endpoint), (self._replay, replay_endpoint)):
            each.linger = 0
            each.ipv6 = "[" in place
            each.maxmsgsize = MAX_REQUEST_BYTES
            try:
                each.bind(place)
            except zmq.ZMQError as error:
                self._end()
                raise ConfigurationError(
                    f"events cannot be published at {place} ({error}): choose an address of this "
                    "machine that is free"
                ) from error
            places.append(each.getsockopt_string(zmq.LAST_ENDPOINT))
        self.endpoints = (places[0], places[1])
        """Where followers connect: the live stream, and the socket for requests."""

    def start(self) -> None:
        """Begin, in a thread."""
        self._loop.start()

    def close(self) -> None:
        """Stop. Followers keep what they know."""
        self._loop.stop()
        self._loop.join()
        self._end()

    def follow(self, streams: Streams) -> None:
        """Pass on these streams from now on, and no others."""
        self._wanted = dict(streams)

    def statistics(self) -> dict[str, Any]:
        """Return the topics, and counts since the start, as values for JSON."""
        counts = {f"num_{name}": count for name, count in sorted(self._counts.items())}
        live, replay = self.endpoints
        return {
            "endpoint": live,
            "replay_endpoint": replay,
            "topics": sorted(self._wanted),
            **counts,
        }

    # --- in the thread

    def _turn(self) -> None:
        self._change_sources()
        ready = dict(self._poller.poll(0 if self._can_answer else _WAIT_MS))
        for topic, source in self._sources.items():
            if source.socket in ready:
                self._pass_on(topic, source)
        for asked, fetch in list(self._fetches.items()):
            if fetch.socket in ready:
                self._collect(asked, fetch)
            elif time.monotonic() > fetch.give_up_s:
                self._counts["lost_answers"] += 1
                self._end_fetch(asked)
        if self._replay in ready:
            self._take_requests()
        self._can_answer = self._answers.go_on(time.monotonic())

    def _change_sources(self) -> None:
        """Connect to publishers that have come, and let go of those that are gone."""
        wanted = self._wanted
        for topic, source in list(self._sources.items()):
            if wanted.get(topic) == source.places:
                continue
            del self._sources[topic]
            self._disconnect(source.socket)
            for asked in [each for each in self._fetches if each[1] == topic]:
                self._end_fetch(asked)
            if topic not in wanted:
                logger.info("events of %s have ended", topic)
                self._live.send_multipart([topic.encode(), *self._clear()], zmq.NOBLOCK)
        for topic in wanted.keys() - self._sources.keys():
            places = wanted[topic]
            try:
                socket = self._connected(zmq.SUB, places[0])
            except zmq.ZMQError as error:
                logger.warning("events of %s cannot be followed: %s", topic, error)
                continue
            socket.subscribe(topic.encode())
            self._sources[topic] = _Source(places, socket)
            logger.info("events of %s come from %s", topic, places[0])

    def _pass_on(self, topic: str, source: _Source) -> None:
        for _ in range(AT_ONCE):
            try:
                frames = source.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            own = _number(frames[1]) if len(frames) == 3 else None
            if own is None:
                self._counts["malformed_batches"] += 1
            elif frames[0] == topic.encode():
                self._counts["batches"] += 1
                frames[1] = source.shifted(own)
                self._live.send_multipart(frames, zmq.NOBLOCK)

    def _take_requests(self) -> None:
        """Pass requests on to their publishers: `[id, "", number, topic]`.

        A request that is repeated gets the answer that is under way, however long that takes.
        """
        while len(self._fetches) < MAX_FETCHES and self._answers.has_room:
            try:
                request = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(request) != 4 or request[1] or len(request[2]) != SEQUENCE.size:
                self._counts["malformed_requests"] += 1
                continue
            client, topic = request[0], request[3].decode(errors="replace")
            self._counts["requests"] += 1
            if (client, topic) in self._fetches:
                continue
            source = self._sources.get(topic)
            if source is not None and source.first is not None:
                try:
                    socket = self._connected(zmq.DEALER, source.places[1])
                except zmq.ZMQError as error:
                    logger.warning("missed events of %s cannot be requested: %s", topic, error)
                    continue
                socket.send_multipart([b"", source.own(request[2])], zmq.NOBLOCK)
                give_up_s = time.monotonic() + FETCH_S
                self._fetches[client, topic] = _Fetch(socket, give_up_s, source.offset)
            elif topic not in self._wanted and time.monotonic() > self._begun_s + UNKNOWN_S:
                cleared = [client, b"", request[3], *self._clear()]
                self._put([cleared, [client, b"", b"", END_MARK, b""]])

    def _collect(self, asked: tuple[bytes, str], fetch: _Fetch) -> None:
        """Take the parts of an answer; pass it on when it is complete."""
        for _ in range(AT_ONCE):
            try:
                frames = fetch.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 4 and frames[2] == END_MARK:
                self._put([*fetch.messages, [asked[0], *frames]])
                self._end_fetch(asked)
                return
            own = _number(frames[2]) if len(frames) == 4 else None
            if own is None or own + fetch.offset < 0:
                self._counts["malformed_batches"] += 1
                continue
            frames[2] = SEQUENCE.pack(own + fetch.offset)
            fetch.messages.append([asked[0], *frames])

    def _put(self, messages: list[list[bytes]]) -> None:
        self._answers.put(messages, time.monotonic())

    def _clear(self) -> tuple[bytes, bytes]:
        """Return number and payload of a batch that says that a cache is empty."""
        number = SEQUENCE.pack(_present_number())
        return number, self._codec.encode_wire(time.time(), [ClearedEvent()])

    def _connected(self, kind: int, place: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.rcvhwm = QUEUED_BATCHES
        socket.maxmsgsize = MAX_PAYLOAD_BYTES
        socket.ipv6 = "[" in place
        if self._keys is not None:
            equip_peer(socket, self._keys)
        try:
            socket.connect(place)
        except zmq.ZMQError:
            socket.close(0)
            raise
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _disconnect(self, socket: zmq.Socket[bytes]) -> None:
        self._poller.unregister(socket)
        socket.close(0)

    def _end_fetch(self, asked: tuple[bytes, str]) -> None:
        fetch = self._fetches.pop(asked, None)
        if fetch is not None:
            self._disconnect(fetch.socket)

    def _end(self) -> None:
        self._context.destroy(0)


def _number(frame: bytes) -> int | None:
    """Return a batch's number, None for a frame that is none."""
    number = int.from_bytes(frame, "big")
    return number if len(frame) == SEQUENCE.size and number <= MAX_SEQUENCE else None


def _present_number() -> int:
    """Return a number that no publisher reaches before the next millisecond."""
    return int(1000 * time.time()) * MILLISECOND_NUMBERS
