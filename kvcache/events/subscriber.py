"""Follows a publisher over the network: an iterator, a callback, or asyncio.

`Subscription` tracks missing events; this module has the sockets. Make one subscriber per
publisher, and combine them in a `PrefixIndex`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

import zmq

from kvcache.base.arguments import as_int, as_number, as_text, check_kind, check_methods
from kvcache.base.curve import CurveKeys, equip_peer
from kvcache.base.errors import ConfigurationError, DeadlineError
from kvcache.base.serving_loop import Faults
from kvcache.events.subscription import (
    Subscription,
    SubscriptionSettings,
    SubscriptionStatistics,
    Update,
)

_WAIT_S: Final = 0.1
_LINGER_MS: Final = 0
_RECEIVE_BATCHES: Final = 20_000


class _Sockets:
    """The two sockets of a subscriber: SUB for the live stream, DEALER for requests."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        replay_endpoint: str,
        topic: bytes,
        *,
        settings: SubscriptionSettings,
        keys: CurveKeys | None,
    ) -> None:
        self._named = [topic] if settings.is_shared else []
        self.live = context.socket(zmq.SUB)
        self.replay = context.socket(zmq.DEALER)
        # Without a publisher, requests must not pile up: each would be answered.
        self.replay.setsockopt(zmq.SNDHWM, 1)
        for each, place in ((self.live, endpoint), (self.replay, replay_endpoint)):
            each.setsockopt(zmq.LINGER, _LINGER_MS)
            each.setsockopt(zmq.RCVHWM, _RECEIVE_BATCHES)
            each.setsockopt(zmq.MAXMSGSIZE, settings.max_payload_bytes)
            try:
                if keys is not None:
                    equip_peer(each, keys)
                each.connect(place)
            except ConfigurationError:
                self.close()
                raise
            except zmq.ZMQError as error:
                self.close()
                raise ConfigurationError(
                    f"{place!r} is not an address to connect to ({error}): pass the publisher's "
                    "endpoint and replay_endpoint, which `kvcache status --json` shows"
                ) from error
        self.live.setsockopt(zmq.SUBSCRIBE, topic)

    def ask(self, number: bytes) -> None:
        """Request everything from a number on. A request that cannot be sent now is lost: the
        subscription asks again."""
        try:
            self.replay.send_multipart([b"", number, *self._named], zmq.DONTWAIT)
        except zmq.ZMQError:
            return

    def close(self) -> None:
        self.live.close()
        self.replay.close()


