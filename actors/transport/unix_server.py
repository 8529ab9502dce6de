"""The coordinator's end for the processes of its own node, over Unix sockets.

No thread stands between socket and coordinator, on either side: a message costs one send and one
receive. A peer names itself in its first frame. Connections without a name are closed when others
come, and so are those that send invalid frames. Processes of other users are refused.
"""

from __future__ import annotations

import errno
import secrets
import select
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from actors.transport.mailbox import WakePipe
from actors.transport.protocol import (
    MAX_IDENTITY_BYTES,
    MAX_KNOWN_PEERS,
    MAX_PROCESSES_PER_RANK,
    Inbound,
    Peer,
    ServerTransport,
    TransportLimits,
    TransportStatistics,
    parse_identity,
)
from actors.transport.unix_channel import CHUNK_BYTES, UNIX_SCHEME, UnixChannel, framed, socket_name
from kvcache.base.errors import ClusterError, MalformedMessageError
from kvcache.base.logs import get_logger
from kvcache.base.serving_loop import Faults
from kvcache.memory_service.protocol import is_trusted
from kvcache.protocol.messages import Address, ClientAddress

logger = get_logger(__name__)

EVENTS_AT_ONCE = 64
BACKLOG = 1024

MAX_STRANGERS = 64
"""Limit of connections without a name; valid peers send it at once."""

