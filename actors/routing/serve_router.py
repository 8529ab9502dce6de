"""A request router for Ray Serve: requests go to the replica that has cached their prefix.

    @serve.deployment(
        num_replicas=2,
        request_router_config=RequestRouterConfig(
            request_router_class="actors.routing.serve_router.PrefixCacheRequestRouter"
        ),
    )
    class Engine:
        def record_replica_metadata(self):          # this replica's addresses, for routers
            return event_metadata(endpoints_in(self.cluster.coordinator_statistics().events, ...))

        async def __call__(self, token_ids): ...

Every process with a handle has its own router, with a `PrefixRouter` inside. Needs the extra
`serve`. It does not tokenize: a request without token ids goes to the smallest load.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from actors.routing.event_endpoints import EventEndpoints
from actors.routing.router import PrefixRouter
from actors.routing.scores import RouterSettings
from kvcache.base.errors import ConfigurationError, KVCacheError
from kvcache.requests.tokens import TokenIds

EVENTS_KEY = "kvcache_events"
"""Key of the `EventEndpoints` in a replica's metadata."""

TOKENS_ARGUMENT = "token_ids"

_MAX_ENDED_EARLY = 10_000
_TOLD = ("endpoint", "replay_endpoint", "heartbeat_s", "topic")


def event_metadata(endpoints: EventEndpoints) -> dict[str, Any]:
    """Return metadata for a deployment's `record_replica_metadata`, alone or with other entries;
    for `record_routing_stats` if its publisher may move.

    Raises ConfigurationError for a publisher that needs keys: Serve's metadata is public.
    """
    if endpoints.keys is not None:
        raise ConfigurationError(
            f"the publisher at {endpoints.endpoint} needs keys, which Serve's metadata would show: "
            "set events.curve to never, and restrict who can reach it"
        )
    values = {name: getattr(endpoints, name) for name in _TOLD}
    return {EVENTS_KEY: values}


class PrefixCacheRequestRouter(RequestRouter):
    """Ranks replicas by their hit for a request's prompt, and by their load."""

    def initialize_state(
        self,
        tokens_argument: str = TOKENS_ARGUMENT,
        lora_argument: str = "lora_name",
        salt_argument: str = "cache_salt",
        **settings: Any,
    ) -> None:
        """Take `request_router_kwargs`.

        Args:
            tokens_argument: the keyword argument, or the field of the first argument, that has the
                prompt's token ids.
            lora_argument: the same for the adapter.
            salt_argument: the same for the salt.
            settings: fields of `RouterSettings`.

        Raises:
            ConfigurationError: invalid settings.
        """
        self._arguments = (tokens_argument, lora_argument, salt_argument)
        self.prefixes = PrefixRouter(RouterSettings(**settings))
        """Known replicas, by the unique part of their ids."""
        self._ending = threading.Lock()
        self._ended_early: OrderedDict[tuple[str, str], None] = OrderedDict()
        """Requests and replicas whose end Serve reported before their begin."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Follow new replicas, and forget those that are gone."""
        super().update_replicas(replicas)
        for replica in replicas:
            self._follow(replica)
        there = {_name(replica.replica_id) for replica in replicas}
        for name in set(self.prefixes.replicas) - there:
            self._forget(name)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a dead replica."""
        super().on_replica_actor_died(replica_id)
        self._forget(_name(replica_id))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidates one by one, best first, and finally all replicas whose publishers
        are unknown. Serve takes the first one with room."""
        if pending_request is not None:
            # Without this, Serve asks again at once while all replicas are full, without end.
            pending_request.routing_context.should_backoff = True
        by_name = {_name(replica.replica_id): replica for replica in candidate_replicas}
        tokens, lora_name, cache_salt = self._prompt_of(pending_request)
        try:
            ranked = self.prefixes.rank(
                tokens, lora_name=lora_name, cache_salt=cache_salt, among=by_name
            )
        except KVCacheError:  # invalid tokens: the replica will tell the caller
            ranked = self.prefixes.rank((), among=by_name)
        best = [[by_name.pop(one.name)] for one in ranked]
        return [*best, list(by_name.values())] if by_name else best

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Add a request to its replica's load, unless it has ended: Serve reports both
        independently."""
        name = _name(replica_id)
        request = (pending_request.metadata.internal_request_id, name)
        num_tokens = len(self._prompt_of(pending_request)[0])
        with self._ending:
            if request in self._ended_early:
                del self._ended_early[request]
            elif name in self.prefixes.replicas:
                self.prefixes.begin("@".join(request), name, num_tokens)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Remove a request, or an attempt that a replica refused, from its load."""
        request = (internal_request_id, _name(replica_id))
        with self._ending:
            if not self.prefixes.end("@".join(request)):
                self._ended_early[request] = None
                if len(self._ended_early) > _MAX_ENDED_EARLY:
                    self._ended_early.popitem(last=False)

    def _follow(self, replica: RunningReplica) -> None:
        told = replica.routing_stats.get(EVENTS_KEY) or replica.replica_metadata.get(EVENTS_KEY)
        if isinstance(told, Mapping):
            self.prefixes.add_replica(
                _name(replica.replica_id), **{name: told[name] for name in _TOLD}
            )

    def _forget(self, name: str) -> None:
        """Forget a replica outside the event loop, which waiting for its thread would block."""
        self._event_loop.run_in_executor(None, self.prefixes.remove_replica, name)

    def _prompt_of(self, request: PendingRequest | None) -> tuple[TokenIds, Any, Any]:
        """Return a request's token ids, adapter and salt, empty if it has none."""
        if request is None:
            return (), None, None
        tokens, lora_name, cache_salt = (_argument(request, name) for name in self._arguments)
        if not isinstance(tokens, Sequence) and not hasattr(tokens, "__array__"):
            tokens = ()
        return tokens, lora_name, cache_salt


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)


def _argument(request: PendingRequest, name: str) -> Any:
    """Return a keyword argument, or a field of the first argument; None if there is neither."""
    if name in request.kwargs:
        return request.kwargs[name]
    first = request.args[0] if request.args else None
    return first.get(name) if isinstance(first, Mapping) else getattr(first, name, None)
