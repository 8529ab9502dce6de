"""A process with clients that hold requests until it is killed.

`python -m tests.attack.crowd_member ADDRESS CONFIG`, with CONFIG as JSON. Imports only the parts
that clients need, because imports take most of its life.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from actors.client import KVCacheClient
from actors.transport import Endpoint, Peer, PeerTransport
from actors.transport.protocol import TransportLimits
from actors.transport.unix_channel import UNIX_SCHEME
from actors.transport.unix_peer import UnixPeer
from actors.transport.zmq_peer import ZmqPeer
from kvcache.config import ClusterConfig, parse_config
from kvcache.protocol.step import NewRequest, StepRequest

NUM_MEMBERS = 4
"""Clients of one process."""


class AddressDialer:
    """Reaches a coordinator at a known address. A `Dialing`."""

    needs_keeping_alive = True

    def __init__(self, address: str, config: ClusterConfig) -> None:
        self.config = config
        self._endpoint = Endpoint(address)

    def endpoint(self) -> Endpoint:
        """Return the address."""
        return self._endpoint

    def noted(self) -> Endpoint | None:
        """Return False: the coordinator never moves."""
        return None

    def open(self, endpoint: Endpoint, peer: Peer) -> PeerTransport:
        """Return a client's end."""
        limits = TransportLimits(self.config.transport.max_message_bytes)
        if endpoint.address.startswith(UNIX_SCHEME):
            return UnixPeer(endpoint, peer, limits)
        return ZmqPeer(endpoint, peer, limits)

    def lost_workers(self) -> str:
        """Return that none is."""
        return ""


def main() -> None:
    """Attach, take blocks, report it, and continue until killed."""
    address, config = sys.argv[1:]
    dialer = AddressDialer(address, parse_config(json.loads(config)))
    clients = [KVCacheClient(dialer) for _ in range(NUM_MEMBERS)]
    for client in clients:
        tokens = np.arange(40, dtype=np.int32)
        client.step(StepRequest(new=(NewRequest(f"{client.client_id}/0", tokens, 40),)))
    print("attached", flush=True)
    while True:
        for client in clients:
            client.step(StepRequest())


if __name__ == "__main__":
    main()
