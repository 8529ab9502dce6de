"""KVCacheReplicas: several clusters of one configuration, each with the whole model and its cache.

    with KVCacheReplicas.launch("configs/my_dp4.yaml") as replicas:
        clients = [replica.client() for replica in replicas]

`cluster.py` knows one cluster. Each replica has its own coordinator, ranks, sockets and events; a
router distinguishes them by data-parallel rank. Replicas share only the launch and the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from actors.clusters.access import connect_to_ray
from actors.clusters.cluster import KVCacheCluster
from actors.clusters.launch import OnProgress
from actors.connect import actor_names
from actors.names import coordinator_name
from actors.routing.event_endpoints import endpoints_in, publisher_host
from kvcache.base.curve import CurveKeys
from kvcache.base.errors import ConfigurationError, NotRunningError
from kvcache.config import ClusterConfig, load_config
from kvcache.config.events import shifted


def replica_name(name: str, rank: int) -> str:
    """Return the cluster name of replica `rank` of the launch `name`."""
    return f"{name}-dp{rank}"


def replica_configs(config: ClusterConfig) -> list[ClusterConfig]:
    """Return each replica's configuration, with its own name, ports and rank.

    Raises ConfigurationError if there are not enough ports.
    """
    size, events = config.parallel.data_parallel_size, config.events
    alone = config.parallel.model_copy(update={"data_parallel_size": 1})
    topic = events.topic or f"kv@{config.name}@{config.model.name}"
    if events.enabled:
        _require_distinct_ports(config)
    return [
        config.model_copy(
            update={
                "name": replica_name(config.name, rank),
                "parallel": alone,
                "events": events.model_copy(
                    update={
                        "data_parallel_rank": rank,
                        "topic": topic,
                        "endpoint": shifted(events.endpoint, rank),
                        "replay_endpoint": shifted(events.replay_endpoint, rank),
                    }
                ),
            }
        )
        for rank in range(size)
    ]


class KVCacheReplicas(Sequence[KVCacheCluster]):
    """The running replicas of one launch, in order of data-parallel rank."""

    def __init__(self, name: str, clusters: Sequence[KVCacheCluster]) -> None:
        """Use `launch` or `connect` instead."""
        self.name = name
        self._clusters = tuple(clusters)

    @classmethod
    def launch(
        cls,
        config: ClusterConfig | str | Path,
        *,
        detached: bool = False,
        on_progress: OnProgress | None = None,
    ) -> KVCacheReplicas:
        """Start `parallel.data_parallel_size` clusters one after the other, all or none.

        Raises what `KVCacheCluster.launch` raises; nothing keeps running then.
        """
        if not isinstance(config, ClusterConfig):
            config = load_config(config)
        started: list[KVCacheCluster] = []
        try:
            for one in replica_configs(config):
                started.append(
                    KVCacheCluster.launch(one, detached=detached, on_progress=on_progress)
                )
        except BaseException:
            _stop(started)
            raise
        return cls(config.name, started)

    @classmethod
    def connect(cls, name: str) -> KVCacheReplicas:
        """Return the running replicas of launch `name`. Raises NotRunningError if there are
        none."""
        connect_to_ray()
        prefix, suffix = replica_name(name, 0).removesuffix("0"), coordinator_name("")
        middles = [
            name.removeprefix(prefix).removesuffix(suffix)
            for name in actor_names()
            if name.startswith(prefix) and name.endswith(suffix)
        ]
        ranks = sorted(int(middle) for middle in middles if middle.isdecimal())
        found = [KVCacheCluster.connect(replica_name(name, rank)) for rank in ranks]
        if not found:
            raise NotRunningError(
                f"no replicas of {name!r} are running: launch them, or check the name"
            )
        return cls(name, found)

    def __len__(self) -> int:
        return len(self._clusters)

    def __getitem__(self, index: Any) -> Any:
        """Return the replica of a rank, or the replicas of a slice."""
        return self._clusters[index]

    def __iter__(self) -> Iterator[KVCacheCluster]:
        return iter(self._clusters)

    def discovery(self) -> list[DiscoveryRecord]:
        """Return how to follow each replica's events. Raises as `discovery_record`."""
        return discovery_records(self._clusters, self.name)

    def stop(self) -> None:
        """End all replicas in order; nothing of them remains. Repeatable."""
        _stop(self._clusters)

    def __enter__(self) -> KVCacheReplicas:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def _stop(clusters: Sequence[KVCacheCluster]) -> None:
    """Stop all of them, even if one of them cannot be stopped."""
    problem: Exception | None = None
    for cluster in clusters:
        try:
            cluster.stop()
        except Exception as error:
            problem = problem or error
    if problem is not None:
        raise problem


def _require_distinct_ports(config: ClusterConfig) -> None:
    """Raise ConfigurationError if a replica's live port is another one's replay port."""
    size, events = config.parallel.data_parallel_size, config.events
    places = [
        shifted(endpoint, rank)
        for endpoint in (events.endpoint, events.replay_endpoint)
        for rank in range(size)
        if not endpoint.endswith((":0", ":*"))
    ]
    twice = sorted({place for place in places if places.count(place) > 1})
    if twice:
        raise ConfigurationError(
            f"events.endpoint and events.replay_endpoint of {size} replicas meet at "
            f"{', '.join(twice)}: leave parallel.data_parallel_size ports between them"
        )


@dataclass(frozen=True)
class DiscoveryRecord:
    """One data-parallel replica, as routers see it.

    `instance`: the common name of all replicas of a launch; `cluster`: this replica's name.
    `block_size`: that of the published group. `last_seq`: -1 before the first batch. `keys`: for
    followers that must authenticate, else None.
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
        """Return plain values for JSON, without the keys."""
        values = asdict(self)
        del values["keys"]
        return {**values, "needs_keys": self.keys is not None}


def discovery_record(cluster: KVCacheCluster, instance: str = "") -> DiscoveryRecord:
    """Return how to follow a running cluster.

    Raises NotRunningError if it publishes no events, or if its publisher is away.
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
