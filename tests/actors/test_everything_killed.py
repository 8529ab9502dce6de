"""kill -9 of everything at once: no process of the cluster and no shared memory remains."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.clusters.placement import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.faults]

SOON_S = 90.0
MARK = "KVCACHE_TEST_MARK"

DRIVER = """
import json, os, signal, sys, threading
import ray
from actors import EmbeddedCluster, KVCacheCluster
from actors.clusters.placement import wait_until
from kvcache.config import parse_config
from tests.actors.embedding_driver import compute

kind, address, configuration = sys.argv[1:]
options = {} if address else {"num_cpus": 4, "include_dashboard": False}
ray.init(address=address or "local", log_to_driver=False, **options)
launcher = EmbeddedCluster if kind == "embedded" else KVCacheCluster
cluster = launcher.launch(parse_config(json.loads(configuration)))
victim = cluster.status().ranks[1].process_id
os.kill(victim, signal.SIGKILL)

def is_replaced():
    status = cluster.status()
    return status.state == "ready" and status.ranks[1].process_id != victim

assert wait_until(is_replaced, 90.0)
client = cluster.client()
compute(client, "first", 1000)
status = cluster.status()
known = {status.coordinator_process_id, *(rank.process_id for rank in status.ranks), os.getpid()}
print("serving", *known, flush=True)
threading.Event().wait()
"""


@pytest.fixture
def mark() -> Iterator[str]:
    """A value in the environment of all processes that a driver starts, including Ray's."""
    made = secrets.token_hex(16)
    yield made
    for process in marked(made):
        with suppress(psutil.Error):
            process.kill()


def start_driver(kind: str, address: str, config: Any, mark: str) -> tuple[Any, list[int]]:
    """Start a driver; return it, and the processes of its cluster, including itself. One of the
    workers has replaced a lost one."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, kind, address, config.model_dump_json()],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: mark},
    )
    assert driver.stdout is not None
    said = next((line for line in driver.stdout if line.startswith("serving")), "")
    process_ids = [int(word) for word in said.split()[1:]]
    if not process_ids:
        driver.kill()
        driver.communicate()
    assert process_ids, "the driver ended"
    return driver, process_ids


def kill_at_once(process_ids: list[int]) -> None:
    for process_id in process_ids:
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes with the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_driver_coordinator_and_workers_killed_at_once_leave_nothing_on_a_ray_that_lives(
    ray_cluster: str, make_config: Any, traces: Any, mark: str
) -> None:
    config = make_config()
    before = shared_memory()
    driver, process_ids = start_driver("actor", ray_cluster, config, mark)
    assert len(process_ids) == 4
    kill_at_once(process_ids)
    driver.communicate()
    assert wait_until(lambda: not marked(mark), SOON_S), marked(mark)
    traces.check(config.name)
    assert shared_memory() - before == set()


@pytest.mark.parametrize("kind", ["actor", "embedded"])
def test_everything_killed_at_once_ray_included_leaves_nothing(
    make_config: Any, kind: str, mark: str
) -> None:
    before = shared_memory()
    driver, process_ids = start_driver(kind, "", make_config(), mark)
    everything = [process.pid for process in marked(mark)]
    assert set(process_ids) < set(everything)
    kill_at_once(everything)
    driver.communicate()
    assert wait_until(lambda: not marked(mark), SOON_S), marked(mark)
    assert shared_memory() - before == set()
