"""Both ends inside one process and one thread: payloads go through deques.

For `LocalCluster`. A part that waits runs `pump`, which gives every other part a turn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from actors.transport.protocol import (
    Inbound,
    Peer,
    PeerTransport,
    ServerTransport,
    TransportStatistics,
)
from kvcache.protocol.messages import Address, ClientAddress

IDLE_S = 0.0005
"""How long a waiting end sleeps after a round without work: only time can help then."""


class LocalServer(ServerTransport):
    """A `ServerTransport` whose peers are made by `connect`."""

    def __init__(self) -> None:
        self._inbox: deque[Inbound] = deque()
        self._peers: dict[Address, LocalPeer] = {}
        self._lost_clients: dict[str, None] = {}
        self._num_sent = self._num_received = self._num_undeliverable = 0

    def connect(self, peer: Peer, pump: Callable[[], bool] = lambda: False) -> LocalPeer:
        """Return a new end for `peer`; `pump` gives the others a turn and says if they had work."""
        made = LocalPeer(self, peer, pump)
        self._peers[peer.address] = made
        if isinstance(peer.address, ClientAddress):
            self._lost_clients.pop(peer.address.client_id, None)
        return made

    def disconnect(self, peer: Peer, end: LocalPeer) -> None:
        """Forget a closed end, unless another one has taken its place."""
        if self._peers.get(peer.address) is end:
            del self._peers[peer.address]
            if isinstance(peer.address, ClientAddress):
                self._lost_clients[peer.address.client_id] = None

    def put(self, inbound: Inbound) -> None:
        """Take a peer's payload."""
        self._inbox.append(inbound)

    def send(self, addresses: Sequence[Address], *payloads: bytes) -> None:
        for address in addresses:
            peer = self._peers.get(address)
            if peer is None:
                self._num_undeliverable += len(payloads)
            else:
                peer.inbox.extend(payloads)
                self._num_sent += len(payloads)

    def receive(self, timeout_s: float) -> list[Inbound]:
        """See `ServerTransport.receive`. Never waits: the peers are in the same thread."""
        inbound = list(self._inbox)
        self._inbox.clear()
        self._num_received += len(inbound)
        return inbound

    def take_lost_clients(self) -> list[str]:
        lost = list(self._lost_clients)
        self._lost_clients.clear()
        return lost

    def wake(self) -> None:
        """Do nothing: no thread waits."""

    def statistics(self) -> TransportStatistics:
        return TransportStatistics(
            sent=self._num_sent, received=self._num_received, undeliverable=self._num_undeliverable
        )

    def close(self) -> None:
        self._peers.clear()
        self._inbox.clear()


class LocalPeer(PeerTransport):
    """A `PeerTransport` of a worker or client in the server's own process."""

    def __init__(self, server: LocalServer, peer: Peer, pump: Callable[[], bool]) -> None:
        self.inbox: deque[bytes] = deque()
        self._server = server
        self._peer = peer
        self._pump = pump
        self._num_sent = self._num_received = 0

    def send(self, payload: bytes) -> None:
        self._num_sent += 1
        self._server.put(Inbound(self._peer, payload))

    def receive(self, timeout_s: float) -> list[bytes]:
        """See `PeerTransport.receive`. Gives the others turns while nothing has arrived."""
        give_up_s = time.monotonic() + timeout_s
        while not self.inbox:
            is_busy = self._pump()
            if self.inbox or time.monotonic() >= give_up_s:
                break
            if not is_busy:
                time.sleep(IDLE_S)
        payloads = list(self.inbox)
        self.inbox.clear()
        self._num_received += len(payloads)
        return payloads

    def fileno(self) -> int:
        """Return no descriptor: everything happens in the caller's thread."""
        return -1

    def wake(self) -> None:
        """Do nothing: no thread waits."""

    def statistics(self) -> TransportStatistics:
        return TransportStatistics(sent=self._num_sent, received=self._num_received)

    def close(self, linger_s: float = 0.0) -> None:
        self._server.disconnect(self._peer, self)
