"""A coordinator in an engine's process: it may die or stop, and another one continues, warm."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from actors import (
    WORKER_CONCURRENCY_GROUPS,
    EmbeddedCluster,
    EmbeddedWorker,
    KVCacheCluster,
    WorkerMethods,
    connect_peer,
)
from actors.clusters.placement import wait_until
from actors.embedded.site import EmbeddedSite, find_cluster
from kvcache.base.errors import (
    AlreadyRunningError,
    ConfigurationError,
    NotRunningError,
    StaleEpochError,
    StartupError,
)
from kvcache.config import ClusterConfig
from kvcache.protocol.step import NewRequest, StepRequest
from tests.actors.embedding_driver import NUM_HIT_TOKENS, compute

pytestmark = [pytest.mark.ray, pytest.mark.faults]

DRIVER = Path(__file__).with_name("embedding_driver.py")
EMPTY = StepRequest("", 0, 0)
START_S = 150.0
"""A launch takes a second, and much longer on a busy machine."""


class Driver:
    """An engine's process with the coordinator of a cluster; see embedding_driver.py."""

    def __init__(self, address: str, config: ClusterConfig) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVER), address, config.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.epoch: int = self.hear()["epoch"]

    def ask(self, order: str) -> dict[str, Any]:
        """Send a command and return the answer."""
        self.order(order)
        return self.hear()

    def order(self, order: str) -> None:
        """Send a command, without waiting."""
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Return the next answer."""
        assert self.process.stdout is not None
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        assert line, f"the driver ended: {self.process.poll()}"
        said: dict[str, Any] = json.loads(line)
        return said

    def kill(self) -> None:
        """Send SIGKILL; return when the process is dead."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(START_S)
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


@pytest.fixture
def drive(ray_cluster: str) -> Iterator[Callable[[ClusterConfig], Driver]]:
    """Starts drivers, which are killed after the test; their clusters are stopped."""
    drivers: list[tuple[Driver, str]] = []

    def start(config: ClusterConfig) -> Driver:
        driver = Driver(ray_cluster, config)
        drivers.append((driver, config.name))
        return driver

    yield start
    for driver, name in drivers:
        driver.kill()
        with suppress(NotRunningError):
            find_cluster(name).stop()


@pytest.fixture
def embed(ray_cluster: str) -> Iterator[Callable[..., EmbeddedCluster]]:
    """Launches clusters in this process that are stopped after the test."""
    launched: list[EmbeddedCluster] = []

    def launch_one(config: ClusterConfig, **options: Any) -> EmbeddedCluster:
        launched.append(EmbeddedCluster.launch(config, **options))
        return launched[-1]

    yield launch_one
    for cluster in launched:
        cluster.stop()


def require_no_threads() -> None:
    """Fail if threads of a coordinator are left in this process."""

    def left() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("kvcache-")]

    assert wait_until(lambda: not left(), 10.0), left()


def require_warm(client: Any, request_id: str) -> None:
    """Fail unless the drivers' first prompt is hit, and its bytes match its tokens."""
    before = client.bytes_checked
    assert compute(client, request_id, 1000) == NUM_HIT_TOKENS
    assert client.failures == ()
    assert client.bytes_checked > before


def test_steps_of_an_embedded_coordinator_are_computed_hit_and_checked(
    embed: Any, make_config: Any, traces: Any
) -> None:
    config = make_config()
    cluster = embed(config)
    with cluster.client() as client, cluster.client("other") as other:
        assert compute(client, "a", 1000) == 0
        require_warm(client, "b")
        require_warm(other, "c")
        numbers = [client.submit(EMPTY) for _ in range(200)]
        client.wait_finished(numbers[-1])
        assert numbers == list(range(numbers[0], numbers[0] + 200))
        status = cluster.status()
        assert (status.state, status.problem, status.is_embedded) == ("ready", "", True)
        assert status.coordinator_process_id == os.getpid()
        statistics = cluster.statistics()
        assert [worker is not None and worker.epoch for worker in statistics.workers] == [1, 1]
        assert statistics.coordinator.num_clients == 2
    cluster.stop()
    cluster.stop()
    traces.check(config.name)
    require_no_threads()
    with pytest.raises(NotRunningError, match="was closed in this process"):
        cluster.client()


def test_threads_and_event_loops_of_the_process_share_the_coordinator(
    embed: Any, make_config: Any
) -> None:
    cluster = embed(make_config(content_check={"enabled": False}))
    done: list[int] = []

    def work() -> None:
        with cluster.client() as client:
            for _ in range(100):
                client.wait_finished(client.step(EMPTY).step)
            done.append(client.finished_step)

    async def work_too() -> None:
        async with await cluster.async_client() as client:
            numbers = [await client.submit(EMPTY) for _ in range(100)]
            results = await asyncio.gather(*(client.wait_result(n) for n in numbers))
            await client.wait_finished(numbers[-1])
            done.append(results[-1].step)

    threads = [threading.Thread(target=work) for _ in range(3)]
    threads.append(threading.Thread(target=lambda: asyncio.run(work_too())))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert done == [100] * 4


