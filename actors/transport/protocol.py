"""The interface of a transport: two kinds of ends that carry bytes, and the names of peers.

    coordinator  ServerTransport   one per coordinator; knows its peers by their identity
    worker       PeerTransport     identity `w:<rank>:<incarnation>`
    client       PeerTransport     identity `c:<client id>`

A transport delivers a payload whole or not at all, possibly late, twice or never; the delivery
rules above it handle order, repetition and loss. It never retries and never blocks on sending. It
refuses and counts payloads without a valid identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from kvcache.base.curve import CurveKeys
from kvcache.base.errors import ConfigurationError, MalformedMessageError
from kvcache.protocol.messages import Address, ClientAddress, WorkerAddress

MAX_IDENTITY_BYTES = 255
"""ZMQ's limit for a routing id."""

HARD_LIMIT_FACTOR = 2
"""A frame longer than this many limits never enters memory; its connection ends."""

MAX_KNOWN_PEERS = 16_384
"""Peers that a server remembers: `transport.max_clients` can be 4096, and a rank may have several
processes."""

MAX_PROCESSES_PER_RANK = 4
"""Processes of one rank that a server remembers: the living one and some that died or will die."""


@dataclass(frozen=True)
class Peer:
    """One process at the other end. `incarnation` is a worker's; a client's is part of its id."""

    address: Address
    incarnation: str = ""

    @property
    def identity(self) -> bytes:
        """The name of the peer's end at the server."""
        if isinstance(self.address, WorkerAddress):
            return f"w:{self.address.rank}:{self.incarnation}".encode()
        return f"c:{self.address.client_id}".encode()


def worker_peer(rank: int, incarnation: str) -> Peer:
    """Return the peer for process `incarnation` of `rank`; raises ConfigurationError."""
    return _checked(Peer(WorkerAddress(rank), incarnation))


def client_peer(client_id: str) -> Peer:
    """Return the peer for client `client_id`; raises ConfigurationError."""
    return _checked(Peer(ClientAddress(client_id)))


def parse_identity(identity: bytes) -> Peer | None:
    """Return the peer of an identity, None if the identity is invalid."""
    if len(identity) > MAX_IDENTITY_BYTES:
        return None
    try:
        kind, _, name = identity.decode().partition(":")
    except UnicodeDecodeError:
        return None
    if kind == "c" and name:
        return Peer(ClientAddress(name))
    rank, _, incarnation = name.partition(":")
    if kind == "w" and rank.isascii() and rank.isdigit() and len(rank) <= 9 and incarnation:
        return Peer(WorkerAddress(int(rank)), incarnation)
    return None


def _checked(peer: Peer) -> Peer:
    """Return `peer` if its identity can be transmitted; raises ConfigurationError."""
    if parse_identity(peer.identity) != peer:
        raise ConfigurationError(
            f"{peer!r} cannot be a peer: ranks are 0 or more, names are not empty and identities "
            f"have at most {MAX_IDENTITY_BYTES} bytes"
        )
    return peer


class Inbound(NamedTuple):
    """A received payload and its sender."""

    peer: Peer
    payload: bytes


@dataclass(frozen=True)
class TransportStatistics:
    """What an end has transferred and refused.

    `foreign`: invalid identity or number of frames. `oversized`: longer than the limit.
    `undeliverable`: the peer is unknown, gone or too slow. `refused_connections`: failed
    handshakes. `disconnections`: connections that ended, in order or because of invalid data.
    `faults`: unexpected errors; each cost its connection or message.
    """

    sent: int = 0
    received: int = 0
    foreign: int = 0
    oversized: int = 0
    undeliverable: int = 0
    refused_connections: int = 0
    disconnections: int = 0
    faults: int = 0

    def __add__(self, other: TransportStatistics) -> TransportStatistics:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return TransportStatistics(**sums)


@dataclass(frozen=True)
class TransportLimits:
    """Bounds of every socket: bytes of a payload, messages queued per peer and direction."""

    max_message_bytes: int
    high_water_mark: int = 4096

    def too_large(self, payload: bytes, to: str = "") -> MalformedMessageError:
        """Return the error for a payload above the limit; `to` names its receivers."""
        receivers = f" to {to}" if to else ""
        return MalformedMessageError(
            f"a message of {len(payload)} bytes{receivers} exceeds the limit of "
            f"{self.max_message_bytes}: schedule less per step or raise the limit"
        )


class ServerTransport(Protocol):
    """The coordinator's end. One thread sends and receives; any thread may call `wake`."""

    def send(self, addresses: Sequence[Address], *payloads: bytes) -> None:
        """Send `payloads`, in order, to every process known under `addresses`, without waiting.

        A payload that cannot be sent now is dropped and counted.
        """

    def receive(self, timeout_s: float) -> list[Inbound]:
        """Return what has arrived; wait for it at most `timeout_s`. Empty: nothing arrived."""

    def take_lost_clients(self) -> list[str]:
        """Return, once, the clients whose last connection has ended and that have not reconnected.

        `receive` has returned all their messages before. A transport without connections, or that
        cannot tell, returns nothing; those clients are dropped later because they are silent.
        """

    def wake(self) -> None:
        """Make a waiting `receive` return. Any thread may call it."""

    def statistics(self) -> TransportStatistics:
        """Return frozen statistics."""

    def close(self) -> None:
        """Release everything at once; unsent payloads are lost. Repeatable."""


@dataclass(frozen=True)
class Endpoint:
    """Where and how a peer connects. `keys` None: no authentication."""

    address: str
    keys: CurveKeys | None = None


class PeerTransport(Protocol):
    """A worker's or client's end. One thread at a time; any thread may call `wake`."""

    def send(self, payload: bytes) -> None:
        """Send `payload` to the coordinator without waiting; drop and count it if impossible."""

    def receive(self, timeout_s: float) -> list[bytes]:
        """Return what has arrived; wait for it at most `timeout_s`. Empty: nothing arrived.

        The fast way: only a message or the timeout ends the wait.
        """

    def receive_or_wake(self, timeout_s: float) -> list[bytes]:
        """Return what has arrived; wait for it at most `timeout_s`, or until `wake`. As `receive`
        in ends that a wake-up interrupts anyway."""
        return self.receive(timeout_s)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when something *may* have arrived.

        The signal may be given once for several payloads: after it, and after every `send`,
        call `receive(0)` until it returns nothing.
        """

    def wake(self) -> None:
        """Make a waiting `receive_or_wake` return. Any thread may call it."""

    def statistics(self) -> TransportStatistics:
        """Return frozen statistics."""

    def close(self, linger_s: float = 0.0) -> None:
        """Release everything; payloads not sent within `linger_s` are lost. Repeatable."""
