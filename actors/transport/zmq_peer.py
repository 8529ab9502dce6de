"""A worker's or client's end over ZMQ: one DEALER socket, connected to one coordinator.

Its identity names the sender. A new epoch may have a new endpoint; then this end is closed and
another one is made.
"""

from __future__ import annotations

from dataclasses import replace

import zmq

from actors.transport.mailbox import WakePipe
from actors.transport.protocol import (
    HARD_LIMIT_FACTOR,
    Endpoint,
    Peer,
    PeerTransport,
    TransportLimits,
    TransportStatistics,
)
from actors.transport.zmq_server import NOBLOCK, PROBE, FrameReceiver, has_message
from kvcache.base.curve import equip_peer
from kvcache.base.errors import ClusterError

RECONNECT_MS = 20
MAX_RECONNECT_MS = 500


class ZmqPeer(PeerTransport):
    """A `PeerTransport` over one DEALER socket."""

    def __init__(self, endpoint: Endpoint, peer: Peer, limits: TransportLimits) -> None:
        """Connect to `endpoint` as `peer`; returns before the connection is established."""
        self._limits = limits
        self._statistics = TransportStatistics()
        self._num_sent = self._num_received = 0
        self._wake = WakePipe()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.identity = peer.identity
        self._socket.maxmsgsize = HARD_LIMIT_FACTOR * limits.max_message_bytes
        self._socket.rcvhwm = self._socket.sndhwm = limits.high_water_mark
        self._socket.reconnect_ivl = RECONNECT_MS
        self._socket.reconnect_ivl_max = MAX_RECONNECT_MS
        if endpoint.keys is not None:
            equip_peer(self._socket, endpoint.keys)
        try:
            self._socket.connect(endpoint.address)
        except zmq.ZMQError as error:
            self.close()
            raise ClusterError(f"cannot connect to {endpoint.address} ({error})") from error
        self._receiver = FrameReceiver(self._socket)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake.fileno(), zmq.POLLIN)

    def send(self, payload: bytes) -> None:
        """See `PeerTransport.send`. Raises MalformedMessageError if it is over the size limit."""
        if len(payload) > self._limits.max_message_bytes:
            raise self._limits.too_large(payload)
        try:
            self._socket.send(payload, NOBLOCK)
        except zmq.Again:
            self._statistics += TransportStatistics(undeliverable=1)
        else:
            self._num_sent += 1

    def receive(self, timeout_s: float) -> list[bytes]:
        payloads: list[bytes] = []
        for frames in self._receiver.receive(timeout_s):
            self._accept(frames, payloads)
        return payloads

    def receive_or_wake(self, timeout_s: float) -> list[bytes]:
        if not has_message(self._socket):
            ready = self._poller.poll(max(0, int(timeout_s * 1000)))
            if any(source is not self._socket for source, _ in ready):
                self._wake.drain()
        return self.receive(0.0)

    def fileno(self) -> int:
        return int(self._socket.fd)

    def wake(self) -> None:
        self._wake.signal()

    def statistics(self) -> TransportStatistics:
        return replace(self._statistics, sent=self._num_sent, received=self._num_received)

    def close(self, linger_s: float = 0.0) -> None:
        if self._context.closed:
            return
        linger_ms = int(linger_s * 1000)
        self._socket.close(linger_ms)
        self._context.destroy(linger_ms)
        self._wake.close()

    def _accept(self, frames: list[bytes], payloads: list[bytes]) -> None:
        """Append the payloads of `frames`, or count why they are refused."""
        if frames == [PROBE]:
            return
        self._num_received += 1
        if len(frames) != 1:
            self._statistics += TransportStatistics(foreign=1)
        elif len(frames[0]) > self._limits.max_message_bytes:
            self._statistics += TransportStatistics(oversized=1)
        else:
            payloads.append(frames[0])
