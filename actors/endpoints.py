"""The coordinator's endpoints: an abstract local address on its node, TCP between nodes.

An endpoint is opened when the first peer asks for it. Beyond loopback, every connection needs the
cluster's keys; `transport.curve: always` requires them everywhere.
"""

from __future__ import annotations

import ipaddress
import json

from actors.reports import NodeAddress
from actors.state import RayRecordStore
from actors.transport import Endpoint
from actors.transport.node_server import NodeServer
from actors.transport.unix_server import unix_address
from actors.transport.zmq_server import local_address, network_address
from kvcache.base.curve import CurveKeys
from kvcache.config import TransportConfig

_RECORD = "whereabouts"


class EndpointTable:
    """The endpoints of one server. Owned by the thread that owns the server."""

    def __init__(
        self, server: NodeServer, config: TransportConfig, keys: CurveKeys, node: NodeAddress
    ) -> None:
        """Begin without endpoints. `node` is the server's node."""
        self._server = server
        self._config = config
        self._keys = keys
        self._node = node
        self._opened: dict[str, Endpoint] = {}

    def endpoint_for(self, peer_node: NodeAddress) -> Endpoint:
        """Return the endpoint for processes on `peer_node`; open it if necessary.

        On the server's own node: an abstract local address. On another node of the same host:
        `bind_host`. Elsewhere: the server's network address, unless `bind_host` names one. A
        `bind_host` beyond loopback is used for all peers. Raises ClusterError if it cannot be
        bound.
        """
        bind_host = self._config.bind_host
        if not is_loopback(bind_host):
            return self._open(bind_host)
        if peer_node.node_id == self._node.node_id:
            return self._open("")
        return self._open(bind_host if peer_node.host == self._node.host else self._node.host)

    def _open(self, host: str) -> Endpoint:
        """Open and return the endpoint on `host`, or the local one for an empty name."""
        endpoint = self._opened.get(host)
        if endpoint is None:
            is_remote = bool(host) and not is_loopback(host)
            is_guarded = is_remote or self._config.curve == "always"
            local = local_address() if is_guarded else unix_address()
            address = network_address(host) if host else local
            bound = self._server.bind(address, is_guarded)
            endpoint = Endpoint(bound, self._keys.for_peers() if is_guarded else None)
            self._opened[host] = endpoint
        return endpoint


def is_loopback(host: str) -> bool:
    """Say whether `host` is a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def save_endpoint(cluster: str, node_id: str, endpoint: Endpoint) -> None:
    """Record the coordinator's endpoint for processes of a node.

    No effect for an endpoint that needs keys. Raises ClusterError if the store cannot be written.
    """
    if endpoint.keys is None:
        record = {"node_id": node_id, "address": endpoint.address}
        RayRecordStore(cluster, _RECORD).save(json.dumps(record).encode())


def load_endpoint(cluster: str, node_id: str) -> Endpoint | None:
    """Return the recorded endpoint for processes of a node, None if there is none.

    Raises ClusterError if the store cannot be read.
    """
    data = RayRecordStore(cluster, _RECORD).load()
    if data is None:
        return None
    try:
        record = json.loads(data)
        is_here, address = record["node_id"] == node_id, record["address"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None  # written by another release
    return Endpoint(address) if is_here and isinstance(address, str) else None
