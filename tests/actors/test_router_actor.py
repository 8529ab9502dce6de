"""The router as an actor, and the commands that follow events, on a real cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import RayTaskError

from actors import KVCacheClient, KVCacheCluster
from actors.names import RAY_NAMESPACE, router_name
from actors.routing.router import start_router
from actors.routing.scores import RouterSettings
from kvcache import NewRequest, StepRequest
from tests.cli.commands import KVCACHE
from tests.waiting import wait_until

pytestmark = pytest.mark.ray

PROMPT_TOKENS = 10 * 16
PATIENCE_S = 60.0
ROOT = Path(__file__).resolve().parents[2]


def play(client: KVCacheClient, name: str, first_token: int) -> np.ndarray:
    prompt = np.arange(first_token, first_token + PROMPT_TOKENS, dtype=np.int32)
    new = NewRequest(name, prompt, max_new_tokens=PROMPT_TOKENS)
    completed = -1
    for request in ({"new": (new,)}, {"finished": (name,)}, {}):
        step = client.submit(StepRequest(**request, completed_step=completed))
        client.wait_finished(step)
        completed = step
    return prompt


def kvcache(
    *arguments: str, address: str, has_enough: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Run a command in a process of its own, until it ends or a line of JSON is enough; return the
    lines."""
    lines: list[dict[str, Any]] = []
    with subprocess.Popen(
        [*KVCACHE, *arguments],
        env={**os.environ, "RAY_ADDRESS": address},
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(json.loads(line))
            if has_enough(lines[-1]):
                process.send_signal(signal.SIGINT)
                break
        assert process.wait(PATIENCE_S) == 0
    return lines


@pytest.mark.launches
def test_an_actor_ranks_clusters_and_commands_follow_them(
    make_config: Any, launch: Callable[..., KVCacheCluster], ray_cluster: str
) -> None:
    anywhere = "tcp://127.0.0.1:0"
    events = {
        "enabled": True,
        "endpoint": anywhere,
        "replay_endpoint": anywhere,
        "heartbeat_s": 0.3,
    }
    cluster = launch(make_config(parallel={"tensor_parallel_size": 1}, events=events))
    router = start_router("test-router", RouterSettings(block_tokens=16))
    found: Any = ray.get_actor(router_name("test-router"), namespace=RAY_NAMESPACE)
    try:
        ray.get(router.add_cluster.remote(cluster.name))
        ray.get(router.add_replica.remote("silent", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1"))
        with cluster.client() as client:
            prompt = play(client, "r0", 1000)
            assert play(client, "r1", 1000) is not None

        def ranked() -> list[tuple[str, int, bool]]:
            rows = ray.get(found.rank.remote(prompt.tolist()))
            return [(row.name, row.num_cached_tokens, row.is_stale) for row in rows]

        wait_until(lambda: ranked()[0] == (cluster.name, PROMPT_TOKENS, False))
        assert ranked()[1] == ("silent", 0, True)
        ray.get(router.report_load.remote(cluster.name, 11.0))
        assert [row[0] for row in ranked()] == ["silent", cluster.name]
        statistics = ray.get(router.statistics.remote())
        assert statistics.replicas[cluster.name].load == 11.0
        assert ray.get(router.replicas.remote()) == (cluster.name, "silent")
        with pytest.raises(RayTaskError, match="add it first"):
            ray.get(router.begin.remote("r0", "nobody", 16))

        dumped = kvcache(
            "events", "dump", cluster.name, address=ray_cluster, has_enough=lambda line: False
        )
        stored = [token for line in dumped for token in line.get("token_ids", ())]
        assert stored == prompt.tolist()
        watch = ("watch", cluster.name, "--json", "--for", f"{PATIENCE_S}")
        seen = kvcache(*watch, address=ray_cluster, has_enough=lambda line: line["is_same_state"])
        assert seen[-1]["is_same_state"] is True
        assert seen[-1]["publisher_checksum"] == seen[-1]["checksum"]
        # The second time, all but the last block, which holds the token to compute.
        assert seen[-1]["hit_rate"] == (PROMPT_TOKENS - 16) / (2 * PROMPT_TOKENS)
    finally:
        ray.kill(router)
