"""Where a coordinator that runs again listens, written down for clients of its node.

A call to an actor that restarts is answered, refused or left waiting as Ray sees fit, for seconds.
A record in the cluster's small state is read in a millisecond, whatever becomes of the actor. It
has no keys in it: who needs some asks the actor.
"""

from __future__ import annotations

import json

from actors.state import RayRecordStore
from actors.transport import Endpoint

_RECORD = "whereabouts"


def save_endpoint(cluster: str, node_id: str, endpoint: Endpoint) -> None:
    """Say that processes of a node find the cluster's coordinator at `endpoint`.

    No effect where it asks for keys. Raises ClusterError when the store cannot be written.
    """
    if endpoint.keys is None:
        record = {"node_id": node_id, "address": endpoint.address}
        RayRecordStore(cluster, _RECORD).save(json.dumps(record).encode())


def load_endpoint(cluster: str, node_id: str) -> Endpoint | None:
    """Return what is written down for processes of that node, None if nothing is.

    Raises ClusterError when the store cannot be read.
    """
    data = RayRecordStore(cluster, _RECORD).load()
    if data is None:
        return None
    try:
        record = json.loads(data)
        is_here, address = record["node_id"] == node_id, record["address"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None  # another release's
    return Endpoint(address) if is_here and isinstance(address, str) else None
