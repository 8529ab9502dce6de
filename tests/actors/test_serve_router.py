"""The request router in Ray Serve: by prefix, by load without tokens, and past a dead replica."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from actors.routing.event_endpoints import EventEndpoints, endpoints_in
from kvcache import NewRequest, StepRequest
from kvcache.base.curve import generate_curve_keys
from kvcache.base.errors import ConfigurationError
from tests.waiting import wait_until

if importlib.util.find_spec("starlette") is None:
    pytest.skip("the extra `serve` is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Serve's own, on import
    from ray import serve
    from ray.serve._private.common import DeploymentID, RequestMetadata
    from ray.serve.config import ProxyLocation, RequestRouterConfig
    from ray.serve.handle import DeploymentHandle
    from ray.serve.request_router import PendingRequest, ReplicaID

    from actors.routing.serve_router import PrefixCacheRequestRouter, event_metadata

pytestmark = [
    pytest.mark.ray,
    pytest.mark.launches,
    pytest.mark.filterwarnings("default"),
]

PROMPT_TOKENS = 10 * 16
PATIENCE_S = 90.0
HEARTBEAT_S = 0.3


class Engine:
    """A deployment with a cluster inside."""

    def __init__(self) -> None:
        from actors.local import LocalCluster
        from tests.actors.conftest import build_config

        anywhere = "tcp://127.0.0.1:0"
        events = {
            "enabled": True,
            "endpoint": anywhere,
            "replay_endpoint": anywhere,
            "heartbeat_s": HEARTBEAT_S,
        }
        config = build_config(parallel={"tensor_parallel_size": 1}, events=events)
        self.cluster = LocalCluster(config)
        self.client = self.cluster.client()
        self.number = 0

    def record_replica_metadata(self) -> dict[str, Any]:
        statistics = self.cluster.coordinator.statistics().events
        return event_metadata(endpoints_in(statistics, "engine", HEARTBEAT_S))

    async def __call__(self, token_ids: list[int] | None = None) -> tuple[int, int]:
        """Compute a prompt; return which process did, and how many tokens were cached."""
        if token_ids is None:
            return os.getpid(), 0
        self.number += 1
        prompt = np.array(token_ids, np.int32)
        new = NewRequest(f"r{self.number}", prompt, max_new_tokens=len(prompt))
        completed, num_hit = -1, 0
        for request in ({"new": (new,)}, {"finished": (new.request_id,)}, {}):
            step = self.client.submit(StepRequest(**request, completed_step=completed))
            result = self.client.wait_result(step)
            num_hit += sum(result.num_hit_tokens.tolist())
            self.client.wait_finished(step)
            completed = step
        return os.getpid(), num_hit


@pytest.fixture
def handle(ray_cluster: str) -> Iterator[DeploymentHandle]:
    serve.start(proxy_location=ProxyLocation.Disabled)
    router = RequestRouterConfig(
        request_router_class="actors.routing.serve_router.PrefixCacheRequestRouter",
        request_router_kwargs={"overlap_weight": 4.0, "block_tokens": 16},
    )
    deployment: Any = serve.deployment(
        num_replicas=2, ray_actor_options={"num_cpus": 0}, request_router_config=router
    )(Engine)
    yield serve.run(deployment.bind(), name="routed", route_prefix=None)
    serve.shutdown()


def test_requests_go_where_their_prefix_is(handle: DeploymentHandle) -> None:
    def ask(first_token: int) -> tuple[int, int]:
        prompt = list(range(first_token, first_token + PROMPT_TOKENS))
        answer: tuple[int, int] = handle.remote(token_ids=prompt).result(timeout_s=PATIENCE_S)
        return answer

    homes: dict[int, int] = {}

    def finds_homes() -> bool:
        """Compute a prompt and send it again; return whether each replica has one that was always
        hit there."""
        first_token = next(fresh)
        home, num_hit = ask(first_token)
        assert num_hit == 0
        if all(ask(first_token) == (home, PROMPT_TOKENS - 16) for _ in range(3)):
            homes[home] = first_token
        return len(homes) == 2

    fresh = itertools.count(step=1000)
    wait_until(finds_homes, limit_s=PATIENCE_S)

    seen = set()
    for request in ({}, {"token_ids": None}) * 10:
        seen.add(handle.remote(**request).result(timeout_s=PATIENCE_S)[0])
    assert seen == set(homes)

    # One of them dies: its prompt is computed elsewhere, and hit there from then on.
    dead, first_token = homes.popitem()
    os.kill(dead, signal.SIGKILL)
    elsewhere = [ask(first_token)]
    while elsewhere[-1][1] == 0:
        elsewhere.append(ask(first_token))
        assert len(elsewhere) < 100
    assert dead not in {home for home, _ in elsewhere}


def test_a_request_that_ends_before_it_is_routed_leaves_no_load() -> None:
    """Serve reports the end by a callback, and the replica when it has accepted."""
    router = PrefixCacheRequestRouter.__new__(PrefixCacheRequestRouter)  # no deployment around it
    router.initialize_state(block_tokens=16)
    there = [ReplicaID(name, DeploymentID("engine")) for name in ("one", "two")]
    with router.prefixes as prefixes, closing(asyncio.new_event_loop()) as loop:
        for replica in there:
            prefixes.add_replica(replica.unique_id, "tcp://127.0.0.1:1", "tcp://127.0.0.1:1")

        def loads() -> list[float]:
            return [state.load for state in prefixes.statistics().replicas.values()]

        for number in range(3):
            metadata = RequestMetadata(f"r{number}", f"internal-{number}")
            request = PendingRequest(
                [], {"token_ids": [1] * 32}, metadata, future=asyncio.Future(loop=loop)
            )
            # The first replica refuses it, which ends that attempt; the second one accepts.
            router.on_request_completed(there[0], f"internal-{number}")
            router.on_request_routed(request, there[1], None)
            assert loads() == [0.0, 2.0]
            router.on_request_completed(there[1], f"internal-{number}")
            assert loads() == [0.0, 0.0]
            # Another one is so quick that its end is reported first.
            metadata.internal_request_id = f"quick-{number}"
            router.on_request_completed(there[0], f"quick-{number}")
            router.on_request_routed(request, there[0], None)
            assert loads() == [0.0, 0.0]


def test_a_publisher_that_wants_keys_is_not_shown_to_everybody() -> None:
    endpoints = EventEndpoints("tcp://h:1", "tcp://h:2", keys=generate_curve_keys())
    with pytest.raises(ConfigurationError, match="needs keys"):
        event_metadata(endpoints)
