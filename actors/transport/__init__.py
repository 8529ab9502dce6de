"""How encoded messages travel between coordinator, workers and clients.

protocol.py   peers, identities, figures, and the two ends every transport offers
zmq_server.py the coordinator's end over ZMQ (default)
zmq_peer.py   a worker's or client's end over ZMQ
ray.py        both ends as Ray actor calls (fallback)
"""

from actors.transport.protocol import (
    Endpoint,
    Inbound,
    Peer,
    PeerTransport,
    ServerTransport,
    TransportStatistics,
    client_peer,
    worker_peer,
)

__all__ = [
    "Endpoint",
    "Inbound",
    "Peer",
    "PeerTransport",
    "ServerTransport",
    "TransportStatistics",
    "client_peer",
    "worker_peer",
]
