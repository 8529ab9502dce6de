"""The addresses at which a cluster publishes its cache events.

Converts a coordinator's statistics into what subscribers need. Clusters that publish no events are
refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvcache.base.curve import CurveKeys
from kvcache.base.errors import ConfigurationError, NotRunningError
from kvcache.events.subscriber import KVEventSubscriber
from kvcache.events.subscription import SubscriptionSettings

if TYPE_CHECKING:
    from actors.clusters.cluster import KVCacheCluster


_ANY_HOST = ("tcp://0.0.0.0:", "tcp://[::]:", "tcp://*:")


@dataclass(frozen=True)
class EventEndpoints:
    """The two sockets of a publisher, and how to follow it.

    `heartbeat_s`: the longest silence of the publisher. `topic`: follow only messages whose topic
    begins with it. `keys`: needed by a publisher that authenticates its followers.

    Raises ConfigurationError for an invalid heartbeat.
    """

    endpoint: str
    replay_endpoint: str
    heartbeat_s: float = 5.0
    topic: str = "kv@"
    keys: CurveKeys | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.heartbeat_s) and self.heartbeat_s > 0):
            raise ConfigurationError(
                f"heartbeat_s is {self.heartbeat_s!r}: pass the publisher's events.heartbeat_s"
            )


def endpoints_in(
    statistics: Mapping[str, Any] | None,
    name: str,
    heartbeat_s: float = 5.0,
    *,
    host: str = "",
    keys: CurveKeys | None = None,
) -> EventEndpoints:
    """Return the endpoints of the publisher with these `statistics`.

    Args:
        statistics: `CoordinatorStatistics.events` of cluster `name`.
        name: for messages.
        heartbeat_s: its `events.heartbeat_s`.
        host: its host, which replaces a wildcard address.
        keys: its followers' keys, None if they need none.

    Raises:
        ConfigurationError: the cluster publishes no events.
        NotRunningError: the publisher is away at the moment.
    """
    if statistics is None:
        raise ConfigurationError(
            f"{name} publishes no cache events: launch it with `events: {{enabled: true}}`"
        )
    places = [str(statistics.get(key, "")) for key in ("endpoint", "replay_endpoint")]
    if not all(places):
        raise NotRunningError(
            f"the event publisher of {name} is not there: "
            f"{statistics.get('problem') or 'wait for it'}"
        )
    live, replay = (_reachable(place, host) for place in places)
    return EventEndpoints(live, replay, heartbeat_s, keys=keys)


def moved(
    before: EventEndpoints, statistics: Mapping[str, Any] | None, host: str
) -> EventEndpoints:
    """Return a publisher's endpoints by newer `statistics`, unchanged if they have none."""
    try:
        now = endpoints_in(statistics, "it", host=host)
    except (ConfigurationError, NotRunningError):
        return before
    return replace(before, endpoint=now.endpoint, replay_endpoint=now.replay_endpoint)


def subscribe(
    endpoints: EventEndpoints, settings: SubscriptionSettings | None = None
) -> KVEventSubscriber:
    """Return a subscriber of a publisher. Raises ConfigurationError for invalid addresses."""
    return KVEventSubscriber(
        endpoints.endpoint,
        endpoints.replay_endpoint,
        topic=endpoints.topic,
        settings=settings,
        keys=endpoints.keys,
    )


def _reachable(place: str, host: str) -> str:
    for anywhere in _ANY_HOST:
        if host and place.startswith(anywhere):
            return f"tcp://{host}:{place.removeprefix(anywhere)}"
    return place


def cluster_endpoints(cluster: KVCacheCluster) -> EventEndpoints:
    """Return the endpoints of a cluster's events, with the keys that its publisher accepts.

    Raises ConfigurationError if it publishes none, NotRunningError while its publisher is away,
    and as `KVCacheCluster.status` does.
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
