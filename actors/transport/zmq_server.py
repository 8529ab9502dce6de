"""The coordinator's end over ZMQ: one ROUTER socket that all workers and clients connect to.

It can listen at several addresses at once: locally without keys, across nodes with them.

The identity of a DEALER socket names the worker or client, so that the server never connects to
anything. An unknown or departed peer is an error inside libzmq (ROUTER_MANDATORY), and counted
here. There are two size limits: a payload above the first is read and refused; a frame above the
second never enters memory, and its sender is disconnected.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import zmq
from zmq.utils.monitor import recv_monitor_message

from actors.transport.protocol import (
    HARD_LIMIT_FACTOR,
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
from kvcache.base.curve import CurveGate, CurveKeys, guard_server
from kvcache.base.errors import ClusterError
from kvcache.base.logs import get_logger
from kvcache.base.serving_loop import Faults
from kvcache.protocol.messages import Address, ClientAddress, WorkerAddress

logger = get_logger(__name__)

LOCAL_ENDPOINT = "ipc://@kvcache-"
"""An abstract address: a second binder is refused, and no file remains."""

MONITORED_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_DISCONNECTED
)


NOBLOCK, SNDMORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)
EVENTS, POLLIN, RCVTIMEO = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVTIMEO)
"""Plain numbers: arithmetic on pyzmq's enumerations takes longer than the calls."""

WAKE_ENDPOINT = "inproc://kvcache-wake"
WAKE_IDENTITY = b"\x01wake"
"""Only this process can connect there; a stranger that takes the name is ignored."""

MONITOR_INTERVAL_S = 0.05
"""How often events of connections are counted; messages have priority."""

PROBE = b""
"""Sent to check whether a client still has a connection; clients ignore it. No other payload is
empty."""

PROBES_PER_END = 3
"""How often all clients are probed after a connection has ended. libzmq does not say whose it was,
and reports it a moment before the socket knows."""


def local_address() -> str:
    """Return a new address for peers on the same node."""
    return LOCAL_ENDPOINT + secrets.token_hex(12)


def network_address(host: str) -> str:
    """Return an address with any free port of `host`."""
    return f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"


MAX_AT_ONCE = 256
"""Messages received in one go: enough to serve a burst together, few enough to answer in
between."""


class FrameReceiver:
    """Receives from a socket, and waits inside libzmq.

    Measured: a poller that also watches another descriptor takes three times as long per message,
    and asking whether there is another message takes a third of a failed receive.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._timeout_ms = -1

    def receive(self, timeout_s: float) -> list[list[bytes]]:
        """Return the frames of the waiting messages, at most `MAX_AT_ONCE`; wait for the first one
        at most `timeout_s`."""
        first = self._receive_first(timeout_s)
        if first is None:
            return []
        messages, socket = [first], self._socket
        while len(messages) < MAX_AT_ONCE and has_message(socket):
            messages.append(socket.recv_multipart(NOBLOCK))
        return messages

    def _receive_first(self, timeout_s: float) -> list[bytes] | None:
        socket = self._socket
        timeout_ms = int(timeout_s * 1000)
        try:
            if timeout_ms <= 0:
                return socket.recv_multipart(NOBLOCK)
            if timeout_ms != self._timeout_ms:
                self._timeout_ms = timeout_ms
                socket.setsockopt(RCVTIMEO, timeout_ms)
            return socket.recv_multipart()
        except zmq.Again:
            return None


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message can be read at once."""
    return bool(int(socket.getsockopt(EVENTS)) & POLLIN)


