"""The coordinator's end in an engine's own process: its clients use queues, without a hop.

    client of this process ──send──▶ `serve`, in the client's own thread ──▶ its queue ──receive──▶
    workers                ──────────────── sockets of a NodeServer ──────────────────────────────▶

A message of such a client is served before `send` returns, so no other thread has to wake up. The
server ensures that only one thread at a time serves. A message that does not fit into a queue is
dropped, as by sockets; the delivery rules repair the loss.
"""

from __future__ import annotations

import queue
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from actors.transport.mailbox import WakePipe
from actors.transport.node_server import NodeServer
from actors.transport.protocol import (
    Inbound,
    Peer,
    PeerTransport,
    TransportLimits,
    TransportStatistics,
)
from kvcache.base.curve import CurveKeys
from kvcache.protocol.messages import Address, ClientAddress

Serve = Callable[[Inbound, "InProcessPeer"], None]
"""Serves a message of a client of this process, in the calling thread."""

_WAKE = b""
"""Ends a wait: no payload is empty."""


class InProcessServer(NodeServer):
    """A `NodeServer` that also has queues for clients of this process, whose messages do not
    arrive in `receive`.

    One thread at a time uses it; any thread may call `wake` and the peers' `receive`.
    """

    def __init__(self, limits: TransportLimits, keys: CurveKeys | None = None) -> None:
        """Make an end without addresses; `keys` are for guarded addresses."""
        super().__init__(limits, keys)
        # A client that is dropped without being closed drops its end, too.
        self._peers: weakref.WeakValueDictionary[Address, InProcessPeer] = (
            weakref.WeakValueDictionary()
        )
        self._closed: deque[str] = deque()
        self._num_sent = self._num_undeliverable = 0

    def connect(self, peer: Peer, serve: Serve) -> InProcessPeer:
        """Return the end of `peer`; `serve` takes its messages."""
        made = InProcessPeer(peer, serve, self._limits)
        self._peers[peer.address] = made
        if isinstance(peer.address, ClientAddress):
            # Called once, when the end is closed or dropped, in any thread.
            finalizer = weakref.finalize(made, self._closed.append, peer.address.client_id)
            finalizer.atexit = False
            made.on_close = finalizer
        return made

    def send(self, addresses: Sequence[Address], *payloads: bytes) -> None:
        others: list[Address] = []
        for address in addresses:
            peer = self._peers.get(address) if type(address) is ClientAddress else None
            if peer is None:
                others.append(address)
                continue
            for payload in payloads:
                if len(payload) > self._limits.max_message_bytes:
                    raise self._limits.too_large(payload, str(address))
            num_put = sum(peer.put(payload) for payload in payloads)
            self._num_sent += num_put
            self._num_undeliverable += len(payloads) - num_put
        if others:
            super().send(others, *payloads)

    def peers(self) -> list[InProcessPeer]:
        """Return the open ends."""
        return list(self._peers.values())

    def take_lost_clients(self) -> list[str]:
        lost = super().take_lost_clients()
        for _ in range(len(self._closed)):
            lost.append(self._closed.popleft())
        return lost

    def statistics(self) -> TransportStatistics:
        return super().statistics() + TransportStatistics(
            sent=self._num_sent, undeliverable=self._num_undeliverable
        )

    def close(self) -> None:
        self._peers.clear()
        super().close()


class InProcessPeer(PeerTransport):
    """A `PeerTransport` of a client in the coordinator's process."""

    def __init__(self, peer: Peer, serve: Serve, limits: TransportLimits) -> None:
        self.peer = peer
        self._serve = serve
        self._limits = limits
        self._max_bytes = limits.max_message_bytes
        self._capacity = limits.high_water_mark
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._readable: WakePipe | None = None  # made when its descriptor is first needed
        self._num_sent = self._num_received = 0
        self._is_closed = False
        self.on_close: Callable[[], object] = lambda: None

    def put(self, payload: bytes) -> bool:
        """Append a payload of the coordinator; return False, unchanged, if closed or full."""
        if self._is_closed or self._inbox.qsize() >= self._capacity:
            return False
        self._inbox.put(payload)
        if self._readable is not None:
            self._readable.signal()
        return True

    def send(self, payload: bytes) -> None:
        """See `PeerTransport.send`. The message has been served when this returns."""
        if len(payload) > self._max_bytes:
            raise self._limits.too_large(payload)
        if not self._is_closed:
            self._num_sent += 1
            self._serve(Inbound(self.peer, payload), self)

    def receive(self, timeout_s: float) -> list[bytes]:
        if self._readable is not None:
            self._readable.drain()
        inbox = self._inbox
        payloads: list[bytes] = []
        try:
            if timeout_s > 0.0:
                payloads.append(inbox.get(timeout=timeout_s))
            while True:
                payloads.append(inbox.get_nowait())
        except queue.Empty:
            pass
        payloads = [payload for payload in payloads if payload]
        self._num_received += len(payloads)
        return payloads

    def fileno(self) -> int:
        if self._readable is None:
            self._readable = WakePipe()
            if not self._inbox.empty():
                self._readable.signal()
        return self._readable.fileno()

    def wake(self) -> None:
        self._inbox.put(_WAKE)

    def statistics(self) -> TransportStatistics:
        return TransportStatistics(sent=self._num_sent, received=self._num_received)

    def close(self, linger_s: float = 0.0) -> None:
        self._is_closed = True
        self.on_close()
        if self._readable is not None:
            self._readable.close()
