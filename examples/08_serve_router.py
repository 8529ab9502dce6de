"""Prefix-aware routing in Ray Serve: requests go where their prefix is cached.

The same documents and questions as in 06_prefix_router.py, this time as a Serve deployment of two
replicas, each with a cluster inside. A replica's metadata has the address of its events;
`PrefixCacheRequestRouter`, in every process that has a handle, follows them and ranks replicas.
For comparison, the example first runs a router that takes turns.

    pip install 'kvcache[serve]'
    .venv/bin/python examples/08_serve_router.py

It joins the Ray cluster that runs on this machine or that RAY_ADDRESS names. If there is none, it
starts one and ends it again.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.serve.config import ProxyLocation, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from actors.local import LocalCluster
from actors.routing.event_endpoints import endpoints_in
from actors.routing.serve_router import PrefixCacheRequestRouter, event_metadata
from kvcache import NewRequest, StepRequest
from kvcache.config import ClusterConfig, parse_config

NUM_DOCUMENTS = 6
DOCUMENT_TOKENS = 24 * 16
QUESTION_TOKENS = 24
NUM_ROUNDS = 6
HEARTBEAT_S = 0.5
PATIENCE_S = 60.0


class EitherRouter(PrefixCacheRequestRouter):
    """Routes by prefix, or in turn if the request says so, for comparison."""

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        """Return the replicas, the one to ask first."""
        if pending_request is not None and pending_request.kwargs.get("in_turn"):
            replicas = sorted(candidate_replicas, key=lambda r: r.replica_id.unique_id)
            turn = self._turn = getattr(self, "_turn", 0) + 1
            pending_request.routing_context.should_backoff = True
            return [[replicas[turn % len(replicas)]]]
        return await super().choose_replicas(candidate_replicas, pending_request)


@serve.deployment(
    num_replicas=2,
    ray_actor_options={"num_cpus": 0},
    request_router_config=RequestRouterConfig(
        request_router_class=EitherRouter,
        # The router learns of a request's end a moment after its result. If the next one is sent
        # at once, the last one still counts as load, and a cached prefix must outweigh it.
        request_router_kwargs={"overlap_weight": 2.0},
    ),
)
class Engine:
    """An engine that computes one prompt after the other, with a cluster in its process."""

    def __init__(self) -> None:
        self._cluster = LocalCluster(config_of(f"replica-{os.getpid()}"))
        self._client = self._cluster.client()
        self._number = 0

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the addresses of this replica's events, for routers."""
        statistics = self._cluster.coordinator.statistics().events
        return event_metadata(endpoints_in(statistics, self._cluster.config.name, HEARTBEAT_S))

    async def __call__(self, token_ids: list[int], in_turn: bool = False) -> tuple[str, int]:
        """Compute a prompt; return who did, and how many of its tokens were cached."""
        self._number += 1
        request_id = f"r{self._number}"
        prompt = np.array(token_ids, np.int32)
        new = NewRequest(request_id, prompt, max_new_tokens=len(prompt))
        step = self._client.submit(StepRequest(new=(new,)))
        num_hit = int(self._client.wait_result(step).num_hit_tokens[0])
        for request in ({"finished": (request_id,)}, {}):
            self._client.wait_finished(step)
            step = self._client.submit(StepRequest(**request, completed_step=step))
        self._client.wait_finished(step)
        return self._cluster.config.name, num_hit


def main() -> None:
    ray.init(log_to_driver=False, include_dashboard=False)
    serve.start(proxy_location=ProxyLocation.Disabled, logging_config={"log_level": "ERROR"})
    try:
        handle = serve.run(Engine.bind(), name="prefix-router-example", route_prefix=None)
        follow_replicas(handle)

        print("Asked in turn:")
        in_turn = ask(handle, questions(0), in_turn=True)
        print(f"  {in_turn:.1%} of the tokens were cached")
        print("Asked where the prefix is:")
        routed = ask(handle, questions(1_000_000), in_turn=False)
        print(f"  {routed:.1%} of the tokens were cached")
        promise(routed > 1.3 * in_turn, "it matters who is asked")
    finally:
        serve.shutdown()
        ray.shutdown()
    print("\nAll as promised.")


def config_of(name: str) -> ClusterConfig:
    """A small model, and a pool of 100 blocks: three documents of 24, and questions."""
    block = 2 * 16 * 2 * 8 * 2  # keys and values of 16 tokens, two heads of eight halves
    anywhere = "tcp://127.0.0.1:0"
    return parse_config(
        {
            "name": name,
            "model": {
                "name": "tiny",
                "max_model_len": 512,
                "layers": [{"kind": "full", "num_kv_heads": 2, "head_size": 8}],
            },
            "cache": {"memory_per_rank": 101 * block},
            "events": {
                "enabled": True,
                "endpoint": anywhere,
                "replay_endpoint": anywhere,
                "heartbeat_s": HEARTBEAT_S,
            },
            "content_check": {"enabled": True},
        }
    )


def follow_replicas(handle: DeploymentHandle) -> None:
    """Compute prompts until this process's router follows both replicas.

    Unknown prompts go to the replicas in turn. A prompt that always goes to the same replica shows
    that the router knows that replica's blocks.
    """
    give_up_s = time.monotonic() + PATIENCE_S
    homes: set[str] = set()
    number = 0
    while len(homes) < 2:
        promise(time.monotonic() < give_up_s, "the router follows its replicas")
        number += 1
        prompt = list(range(5_000_000 + 1000 * number, 5_000_000 + 1000 * number + DOCUMENT_TOKENS))
        answers = {handle.remote(token_ids=prompt).result()[0] for _ in range(4)}
        homes |= answers if len(answers) == 1 else set()
    print(f"After {number} prompts, each is found where it was computed.")


def questions(first_token: int) -> list[list[int]]:
    """A question about each document, round after round, in an order that changes."""
    choice = random.Random(7)
    prompts = []
    for _ in range(NUM_ROUNDS):
        for document in choice.sample(range(NUM_DOCUMENTS), NUM_DOCUMENTS):
            start = first_token + 10_000 * document
            question = [choice.randrange(50_000) for _ in range(QUESTION_TOKENS)]
            prompts.append([*range(start, start + DOCUMENT_TOKENS), *question])
    return prompts


def ask(handle: DeploymentHandle, prompts: list[list[int]], *, in_turn: bool) -> float:
    """Compute every prompt, one after the other; return the share that was cached."""
    num_hit = 0
    for prompt in prompts:
        num_hit += handle.remote(token_ids=prompt, in_turn=in_turn).result()[1]
    return num_hit / sum(map(len, prompts))


def promise(holds: bool, what: str) -> None:
    """End the example with exit status 1 unless `what` was promised holds."""
    if not holds:
        sys.exit(f"not as promised: {what}")


if __name__ == "__main__":
    main()
