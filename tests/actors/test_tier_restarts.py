"""Tiers on Ray outlive the processes that use them; only files outlive all processes.

Every byte that is loaded again is compared by the forward that reads it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors import KVCacheCluster
from actors.clusters.placement import wait_until
from kvcache.base.errors import KVCacheError
from kvcache.coordinator.settings import OffloadStatistics
from tests.actors.test_everything_killed import (
    MARK,
    kill_at_once,
    mark,  # noqa: F401  a fixture
    marked,
    shared_memory,
)
from tests.actors.tier_driver import BLOCKS, FOUND, play_all, play_until_found, tier_config

pytestmark = [pytest.mark.ray, pytest.mark.faults]

SOON_S = 90.0
PROMPTS = range(6)
ALL_FOUND = [FOUND] * len(PROMPTS)
HOST_BLOCKS = len(PROMPTS) * BLOCKS + 16
"""Enough for all of them."""


DRIVER = """
import json, sys, threading
import ray
from actors import KVCacheCluster
from actors.memory_service import find_memory_services
from kvcache.config import parse_config
from tests.actors.tier_driver import play

ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
cluster = KVCacheCluster.launch(parse_config(json.loads(sys.argv[1])))
client = cluster.client()
for number in range(4):
    play(client, number)
(service,) = find_memory_services(cluster.name)
print("keeps", ray.get(service.report.remote()).statistics.num_segments, "segments", flush=True)
threading.Event().wait()
"""


class Player:
    """Plays prompts on a cluster on Ray, and asks it how its tiers are."""

    def __init__(self, cluster: KVCacheCluster, client: Any) -> None:
        self.cluster, self.client = cluster, client

    def play_all(self) -> list[int]:
        found = play_all(self.client, PROMPTS, self.statistics)
        assert self.client.failures == ()
        return found

    def find(self, number: int) -> None:
        play_until_found(self.client, number, self.statistics)
        assert self.client.failures == ()

    def statistics(self) -> OffloadStatistics:
        """Return the statistics of the coordinator, once there is one."""
        answers: list[OffloadStatistics] = []

        def is_answered() -> bool:
            try:
                told = self.cluster.statistics().coordinator
            except KVCacheError:
                return False
            if told is not None and told.offload is not None:
                answers.append(told.offload)
            return bool(answers)

        assert wait_until(is_answered, SOON_S)
        return answers[-1]

    def transfers(self, rank: int) -> Any:
        worker = self.cluster.statistics().workers[rank]
        return worker.transfers

    def kill_worker(self, rank: int) -> None:
        victim = self.cluster.status().ranks[rank].process_id
        os.kill(victim, signal.SIGKILL)
        assert wait_until(lambda: self._is_replaced(rank, victim), SOON_S)

    def kill_coordinator(self) -> None:
        victim = self.cluster.status().coordinator_process_id
        os.kill(victim, signal.SIGKILL)
        assert wait_until(lambda: self._is_ready_without(victim), SOON_S)

    def _is_replaced(self, rank: int, victim: int) -> bool:
        status = self.cluster.status()
        return status.state == "ready" and status.ranks[rank].process_id != victim

    def _is_ready_without(self, victim: int) -> bool:
        try:
            status = self.cluster.status()
        except KVCacheError:
            return False
        return status.state == "ready" and status.coordinator_process_id != victim


def test_host_memory_outlives_a_worker_and_the_coordinator(
    launch: Any, traces: Any, tmp_path: Path
) -> None:
    cluster = launch(tier_config(tmp_path, host_blocks=HOST_BLOCKS))
    with cluster.client() as client:
        player = Player(cluster, client)
        player.play_all()
        assert player.play_all() == ALL_FOUND

        player.kill_worker(1)
        player.find(0)
        assert player.play_all() == ALL_FOUND
        told = player.statistics()
        assert (told.num_fetched_tokens, told.num_failed_jobs) == (0, 0)
        assert told.num_loaded_tokens >= sum(ALL_FOUND)
        assert [player.transfers(rank).host.origin for rank in (0, 1)] == ["fresh", "attached"]

        player.kill_coordinator()
        player.find(0)
        assert player.play_all() == ALL_FOUND
        told = player.statistics()
        assert told.num_adopted_blocks >= len(PROMPTS) * BLOCKS
        assert told.num_failed_jobs == 0
    cluster.stop()
    traces.check(cluster.name)


def test_files_outlive_the_cluster_and_a_rank_that_lost_them_is_served_without(
    launch: Any, traces: Any, tmp_path: Path
) -> None:
    config = tier_config(tmp_path, "test-tiers-again")
    cluster = launch(config)
    with cluster.client() as client:
        Player(cluster, client).play_all()
    cluster.stop()
    traces.check(cluster.name)

    cluster = launch(config)
    with cluster.client() as client:
        player = Player(cluster, client)
        player.find(0)
        assert player.play_all() == ALL_FOUND
        assert player.statistics().num_fetched_tokens >= sum(ALL_FOUND) // 2
        assert player.transfers(1).files.problems == {}

        (here,) = tmp_path.glob("*/*/rank1")
        for path in sorted(here.glob("??/*.kvb")):
            os.truncate(path, path.stat().st_size // 2)
        assert sum(player.play_all()) < sum(ALL_FOUND)
        assert player.transfers(1).files.problems["truncated"] > 0
        assert player.play_all() == ALL_FOUND  # they were computed and written again

        here.rename(tmp_path / "elsewhere")
        here.write_text("no directory")
        player.kill_worker(1)
        player.play_all()
        told = player.statistics()
        assert told.tiers.disk_problem == "rank 1 works without files: look into its log"
        assert "cannot be used (File exists)" in player.transfers(1).files_problem
        assert client.failures == ()
    cluster.stop()
    traces.check(cluster.name)


def test_everything_killed_at_once_leaves_files_only(tmp_path: Path, mark: str) -> None:  # noqa: F811
    before = shared_memory()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, tier_config(tmp_path).model_dump_json()],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: mark},
    )
    assert driver.stdout is not None
    said = next((line for line in driver.stdout if line.startswith("keeps ")), "it ended")
    everything = [process.pid for process in marked(mark)]
    kill_at_once(everything)
    driver.communicate()
    assert said == "keeps 2 segments\n"
    assert wait_until(lambda: not marked(mark), SOON_S), marked(mark)
    assert shared_memory() - before == set()
    assert list(tmp_path.glob("*/*/rank0/??/*.kvb"))