def test_a_killed_driver_is_taken_over_warm(drive: Any, make_config: Any, traces: Any) -> None:
    # If its clients were awaited, the first step would have no answer in time.
    config = make_config(deadlines={"reattach_s": 60.0, "step_s": 61.0})
    driver = drive(config)
    assert driver.epoch == 1
    driver.kill()
    with EmbeddedCluster.take_over(config.name) as cluster, cluster.client() as client:
        assert client.epoch == cluster.status().epoch == 2
        require_warm(client, "second")
        statistics = cluster.statistics().coordinator
        assert (statistics.num_kept_blocks, statistics.cold_reason) == (2, "")
    traces.check(config.name)
    require_no_threads()
    with pytest.raises(NotRunningError, match="has its coordinator in a process"):
        EmbeddedCluster.take_over(config.name)


def test_a_driver_that_stood_still_meanwhile_is_told_with_its_next_call(
    drive: Any, make_config: Any, traces: Any
) -> None:
    config = make_config()
    driver = drive(config)
    os.kill(driver.process.pid, signal.SIGSTOP)
    cluster = EmbeddedCluster.take_over(config.name)
    with cluster.client() as client:
        require_warm(client, "second")
        os.kill(driver.process.pid, signal.SIGCONT)
        said = driver.ask("step")
        assert said["what"] == "error"
        assert said["type"] == "SupersededError"
        assert said["text"] == (
            f"cluster {config.name} was taken over by process {os.getpid()} on "
            f"{cluster.status().coordinator_node.host} in epoch 2: schedule there, workers do not "
            "obey this process any more"
        )
        assert driver.ask("step")["type"] == "SupersededError"
        status = driver.ask("status")
        assert (status["state"], status["problem"]) == ("failed", said["text"])
        assert driver.ask("stop")["what"] == "done"
        require_warm(client, "third")
        assert cluster.status().state == "ready"
        assert client.epoch == 2
    cluster.stop()
    traces.check(config.name)


def test_what_a_driver_leaves_is_taken_over_by_the_same_process_and_stopped(
    embed: Any, make_config: Any, traces: Any
) -> None:
    config = make_config()
    first = embed(config)
    client = first.client()
    assert compute(client, "a", 1000) == 0
    first.leave()
    with pytest.raises(StaleEpochError, match="was closed in this process"):
        client.step(EMPTY)
    assert find_cluster(config.name).status().problem == (
        "no process has its coordinator: take it over with EmbeddedCluster.take_over, or stop it"
    )
    second = EmbeddedCluster.take_over(config.name)
    with second.client() as again:
        require_warm(again, "b")
    first.stop()  # no longer its own
    assert second.status().state == "ready"
    second.stop()
    client.close()
    traces.check(config.name)


def test_no_thread_of_a_coordinator_that_was_left_can_ask_ray_any_more(
    embed: Any, make_config: Any, traces: Any
) -> None:
    config = make_config(offload={"host_memory_per_rank": "1MiB"})
    before = set(threading.enumerate())
    cluster = embed(config)
    looking_after = {
        "kvcache-sentinels",
        "kvcache-worker-supervisor",
        "kvcache-memory-service-watch",
    }
    assert looking_after <= {thread.name for thread in threading.enumerate()}
    cluster.leave()
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert left & {*looking_after, "kvcache-successors"} == set()
    with EmbeddedCluster.take_over(config.name):
        pass
    traces.check(config.name)


def test_a_name_is_taken_while_its_driver_or_its_workers_live(
    drive: Any, make_config: Any, traces: Any
) -> None:
    config = make_config()
    driver = drive(config)
    lives = f"a cluster named '{config.name}' is running, with its coordinator in process "
    orphans = (
        f"the workers of a cluster named '{config.name}' are running without a coordinator: take "
        "it over, stop it, or launch under another name"
    )

    def require_refusal(says: str) -> None:
        for launch in (EmbeddedCluster.launch, KVCacheCluster.launch):
            with pytest.raises(AlreadyRunningError, match=says):
                launch(config)

    require_refusal(f"{lives}{driver.process.pid} on ")
    second = EmbeddedCluster.take_over(config.name)
    assert wait_until(lambda: driver.ask("status")["state"] == "failed", 10.0)
    assert driver.ask("step")["type"] == "SupersededError"
    require_refusal(f"{lives}{os.getpid()} on ")
    second.leave()
    require_refusal(orphans)
    with EmbeddedCluster.take_over(config.name) as third, third.client() as client:
        assert client.epoch == 3
        require_warm(client, "third")
    traces.check(config.name)


def test_a_name_that_an_actor_runs_under_is_refused(shared: KVCacheCluster) -> None:
    with pytest.raises(AlreadyRunningError, match="a cluster named 'test-shared' is running"):
        EmbeddedCluster.launch(shared.config)
    with pytest.raises(NotRunningError, match="has its coordinator in a process"):
        EmbeddedCluster.take_over(shared.name)
    with shared.client() as client:
        client.wait_finished(client.step(EMPTY).step)


