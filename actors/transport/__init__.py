"""How encoded messages travel between coordinator, workers and clients.

protocol.py     peers, identities, statistics, and the two ends every transport offers
node_server.py  the coordinator's end (default): unix_server.py on its node, zmq_server.py beyond
unix_server.py  the coordinator's end over Unix sockets; unix_channel.py is one connection
unix_peer.py    a worker's or client's end over a Unix socket
zmq_server.py   the coordinator's end over ZMQ, with keys (curve.py) if they are required
zmq_peer.py     a worker's or client's end over ZMQ
ray.py          both ends as Ray actor calls (fallback)
mailbox.py      between threads of one process: a pipe that wakes, a bounded queue
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
