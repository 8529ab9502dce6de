"""The Ray side: one coordinator actor, one worker actor per rank, clients that talk to them.

    clusters/       launch, connect, status, stop         client.py, async_client.py  for engines
    coordinator.py  the coordinator actor                 workers/    ranks, in our actors or yours
    embedded/       the coordinator in your own process   local.py    all of it in one process
    routing/        which replica serves a prompt         cli/, dashboard/  for people
    transport/      sockets, or Ray calls as fallback

The code here is thin: `kvcache` makes all decisions and never imports Ray. Names are imported on
first use, so that the coordinator's process never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.async_client import AsyncKVCacheClient
    from actors.client import KVCacheClient
    from actors.clusters.cluster import KVCacheCluster
    from actors.clusters.replicas import KVCacheReplicas
    from actors.connect import connect_peer
    from actors.coordinator import CoordinatorActor
    from actors.embedded.cluster import EmbeddedCluster
    from actors.local import LocalCluster
    from actors.workers.embedding import EmbeddedWorker
    from actors.workers.worker import WORKER_CONCURRENCY_GROUPS, WorkerActor, WorkerMethods

_HOMES = {
    "AsyncKVCacheClient": "actors.async_client",
    "CoordinatorActor": "actors.coordinator",
    "EmbeddedCluster": "actors.embedded.cluster",
    "EmbeddedWorker": "actors.workers.embedding",
    "KVCacheClient": "actors.client",
    "KVCacheCluster": "actors.clusters.cluster",
    "KVCacheReplicas": "actors.clusters.replicas",
    "LocalCluster": "actors.local",
    "WORKER_CONCURRENCY_GROUPS": "actors.workers.worker",
    "WorkerActor": "actors.workers.worker",
    "WorkerMethods": "actors.workers.worker",
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
    """Import the module of `name` on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'actors' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
