"""Processes that fail: at start-up nothing is left; later there is an error that names them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table
from typer.testing import CliRunner

from actors import KVCacheCluster, WorkerActor
from actors.cli import app
from actors.clusters import access
from actors.clusters.launch import Launch, LaunchOptions
from actors.clusters.placement import wait_until
from kvcache.base.errors import (
    ConfigurationError,
    DeadlineError,
    KVCacheError,
    NotEnoughMemoryError,
    NotRunningError,
    StaleEpochError,
    StartupError,
    WorkerLostError,
)
from kvcache.config import ClusterConfig
from kvcache.planner import Plan
from kvcache.protocol.step import StepRequest
from tests.cli.commands import KVCACHE

pytestmark = pytest.mark.ray

EMPTY = StepRequest("", 0, 0)


class RaisingWorker(WorkerActor):
    def __init__(self, config: ClusterConfig, place: int) -> None:
        if place == 1:
            raise RuntimeError("no such device")
        super().__init__(config, place)


class HangingWorker(WorkerActor):
    def __init__(self, config: ClusterConfig, place: int) -> None:
        while place == 1:
            time.sleep(1.0)
        super().__init__(config, place)


class DyingWorker(WorkerActor):
    def kvcache_allocate(self, rank: int, plan: Plan) -> str:
        if rank == 1:
            os._exit(3)
        return super().kvcache_allocate(rank, plan)


class StrangeWorker(WorkerActor):
    def kvcache_allocate(self, rank: int, plan: Plan) -> str:
        return super().kvcache_allocate(rank, plan) if rank == 0 else "another plan"


class FullWorker(WorkerActor):
    def kvcache_allocate(self, rank: int, plan: Plan) -> str:
        raise NotEnoughMemoryError("needs 8 bytes, 0 are free")


class SilentWorker(WorkerActor):
    def kvcache_attach(self, endpoint: Any) -> None:
        """Never connect."""


@dataclass(frozen=True)
class FailingStart:
    """A worker that fails, and the resulting error."""

    worker_class: type[WorkerActor]
    error: type[KVCacheError]
    says: str
    startup_s: float


@pytest.mark.faults
@pytest.mark.parametrize(
    "case",
    [
        FailingStart(RaisingWorker, StartupError, "rank 1 died before .* no such device", 120.0),
        FailingStart(
            HangingWorker, StartupError, "rank 1 did not start and report within 7 s", 7.0
        ),
        FailingStart(
            DyingWorker,
            StartupError,
            "rank 1 died before it could allocate its blocks: .* its worker process has died",
            120.0,
        ),
        FailingStart(
            StrangeWorker, StartupError, "rank 1 has plan another plan, the launcher has", 120.0
        ),
        FailingStart(
            FullWorker, NotEnoughMemoryError, "rank [01]: needs 8 bytes, 0 are free", 120.0
        ),
        FailingStart(SilentWorker, StartupError, "rank 0, 1 is missing", 30.0),
    ],
    ids=lambda case: case.worker_class.__name__,
)
def test_a_start_up_that_fails_names_rank_and_cause_and_leaves_nothing(
    case: FailingStart, make_config: Any, traces: Any
) -> None:
    config = make_config(deadlines={"startup_s": case.startup_s})
    with pytest.raises(case.error, match=case.says):
        KVCacheCluster.launch(config, worker_class=case.worker_class)
    traces.check(config.name)


STOPPED = (
    "{} was stopped by another process while it was starting, and nothing of it is left: launch it "
    "again"
)


@pytest.mark.faults
@pytest.mark.parametrize("stage", ["reserving", "allocating", "connecting"])
def test_a_launch_that_is_stopped_from_elsewhere_says_so_and_leaves_nothing(
    ray_cluster: str, stage: str, make_config: Any, traces: Any
) -> None:
    config = make_config()

    def stop_at_stage(line: str) -> None:
        if line.startswith(stage):
            KVCacheCluster.connect(config.name).stop()

    with pytest.raises(StartupError) as caught:
        KVCacheCluster.launch(config, on_progress=stop_at_stage)
    assert str(caught.value) == STOPPED.format(config.name)
    traces.check(config.name)


@pytest.mark.faults
@pytest.mark.parametrize("what", ["room", "ranks"])
def test_a_launch_that_waits_ends_soon_when_it_is_stopped(
    ray_cluster: str, what: str, make_config: Any, traces: Any
) -> None:
    num_cpus = 50.0 if what == "room" else 1.0
    config = make_config(workers={"num_cpus_per_rank": num_cpus}, deadlines={"startup_s": 300.0})

    def is_waiting() -> bool:
        if what == "room":
            groups = placement_group_table().values()
            return any(group["name"] == f"{config.name}/workers" for group in groups)
        with suppress(NotRunningError):
            return bool(KVCacheCluster.connect(config.name).workers)
        return False

    def stop() -> None:
        if wait_until(is_waiting, 120.0):
            KVCacheCluster.connect(config.name).stop()

    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(StartupError) as caught:
        KVCacheCluster.launch(config, worker_class=SilentWorker)
    stopping.join()
    assert str(caught.value) == STOPPED.format(config.name)
    traces.check(config.name)


@pytest.mark.faults
def test_stop_ends_a_launch_that_another_command_began(
    ray_cluster: str, make_config: Any, traces: Any, tmp_path: Path
) -> None:
    config = make_config()
    path = tmp_path / "cluster.json"  # which is YAML, too
    path.write_text(config.model_dump_json(exclude_none=True))
    environment = {**os.environ, "RAY_ADDRESS": ray_cluster}
    launch = [*KVCACHE, "launch", "--config", str(path), "--detach"]
    with subprocess.Popen(launch, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        assert any(line.startswith("waiting for 2 worker(s)") for line in process.stderr)
        stopped = subprocess.run(
            [*KVCACHE, "stop", "--name", config.name],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=environment,
        )
        told = process.stderr.read()
    assert (stopped.returncode, stopped.stderr) == (0, f"{config.name} has stopped\n")
    # The launch may have continued meanwhile: its last message counts.
    last_line = told.splitlines()[-1]
    assert (process.returncode, last_line) == (3, f"kvcache: {STOPPED.format(config.name)}")
    traces.check(config.name)


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("on_progress", 7),
        ("detached", "no"),
        ("worker_actors", 7),
        ("worker_class", int),
        ("worker_class", "WorkerActor"),
    ],
)
def test_a_launch_refuses_what_it_cannot_use_before_anything_starts(
    make_config: Any, what: str, value: Any
) -> None:
    with pytest.raises(ConfigurationError, match=f"{what} is "):
        KVCacheCluster.launch(make_config(), **{what: value})


@pytest.mark.faults
def test_a_cluster_whose_coordinator_hangs_is_stopped(
    ray_cluster: str, make_config: Any, traces: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "CALL_TIMEOUT_S", 2.0)
    cluster = KVCacheCluster.launch(make_config(), detached=True)
    coordinator = cluster.status().coordinator_process_id
    os.kill(coordinator, signal.SIGSTOP)
    with pytest.raises(DeadlineError, match="or end the cluster with `kvcache stop`"):
        cluster.status()
    stopped = CliRunner().invoke(app, ["stop", "--name", cluster.name])
    assert (stopped.exit_code, stopped.stderr) == (
        0,
        f"the coordinator of {cluster.name} does not answer: ending its actors by name\n"
        f"{cluster.name} has stopped\n",
    )
    traces.check(cluster.name)
    assert wait_until(lambda: not psutil.pid_exists(coordinator), 120.0)


@pytest.mark.faults
def test_a_cluster_whose_launcher_has_died_says_that_it_failed(
    ray_cluster: str, make_config: Any, traces: Any
) -> None:
    config = make_config(deadlines={"startup_s": 1.0})
    launch = Launch(config, LaunchOptions(is_detached=True, on_progress=print))
    launch._create_coordinator()  # and the launcher dies here
    cluster = KVCacheCluster.connect(config.name)
    assert wait_until(lambda: cluster.status().state == "failed", 120.0)
    assert cluster.status().problem == (
        "its launch has not ended within 21 s: stop the cluster and launch it again"
    )
    cluster.stop()
    traces.check(config.name)


def test_a_stage_that_fits_no_node_is_an_error_that_says_what_there_is(
    ray_cluster: str, make_config: Any, traces: Any
) -> None:
    config = make_config(workers={"num_cpus_per_rank": 50.0}, deadlines={"startup_s": 1.0})
    with pytest.raises(StartupError) as caught:
        KVCacheCluster.launch(config)
    assert "no room for 1 pipeline stage(s) of {'CPU': 100.0} each after" in str(caught.value)
    assert "placement is INFEASIBLE" in str(caught.value) or "PENDING" in str(caught.value)
    assert "nodes have 8 CPU / 0 GPU" in str(caught.value)
    traces.check(config.name)


def test_too_little_memory_is_an_error_that_says_what_would_fit(
    ray_cluster: str, make_config: Any, traces: Any
) -> None:
    config = make_config(cache={"memory_per_rank": "4KiB"})
    with pytest.raises(NotEnoughMemoryError):
        KVCacheCluster.launch(config)
    traces.check(config.name)


@pytest.mark.faults
def test_a_killed_worker_is_named_quickly_and_the_cluster_stops_clean(
    launch: Any, make_config: Any, traces: Any
) -> None:
    config = make_config(deadlines={"replacement_s": 0.0})
    cluster = launch(config)
    with cluster.client() as client:
        client.wait_finished(client.step(EMPTY).step)
        victim = cluster.status().ranks[1]
        started_s = time.monotonic()
        os.kill(victim.process_id, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="rank 1 is lost"):
            for _ in range(10_000):
                client.wait_finished(client.step(EMPTY).step)
        assert time.monotonic() - started_s < config.deadlines.step_s
        status = cluster.status()
        assert status.state == "degraded"
        assert status.ranks[1].problem
        assert status.ranks[1].replacement == "none, deadlines.replacement_s is 0"
        assert cluster.statistics().workers[1] is None
        with pytest.raises(WorkerLostError, match="rank 1 is lost"):
            client.attach(timeout_s=0.5)
    cluster.stop()
    traces.check(config.name)


@contextmanager
def stopped(process_id: int) -> Iterator[None]:
    """The process is stopped meanwhile."""
    os.kill(process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process_id, signal.SIGCONT)


@pytest.mark.faults
def test_a_worker_that_hangs_is_named_and_served_again_when_it_goes_on(
    launch: Any, make_config: Any
) -> None:
    cluster = launch(make_config(deadlines={"worker_silence_s": 1.0}))
    with cluster.client() as client:
        client.wait_finished(client.step(EMPTY).step)
        with stopped(cluster.status().ranks[0].process_id):
            assert wait_until(lambda: cluster.status().problem, 10.0)
            assert "rank 0" in cluster.status().problem
            with pytest.raises(WorkerLostError, match="rank 0"):
                client.step(EMPTY)
        assert wait_until(lambda: not cluster.status().problem, 10.0)
        client.wait_finished(client.step(EMPTY).step)


@pytest.mark.faults
def test_a_coordinator_that_is_killed_takes_over_again_and_clients_attach_again(
    launch: Any, make_config: Any
) -> None:
    cluster = launch(make_config())
    with cluster.client() as client:
        client.wait_finished(client.step(EMPTY).step)
        ray.kill(cluster._parts.coordinator, no_restart=False)
        with pytest.raises(StaleEpochError):
            for _ in range(10_000):
                client.wait_finished(client.step(EMPTY).step)
        client.attach()
        assert client.epoch == 2
        client.wait_finished(client.step(EMPTY).step)
        assert cluster.status().state == "ready"
