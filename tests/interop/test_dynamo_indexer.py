"""Dynamo's indexer, subscribed to a cluster under load, answers like our own index.

Compared are the leading tokens of every played prompt, on the device, in host memory and in files,
under every salt and adapter; and the hashes of all cached blocks, medium by medium.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.interop.dynamo_indexer import DynamoIndexer
from tests.interop.published_cluster import Prompt, PublishedCluster, fixed_places

pytestmark = pytest.mark.interop

StartIndexer = Callable[[], DynamoIndexer]


def differences(cluster: PublishedCluster, indexer: DynamoIndexer) -> list[str]:
    found = []
    ours, theirs = cluster.hashes(), indexer.hashes()
    for medium in sorted({*ours, *theirs}):
        here, there = ours.get(medium, set()), theirs.get(medium, set())
        if here != there:
            found.append(f"{medium}: {len(here - there)} missing, {len(there - here)} too many")
    for prompt in cluster.questions() if not found else ():
        expected, answer = cluster.in_order(prompt), indexer.answer(prompt)
        if answer != expected:
            found.append(f"{prompt}: {answer}, ours is {expected}")
    return found


def become_equal(cluster: PublishedCluster, indexer: DynamoIndexer) -> None:
    """Wait until both know the same of a quiet cluster, by all possible queries."""
    cluster.settle()
    found: list[str] = ["not asked yet"]

    def are_equal() -> bool:
        cluster.settle()
        found[:] = differences(cluster, indexer)
        return not found

    try:
        cluster.wait_until(are_equal, "the indexer knows what we know")
    except AssertionError as error:
        raise AssertionError(f"{found[:5]}\n{indexer.said()}") from error


def test_who_joins_before_the_first_prompt_follows_all_evictions(
    start_indexer: StartIndexer,
) -> None:
    indexer = start_indexer()
    with PublishedCluster(1) as cluster:
        indexer.register(cluster)
        for _ in range(4):
            cluster.load(10)
            become_equal(cluster, indexer)
        lost = cluster.expected(cluster.published[0])
        assert lost.device < len(cluster.published[0].token_ids) // cluster.block_size
        assert len(cluster.hashes()["GPU"]) > 32


def test_who_joins_late_gets_everything_at_once(start_indexer: StartIndexer) -> None:
    indexer = start_indexer()
    with PublishedCluster(2) as cluster:
        cluster.load(20)
        indexer.register(cluster)
        cluster.load(3)
        become_equal(cluster, indexer)
        cluster.load(10)
        become_equal(cluster, indexer)
        cluster.settle()
        assert cluster.statistics()["num_snapshots"] > 0


@pytest.mark.parametrize("history_batches", [10_000, 2], ids=["history held", "history gone"])
def test_who_misses_a_stretch_asks_for_it(
    start_indexer: StartIndexer, history_batches: int
) -> None:
    indexer = start_indexer()
    with PublishedCluster(3, history_batches=history_batches) as cluster:
        indexer.register(cluster)
        cluster.load(10)
        become_equal(cluster, indexer)
        cluster.settle()
        before = cluster.statistics()
        indexer.pause()
        cluster.load(10)
        cluster.settle()
        assert differences(cluster, indexer), "nothing was lost: this shows nothing"
        indexer.resume()
        become_equal(cluster, indexer)
        # The answer had the missed batches if they are kept, and the whole state otherwise.
        statistics = cluster.statistics()
        is_held = history_batches > 2
        assert (statistics["num_replays"] > before["num_replays"]) == is_held
        assert (statistics["num_snapshots"] > before["num_snapshots"]) != is_held


def test_a_publisher_that_is_killed_is_followed_when_it_is_back(
    start_indexer: StartIndexer,
) -> None:
    indexer = start_indexer()
    with PublishedCluster(4, **fixed_places()) as cluster:
        indexer.register(cluster)
        cluster.load(8)
        become_equal(cluster, indexer)
        for _ in range(2):
            num_restarts = cluster.statistics()["num_publisher_restarts"]
            os.kill(cluster.statistics()["process_id"], signal.SIGKILL)
            cluster.load(4)
            cluster.wait_until(
                lambda before=num_restarts: (
                    cluster.statistics()["num_publisher_restarts"] > before
                    and "last_seq" in cluster.statistics()
                ),
                "another publisher is there",
            )
            cluster.load(4)
            become_equal(cluster, indexer)


def test_a_reset_clears_it(start_indexer: StartIndexer) -> None:
    indexer = start_indexer()
    with PublishedCluster(5, num_host_blocks=200) as cluster:
        indexer.register(cluster)
        cluster.load(8)
        become_equal(cluster, indexer)
        assert cluster.hashes()["GPU"]
        assert cluster.client.reset_prefix_cache()
        become_equal(cluster, indexer)
        assert "GPU" not in indexer.hashes()
        cluster.load(8)
        become_equal(cluster, indexer)


def test_host_memory_and_files_are_told_apart(start_indexer: StartIndexer, tmp_path: Path) -> None:
    indexer = start_indexer()
    directory = tmp_path / "files"
    directory.mkdir()
    with PublishedCluster(6, num_host_blocks=120, directory=str(directory)) as cluster:
        indexer.register(cluster)
        for _ in range(4):
            cluster.load(12)
            become_equal(cluster, indexer)
        assert set(indexer.hashes()) == {"GPU", "CPU", "STORAGE"}
        answers = [indexer.answer(prompt) for prompt in cluster.published]
        assert any(a.host > a.device for a in answers), "nothing was in host memory alone"
        assert any(a.storage > a.host for a in answers), "nothing was in files alone"
        late = start_indexer()
        late.register(cluster)
        become_equal(cluster, late)


def test_adapters_and_salts_are_never_mixed_up(start_indexer: StartIndexer) -> None:
    indexer = start_indexer()
    tokens = np.arange(160, dtype=np.int32)
    with PublishedCluster(7) as cluster:
        indexer.register(cluster)
        salted = Prompt(tokens, cache_salt="pepper")
        cluster.play(salted, Prompt(tokens + 1000, lora_name="poet"))
        cluster.play(Prompt(tokens + 2000, "poet", "pepper"))
        become_equal(cluster, indexer)
        assert indexer.answer(salted).device == 160
        assert indexer.answer(Prompt(tokens)).device == 0
        assert indexer.answer(Prompt(tokens, cache_salt="cumin")).device == 0
        assert indexer.answer(Prompt(tokens + 1000, lora_name="lawyer")).device == 0
        assert indexer.answer(Prompt(tokens + 2000, "poet")).device == 0
        assert indexer.answer(Prompt(tokens + 2000, "poet", "pepper")).device == 160


def test_one_block_per_event_is_the_same_to_it(start_indexer: StartIndexer) -> None:
    indexer = start_indexer()
    with PublishedCluster(8, publish_one_block_per_event=True) as cluster:
        cluster.load(4)
        indexer.register(cluster)
        cluster.load(8)
        become_equal(cluster, indexer)


def test_positions_are_read_as_well_but_salted_blocks_are_passed_over(
    start_indexer: StartIndexer,
) -> None:
    """It has no position for a salt. The value there makes it drop the event, so that salted
    blocks are not found; they are never taken for others."""
    indexer = start_indexer()
    tokens = np.arange(160, dtype=np.int32)
    with PublishedCluster(9, encoding="array", salts=(None,)) as cluster:
        cluster.load(4)
        indexer.register(cluster)
        cluster.load(8)
        become_equal(cluster, indexer)
        cluster.play(Prompt(tokens, cache_salt="pepper"))
        after = Prompt(tokens + 1000)
        cluster.play(after)
        cluster.settle()
        cluster.wait_until(lambda: indexer.answer(after).device == 160, "it knows what came after")
        for salt in (None, "pepper", "cumin"):
            assert indexer.answer(Prompt(tokens, cache_salt=salt)).device == 0
        assert cluster.expected(Prompt(tokens, cache_salt="pepper")).device == 160


def test_who_forgets_a_publisher_can_come_back(start_indexer: StartIndexer) -> None:
    indexer = start_indexer()
    with PublishedCluster(10) as cluster:
        indexer.register(cluster)
        cluster.load(6)
        become_equal(cluster, indexer)
        indexer.unregister()
        cluster.load(6)
        indexer.register(cluster)
        become_equal(cluster, indexer)


def test_replicas_are_told_apart_by_their_rank(start_indexer: StartIndexer) -> None:
    indexer = start_indexer()
    tokens = np.arange(160, dtype=np.int32)
    with PublishedCluster(11) as first, PublishedCluster(12, data_parallel_rank=1) as second:
        indexer.register(first)
        indexer.register(second, rank=1)
        first.play(Prompt(tokens))
        second.play(Prompt(tokens[:80]), Prompt(tokens + 1000))
        expected = [{0: 160, 1: 80}, {1: 160}]
        second.wait_until(
            lambda: [indexer.device_by_rank(Prompt(tokens + n)) for n in (0, 1000)] == expected,
            f"ranks have {expected}",
        )
