"""Both ends as Ray actor calls, for processes that cannot open sockets to each other.

    worker, client ──coordinator.post(identity, payload)──▶ RayServer inbox
    RayServer ──worker.kvcache_deliver(payload)───────────▶ RayPeer inbox of that worker
    RayServer outbox per client ◀──coordinator.collect(client id)── RayPeer of that client

About ten times slower than ZMQ. Calls are started and their results dropped. A failed call is a
lost message, which the delivery rules repair; this module never repeats a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray

from actors.transport.mailbox import Mailbox, WakePipe
from actors.transport.protocol import (
    Inbound,
    Peer,
    PeerTransport,
    ServerTransport,
    TransportLimits,
    TransportStatistics,
    parse_identity,
)
from kvcache.base.serving_loop import ServingLoop
from kvcache.protocol.messages import Address, ClientAddress, WorkerAddress

RAY_SCHEME = "ray:"
"""An endpoint of this kind names the coordinator's actor."""

COLLECT_TIMEOUT_S = 0.25
"""How long one `collect` call waits in the coordinator before it returns nothing."""

MAX_OUTBOXES = 8192
"""Clients with an outbox, twice the limit of `transport.max_clients`; the least recently used one
is dropped."""

ActorHandle = Any
"""Ray's handles have the methods of their class, whichever it is."""


class RayServer(ServerTransport):
    """A `ServerTransport` inside the coordinator actor, which forwards `post` and `collect`."""

    def __init__(
        self, worker_of: Callable[[int], ActorHandle | None], limits: TransportLimits
    ) -> None:
        """`worker_of` returns the actor of a rank, or None while there is none."""
        self._worker_of = worker_of
        self._limits = limits
        self._inbox = Mailbox(limits.high_water_mark)
        self._outboxes: dict[str, Mailbox] = {}
        self._lock = threading.Lock()
        self._statistics = TransportStatistics()

    def post(self, identity: bytes, payload: bytes) -> None:
        """Take a payload that a peer sent. Any thread."""
        peer = parse_identity(identity) if isinstance(identity, bytes) else None
        if peer is None or not isinstance(payload, bytes):
            self._count(received=1, foreign=1)
        elif len(payload) > self._limits.max_message_bytes:
            self._count(received=1, oversized=1)
        else:
            is_taken = self._inbox.put(Inbound(peer, payload))
            self._count(received=1, undeliverable=0 if is_taken else 1)

    def collect(self, client_id: str, timeout_s: float) -> list[bytes]:
        """Return the messages for a client; wait for the first at most `timeout_s`. Any thread."""
        return self._outbox(client_id).take(timeout_s)

    def send(self, addresses: Sequence[Address], *payloads: bytes) -> None:
        for payload in payloads:
            self._send(addresses, payload)

    def _send(self, addresses: Sequence[Address], payload: bytes) -> None:
        if len(payload) > self._limits.max_message_bytes:
            raise self._limits.too_large(payload, str(list(addresses)))
        for address in addresses:
            if isinstance(address, ClientAddress):
                is_sent = self._outbox(address.client_id).put(payload)
            else:
                is_sent = self._send_to_worker(address, payload)
            self._count(sent=1 if is_sent else 0, undeliverable=0 if is_sent else 1)

    def receive(self, timeout_s: float) -> list[Inbound]:
        return self._inbox.take(timeout_s)

    def take_lost_clients(self) -> list[str]:
        """See `ServerTransport.take_lost_clients`: calls have no connections."""
        return []

    def wake(self) -> None:
        self._inbox.wake()

    def statistics(self) -> TransportStatistics:
        with self._lock:
            return replace(self._statistics)

    def close(self) -> None:
        with self._lock:
            self._outboxes.clear()

    def _send_to_worker(self, address: WorkerAddress, payload: bytes) -> bool:
        worker = self._worker_of(address.rank)
        if worker is None:
            return False
        worker.kvcache_deliver.remote(payload)
        return True

    def _outbox(self, client_id: str) -> Mailbox:
        with self._lock:
            outbox = self._outboxes.pop(client_id, None) or Mailbox(self._limits.high_water_mark)
            self._outboxes[client_id] = outbox  # the most recently used is last
            if len(self._outboxes) > MAX_OUTBOXES:
                del self._outboxes[next(iter(self._outboxes))]
            return outbox

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._statistics += TransportStatistics(**counts)


class RayPeer(PeerTransport):
    """A `PeerTransport` of a worker: its actor puts arriving payloads into `inbox`."""

    def __init__(
        self, coordinator: ActorHandle, peer: Peer, limits: TransportLimits, inbox: Mailbox
    ) -> None:
        """Send through the coordinator's actor handle, as `peer`."""
        self._coordinator = coordinator
        self._identity = peer.identity
        self._limits = limits
        self._inbox = inbox
        self._readable = WakePipe()
        inbox.on_put = self._readable.signal
        self._num_sent = self._num_received = 0

    def send(self, payload: bytes) -> None:
        """See `PeerTransport.send`. Raises MalformedMessageError if it is over the size limit."""
        if len(payload) > self._limits.max_message_bytes:
            raise self._limits.too_large(payload)
        self._coordinator.post.remote(self._identity, payload)
        self._num_sent += 1

    def receive(self, timeout_s: float) -> list[bytes]:
        payloads = self._inbox.take(timeout_s)
        if not payloads:
            self._readable.drain()
            payloads = self._inbox.take(0.0)
        self._num_received += len(payloads)
        return payloads

    def fileno(self) -> int:
        return self._readable.fileno()

    def wake(self) -> None:
        self._inbox.wake()

    def statistics(self) -> TransportStatistics:
        return TransportStatistics(
            sent=self._num_sent, received=self._num_received, undeliverable=self._inbox.num_refused
        )

    def close(self, linger_s: float = 0.0) -> None:
        self._inbox.on_put = None
        self._readable.close()


class RayClientPeer(RayPeer):
    """A `PeerTransport` of a client, which is no actor: its own thread asks for messages."""

    def __init__(self, coordinator: ActorHandle, peer: Peer, limits: TransportLimits) -> None:
        """Start to ask. The thread sleeps inside Ray and ends with `close`."""
        super().__init__(coordinator, peer, limits, Mailbox(limits.high_water_mark))
        self._client_id = peer.identity.partition(b":")[2].decode()
        self._loop = ServingLoop("kvcache-ray-client", self._collect)
        self._loop.start()

    def close(self, linger_s: float = 0.0) -> None:
        if not self._loop.is_stopping:
            self._loop.stop()
            self._loop.join(4 * COLLECT_TIMEOUT_S)
            super().close()

    def _collect(self) -> None:
        try:
            call = self._coordinator.collect.remote(self._client_id, COLLECT_TIMEOUT_S)
            payloads = ray.get(call, timeout=20 * COLLECT_TIMEOUT_S)
        except ray.exceptions.RayError:
            # The coordinator is away: the session notices by its own deadlines.
            self._loop.pause(COLLECT_TIMEOUT_S)
            return
        for payload in payloads:
            self._inbox.put(payload)
