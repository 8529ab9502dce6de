"""Dynamo's selection service and radix tree, in process, answer like our own index.

The service subscribes by itself, as in Ray Serve's KV-aware router. A subscriber feeds the tree,
decoding with vLLM's types and hashing with Dynamo's own function.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.published_cluster import MODEL, Answer, Prompt, PublishedCluster
from tests.interop.router_process import RouterProcess

pytestmark = pytest.mark.interop

FIRST, SECOND = 1, 2


@pytest.fixture
def router(router_python: Path, tmp_path: Path) -> Iterator[RouterProcess]:
    with RouterProcess(router_python, tmp_path / "host") as made:
        yield made


def subscribe(router: RouterProcess, cluster: PublishedCluster, worker_id: int = FIRST) -> None:
    worker = {
        "worker_id": worker_id,
        "model_name": MODEL,
        "endpoint": f"http://127.0.0.1/{worker_id}",
        "block_size": cluster.block_size,
        "kv_events_endpoint": cluster.endpoint,
        "replay_endpoint": cluster.replay_endpoint,
    }
    assert router.ask("subscribe", worker=worker)["lifecycle"] == "schedulable"


def asked(prompt: Prompt) -> dict[str, Any]:
    return {
        "model_name": MODEL,
        "token_ids": prompt.token_ids.tolist(),
        "lora_name": prompt.lora_name,
        "cache_salt": prompt.cache_salt,
    }


def answers(
    router: RouterProcess, prompts: list[Prompt], block_size: int
) -> list[dict[int, Answer]]:
    found = []
    for reply in router.ask("overlap", requests=[asked(prompt) for prompt in prompts]):
        found.append(
            {
                each["worker_id"]: Answer(
                    each["device_blocks"] * block_size,
                    each["host_pinned_blocks"] * block_size,
                    each["disk_blocks"] * block_size,
                )
                for each in reply["workers"]
            }
        )
    return found


def become_equal(router: RouterProcess, *clusters: PublishedCluster) -> None:
    """Wait until the service knows the same of all clusters, workers 1, 2, ..., as we do."""
    found: list[Any] = []
    prompts = [prompt for cluster in clusters for prompt in cluster.questions()]
    # A prompt of less than a block has nothing to query.
    prompts = [p for p in prompts if len(p.token_ids) >= clusters[0].block_size]

    def are_equal() -> bool:
        for cluster in clusters:
            cluster.settle()
        replies = answers(router, prompts, clusters[0].block_size)
        found[:] = [
            (prompt, got, wanted)
            for prompt, got in zip(prompts, replies, strict=True)
            for wanted in [{i: c.in_order(prompt) for i, c in enumerate(clusters, FIRST)}]
            if got != wanted
        ]
        return not found

    try:
        clusters[0].wait_until(are_equal, "the service knows what we know")
    except AssertionError as error:
        raise AssertionError(f"{found[:5]}\n{router.said()}") from error


def test_the_service_follows_a_cluster_with_tiers(router: RouterProcess, tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    with PublishedCluster(20, num_host_blocks=120, directory=str(directory)) as cluster:
        cluster.load(10)
        subscribe(router, cluster)
        for _ in range(3):
            cluster.load(10)
            become_equal(router, cluster)
        assert cluster.client.reset_prefix_cache()
        become_equal(router, cluster)


def test_the_service_selects_who_has_the_prompt(router: RouterProcess) -> None:
    with PublishedCluster(21) as first, PublishedCluster(22) as second:
        subscribe(router, first, FIRST)
        subscribe(router, second, SECOND)
        first.load(8)
        second.load(8)
        become_equal(router, first, second)
        for cluster, worker_id in ((first, FIRST), (second, SECOND)):
            cached = [p for p in cluster.published if cluster.expected(p).device >= 2 * 16]
            assert cached
            for prompt in cached:
                assert router.ask("select", request=asked(prompt))["worker_id"] == worker_id


def test_a_radix_tree_fed_through_the_types_of_vllm_matches_what_we_match(
    router: RouterProcess,
) -> None:
    with PublishedCluster(23) as cluster:
        cluster.load(6)
        router.ask("follow", endpoint=cluster.endpoint, replay_endpoint=cluster.replay_endpoint)
        for _ in range(3):
            cluster.load(10)
            prompts = [prompt for prompt in cluster.questions() if prompt.cache_salt is None]
            plain = [
                {
                    "token_ids": prompt.token_ids.tolist(),
                    "block_size": cluster.block_size,
                    "lora_name": prompt.lora_name,
                }
                for prompt in prompts
            ]
            found: dict[str, Any] = {}

            def are_equal(
                prompts: list[Prompt] = prompts,
                plain: list[dict[str, Any]] = plain,
                found: dict[str, Any] = found,
            ) -> bool:
                cluster.settle()
                found.update(router.ask("leading", prompts=plain))
                expected = [cluster.expected(p).device // cluster.block_size for p in prompts]
                assert not found["problem"], found["problem"]
                return bool(found["counts"] == expected)

            cluster.wait_until(are_equal, f"the tree knows what we know: {found}")
