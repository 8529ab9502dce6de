"""A running cluster's publisher, as its coordinator knows it: where it is, and who may follow.

Between clusters on Ray and followers of their events in this process. For other routers,
discovery.py says the same in a record.
"""

from __future__ import annotations

from actors.cluster import KVCacheCluster
from actors.event_endpoints import EventEndpoints, endpoints_in


def cluster_endpoints(cluster: KVCacheCluster) -> EventEndpoints:
    """Return where a cluster publishes its events, with the keys that it takes.

    Raises ConfigurationError for one that publishes none, NotRunningError while its publisher is
    not there, and as `KVCacheCluster.status` does.
    """
    statistics = cluster.coordinator_statistics()
    return endpoints_in(
        None if statistics is None else statistics.events,
        cluster.name,
        cluster.config.events.heartbeat_s,
        host=publisher_host(cluster),
        keys=cluster.event_keys(),
    )


def publisher_host(cluster: KVCacheCluster) -> str:
    """Return the host on which a cluster's publisher runs. Raises as `KVCacheCluster.status`."""
    return cluster.status().coordinator_node.host
