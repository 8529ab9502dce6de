"""The coordinator's end for all peers: Unix sockets on its node, ZMQ from other nodes.

The ZMQ server is made when the first address needs it: for another node, or because keys are
required. Before that it costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.transport.protocol import Inbound, ServerTransport, TransportLimits, TransportStatistics
from actors.transport.unix_channel import UNIX_SCHEME
from actors.transport.unix_server import UnixServer
from actors.transport.zmq_server import ZmqServer
from kvcache.base.curve import CurveKeys
from kvcache.base.errors import ClusterError
from kvcache.protocol.messages import Address


class NodeServer(ServerTransport):
    """A `ServerTransport` over Unix sockets and ZMQ."""

    def __init__(self, limits: TransportLimits, keys: CurveKeys | None = None) -> None:
        """Make an end without addresses; `keys` are for guarded addresses."""
        self._limits = limits
        self._keys = keys
        self._near = UnixServer(limits)
        self._far: ZmqServer | None = None
        self._is_closed = False

    def bind(self, address: str, is_guarded: bool) -> str:
        """Also listen on `address`; return the endpoint that peers connect to.

        Guarded: only holders of the keys may connect, which Unix sockets do not offer. Raises
        ClusterError if it cannot be bound.
        """
        if address.startswith(UNIX_SCHEME):
            if is_guarded:
                raise ClusterError(f"cannot guard {address}: bind an ipc:// or tcp:// address")
            return self._near.bind(address)
        if self._far is None:
            self._far = ZmqServer(self._limits, self._keys)
            self._near.watch(self._far.fileno())
        return self._far.bind(address, is_guarded)

    def send(self, addresses: Sequence[Address], *payloads: bytes) -> None:
        far = self._far
        if far is None:
            self._near.send(addresses, *payloads)
            return
        near = [address for address in addresses if self._near.is_connected(address)]
        if near:
            self._near.send(near, *payloads)
        # A rank may have processes on both sides; one of them is dead or will die.
        others = [a for a in addresses if far.is_connected(a) or a not in near]
        if others:
            far.send(others, *payloads)

    def receive(self, timeout_s: float) -> list[Inbound]:
        far = self._far
        if far is None:
            return self._near.receive(timeout_s)
        # ZMQ's descriptor signals news only once: check before every wait.
        inbound = far.receive(0.0)
        has_more = bool(inbound) or far.has_arrived()
        return inbound + self._near.receive(0.0 if has_more else timeout_s)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when something may have arrived. It may miss
        messages: check `has_arrived` before every wait for it and after every `send`."""
        return self._near.fileno()

    def has_arrived(self) -> bool:
        """Whether there are messages that the descriptor may have signalled already."""
        return self._far is not None and self._far.has_arrived()

    @property
    def num_disconnections(self) -> int:
        """Number of ended connections of this node, as far as known."""
        return self._near.num_disconnections

    def take_lost_clients(self) -> list[str]:
        lost = self._near.take_lost_clients()
        if self._far is not None:
            lost += self._far.take_lost_clients()
        return lost

    def wake(self) -> None:
        self._near.wake()

    def statistics(self) -> TransportStatistics:
        near = self._near.statistics()
        return near if self._far is None else near + self._far.statistics()

    def close(self) -> None:
        self._near.close()
        if self._far is not None:
            self._far.close()