ACCEPT_PAUSE_S = 0.5
"""How long to stop accepting when the process has no descriptor left."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC)
_READ, _WRITE = int(select.EPOLLIN), int(select.EPOLLOUT)


def unix_address() -> str:
    """Return a new address for peers on the same node."""
    return f"{UNIX_SCHEME}kvcache-{secrets.token_hex(12)}"


@dataclass(eq=False)
class _Connection:
    """`peer` is None until the connection has named itself."""

    channel: UnixChannel
    peer: Peer | None = None
    is_watched_for_room: bool = False


class UnixServer(ServerTransport):
    """A `ServerTransport` over Unix sockets."""

    def __init__(self, limits: TransportLimits) -> None:
        self._limits = limits
        self._max_bytes = limits.max_message_bytes
        self._epoll = select.epoll()
        self._chunk = bytearray(CHUNK_BYTES)
        self._wake = WakePipe()
        self._watch(self._wake.fileno(), _READ)
        self._listeners: dict[int, socket.socket] = {}
        self._connections: dict[int, _Connection] = {}
        self._strangers: dict[_Connection, None] = {}  # the oldest first
        self._known: dict[Address, dict[bytes, _Connection]] = {}
        self._lost_clients: dict[str, None] = {}
        self._accept_again_s: float | None = None
        self._counts: Counter[str] = Counter()
        self._faults = Faults("the coordinator's Unix sockets")
        self._num_sent = self._num_received = 0
        self._is_closed = False

    def bind(self, address: str) -> str:
        """Also listen on `address`. Raises ClusterError if it cannot be bound."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(socket_name(address))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise ClusterError(
                f"cannot listen on {address} ({error}): take another name"
            ) from error
        listener.setblocking(False)
        self._listeners[listener.fileno()] = listener
        self._watch(listener.fileno(), _READ)
        return address

    def watch(self, descriptor: int) -> None:
        """Make a waiting `receive` also return when `descriptor` becomes readable."""
        self._watch(descriptor, _READ | int(select.EPOLLET))

    def fileno(self) -> int:
        """Return a descriptor that is readable while `receive` has messages."""
        return self._epoll.fileno()

    @property
    def num_disconnections(self) -> int:
        """Number of ended connections that `receive` and `send` have seen."""
        return self._counts["disconnections"]

    def is_connected(self, address: Address) -> bool:
        """Whether a process is known under `address`."""
        return address in self._known

    def send(self, addresses: Sequence[Address], *payloads: bytes) -> None:
        """See `ServerTransport.send`. Payloads for one process are sent together and wake it
        once."""
        for payload in payloads:
            if len(payload) > self._max_bytes:
                raise self._limits.too_large(payload, str(list(addresses)))
        frames, known = framed(payloads), self._known
        for address in addresses:
            ends = known.get(address)
            if ends is None:
                self._counts["undeliverable"] += len(payloads)
                continue
            for connection in tuple(ends.values()):
                self._send_to(connection, frames, len(payloads))

    def receive(self, timeout_s: float) -> list[Inbound]:
        inbound: list[Inbound] = []
        if self._accept_again_s is not None:
            self._accept_again(self._accept_again_s)
        for descriptor, events in self._epoll.poll(timeout_s, EVENTS_AT_ONCE):
            connection = self._connections.get(descriptor)
            try:
                if connection is None:
                    self._on_other(descriptor)
                    continue
                if events & _WRITE:
                    self._flush(connection)
                if events & ~_WRITE:
                    self._read(connection, inbound)
            except Exception as error:
                self._faults.note("a connection", error)
                if connection is not None:
                    self._cut_off(connection)
        return inbound

    def take_lost_clients(self) -> list[str]:
        lost = list(self._lost_clients)
        self._lost_clients.clear()
        return lost

    def wake(self) -> None:
        self._wake.signal()

    def statistics(self) -> TransportStatistics:
        return TransportStatistics(
            sent=self._num_sent,
            received=self._num_received,
            faults=self._faults.count,
            **self._counts,
        )

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for connection in self._connections.values():
            connection.channel.close()
        for listener in self._listeners.values():
            listener.close()
        self._connections.clear()
        self._strangers.clear()
        self._known.clear()
        self._epoll.close()
        self._wake.close()

    def _watch(self, descriptor: int, events: int) -> None:
        self._epoll.register(descriptor, events)

    def _send_to(self, connection: _Connection, frames: bytes, num_frames: int) -> None:
        channel = connection.channel
        try:
            is_sent = channel.send(frames)
        except OSError:
            # Its last messages are still to be read; a read finds the end after them.
            self._counts["undeliverable"] += num_frames
            return
        if is_sent:
            self._num_sent += num_frames
        else:
            self._counts["undeliverable"] += num_frames
        if channel.has_waiting and not connection.is_watched_for_room:
            connection.is_watched_for_room = True
            self._epoll.modify(channel.fileno(), _READ | _WRITE)

    def _flush(self, connection: _Connection) -> None:
        try:
            connection.channel.flush()
        except OSError:
            return  # a read finds the same, and closes it
        if not connection.channel.has_waiting:
            connection.is_watched_for_room = False
            self._epoll.modify(connection.channel.fileno(), _READ)

    def _read(self, connection: _Connection, inbound: list[Inbound]) -> None:
        try:
            payloads = connection.channel.receive()
        except MalformedMessageError as error:
            logger.warning("refused: %s: it is cut off, for %s", _who(connection), error)
            self._cut_off(connection)
            return
        except OSError:
            self._cut_off(connection)
            return
        peer = connection.peer
        if peer is None:
            if not payloads:
                return
            peer = self._get_to_know(connection, payloads.pop(0))
            if peer is None:
                return
        for payload in payloads:
            self._num_received += 1
            if len(payload) > self._max_bytes:
                self._counts["oversized"] += 1
                logger.warning(
                    "refused: a message of %d bytes from %s, the limit is %d",
                    len(payload),
                    peer.address,
                    self._max_bytes,
                )
            else:
                inbound.append(Inbound(peer, payload))

    def _get_to_know(self, connection: _Connection, identity: bytes) -> Peer | None:
        """Remember the sender of a connection; close it if the identity is invalid.

        Messages say which of several processes of a rank is meant. Beyond a limit the oldest one is
        closed. A peer that reconnects replaces its old connection.
        """
        peer = parse_identity(identity)
        if peer is None:
            self._counts["foreign"] += 1
            logger.warning(
                "refused: a connection as %r, which is not a peer of this cluster",
                identity[:MAX_IDENTITY_BYTES],
            )
            self._cut_off(connection)
            return None
        ends = self._known.setdefault(peer.address, {})
        before = ends.pop(identity, None)
        connection.peer = peer
        connection.channel.trust()
        del self._strangers[connection]
        ends[identity] = connection
        if isinstance(peer.address, ClientAddress):
            self._lost_clients.pop(peer.address.client_id, None)
        if before is not None:
            self._cut_off(before)
        if len(ends) > MAX_PROCESSES_PER_RANK:
            logger.warning("refused: %s has too many connections, the oldest ends", peer.address)
            self._cut_off(next(iter(ends.values())))
        return peer

    def _cut_off(self, connection: _Connection) -> None:
        """End a connection and forget it."""
        descriptor = connection.channel.fileno()
        if self._connections.pop(descriptor, None) is None:
            return
        self._counts["disconnections"] += 1
        self._epoll.unregister(descriptor)
        connection.channel.close()
        peer = connection.peer
        if peer is None:
            del self._strangers[connection]
            return
        ends = self._known.get(peer.address, {})
        if ends.get(peer.identity) is connection:
            del ends[peer.identity]
        if not ends:
            self._known.pop(peer.address, None)
            if isinstance(peer.address, ClientAddress):
                self._lost_clients[peer.address.client_id] = None

    def _on_other(self, descriptor: int) -> None:
        """Serve another descriptor: a listener, or the pipe."""
        listener = self._listeners.get(descriptor)
        if listener is not None:
            self._accept(listener)
        elif descriptor == self._wake.fileno():
            self._wake.drain()

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._pause_accepting()
            return  # otherwise the peer has gone again
        if not is_trusted(accepted) or len(self._connections) >= MAX_KNOWN_PEERS:
            self._counts["refused_connections"] += 1
            logger.warning(
                "refused: a connection of another user, or beyond the %d that may be open",
                MAX_KNOWN_PEERS,
            )
            accepted.close()
            return
        try:
            self._watch(accepted.fileno(), _READ)
        except OSError as error:
            self._counts["refused_connections"] += 1
            logger.warning("refused: a connection: %s", error)
            accepted.close()
            return
        channel = UnixChannel(accepted, self._limits, self._chunk, MAX_IDENTITY_BYTES)
        connection = _Connection(channel)
        self._connections[accepted.fileno()] = connection
        self._strangers[connection] = None
        if len(self._strangers) > MAX_STRANGERS:
            logger.warning("refused: a connection without a name, in favour of others")
            self._cut_off(next(iter(self._strangers)))

    def _pause_accepting(self) -> None:
        """Ignore the listeners for a while: they would be ready all the time, without effect."""
        self._counts["refused_connections"] += 1
        logger.error(
            "refused: connections, for %g s: this process has no descriptor left", ACCEPT_PAUSE_S
        )
        self._accept_again_s = time.monotonic() + ACCEPT_PAUSE_S
        for descriptor in self._listeners:
            self._epoll.modify(descriptor, 0)

    def _accept_again(self, not_before_s: float) -> None:
        if time.monotonic() >= not_before_s:
            self._accept_again_s = None
            for descriptor in self._listeners:
                self._epoll.modify(descriptor, _READ)


def _who(connection: _Connection) -> str:
    """Name the other end of a connection, for the log."""
    return "a stranger" if connection.peer is None else str(connection.peer.address)
