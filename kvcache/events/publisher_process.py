"""The process that publishes: sockets for routers on one side, the coordinator's on the other.

Started by `process_link.py`; ends when the coordinator's end of the pair is closed. Whatever a
router does, only this process waits, never a step. Queues are bounded. If a router is too slow, its
socket drops batches, and the router sees a gap. Live batches beyond the queue's limit are dropped,
oldest first, counted, and kept for clients that ask.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import zmq

from kvcache.base.curve import CurveGate, CurveKeys, guard_server
from kvcache.base.errors import KVCacheError
from kvcache.base.logs import log_to_stderr
from kvcache.base.serving_loop import Faults
from kvcache.core import CacheEvent
from kvcache.events.answers import Answers
from kvcache.events.feed_frames import FeedReader, pack_frame, unpack_events, unpack_state
from kvcache.events.publisher import EventPublisher, Frames, PublisherSettings
from kvcache.events.translation import GroupKind

_READ_BYTES: Final = 1 << 20
_READS_AT_ONCE: Final = 16
_STATISTICS_S: Final = 0.2
_GREETING_S: Final = 0.1
_LINGER_MS: Final = 200
_BIND_PAUSE_S: Final = 0.05
_GATHER_S: Final = 0.002
"""How long events wait for others, so that quick steps make one batch and wake this process
once."""

_NICENESS: Final = 5
"""Steps take precedence if there are more processes than processors."""

_MAX_EVENTS: Final = 4096
"""Most events of one batch; further ones make another."""
_MAX_REQUEST_BYTES: Final = 1024
_REQUESTS_AT_ONCE: Final = 16
_GREETINGS_AT_ONCE: Final = 1000
_UNREAD_MS: Final = 30_000
"""A client that reads nothing for this long is disconnected, and its queue is dropped."""
_ANSWERING_MS: Final = 10
"""How often a slow client is tried again."""


@dataclass(frozen=True)
class SocketSettings:
    """Where to bind, how long to try (an earlier publisher may still be ending), and the lengths of
    queues: batches for a router that does not read, and batches that come at once. With
    `curve_keys` (`CurveKeys`, in the order of its fields) only their holders can connect."""

    endpoint: str
    replay_endpoint: str
    bind_s: float = 5.0
    send_batches: int = 10_000
    live_batches: int = 10_000
    curve_keys: tuple[bytes, bytes, bytes, bytes] | None = field(default=None, repr=False)


class PublisherLoop:
    """Publishes the frames from `feed` until that is closed."""

    def __init__(
        self, feed: socket.socket, publisher: EventPublisher, sockets: SocketSettings
    ) -> None:
        """Bind both sockets. Raises zmq.ZMQError without a name: the caller knows the endpoints."""
        self._feed = feed
        self._publisher = publisher
        self._limits = sockets
        self._context = zmq.Context()
        keys = None if sockets.curve_keys is None else CurveKeys(*sockets.curve_keys)
        self._gate = None if keys is None else CurveGate(self._context, keys)
        self._live = self._context.socket(zmq.XPUB)
        self._live.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._replay = self._context.socket(zmq.ROUTER)
        for each in (self._live, self._replay):
            each.setsockopt(zmq.LINGER, _LINGER_MS)
            each.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
            each.setsockopt(zmq.TCP_MAXRT, _UNREAD_MS)
            guard_server(each, keys)
        self._live.setsockopt(zmq.SNDHWM, sockets.send_batches)
        self._answers = Answers(self._replay)
        self._faults = Faults("the event publisher")
        self._reader = FeedReader()
        self._queue: deque[Frames] = deque()
        self._num_dropped = 0
        self._published_s = self._greeted_s = self._told_s = time.monotonic()
        self._has_begun = False
        self._can_answer = False
        self._events: list[CacheEvent] = []
        self._time_s = 0.0
        self._told: tuple[Any, ...] = ()

    def bind(self) -> tuple[str, str]:
        """Bind both sockets; return their addresses. Raises OSError with the endpoint's name."""
        give_up_s = time.monotonic() + self._limits.bind_s
        places = []
        for each, endpoint in (
            (self._live, self._limits.endpoint),
            (self._replay, self._limits.replay_endpoint),
        ):
            while True:
                try:
                    each.bind(endpoint)
                    break
                except zmq.ZMQError as error:
                    if error.errno != zmq.EADDRINUSE or time.monotonic() > give_up_s:
                        raise OSError(f"{endpoint}: {error}") from error
                    time.sleep(_BIND_PAUSE_S)
            places.append(each.getsockopt_string(zmq.LAST_ENDPOINT))
        return places[0], places[1]

    def run(self) -> None:
        """Publish until the feed is closed."""
        poller = zmq.Poller()
        for each in (self._live, self._replay, self._feed):
            poller.register(each, zmq.POLLIN)
        is_open = True
        while is_open:
            poller.modify(self._replay, zmq.POLLIN if self._answers.has_room else 0)
            ready = dict(poller.poll(self._timeout_ms()))
            if self._feed.fileno() in ready:
                time.sleep(_GATHER_S)
                is_open = self._read_feed()
                self._publish()
            if self._live in ready:
                with self._faults.contained("a subscription"):
                    self._greet()
            self._send_queue()
            if self._replay in ready:
                self._take_requests()
            self._can_answer = self._answers.go_on(time.monotonic())
            self._keep_alive()
            self._tell()
        self.close()

    def close(self) -> None:
        """Close the sockets, with a moment for sent messages to leave."""
        self._live.close()
        self._replay.close()
        self._context.term()
        if self._gate is not None:
            self._gate.join()

    def _timeout_ms(self) -> int:
        """Return how long there is nothing to do: until the next heartbeat or statistics."""
        now_s = time.monotonic()
        if self._can_answer:
            return 0
        due_s = self._published_s + self._publisher.settings.heartbeat_s
        if self._answers or not self._answers.has_room:
            due_s = min(due_s, now_s + _ANSWERING_MS / 1000)
        if self._told != self._statistics():
            due_s = min(due_s, self._told_s + _STATISTICS_S)
        return max(1, int(1000 * (due_s - now_s)))

    def _read_feed(self) -> bool:
        """Read frames, up to a limit; return whether there may be more."""
        for _ in range(_READS_AT_ONCE):
            try:
                data = self._feed.recv(_READ_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            for frame in self._reader.feed(data):
                self._take(*frame)
        return True

    def _take(self, kind: str, *values: Any) -> None:
        if kind == "batch":
            self._time_s, events = values
            self._events += unpack_events(events)
            if len(self._events) >= _MAX_EVENTS:
                self._publish()
        elif kind == "begin":
            first_seq, time_s, state = values
            self._publish()
            self._has_begun = True
            self._queue_up(self._publisher.begin(first_seq, time_s, unpack_state(state)))

    def _publish(self) -> None:
        """Publish the frames that were read as one batch."""
        if self._events:
            events, self._events = self._events, []
            self._queue_up(self._publisher.publish(self._time_s, events))

    def _queue_up(self, frames: Frames) -> None:
        if not frames:
            return
        self._queue.append(frames)
        self._published_s = time.monotonic()
        if len(self._queue) > self._limits.live_batches:
            self._queue.popleft()
            self._num_dropped += 1

    def _send_queue(self) -> None:
        while self._queue:
            # Never waits: a subscriber whose queue is full misses the batch.
            self._live.send_multipart(self._queue.popleft(), zmq.DONTWAIT, copy=False)

    def _greet(self) -> None:
        """Send the present number to all when a subscriber joins, but not too often."""
        for _ in range(_GREETINGS_AT_ONCE):
            try:
                self._live.recv(zmq.DONTWAIT)
            except zmq.Again:
                break
        self._greeted_s = time.monotonic()
        self._published_s = min(
            self._published_s, self._greeted_s - self._publisher.settings.heartbeat_s + _GREETING_S
        )

    def _keep_alive(self) -> None:
        if not self._has_begun:
            self._published_s = time.monotonic()
            return
        if time.monotonic() - self._published_s >= self._publisher.settings.heartbeat_s:
            self._queue_up(self._publisher.heartbeat(time.time()))
            self._send_queue()

    def _take_requests(self) -> None:
        """Read a few requests: the others next time."""
        for _ in range(_REQUESTS_AT_ONCE):
            if not self._answers.has_room:
                return
            try:
                request = self._replay.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            with self._faults.contained("a request"):
                self._answers.put(self._publisher.answer(request, time.time()), time.monotonic())

    def _statistics(self) -> tuple[Any, ...]:
        return (self._publisher.last_seq, self._num_dropped, self._num_faults())

    def _num_faults(self) -> int:
        return self._faults.count + self._answers.faults.count

    def _tell(self) -> None:
        """Send statistics to the coordinator now and then."""
        now_s = time.monotonic()
        statistics = self._statistics()
        if statistics == self._told or now_s - self._told_s < _STATISTICS_S:
            return
        self._told, self._told_s = statistics, now_s
        values = {**asdict(self._publisher.statistics()), "num_dropped_batches": self._num_dropped}
        values["num_given_up_answers"] = self._answers.num_given_up
        values["num_faults"] = self._num_faults()
        values["last_fault"] = self._faults.last or self._answers.faults.last
        try:
            self._feed.send(pack_frame("statistics", values), socket.MSG_DONTWAIT)
        except OSError:
            return  # it will get the next ones


def main() -> None:
    """Serve the pair of sockets whose descriptor is the only argument."""
    # Ctrl-C in a terminal is for the coordinator: this process ends after it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_to_stderr(("kvcache",))
    feed = socket.socket(fileno=int(sys.argv[1]))
    feed.setblocking(True)
    reader = FeedReader()
    opened: list[list[Any]] = []
    while not opened:
        data = feed.recv(_READ_BYTES)
        if not data:
            return
        opened = reader.feed(data)
    _, settings, kinds, sockets = opened[0]
    try:
        publisher = EventPublisher(
            PublisherSettings(**settings), [GroupKind(*kind) for kind in kinds]
        )
        loop = PublisherLoop(feed, publisher, SocketSettings(**sockets))
        places = loop.bind()
    except (KVCacheError, OSError, zmq.ZMQError) as error:
        feed.sendall(pack_frame("failed", str(error)))
        return
    os.nice(_NICENESS)
    feed.sendall(pack_frame("ready", *places))
    feed.setblocking(False)
    loop.run()


if __name__ == "__main__":
    main()
