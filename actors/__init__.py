"""The Ray side: one coordinator actor, one worker actor per rank, clients that talk to them.

    cluster.py      launch, connect, status, stop          client.py, async_client.py  for engines
    coordinator.py  the coordinator actor                  worker.py     the worker actor
    embedding.py    a rank inside an actor of yours        local.py      all of it in one process
    embedded_cluster.py  the coordinator inside a process of yours
    transport/      sockets, or Ray calls as fallback      health.py     who is dead

Thin: everything that decides is in `kvcache`, which never imports Ray. Names are imported when they
are first used, so that the coordinator's process never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.async_client import AsyncKVCacheClient
    from actors.client import KVCacheClient
    from actors.cluster import KVCacheCluster
    from actors.connect import connect_peer
    from actors.coordinator import CoordinatorActor
    from actors.embedded_cluster import EmbeddedCluster
    from actors.embedding import EmbeddedWorker
    from actors.local import LocalCluster
    from actors.replicas import KVCacheReplicas
    from actors.worker import WORKER_CONCURRENCY_GROUPS, WorkerActor, WorkerMethods

_HOMES = {
    "AsyncKVCacheClient": "actors.async_client",
    "CoordinatorActor": "actors.coordinator",
    "EmbeddedCluster": "actors.embedded_cluster",
    "EmbeddedWorker": "actors.embedding",
    "KVCacheClient": "actors.client",
    "KVCacheCluster": "actors.cluster",
    "KVCacheReplicas": "actors.replicas",
    "LocalCluster": "actors.local",
    "WORKER_CONCURRENCY_GROUPS": "actors.worker",
    "WorkerActor": "actors.worker",
    "WorkerMethods": "actors.worker",
    "connect_peer": "actors.connect",
}

__all__ = [
    "WORKER_CONCURRENCY_GROUPS",
    "AsyncKVCacheClient",
    "CoordinatorActor",
    "EmbeddedCluster",
    "EmbeddedWorker",
    "KVCacheClient",
    "KVCacheCluster",
    "KVCacheReplicas",
    "LocalCluster",
    "WorkerActor",
    "WorkerMethods",
    "connect_peer",
]


def __getattr__(name: str) -> Any:
    """Import the module that `name` lives in, on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'actors' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
