"""Log lines of a cluster's processes: in the file that its status names."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.actors.conftest import Launch, MakeConfig
from tests.waiting import wait_until

pytestmark = pytest.mark.ray

DEADLINE_S = 90.0


def test_the_log_of_a_cluster_is_in_the_file_that_its_status_names(
    launch: Launch, make_config: MakeConfig
) -> None:
    cluster = launch(make_config())
    path = Path(cluster.status().log_path)
    assert path.is_file()
    await_line(path, " INFO kvcache.coordinator.coordinator: epoch 1 is ready after ")
    victim = cluster.status().ranks[1].process_id
    os.kill(victim, signal.SIGKILL)
    await_line(path, " WARNING kvcache.coordinator.coordinator: epoch 1 ends: rank 1 is lost, ")
    await_line(path, " INFO actors.workers.replacement: rank 1: its replacement begins in 0 s")
    await_line(path, " INFO actors.workers.replacement: rank 1 is served again by process ")
    await_line(path, " INFO kvcache.coordinator.coordinator: epoch 2 is ready after ")


def await_line(path: Path, part: str) -> None:
    wait_until(lambda: part in path.read_text(), path.read_text, limit_s=DEADLINE_S)
