"""A worker's or client's end over a Unix socket: one connection to the coordinator of its node.

The first frame names the sender. After a lost connection it reconnects, but only to the same
coordinator: an address is never reused, so another coordinator needs another end.
"""

from __future__ import annotations

import math
import os
import select
import socket
import time
from collections import Counter
from contextlib import suppress

from actors.transport.mailbox import WakePipe
from actors.transport.protocol import (
    Endpoint,
    Peer,
    PeerTransport,
    TransportLimits,
    TransportStatistics,
)
from actors.transport.unix_channel import UnixChannel, framed, socket_name
from kvcache.base.errors import MalformedMessageError
from kvcache.base.serving_loop import Faults
from kvcache.memory_service.protocol import ROOT, is_trusted

PUSH_MS = 500
"""How long the coordinator may not read while it receives a large message."""

RECONNECT_S = 0.02
MAX_RECONNECT_S = 0.5
"""Pause after the first failed attempt to connect; it doubles each time."""


class UnixPeer(PeerTransport):
    """A `PeerTransport` over one stream socket."""

    def __init__(self, endpoint: Endpoint, peer: Peer, limits: TransportLimits) -> None:
        """Connect to `endpoint` as `peer`; tried again later if no server listens."""
        self._limits = limits
        self._max_bytes = limits.max_message_bytes
        self._name = socket_name(endpoint.address)
        self._identity = peer.identity
        self._num_sent = self._num_received = 0
        self._counts: Counter[str] = Counter()
        self._faults = Faults("a Unix socket to the coordinator")
        self._wake = WakePipe()
        # Readable when the connection is, whichever one it is by then.
        self._readable = select.epoll()
        self._channel: UnixChannel | None = None
        self._next_attempt_s = 0.0
        self._pause_s = RECONNECT_S
        self._is_closed = False
        self._connect()

    def send(self, payload: bytes) -> None:
        """See `PeerTransport.send`. Raises MalformedMessageError if it is over the size limit."""
        if len(payload) > self._max_bytes:
            raise self._limits.too_large(payload)
        channel = self._channel or self._connect()
        was_waiting = channel is not None and channel.has_waiting
        try:
            is_sent = channel is not None and channel.send(framed((payload,)))
        except OSError:
            is_sent = False  # a read finds the end, after the data before it
        if is_sent:
            self._num_sent += 1
            if channel is not None and channel.has_waiting and not was_waiting:
                self._push(channel)
        else:
            self._counts["undeliverable"] += 1

    def receive(self, timeout_s: float) -> list[bytes]:
        channel = self._channel
        if channel is None or channel.has_waiting:
            return self._receive_slowly(timeout_s)
        return self._read(channel, timeout_s)

    def receive_or_wake(self, timeout_s: float) -> list[bytes]:
        return self._receive_slowly(timeout_s)

    def fileno(self) -> int:
        return self._readable.fileno()

    def wake(self) -> None:
        self._wake.signal()

    def statistics(self) -> TransportStatistics:
        return TransportStatistics(
            sent=self._num_sent,
            received=self._num_received,
            faults=self._faults.count,
            **self._counts,
        )

    def close(self, linger_s: float = 0.0) -> None:
        self._is_closed = True
        if self._channel is not None:
            self._channel.linger(linger_s)
            self._channel.close()
            self._channel = None
        self._readable.close()
        self._wake.close()

    def _push(self, channel: UnixChannel) -> None:
        """Send the part of a message that exceeds the socket's buffer while the other end reads it,
        because no other thread would send it later. A coordinator that does not read is waited for
        once, not with every message."""
        poller = select.poll()
        poller.register(channel.fileno(), select.POLLOUT)
        try:
            while channel.has_waiting and poller.poll(PUSH_MS):
                channel.flush()
        except OSError:
            return  # a read finds the end, after the data before it

    def _read(self, channel: UnixChannel, timeout_s: float) -> list[bytes]:
        try:
            payloads = channel.receive(timeout_s)
        except (OSError, MalformedMessageError):
            self._disconnect()
            return []
        except Exception as error:
            self._faults.note("a connection", error)
            self._disconnect()
            return []
        self._num_received += len(payloads)
        for payload in payloads:
            if len(payload) > self._max_bytes:
                return self._without_oversized(payloads)
        return payloads

    def _without_oversized(self, payloads: list[bytes]) -> list[bytes]:
        fitting = [payload for payload in payloads if len(payload) <= self._max_bytes]
        self._counts["oversized"] += len(payloads) - len(fitting)
        return fitting

    def _receive_slowly(self, timeout_s: float) -> list[bytes]:
        """Receive without a connection, while sent data waits to be read, or while other threads
        may `wake` this one."""
        if self._is_closed:
            return []
        if self._channel is None:
            timeout_s = min(timeout_s, max(0.0, self._next_attempt_s - time.monotonic()))
        self._wait(timeout_s)
        channel = self._channel or self._connect()
        if channel is None:
            return []
        with suppress(OSError):  # a read finds the end, after the data before it
            channel.flush()
        return self._read(channel, 0.0)

    def _wait(self, timeout_s: float) -> None:
        """Wait for a payload, for room to send, or for `wake`."""
        poller = select.poll()
        poller.register(self._wake.fileno(), select.POLLIN)
        channel = self._channel
        if channel is not None:
            wanted = select.POLLIN | (select.POLLOUT if channel.has_waiting else 0)
            poller.register(channel.fileno(), wanted)
        ready = poller.poll(math.ceil(max(0.0, timeout_s) * 1000))
        if any(descriptor == self._wake.fileno() for descriptor, _ in ready):
            self._wake.drain()

    def _connect(self) -> UnixChannel | None:
        """Connect if it is due; return the connection if there is one."""
        now_s = time.monotonic()
        if self._is_closed or now_s < self._next_attempt_s:
            return None
        self._next_attempt_s = now_s + self._pause_s
        channel = self._open()
        if channel is None:
            self._pause_s = min(2 * self._pause_s, MAX_RECONNECT_S)
        else:
            self._channel, self._pause_s = channel, RECONNECT_S
        return channel

    def _open(self) -> UnixChannel | None:
        """Return a new connection over which the first frame has been sent; None if there is none
        now, or if another user's process listens at the address."""
        try:
            connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            return None  # no descriptor is free
        try:
            connecting.setblocking(False)
            connecting.connect(self._name)
            if os.geteuid() != ROOT and not is_trusted(connecting):
                self._counts["refused_connections"] += 1
                connecting.close()
                return None
            channel = UnixChannel(connecting, self._limits)
            channel.send(framed((self._identity,)))
            self._readable.register(channel.fileno(), select.EPOLLIN)
        except OSError:
            connecting.close()
            return None
        return channel

    def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            self._counts["disconnections"] += 1
            self._readable.unregister(channel.fileno())
            channel.close()