class KVEventSubscriber:
    """Follows one publisher exactly. One user, one thread.

    with KVEventSubscriber("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657") as subscriber:
        for update in subscriber:
            index.follow("replica 0", update)
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        *,
        topic: str = "kv@",
        on_update: Callable[[Update], None] | None = None,
        settings: SubscriptionSettings | None = None,
        keys: CurveKeys | None = None,
    ) -> None:
        """Connect, and request the whole state.

        Args:
            endpoint: the live stream.
            replay_endpoint: answers requests for missed events.
            topic: only messages whose topic begins with it.
            on_update: called with each update, which is also returned.
            settings: times and limits.
            keys: for a publisher that requires keys; its discovery record has them.

        Raises:
            ConfigurationError: an invalid address or another invalid argument.
        """
        endpoint = as_text("endpoint", endpoint, ConfigurationError)
        replay_endpoint = as_text("replay_endpoint", replay_endpoint, ConfigurationError)
        topic = as_text("topic", topic, ConfigurationError, may_be_empty=True)
        if on_update is not None:
            check_methods("on_update", on_update, ("__call__",), ConfigurationError)
        check_kind("keys", keys, (CurveKeys, type(None)), ConfigurationError)
        self._settings = SubscriptionSettings() if settings is None else settings
        check_kind("settings", self._settings, SubscriptionSettings, ConfigurationError)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._sockets = _Sockets(
                self._context,
                endpoint,
                replay_endpoint,
                topic.encode(),
                settings=self._settings,
                keys=keys,
            )
        except ConfigurationError:
            self._context.term()
            raise
        self._topic = topic.encode() if self._settings.is_shared else None
        self._subscription = Subscription(self._settings, time.monotonic())
        self._faults = Faults("an event subscriber")
        self._on_update = on_update
        self._is_closed = False
        self._poller = zmq.Poller()
        self._poller.register(self._sockets.live, zmq.POLLIN)
        self._poller.register(self._sockets.replay, zmq.POLLIN)

    @property
    def last_seq(self) -> int | None:
        """Everything up to this number is known; None before anything is."""
        return self._subscription.last_seq

    @property
    def checksum(self) -> int:
        """Checksum of the state at `last_seq`: equal to the publisher's at the same number."""
        return self._subscription.mirror.checksum

    @property
    def is_exact(self) -> bool:
        """Whether nothing is known to be missing."""
        return self._subscription.is_exact

    def poll(self, timeout_s: float = 0.0) -> list[Update]:
        """Return new updates, waiting at most `timeout_s` for some."""
        give_up_s = time.monotonic() + as_number("timeout_s", timeout_s, at_least=0)
        while True:
            self._ask()
            wait_s = min(max(0.0, give_up_s - time.monotonic()), _WAIT_S)
            ready = dict(self._poller.poll(int(1000 * wait_s)))
            found: list[Update] = []
            if self._sockets.replay in ready:
                found += self._receive(self._sockets.replay, self._subscription.on_reply)
            if self._sockets.live in ready:
                found += self._receive(self._sockets.live, self._subscription.on_live)
            self._ask()
            if found or time.monotonic() >= give_up_s:
                if self._on_update is not None:
                    for update in found:
                        self._on_update(update)
                return found

    def wait_for(self, seq: int, timeout_s: float) -> None:
        """Wait until everything up to number `seq` is known.

        Raises DeadlineError if it is not within `timeout_s`.
        """
        seq, timeout_s = as_int("seq", seq), as_number("timeout_s", timeout_s, at_least=0)
        give_up_s = time.monotonic() + timeout_s
        while self.last_seq is None or self.last_seq < seq or not self.is_exact:
            remaining_s = give_up_s - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineError(
                    f"event {seq} is not known within {timeout_s:g} s, the last one is "
                    f"{self.last_seq}: is the publisher there, and are both addresses its own?"
                )
            self.poll(min(remaining_s, _WAIT_S))

    def __iter__(self) -> Iterator[Update]:
        """Yield updates until the subscriber is closed."""
        while not self._is_closed:
            yield from self.poll(_WAIT_S)

    def statistics(self) -> SubscriptionStatistics:
        """Return frozen statistics."""
        return self._subscription.statistics()

    def close(self) -> None:
        """Disconnect. May be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._sockets.close()
            self._context.term()

    def __enter__(self) -> KVEventSubscriber:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self) -> None:
        number = self._subscription.request(time.monotonic())
        if number is not None:
            self._sockets.ask(number)

    def _receive(
        self, source: zmq.Socket[bytes], take: Callable[[list[bytes], float], list[Update]]
    ) -> list[Update]:
        """Read the messages that wait at a socket, as far as possible in one turn."""
        found: list[Update] = []
        for _ in range(_RECEIVE_BATCHES):
            try:
                frames = source.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            is_live = source is self._sockets.live
            if self._topic is not None and is_live and frames[0] != self._topic:
                continue  # a longer topic
            try:
                found += take(frames, time.monotonic())
            except Exception as error:
                self._subscription.start_over(
                    self._faults.note("a message", error), time.monotonic()
                )
        return found


class AsyncKVEventSubscriber:
    """`KVEventSubscriber` for asyncio: iterate over it with `async for`."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        *,
        topic: str = "kv@",
        settings: SubscriptionSettings | None = None,
        keys: CurveKeys | None = None,
    ) -> None:
        """Connect, and request the whole state; arguments as of `KVEventSubscriber`."""
        self._inner = KVEventSubscriber(
            endpoint, replay_endpoint, topic=topic, settings=settings, keys=keys
        )
        self._waiting: deque[Update] = deque()
        # Held while a thread uses the sockets: a cancelled caller leaves such a thread.
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def last_seq(self) -> int | None:
        """Everything up to this number is known; None before anything is."""
        return self._inner.last_seq

    @property
    def checksum(self) -> int:
        """Checksum of the state at `last_seq`."""
        return self._inner.checksum

    def statistics(self) -> SubscriptionStatistics:
        """Return frozen statistics."""
        return self._inner.statistics()

    def __aiter__(self) -> AsyncIterator[Update]:
        return self

    async def __anext__(self) -> Update:
        """Return the next update, letting others run meanwhile."""
        while not self._waiting:
            if self._is_closed:
                raise StopAsyncIteration
            self._waiting.extend(await asyncio.to_thread(self._poll))
        return self._waiting.popleft()

    def _poll(self) -> list[Update]:
        with self._lock:
            return [] if self._is_closed else self._inner.poll(_WAIT_S)

    async def close(self) -> None:
        """Disconnect when calls in progress have ended."""
        self._is_closed = True
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._lock:
            self._inner.close()