class ZmqServer(ServerTransport):
    """One ROUTER socket."""

    def __init__(self, limits: TransportLimits, keys: CurveKeys | None = None) -> None:
        """Make an end without addresses; `keys` are for guarded addresses."""
        self._limits = limits
        self._identities: dict[Address, dict[bytes, None]] = {}
        self._statistics = TransportStatistics()
        self._faults = Faults("the coordinator's ZMQ socket")
        self._num_sent = self._num_received = 0
        self._lost_clients: dict[str, None] = {}
        self._num_probes_left = 0
        self._look_at_monitor_s = 0.0
        self._waking = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._keys = keys
        self._gate = None if keys is None else CurveGate(self._context, keys)
        self._socket = self._open_socket()
        self._receiver = FrameReceiver(self._socket)
        self._known: dict[bytes, Peer] = {}
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(MONITORED_EVENTS)
        self._socket.bind(WAKE_ENDPOINT)
        self._waker = self._context.socket(zmq.DEALER)
        self._waker.identity = WAKE_IDENTITY
        self._waker.linger = 0
        self._waker.connect(WAKE_ENDPOINT)

    def bind(self, address: str, is_guarded: bool) -> str:
        """Also listen on `address`; return the endpoint that peers connect to.

        Guarded: only holders of the keys may connect. Raises ClusterError if it cannot be bound.
        """
        if is_guarded and self._keys is None:
            raise ClusterError(f"cannot guard {address}: this server was made without keys")
        guard_server(self._socket, self._keys if is_guarded else None)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ClusterError(
                f"cannot listen on {address} ({error}): set transport.bind_host to an address of "
                "this node"
            ) from error
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, addresses: Sequence[Address], *payloads: bytes) -> None:
        for payload in payloads:
            self._send(addresses, payload)

    def _send(self, addresses: Sequence[Address], payload: bytes) -> None:
        if len(payload) > self._limits.max_message_bytes:
            raise self._limits.too_large(payload, str(list(addresses)))
        for address in addresses:
            identities = self._identities.get(address)
            if identities is None and isinstance(address, ClientAddress):
                identities = {f"c:{address.client_id}".encode(): None}
            if not identities:
                self._count(undeliverable=1)
                continue
            for identity in tuple(identities):
                self._send_to(address, identity, payload)

    def receive(self, timeout_s: float) -> list[Inbound]:
        inbound: list[Inbound] = []
        for frames in self._receiver.receive(timeout_s):
            try:
                self._take(frames, inbound)
            except Exception as error:
                self._faults.note("a message", error)
        now_s = time.monotonic()
        if now_s >= self._look_at_monitor_s:
            self._look_at_monitor_s = now_s + MONITOR_INTERVAL_S
            self._read_monitor()
            # Not before everything is read: a client that is gone may have sent something before.
            if self._num_probes_left and not has_message(self._socket):
                self._num_probes_left -= 1
                self._probe_clients()
        return inbound

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when something *may* have arrived, once for all
        of it: after the signal, and before every wait, call `receive(0)`."""
        return int(self._socket.fd)

    def has_arrived(self) -> bool:
        """Whether `receive` has something to read, even if it will be refused."""
        return has_message(self._socket)

    def is_connected(self, address: Address) -> bool:
        """Whether a worker process has been heard under `address`; clients are not recorded."""
        return bool(self._identities.get(address))

    def take_lost_clients(self) -> list[str]:
        lost = list(self._lost_clients)
        self._lost_clients.clear()
        return lost

    def wake(self) -> None:
        with self._waking:
            if not self._waker.closed:
                self._waker.send(b"", zmq.NOBLOCK)

    def statistics(self) -> TransportStatistics:
        return replace(
            self._statistics,
            sent=self._num_sent,
            received=self._num_received,
            faults=self._faults.count,
        )

    def close(self) -> None:
        if self._context.closed:
            return
        with self._waking:
            self._waker.close(0)
        self._socket.disable_monitor()
        self._socket.close(0)
        self._monitor.close(0)
        self._context.term()  # also ends the gate's thread, which closes its own socket
        if self._gate is not None:
            self._gate.join()

    def _open_socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.router_mandatory = True
        # A peer that reconnects must not be blocked by its own dead connection.
        socket.router_handover = True
        socket.maxmsgsize = HARD_LIMIT_FACTOR * self._limits.max_message_bytes
        socket.rcvhwm = socket.sndhwm = self._limits.high_water_mark
        return socket

    def _send_to(self, address: Address, identity: bytes, payload: bytes) -> None:
        try:
            self._socket.send(identity, SNDMORE)
            self._socket.send(payload, NOBLOCK)
        except zmq.Again:
            self._count(undeliverable=1)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._count(undeliverable=1)
            if isinstance(address, WorkerAddress):
                self._identities[address].pop(identity, None)
                self._known.pop(identity, None)
        else:
            self._num_sent += 1

    def _take(self, frames: list[bytes], inbound: list[Inbound]) -> None:
        """Append the payload of `frames`, or count why it is refused."""
        if frames[0] == WAKE_IDENTITY:
            return
        self._num_received += 1
        peer = self._known.get(frames[0]) if len(frames) == 2 else None
        if peer is None and len(frames) == 2:
            peer = self._get_to_know(frames[0])
        if peer is None:
            self._count(foreign=1)
            logger.warning(
                "refused: %d frames from %r, which is not a peer of this cluster",
                len(frames),
                frames[0][:MAX_IDENTITY_BYTES],
            )
        elif len(frames[1]) > self._limits.max_message_bytes:
            self._count(oversized=1)
            logger.warning(
                "refused: a message of %d bytes from %s, the limit is %d",
                len(frames[1]),
                peer.address,
                self._limits.max_message_bytes,
            )
        else:
            inbound.append(Inbound(peer, frames[1]))

    def _get_to_know(self, identity: bytes) -> Peer | None:
        """Return the peer of an identity, and cache it."""
        peer = parse_identity(identity)
        if peer is not None:
            if len(self._known) >= MAX_KNOWN_PEERS:
                self._known.clear()
            self._known[identity] = peer
            if isinstance(peer.address, WorkerAddress):
                self._remember(peer.address, identity)
            else:
                self._lost_clients.pop(peer.address.client_id, None)
        return peer

    def _remember(self, address: WorkerAddress, identity: bytes) -> None:
        """Record `identity` as a process of the rank; beyond a limit the oldest is dropped.

        Messages say which of several processes is meant (incarnation, nonce).
        """
        identities = self._identities.setdefault(address, {})
        if identity not in identities:
            identities[identity] = None
            if len(identities) > MAX_PROCESSES_PER_RANK:
                oldest = next(iter(identities))
                del identities[oldest]
                self._known.pop(oldest, None)

    def _read_monitor(self) -> None:
        """Count libzmq's events of connections."""
        while has_message(self._monitor):
            is_end = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED
            self._count(disconnections=int(is_end), refused_connections=int(not is_end))
            if is_end:
                self._num_probes_left = PROBES_PER_END
            else:
                logger.warning("refused: a connection without a valid key")

    def _probe_clients(self) -> None:
        """Find the clients without a connection: libzmq has no queue for them."""
        for identity, peer in tuple(self._known.items()):
            if not isinstance(peer.address, ClientAddress):
                continue
            try:
                self._socket.send(identity, SNDMORE)
                self._socket.send(PROBE, NOBLOCK)
            except zmq.Again:
                continue  # it has a connection but does not read
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                del self._known[identity]
                self._lost_clients[peer.address.client_id] = None

    def _count(self, foreign: int = 0, oversized: int = 0, **more: int) -> None:
        self._statistics += TransportStatistics(foreign=foreign, oversized=oversized, **more)
