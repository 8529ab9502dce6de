"""The memory service of a node is killed or stopped: it restarts, and memory is kept again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.actors.conftest import launch, traces  # noqa: F401  fixtures
from tests.actors.test_tier_restarts import ALL_FOUND, HOST_BLOCKS, Player
from tests.actors.tier_driver import tier_config
from tests.attack.siege import is_keeping_all, wait_for_memory_service

pytestmark = [pytest.mark.ray, pytest.mark.faults]


def test_a_killed_memory_service_comes_back_and_memory_outlives_its_worker_again(
    launch: Any,  # noqa: F811
    traces: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    config = tier_config(tmp_path, host_blocks=HOST_BLOCKS, offload={"disk": None})
    cluster = launch(config)
    with cluster.client() as client:
        player = Player(cluster, client)
        player.play_all()
        before = wait_for_memory_service(cluster, is_keeping_all)
        assert cluster.status().warnings == ()

        os.kill(before.process_id, signal.SIGSTOP)
        away = wait_for_memory_service(cluster, lambda status: bool(status.problem))
        assert away.problem == "it does not answer"
        assert player.play_all() == ALL_FOUND  # no step waits for a memory service
        (warning,) = cluster.status().warnings
        assert "host memory of ranks 0, 1 now ends with their processes" in warning
        assert cluster.status().state == "ready"

        os.kill(before.process_id, signal.SIGKILL)
        after = wait_for_memory_service(
            cluster,
            lambda status: status.process_id != before.process_id and is_keeping_all(status),
        )
        assert after.num_restarts == 1
        assert cluster.status().warnings == ()
        assert player.play_all() == ALL_FOUND

        player.kill_worker(1)
        player.find(0)
        assert player.play_all() == ALL_FOUND
        assert [player.transfers(rank).host.origin for rank in (0, 1)] == ["fresh", "attached"]
        assert player.statistics().num_failed_jobs == 0
        assert is_keeping_all(wait_for_memory_service(cluster, lambda status: True))
    cluster.stop()
    traces.check(cluster.name)