def test_a_launch_that_fails_frees_the_name(
    ray_cluster: str, make_config: Any, traces: Any
) -> None:
    config = make_config(deadlines={"startup_s": 1.0}, workers={"num_cpus_per_rank": 50.0})
    for _ in range(2):
        with pytest.raises(StartupError, match="no room for 1 pipeline stage"):
            EmbeddedCluster.launch(config)
    traces.check(config.name)
    require_no_threads()


def test_ray_calls_cannot_reach_an_embedded_coordinator(ray_cluster: str, make_config: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot be called: set it to zmq"):
        EmbeddedCluster.launch(make_config(transport={"kind": "ray"}))


def test_others_see_where_the_coordinator_is_and_can_stop_the_cluster(
    ray_cluster: str, drive: Any, make_config: Any, traces: Any
) -> None:
    config = make_config()
    driver = drive(config)
    site = find_cluster(config.name)
    assert isinstance(site, EmbeddedSite)
    status = site.status()
    assert (status.state, status.problem, status.is_embedded) == ("ready", "", True)
    assert (status.coordinator_process_id, status.epoch) == (driver.process.pid, 1)
    assert [rank.rank for rank in status.ranks] == [0, 1]
    shown = subprocess.run(
        [
            sys.executable,
            "-c",
            "from actors.cli import main; main()",
            "status",
            "-n",
            config.name,
        ],
        env={**os.environ, "RAY_ADDRESS": ray_cluster},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=True,
    )
    assert f"embedded in process {driver.process.pid} on" in shown.stdout
    with pytest.raises(NotRunningError, match=f"is in process {driver.process.pid} on "):
        KVCacheCluster.connect(config.name)
    site.stop()
    assert wait_until(lambda: driver.ask("status")["state"] == "failed", 10.0)
    said = driver.ask("step")
    assert said["text"] == f"cluster {config.name} was stopped by another process: launch it again"
    traces.check(config.name)


def test_a_worker_that_died_is_replaced_and_the_others_stay_warm(
    embed: Any, make_config: Any
) -> None:
    cluster = embed(make_config())
    with cluster.client() as client:
        compute(client, "a", 1000)
        os.kill(cluster.status().ranks[1].process_id, signal.SIGKILL)
        assert wait_until(lambda: cluster.status().epoch > 1, 30.0)
        assert wait_until(lambda: cluster.status().state == "ready", 60.0)
        client.poll()
        client.attach()
        assert compute(client, "b", 1000) == 0  # a block that one rank lost is lost
        assert compute(client, "c", 1000) == NUM_HIT_TOKENS
        assert client.failures == ()


def test_driver_and_worker_that_die_together_are_both_replaced(
    drive: Any, make_config: Any, traces: Any
) -> None:
    config = make_config()
    driver = drive(config)
    victim = find_cluster(config.name).status().ranks[0].process_id
    driver.kill()
    os.kill(victim, signal.SIGKILL)
    with EmbeddedCluster.take_over(config.name) as cluster, cluster.client() as client:
        assert compute(client, "b", 1000) == 0
        assert compute(client, "c", 1000) == NUM_HIT_TOKENS
        assert client.failures == ()
    traces.check(config.name)


@ray.remote(num_cpus=0.1, concurrency_groups=WORKER_CONCURRENCY_GROUPS)
class Engine(WorkerMethods):
    """An engine's own actor that keeps a rank's cache inside itself."""

    def __init__(self, config: ClusterConfig, place: int) -> None:
        self.kvcache = EmbeddedWorker(config, place, connect_peer)

    def forward(self, epoch: int, seq: int) -> list[int]:
        """Run one forward."""
        worker = self.kvcache.worker
        worker.begin_forward(epoch, seq, timeout_s=10.0)
        worker.end_forward(epoch, seq)
        self.kvcache.poll()
        return worker.block_tables[0][0][:3].tolist()


def test_an_engines_own_actors_are_taken_over_too(embed: Any, make_config: Any) -> None:
    config = make_config(content_check={"enabled": False})
    engines = [Engine.remote(config, place) for place in range(2)]
    first = embed(config, worker_actors=engines)
    tokens = np.arange(40, dtype=np.int32)
    with first.client() as client:
        result = client.step(StepRequest(new=(NewRequest("a", tokens, max_new_tokens=40),)))
        calls = [engine.forward.remote(result.epoch, result.seq) for engine in engines]
        assert ray.get(calls, timeout=30) == [result.patches.block_ids.tolist()] * 2
        client.wait_applied(result.step)
    first.leave()
    with EmbeddedCluster.take_over(config.name) as second, second.client() as client:
        assert client.epoch == 2
        assert len(second.workers) == 2
    for engine in engines:
        ray.kill(engine)
