"""What a transport is: two kinds of ends that carry bytes, and the names of the peers.

    coordinator  ServerTransport   one per coordinator; knows its peers by their identity
    worker       PeerTransport     identity `w:<rank>:<incarnation>`
    client       PeerTransport     identity `c:<client id>`

A transport delivers a payload whole or not at all, possibly late, twice or never: order,
repetition and loss are the business of the delivery rules above it. It never retries, never blocks
on sending, and refuses (and counts) whatever does not come from a peer with a proper identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from kvcache.base.curve import CurveKeys
from kvcache.base.errors import ConfigurationError
from kvcache.protocol.messages import Address, ClientAddress, WorkerAddress

MAX_IDENTITY_BYTES = 255
"""ZMQ's limit for a routing id."""

MAX_PROCESSES_PER_RANK = 4
"""Processes of one rank that a server remembers: the living one and some that died or will."""


@dataclass(frozen=True)
class Peer:
    """One process at the other end. `incarnation` is a worker's; clients carry it in their id."""

    address: Address
    incarnation: str = ""

    @property
    def identity(self) -> bytes:
        """The name under which the peer's end is known to the server's."""
        if isinstance(self.address, WorkerAddress):
            return f"w:{self.address.rank}:{self.incarnation}".encode()
        return f"c:{self.address.client_id}".encode()


def worker_peer(rank: int, incarnation: str) -> Peer:
    """Return the peer that is process `incarnation` of `rank`; raises ConfigurationError."""
    return _checked(Peer(WorkerAddress(rank), incarnation))


def client_peer(client_id: str) -> Peer:
    """Return the peer that is client `client_id`; raises ConfigurationError."""
    return _checked(Peer(ClientAddress(client_id)))


def parse_identity(identity: bytes) -> Peer | None:
    """Return the peer that `identity` names, or None if it is no identity of ours."""
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
    """Return `peer` if its identity survives the way to the server; raises ConfigurationError."""
    if parse_identity(peer.identity) != peer:
        raise ConfigurationError(
            f"{peer!r} cannot be a peer: ranks are 0 or more, names are not empty and identities "
            f"have at most {MAX_IDENTITY_BYTES} bytes"
        )
    return peer


class Inbound(NamedTuple):
    """A payload that arrived, and from whom."""

    peer: Peer
    payload: bytes


@dataclass(frozen=True)
class TransportStatistics:
    """What an end has carried and refused.

    `foreign`: from no identity of ours, or with another number of frames. `oversized`: longer than
    the limit. `undeliverable`: to a peer that is unknown, gone or does not keep up.
    `refused_connections`: that failed the handshake. `disconnections`: connections that ended, be
    it in order or because they sent what no peer sends. `faults`: errors that should not be, each
    of which cost its connection or message.
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


class ServerTransport(Protocol):
    """The coordinator's end. One thread sends and receives; `wake` alone is for others."""

    def send(self, addresses: Sequence[Address], *payloads: bytes) -> None:
        """Send `payloads`, in order, to every process known under `addresses`, without waiting.

        What cannot be sent now is dropped and counted.
        """

    def receive(self, timeout_s: float) -> list[Inbound]:
        """Return what has arrived; wait for it at most `timeout_s`. Empty: nothing came."""

    def take_lost_clients(self) -> list[str]:
        """Return, once, the clients whose last connection has ended, and who have none again.

        All that came over it was returned by `receive` before. A transport that has no connections,
        or cannot tell whose has ended, returns nothing: silence says it, later.
        """

    def wake(self) -> None:
        """Make a waiting `receive` return. Any thread may call it."""

    def statistics(self) -> TransportStatistics:
        """Return frozen statistics."""

    def close(self) -> None:
        """Give everything back at once; what was not sent is lost. Repeatable."""


@dataclass(frozen=True)
class Endpoint:
    """Where a peer connects to, and with what. `keys` None: no proof of identity is asked for."""

    address: str
    keys: CurveKeys | None = None


class PeerTransport(Protocol):
    """A worker's or client's end. One thread at a time; `wake` alone is for others."""

    def send(self, payload: bytes) -> None:
        """Send `payload` to the coordinator without waiting; dropped and counted if impossible."""

    def receive(self, timeout_s: float) -> list[bytes]:
        """Return what has arrived; wait for it at most `timeout_s`. Empty: nothing came.

        The fast way: nothing but a message or the time ends the wait.
        """

    def receive_or_wake(self, timeout_s: float) -> list[bytes]:
        """Return what has arrived; wait for it at most `timeout_s`, or until `wake`."""

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
        """Give everything back; what could not be sent within `linger_s` is lost. Repeatable."""
