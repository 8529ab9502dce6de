"""Garbage on every socket of a real cluster, while it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.actors.conftest import launch, traces  # noqa: F401  fixtures
from tests.attack.siege import besieged, siege_config

pytestmark = [pytest.mark.ray, pytest.mark.faults]

NUM_ATTACKS = 60


def test_a_cluster_serves_under_garbage_on_all_of_its_sockets(
    launch: Any,  # noqa: F811
    traces: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    cluster = launch(siege_config(tmp_path))
    with besieged(cluster, seed=1) as siege:
        owners = {listening.owner for listening in siege.sockets}
        assert {"coordinator", "memory service 0", "publisher"} <= owners
        for _ in range(3):
            siege.attack(NUM_ATTACKS // 3)
            siege.check()
        siege.steal_memory()
        siege.check()
    cluster.stop()
    traces.check(cluster.name)
