"""A router that knows the replicas' caches: it ranks replicas by cached prefix and by load.

    router = PrefixRouter()
    router.add_replica("a", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657")
    router.add_replica("b", "tcp://10.0.0.2:5557", "tcp://10.0.0.2:5657")
    best = router.rank(prompt)[0]
    router.begin("r0", best.name, len(prompt))      ...      router.end("r0")

`PrefixRouter` needs no Ray; `RouterActor` is the same as an actor for many callers. It sends no
requests itself. It reports a silent replica as stale, and does not judge whether it lives.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from actors.names import RAY_NAMESPACE, router_name
from actors.routing.event_endpoints import EventEndpoints, subscribe
from actors.routing.scores import Candidate, RankedReplica, RouterSettings, rank_candidates
from kvcache.base.arrays import Int32Array
from kvcache.base.clock import Clock, SystemClock
from kvcache.base.curve import CurveKeys
from kvcache.base.errors import RequestError
from kvcache.base.serving_loop import ServingLoop, describe_error
from kvcache.events.prefix_index import PrefixIndex, PrefixMatch
from kvcache.events.subscriber import KVEventSubscriber
from kvcache.events.subscription import SubscriptionSettings, SubscriptionStatistics, Update
from kvcache.requests.tokens import TokenIds, as_token_ids

_POLL_S = 0.1
_SOURCE = "replica"


@dataclass(frozen=True)
class ReplicaState:
    """One replica as the router sees it. `load`: in blocks of `RouterSettings.block_tokens`."""

    endpoints: EventEndpoints
    load: float
    num_requests: int
    is_stale: bool
    known: FollowerState


@dataclass(frozen=True)
class RouterStatistics:
    """Statistics of a router. `num_stale_rankings`: rankings with at least one stale replica.
    `num_forgotten_requests`: requests dropped, because too many had begun without ending."""

    replicas: dict[str, ReplicaState]
    num_rankings: int
    num_stale_rankings: int
    num_open_requests: int
    num_forgotten_requests: int


@dataclass
class _Replica:
    follower: ReplicaFollower
    reported_load: float = 0.0
    last_begun: int = 0
    requests: dict[str, float] = field(default_factory=dict)

    @property
    def load(self) -> float:
        return self.reported_load + sum(self.requests.values())


class PrefixRouter:
    """Follows replicas and ranks them. Thread-safe."""

    def __init__(self, settings: RouterSettings | None = None, clock: Clock | None = None) -> None:
        """Begin without replicas. `clock` measures how long replicas are silent."""
        self.settings = settings or RouterSettings()
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._replicas: dict[str, _Replica] = {}
        self._places: dict[str, str] = {}
        """Request to replica, oldest request first."""
        self._num_begun = 0
        self._num_rankings = 0
        self._num_stale = 0
        self._num_forgotten = 0

    @property
    def replicas(self) -> tuple[str, ...]:
        """The names of all replicas, in the order in which they were added."""
        with self._lock:
            return tuple(self._replicas)

    def add_replica(
        self,
        name: str,
        endpoint: str,
        replay_endpoint: str,
        *,
        heartbeat_s: float = 5.0,
        topic: str = "kv@",
        keys: CurveKeys | None = None,
    ) -> None:
        """Follow a replica from now on. No effect if it is followed at the same addresses already;
        at other addresses it is followed there instead, and its load stays.

        Args:
            name: its name in rankings.
            endpoint: the address of its live stream.
            replay_endpoint: the address that replays missed events.
            heartbeat_s: its `events.heartbeat_s`.
            topic: follow only messages whose topic begins with it.
            keys: needed by a publisher that authenticates its followers.

        Raises:
            ConfigurationError: an invalid address or heartbeat.
        """
        endpoints = EventEndpoints(endpoint, replay_endpoint, heartbeat_s, topic, keys)
        with self._lock:
            known = self._replicas.get(name)
            if known is not None and known.follower.endpoints == endpoints:
                return
            silence_s = self.settings.stale_heartbeats * heartbeat_s
            follower = ReplicaFollower(endpoints, self._clock, silence_s)
            if known is None:
                self._replicas[name] = _Replica(follower)
                return
            left, known.follower = known.follower, follower
        left.close()

    def remove_replica(self, name: str) -> None:
        """Forget a replica and its requests. No effect for an unknown one. Repeatable."""
        with self._lock:
            replica = self._replicas.pop(name, None)
            for request_id in () if replica is None else replica.requests:
                del self._places[request_id]
        if replica is not None:
            replica.follower.close()

    def rank(
        self,
        token_ids: TokenIds,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        among: Iterable[str] | None = None,
    ) -> list[RankedReplica]:
        """Return the replicas for a prompt, the cheapest first.

        Args:
            token_ids: the prompt, shape `(n,)`.
            lora_name: its adapter.
            cache_salt: its salt.
            among: only these replicas; unknown names are ignored.

        Raises:
            RequestError: invalid token ids.
        """
        tokens = as_token_ids(token_ids, "prompt token id")
        wanted = None if among is None else set(among)
        with self._lock:
            asked = [
                (name, replica.follower, replica.load, replica.last_begun)
                for name, replica in self._replicas.items()
                if wanted is None or name in wanted
            ]
        candidates = [
            Candidate(
                name,
                None if self._is_stale(follower) else follower.match(tokens, lora_name, cache_salt),
                load,
                last_begun,
                follower.num_blocks,
            )
            for name, follower, load, last_begun in asked
        ]
        ranked = rank_candidates(candidates, len(tokens), self.settings)
        with self._lock:
            self._num_rankings += 1
            self._num_stale += any(one.is_stale for one in ranked)
        return ranked

    def begin(self, request_id: str, replica: str, num_tokens: int) -> None:
        """Add a request of `num_tokens` tokens to the load of `replica`. No effect if repeated;
        with another replica, the request moves.

        Raises:
            RequestError: an unknown replica, or an invalid number of tokens.
        """
        if num_tokens < 0:
            raise RequestError(f"request {request_id} has {num_tokens} tokens: pass 0 or more")
        with self._lock:
            known = self._known(replica)
            if request_id not in known.requests:
                self._num_begun += 1
                known.last_begun = self._num_begun
            self._end(request_id)
            known.requests[request_id] = num_tokens / self.settings.block_tokens
            self._places[request_id] = replica
            while len(self._places) > self.settings.max_open_requests:
                self._end(next(iter(self._places)))
                self._num_forgotten += 1

    def end(self, request_id: str) -> bool:
        """Remove a request from its replica's load; return whether it was there. Repeatable."""
        with self._lock:
            return self._end(request_id)

    def report_load(self, replica: str, load: float) -> None:
        """Set a replica's own report of its load, in blocks of `RouterSettings.block_tokens`. It is
        added to the load of requests begun here, until the next report.

        Raises:
            RequestError: an unknown replica, or an invalid load.
        """
        if not (math.isfinite(load) and load >= 0):
            raise RequestError(f"load {load!r} of replica {replica}: pass a number from 0 on")
        with self._lock:
            self._known(replica).reported_load = load

    def statistics(self) -> RouterStatistics:
        """Return frozen statistics."""
        with self._lock:
            replicas = {
                name: ReplicaState(
                    replica.follower.endpoints,
                    replica.load,
                    len(replica.requests),
                    self._is_stale(replica.follower),
                    replica.follower.state(),
                )
                for name, replica in self._replicas.items()
            }
            return RouterStatistics(
                replicas,
                self._num_rankings,
                self._num_stale,
                len(self._places),
                self._num_forgotten,
            )

    def close(self) -> None:
        """Stop following. Repeatable."""
        for name in tuple(self._replicas):
            self.remove_replica(name)

    def __enter__(self) -> PrefixRouter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _is_stale(self, follower: ReplicaFollower) -> bool:
        limit_s = self.settings.stale_heartbeats * follower.endpoints.heartbeat_s
        silent_s = follower.silent_s
        return silent_s is None or silent_s > limit_s

    def _known(self, name: str) -> _Replica:
        replica = self._replicas.get(name)
        if replica is None:
            raise RequestError(
                f"no replica {name!r} is followed, there are {sorted(self._replicas)}: add it first"
            )
        return replica

    def _end(self, request_id: str) -> bool:
        place = self._places.pop(request_id, None)
        if place is not None:
            del self._replicas[place].requests[request_id]
        return place is not None


