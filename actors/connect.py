"""Finds and ends the package's actors, and opens connections to the coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from actors.names import RAY_NAMESPACE
from actors.reports import NodeAddress
from actors.transport import Endpoint, Peer, PeerTransport
from actors.transport.mailbox import Mailbox
from actors.transport.protocol import TransportLimits
from actors.transport.ray import RAY_SCHEME, RayClientPeer, RayPeer
from actors.transport.unix_channel import UNIX_SCHEME
from actors.transport.unix_peer import UnixPeer
from actors.transport.zmq_peer import ZmqPeer
from kvcache.base.errors import NotRunningError
from kvcache.protocol.messages import WorkerAddress


def require_ray() -> None:
    """Raise NotRunningError after `ray.shutdown`, because a call of Ray would then start another
    cluster or fail inside Ray."""
    if not ray.is_initialized():
        raise NotRunningError(
            "this process is not connected to Ray: close clients and clusters before ray.shutdown()"
        )


def this_node() -> NodeAddress:
    """Return the node of this process. Raises as `require_ray` does."""
    require_ray()
    node_id = ray.get_runtime_context().get_node_id()
    get_host: Any = ray.util.get_node_ip_address
    return NodeAddress(str(node_id), str(get_host()))


def log_path() -> str:
    """Return the file to which Ray writes this actor's stderr, empty if unknown."""
    worker: Any = ray._private.worker.global_worker
    ask: Any = getattr(worker, "get_err_file_path", str)
    return str(ask())


def connect_peer(
    endpoint: Endpoint, peer: Peer, max_message_bytes: int, mailbox: Mailbox
) -> PeerTransport:
    """Return the connection of `peer` to the coordinator at `endpoint`.

    A worker's actor puts payloads of Ray calls into `mailbox`; sockets do not use it. Raises
    ClusterError if the endpoint is invalid, NotRunningError if its actor is gone.
    """
    limits = TransportLimits(max_message_bytes)
    if endpoint.address.startswith(UNIX_SCHEME):
        return UnixPeer(endpoint, peer, limits)
    if not endpoint.address.startswith(RAY_SCHEME):
        return ZmqPeer(endpoint, peer, limits)
    name = endpoint.address.removeprefix(RAY_SCHEME)
    coordinator = find_actor(name)
    if coordinator is None:
        raise NotRunningError(f"there is no coordinator {name}: is the cluster up?")
    if isinstance(peer.address, WorkerAddress):
        return RayPeer(coordinator, peer, limits, mailbox)
    return RayClientPeer(coordinator, peer, limits)


def find_actor(name: str) -> Any | None:
    """Return the actor of this name in the package's Ray namespace, None if there is none."""
    try:
        return ray.get_actor(name, namespace=RAY_NAMESPACE)
    except ValueError:
        return None


def is_actor_known(name: str) -> bool:
    """Say whether an actor of this name lives in the package's Ray namespace."""
    return find_actor(name) is not None


def actor_names() -> list[str]:
    """Return the names of all actors in the package's Ray namespace."""
    actors: Any = ray.util.list_named_actors(all_namespaces=True)
    return [str(actor["name"]) for actor in actors if actor["namespace"] == RAY_NAMESPACE]


def end_actors(actors: Iterable[Any]) -> None:
    """End actors permanently, whatever state they are in; their names become free."""
    for actor in actors:
        with suppress(RayError, ValueError):
            ray.kill(actor, no_restart=True)
