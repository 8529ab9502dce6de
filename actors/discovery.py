"""Where a running cluster publishes its events, and what a router has to know to follow them.

From coordinators to the configuration of routers. One record for each replica; what it says was
asked of the coordinator just now, so that it is never of a cluster that has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from actors.cluster import KVCacheCluster
from actors.cluster_events import publisher_host
from actors.event_endpoints import endpoints_in
from kvcache.base.curve import CurveKeys
from kvcache.base.errors import NotRunningError


@dataclass(frozen=True)
class DiscoveryRecord:
    """One data-parallel replica, as routers see it.

    `instance`: what all replicas of a launch have in common; `cluster`: this one's own name.
    `block_size` is that of the group that is published, `last_seq` -1 before anything was. `keys`
    are for followers that must prove themselves, None where they need not.
    """

    instance: str
    cluster: str
    data_parallel_rank: int
    model: str
    endpoint: str
    replay_endpoint: str
    topic: str
    encoding: str
    block_size: int
    hash_algorithm: str
    hash_seed: str
    last_seq: int
    keys: CurveKeys | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; keys are not among them."""
        values = asdict(self)
        del values["keys"]
        return {**values, "needs_keys": self.keys is not None}


def discovery_record(cluster: KVCacheCluster, instance: str = "") -> DiscoveryRecord:
    """Return how to follow a running cluster.

    Raises NotRunningError when it publishes nothing, or its publisher is not there at the moment.
    """
    config, keys = cluster.config, cluster.event_keys()
    statistics = cluster.coordinator_statistics()
    events = None if statistics is None else statistics.events
    if events is None:
        raise NotRunningError(
            f"{cluster.name} publishes no events: launch it with events.enabled: true"
        )
    if not events["is_alive"]:
        raise NotRunningError(
            f"the event publisher of {cluster.name} is not there: {events['problem']}; it is "
            "started again, ask again"
        )
    there = endpoints_in(events, cluster.name, host=publisher_host(cluster), keys=keys)
    return DiscoveryRecord(
        instance=instance or cluster.name,
        cluster=cluster.name,
        data_parallel_rank=config.events.data_parallel_rank,
        model=config.model.name,
        endpoint=there.endpoint,
        replay_endpoint=there.replay_endpoint,
        topic=config.events.topic or f"kv@{cluster.name}@{config.model.name}",
        encoding=config.events.encoding,
        block_size=events["block_size"],
        hash_algorithm=config.cache.hash_algorithm,
        hash_seed=config.cache.hash_seed,
        last_seq=events.get("last_seq", -1),
        keys=keys,
    )


def discovery_records(clusters: Sequence[KVCacheCluster], instance: str) -> list[DiscoveryRecord]:
    """Return how to follow each replica of a launch. Raises as `discovery_record`."""
    return [discovery_record(cluster, instance) for cluster in clusters]
