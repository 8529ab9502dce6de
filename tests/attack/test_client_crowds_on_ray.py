"""The crowds of test_client_crowds.py on a real cluster: the actor is asked for leftovers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from actors import KVCacheCluster
from actors.clusters.placement import wait_until
from actors.connect import this_node
from kvcache.protocol.step import StepRequest
from tests.actors.conftest import build_config
from tests.attack.crowd_member import NUM_MEMBERS
from tests.attack.crowded_cluster import DEADLINE_S
from tests.attack.test_client_crowds import NUM_CLIENTS, ROOT, prompt

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster(ray_cluster: str) -> Iterator[KVCacheCluster]:
    """A cluster with room for the crowd. A client that is merely silent is not given up."""
    config = build_config(
        "crowd",
        cache={"memory_per_rank": "4MiB"},
        parallel={"tensor_parallel_size": 1},
        deadlines={"client_silence_s": 600.0, "reattach_s": 2.0},
        scheduler={"max_num_seqs": 256},
    )
    with KVCacheCluster.launch(config) as launched:
        yield launched


def left(cluster: KVCacheCluster) -> tuple[int, int, int]:
    """Return how many clients, requests and blocks in use there are."""
    statistics: Any = cluster.coordinator_statistics()
    manager = statistics.manager
    core = manager.core
    return (
        statistics.num_clients,
        manager.num_running_requests + manager.num_preempted_requests,
        core.num_blocks - core.num_free_blocks,
    )


def await_nothing_left(cluster: KVCacheCluster) -> None:
    assert wait_until(lambda: left(cluster) == (0, 0, 0), DEADLINE_S), left(cluster)


def test_async_clients_that_close_together_leave_nothing(cluster: KVCacheCluster) -> None:
    async def crowd() -> None:
        clients = [await cluster.async_client() for _ in range(NUM_CLIENTS)]
        first = [await c.submit(StepRequest(new=(prompt(c.client_id),))) for c in clients]
        await asyncio.gather(*(c.wait_result(n) for c, n in zip(clients, first, strict=True)))
        for client in clients:
            for _ in range(3):
                await client.submit(StepRequest())
        await asyncio.gather(*(client.close() for client in clients))

    for _ in range(2):
        asyncio.run(crowd())
        await_nothing_left(cluster)


@pytest.mark.faults
def test_a_process_that_is_killed_with_requests_leaves_nothing(cluster: KVCacheCluster) -> None:
    endpoint = ray.get(cluster._parts.coordinator.endpoint_for.remote(this_node()))
    arguments = [endpoint.address, cluster.config.model_dump_json()]
    command = [sys.executable, "-m", "tests.attack.crowd_member", *arguments]
    member = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert member.stdout is not None and member.stdout.readline() == b"attached\n"
        assert left(cluster)[:2] == (NUM_MEMBERS, NUM_MEMBERS)
    finally:
        member.kill()
        member.communicate()
    await_nothing_left(cluster)