class RouterActor(PrefixRouter):
    """A `PrefixRouter` for the whole Ray cluster. Make one with `start_router`."""

    def replicas(self) -> tuple[str, ...]:  # type: ignore[override]  # actors have no properties
        """Return the names of all replicas, in the order in which they were added."""
        return tuple(self._replicas)

    def add_cluster(self, name: str) -> None:
        """Follow a running cluster under its name; also again, after its publisher has moved. Each
        replica of a launch is a cluster: `replica_name` returns its name.

        Raises NotRunningError, DeadlineError as `KVCacheCluster.connect` does, ConfigurationError
        if it publishes no events.
        """
        from actors.clusters.cluster import KVCacheCluster
        from actors.routing.event_endpoints import cluster_endpoints

        found = cluster_endpoints(KVCacheCluster.connect(name))
        self.add_replica(name, **vars(found))


def start_router(name: str, settings: RouterSettings | None = None, **options: Any) -> Any:
    """Return the handle of a new `RouterActor`, which is registered as `router_name(name)`.

    `options` are Ray's for the actor, such as `lifetime` or `num_cpus` [0]. Raises ValueError, as
    Ray does, if the name is taken.
    """
    import ray

    make_remote: Any = ray.remote
    actor = make_remote(RouterActor).options(
        **{"name": router_name(name), "namespace": RAY_NAMESPACE, "num_cpus": 0, **options}
    )
    return actor.remote(settings)


