"""Clusters for the tests of this package: a shared one, and a way to launch others."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table

from actors import KVCacheCluster
from kvcache.config import ClusterConfig, parse_config

MakeConfig = Callable[..., ClusterConfig]
Launch = Callable[..., KVCacheCluster]

_numbers = itertools.count()


def build_config(name: str = "", **sections: dict[str, Any]) -> ClusterConfig:
    """Return a small content-checked TP2 configuration with a name of its own."""
    settings: dict[str, Any] = {
        "name": name or f"test-{next(_numbers)}",
        "model": {
            "name": "small",
            "max_model_len": 512,
            "layers": [{"kind": "full", "count": 4, "num_kv_heads": 2, "head_size": 8}],
        },
        "cache": {"memory_per_rank": "1MiB"},
        "parallel": {"tensor_parallel_size": 2},
        "transport": {"resend_s": 0.2, "heartbeat_s": 0.4},
        "deadlines": {"startup_s": 120.0, "step_s": 40.0, "shutdown_s": 4.0},
        "content_check": {"enabled": True},
    }
    for section, values in sections.items():
        settings[section] = {**settings.get(section, {}), **values}
    return parse_config(settings)


@pytest.fixture
def make_config() -> MakeConfig:
    """Makes configurations; see `build_config`."""
    return build_config


@pytest.fixture
def launch(ray_cluster: str) -> Iterator[Launch]:
    """Launches clusters that are stopped after the test."""
    launched: list[KVCacheCluster] = []

    def launch_one(config: ClusterConfig, **options: Any) -> KVCacheCluster:
        launched.append(KVCacheCluster.launch(config, **options))
        return launched[-1]

    yield launch_one
    for cluster in launched:
        cluster.stop()


@pytest.fixture(scope="session")
def shared(ray_cluster: str) -> Iterator[KVCacheCluster]:
    """A TP2 cluster for tests that leave it healthy."""
    with KVCacheCluster.launch(build_config("test-shared")) as cluster:
        yield cluster


class Traces:
    """Leftovers of clusters that belong to this test run and not to Ray."""

    def __init__(self) -> None:
        self._before = _look()

    def check(self, name: str) -> None:
        """Fail unless all parts of the cluster `name` are gone, now or very soon."""
        give_up_s = time.monotonic() + 15.0
        while left := {trace: what for trace, what in _look().items() if trace not in self._before}:
            assert time.monotonic() < give_up_s, left
            time.sleep(0.02)
        named = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        assert [actor for actor in named if actor.startswith(f"{name}/")] == []
        groups = [
            group["name"]
            for group in placement_group_table().values()
            if group["state"] != "REMOVED"
        ]
        assert f"{name}/workers" not in groups


def _look() -> dict[str, str]:
    """Return our actor processes, their sockets, and shared memory files, each with its present
    activity, which does not identify it: Ray names a process after its present call."""
    traces = {f"/dev/shm/{path.name}": "" for path in Path("/dev/shm").glob("kvcache*")}
    inodes: set[str] = set()
    for process in psutil.Process().children(recursive=True):
        folder = Path(f"/proc/{process.pid}")
        try:
            command = (folder / "cmdline").read_bytes().strip(b"\0")
            inodes.update(os.readlink(link) for link in (folder / "fd").iterdir())
        except OSError:
            continue  # it has just ended
        if command.startswith(b"ray::") and re.search(rb"Worker|Coordinator", command):
            identity = f"process {process.pid} started {process.create_time()}"
            traces[identity] = command.decode(errors="replace")
    for line in Path("/proc/net/unix").read_text().splitlines():
        fields = line.split()
        if fields[-1].startswith("@kvcache-") and f"socket:[{fields[6]}]" in inodes:
            traces[f"socket {fields[-1]} {fields[6]}"] = ""
    return traces


@pytest.fixture
def traces(ray_cluster: str) -> Traces:
    """The leftovers before the test."""
    return Traces()