@dataclass(frozen=True)
class FollowerState:
    """How well a replica is known. `silent_s`: time since its last message, None before the first.
    `num_blocks`: in all media together, each counted once."""

    silent_s: float | None
    num_blocks: int
    events: SubscriptionStatistics
    problem: str


class ReplicaFollower:
    """Knows the cache of one replica. Thread-safe; its own thread receives the events."""

    def __init__(self, endpoints: EventEndpoints, clock: Clock, silence_s: float) -> None:
        """Connect and follow from now on.

        Args:
            endpoints: the replica's publisher.
            clock: measures how long it is silent.
            silence_s: after this time, ask whether events were missed.

        Raises:
            ConfigurationError: an invalid address.
        """
        self.endpoints = endpoints
        self._clock = clock
        self._lock = threading.Lock()
        self._index = PrefixIndex()
        self._heard_s: float | None = None
        self._problem = ""
        self._settings = SubscriptionSettings(silence_s=silence_s)
        self._subscriber: KVEventSubscriber | None = subscribe(endpoints, self._settings)
        self._statistics = self._subscriber.statistics()
        self._loop = ServingLoop("replica-follower", self._turn)
        self._loop.start()

    @property
    def silent_s(self) -> float | None:
        """Seconds since the last message; None before the first."""
        heard_s = self._heard_s
        return None if heard_s is None else self._clock.now() - heard_s

    @property
    def num_blocks(self) -> int:
        """Number of the replica's blocks in all media together, each counted once."""
        with self._lock:
            return self._index.num_blocks(_SOURCE)

    def match(
        self, token_ids: Int32Array, lora_name: str | None, cache_salt: str | None
    ) -> PrefixMatch | None:
        """Return the replica's hit for a prompt of shape `(n,)`; None before its first message."""
        with self._lock:
            found = self._index.match(token_ids, lora_name=lora_name, cache_salt=cache_salt)
        return found[0] if found else None

    def state(self) -> FollowerState:
        """Return how well the replica is known."""
        with self._lock:
            statistics, problem = self._statistics, self._problem
            num_blocks = self._index.num_blocks(_SOURCE)
        return FollowerState(self.silent_s, num_blocks, statistics, problem)

    def close(self) -> None:
        """Stop following; returns when the thread has ended. Repeatable."""
        self._loop.stop()
        self._loop.join()
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None

    def _turn(self) -> None:
        """Receive for a moment. After an error, drop everything and follow from the beginning."""
        subscriber = self._subscriber
        if subscriber is None:
            subscriber = self._subscriber = subscribe(self.endpoints, self._settings)
        try:
            for update in subscriber.poll(_POLL_S):
                self._take(update)
            statistics = subscriber.statistics()
        except Exception as error:
            with self._lock:
                self._index = PrefixIndex()
                self._problem = f"followed from the beginning after {describe_error(error)}"
            self._subscriber = None
            subscriber.close()
            raise
        with self._lock:
            self._statistics = statistics

    def _take(self, update: Update) -> None:
        if update.is_restatement:
            index = PrefixIndex()
            index.follow(_SOURCE, update)
            with self._lock:
                self._index = index
        else:
            with self._lock:
                self._index.follow(_SOURCE, update)
        self._heard_s = self._clock.now()
