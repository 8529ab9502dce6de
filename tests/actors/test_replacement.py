"""Lost workers of a running cluster: their ranks get other processes, and clients continue."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.util.placement_group import remove_placement_group
from typer.testing import CliRunner

from actors import (
    WORKER_CONCURRENCY_GROUPS,
    EmbeddedWorker,
    KVCacheCluster,
    WorkerActor,
    WorkerMethods,
    connect_peer,
)
from actors.cli import app
from actors.clusters.placement import wait_until
from actors.memory_service import find_memory_services
from actors.reports import WorkerReport
from kvcache.base.errors import (
    DeadlineError,
    NotRunningError,
    RequestError,
    StaleEpochError,
    StartupError,
    WorkerLostError,
)
from kvcache.config import ClusterConfig
from kvcache.planner import RankMemory
from kvcache.protocol.step import NewRequest, StepRequest
from tests.cli.commands import KVCACHE

pytestmark = [pytest.mark.ray, pytest.mark.faults]

EMPTY = StepRequest("", 0, 0)
ANY_PORT = "tcp://127.0.0.1:0"
SOON_S = 90.0
"""Time that a busy machine may take to start a process or two."""


def kill(cluster: KVCacheCluster, *ranks: int) -> None:
    for rank in ranks:
        os.kill(cluster.status().ranks[rank].process_id, signal.SIGKILL)


def play(client: Any, request_id: str, first: int) -> int:
    """Compute a prompt and finish it; return how many of its tokens were cached."""
    tokens = np.arange(first, first + 40, dtype=np.int32)
    new = (NewRequest(request_id, tokens, max_new_tokens=40),)
    computed = client.step(StepRequest("", 0, 0, new=new))
    client.wait_finished(computed.step)
    done = StepRequest("", 0, 0, completed_step=computed.step, finished=(request_id,))
    client.wait_finished(client.step(done).step)
    assert client.failures == ()
    return int(computed.num_hit_tokens[0])


def notice_and_attach_again(client: Any) -> None:
    """Step until the epoch's end is known, then attach to the next one."""
    with pytest.raises((WorkerLostError, StaleEpochError)):
        for _ in range(100_000):
            with contextlib.suppress(DeadlineError):  # no message yet: ask again
                client.wait_finished(client.step(EMPTY).step)
    client.attach(timeout_s=SOON_S)


def test_a_killed_worker_is_replaced_and_its_clients_go_on(
    launch: Any, make_config: Any, traces: Any
) -> None:
    cluster = launch(make_config())
    before = cluster.status()
    with cluster.client() as client:
        assert [play(client, "a", 0), play(client, "b", 0)] == [0, 32]
        kill(cluster, 1)
        notice_and_attach_again(client)
        assert [play(client, "c", 0), play(client, "d", 0)] == [0, 32]
        assert client.bytes_checked > 0
        assert wait_until(lambda: cluster.status().state == "ready", SOON_S)
        after = cluster.status()
        assert after.epoch > before.epoch
        assert after.ranks[0].process_id == before.ranks[0].process_id
        assert after.ranks[1].process_id != before.ranks[1].process_id
        assert [rank.describe() for rank in after.ranks] == ["ready", "ready"]
        assert None not in cluster.statistics().workers
    cluster.stop()
    traces.check(cluster.name)


def test_a_process_that_took_a_lost_ones_place_outlives_the_coordinator_that_had_it_made(
    launch: Any, make_config: Any
) -> None:
    cluster = launch(make_config())
    with cluster.client() as client:
        kill(cluster, 1)
        notice_and_attach_again(client)
        assert play(client, "a", 0) == 0
        client.wait_finished(client.step(EMPTY).step)
        assert wait_until(lambda: cluster.status().state == "ready", SOON_S)
        before = cluster.status()
        os.kill(before.coordinator_process_id, signal.SIGKILL)
        notice_and_attach_again(client)
        assert play(client, "b", 0) == 32
        assert cluster.status().ranks == before.ranks


def test_all_workers_of_a_stage_are_replaced_at_once(launch: Any, make_config: Any) -> None:
    cluster = launch(make_config())
    before = {rank.process_id for rank in cluster.status().ranks}
    with cluster.client() as client:
        assert play(client, "a", 0) == 0
        kill(cluster, 0, 1)
        notice_and_attach_again(client)
        assert [play(client, "b", 0), play(client, "c", 0)] == [0, 32]
    assert wait_until(lambda: cluster.status().state == "ready", SOON_S)
    assert before.isdisjoint(rank.process_id for rank in cluster.status().ranks)


def test_a_worker_that_hangs_is_ended_and_replaced(launch: Any, make_config: Any) -> None:
    cluster = launch(make_config(deadlines={"worker_silence_s": 1.0, "worker_kill_s": 3.0}))
    with cluster.client() as client:
        assert play(client, "a", 0) == 0
        hanging = cluster.status().ranks[0].process_id
        os.kill(hanging, signal.SIGSTOP)
        assert wait_until(lambda: "so it was ended" in cluster.status().problem, SOON_S)
        assert not psutil.pid_exists(hanging)
        notice_and_attach_again(client)
        assert [play(client, "b", 0), play(client, "c", 0)] == [0, 32]


def test_a_replay_goes_on_when_a_worker_that_hangs_is_ended_and_replaced(
    ray_cluster: str, launch: Any, make_config: Any, tmp_path: Path
) -> None:
    cluster = launch(make_config(deadlines={"worker_silence_s": 1.0}))  # the others follow
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": i, "input_length": 400, "output_length": 100, "hash_ids": [i % 7]}
        for i in range(400)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    replay = [*KVCACHE, "replay", str(trace), "--name", cluster.name, "--json", "--no-progress"]
    environment = {**os.environ, "RAY_ADDRESS": ray_cluster}
    with subprocess.Popen(
        replay, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert wait_until(lambda: num_steps(cluster) > 30, SOON_S)
        hanging = cluster.status().ranks[1].process_id
        os.kill(hanging, signal.SIGSTOP)
        try:
            shown, told = process.communicate(timeout=4 * SOON_S)
        finally:
            process.kill()
    assert process.returncode == 0, told
    report = json.loads(shown)
    assert (report["num_requests"], report["num_wrong_blocks"]) == (400, 0)
    assert report["num_returns"] >= 1 and report["bytes_checked"] > 0
    assert "a process of the cluster is lost: waiting" in told
    assert "the cluster serves again: all running requests come back" in told
    assert not psutil.pid_exists(hanging)


def num_steps(cluster: KVCacheCluster) -> int:
    statistics = cluster.coordinator_statistics()
    return 0 if statistics is None else statistics.num_steps


def test_a_worker_and_the_coordinator_are_lost_together(launch: Any, make_config: Any) -> None:
    cluster = launch(make_config())
    with cluster.client() as client:
        assert play(client, "a", 0) == 0
        before = cluster.status()
        kill(cluster, 1)
        os.kill(before.coordinator_process_id, signal.SIGKILL)
        notice_and_attach_again(client)
        assert [play(client, "b", 0), play(client, "c", 0)] == [0, 32]
    after = cluster.status()
    assert after.coordinator_process_id != before.coordinator_process_id
    assert after.ranks[0].process_id == before.ranks[0].process_id
    assert after.ranks[1].process_id != before.ranks[1].process_id


def test_workers_that_hang_while_the_coordinator_restarts_are_replaced(
    launch: Any, make_config: Any
) -> None:
    cluster = launch(make_config(deadlines={"worker_silence_s": 1.0, "worker_kill_s": 3.0}))
    with cluster.client() as client:
        assert play(client, "a", 0) == 0
        before = cluster.status()
        os.kill(before.ranks[1].process_id, signal.SIGSTOP)
        os.kill(before.coordinator_process_id, signal.SIGKILL)
        notice_and_attach_again(client)
        assert [play(client, "b", 0), play(client, "c", 0)] == [0, 32]
    assert not psutil.pid_exists(before.ranks[1].process_id)


def test_a_coordinator_without_workers_reports_that_the_cluster_has_ended(
    launch: Any, make_config: Any, traces: Any, tmp_path: Path
) -> None:
    cluster = launch(
        make_config(events={"enabled": True, "endpoint": ANY_PORT, "replay_endpoint": ANY_PORT})
    )
    before = cluster.status()
    for process_id in (before.coordinator_process_id, *(r.process_id for r in before.ranks)):
        os.kill(process_id, signal.SIGKILL)
    assert wait_until(lambda: answered(cluster, "failed"), SOON_S)
    problem = cluster.status().problem
    assert problem.startswith("the restarted coordinator finds no worker: rank 0: ")
    assert problem.endswith(": stop the cluster and launch it again")
    assert "common causes" not in problem
    assert_that_commands_say_so(cluster.name, problem, tmp_path)
    cluster.stop()
    traces.check(cluster.name)


def assert_that_commands_say_so(name: str, problem: str, directory: Path) -> None:
    """A failed cluster cannot be used for replays, recordings, events, inspection or changes."""
    path = directory / "recorded.jsonl"
    for command in (
        ("replay", "--limit", "1", "--no-progress"),
        ("record", str(path), "--seconds", "0.1"),
        ("watch", name, "--for", "1"),
        ("events", "dump", name, "--limit", "1"),
        ("usage",),
        ("prefixes",),
        ("pins",),
        ("pin", "--tokens", "7,8,9"),
        ("clear", "--yes"),
    ):
        result = CliRunner().invoke(app, command if name in command else [*command, "--name", name])
        told = (result.exit_code, result.stderr)
        assert told == (3, f"kvcache: {name} has failed: {problem}\n"), command
    assert not path.exists()


def answered(cluster: KVCacheCluster, state: str) -> bool:
    """Return whether the coordinator answers with this state of the cluster."""
    try:
        return cluster.status().state == state
    except (DeadlineError, NotRunningError):
        return False


def flag_of(config: ClusterConfig) -> Path:
    """Return the file whose presence makes the workers of a test behave differently."""
    return Path(tempfile.gettempdir()) / f"kvc-flag-{config.name}"


class ShrinkingWorker(WorkerActor):
    """Has less memory while its flag is there."""

    def __init__(self, config: ClusterConfig, place: int) -> None:
        super().__init__(config, place)
        self._flag = flag_of(config)

    def kvcache_report(self, num_sharing: int) -> WorkerReport:
        report = super().kvcache_report(num_sharing)
        if not self._flag.exists():
            return report
        return replace(report, memory=RankMemory(4096), free_bytes=4096)


def test_a_rank_that_comes_back_with_less_memory_is_refused_until_there_is_enough(
    launch: Any, make_config: Any
) -> None:
    config = make_config()
    cluster = launch(config, worker_class=ShrinkingWorker)
    flag = flag_of(config)
    flag.touch()
    try:
        with cluster.client() as client:
            client.wait_finished(client.step(EMPTY).step)
            kill(cluster, 1)
            expected = (
                r"rank 1: lost \(.*\), replacement: failed: the plan needs 1048576 bytes on "
                r"rank 1, 4096 are available on [0-9.]+: free memory there, or stop the cluster "
                r"and launch it again, which makes a new plan: again in [0-9.]+ s"
            )
            assert wait_until(lambda: re.search(expected, cluster.status().problem), SOON_S)
            with pytest.raises(WorkerLostError, match=r"rank 1 is lost .* 4096 are available"):
                for _ in range(10_000):
                    client.wait_finished(client.step(EMPTY).step)
            flag.unlink()
            client.attach(timeout_s=SOON_S)
            assert [play(client, "b", 0), play(client, "c", 0)] == [0, 32]
    finally:
        flag.unlink(missing_ok=True)


def test_a_rank_whose_room_is_gone_cannot_be_replaced_and_says_so(
    launch: Any, make_config: Any, traces: Any
) -> None:
    cluster = launch(make_config(deadlines={"replacement_s": 1.0}))
    with cluster.client() as client:
        client.wait_finished(client.step(EMPTY).step)
        remove_placement_group(cluster._parts.placement)
        gone = "failed: the placement group of the cluster is gone, and its room with it"

        def are_given_up() -> bool:
            states = [rank.replacement for rank in cluster.status().ranks]
            return all(s.startswith(gone) and s.endswith("launch it again") for s in states)

        assert wait_until(are_given_up, SOON_S)
        with pytest.raises(WorkerLostError, match=r"rank 0 is lost .* launch it again"):
            client.attach(timeout_s=0.5)
        with pytest.raises(StartupError, match="rank 1 is not replaced: failed: the placement"):
            cluster.replace_worker(1)
        with pytest.raises(RequestError, match="rank is 2: pass an integer from 0 to 1"):
            cluster.replace_worker(2)
    cluster.stop()
    traces.check(cluster.name)


@ray.remote(num_cpus=0.1, concurrency_groups=WORKER_CONCURRENCY_GROUPS)
class Engine(WorkerMethods):
    """An engine's own actor that keeps a rank's cache inside itself."""

    def __init__(self, config: ClusterConfig, place: int) -> None:
        self.kvcache = EmbeddedWorker(config, place, connect_peer)

    def poll(self, num_times: int) -> None:
        """Serve the coordinator for a while."""
        for _ in range(num_times):
            self.kvcache.poll(0.01)


def test_an_engine_hands_over_another_actor_for_one_that_is_lost(
    launch: Any, make_config: Any
) -> None:
    config = make_config(content_check={"enabled": False}, transport={"heartbeat_s": 0.4})
    engines = [Engine.remote(config, place) for place in range(2)]
    cluster = launch(config, worker_actors=engines)
    with pytest.raises(RequestError, match="are the engine's own: pass another one"):
        cluster.replace_worker(0)
    ray.kill(engines[1])
    remedy = "the engine has to make an actor and pass it to KVCacheCluster.replace_worker"
    assert wait_until(lambda: remedy in cluster.status().problem, SOON_S)
    engines[1] = Engine.remote(config, 1)
    polling = [engine.poll.remote(2000) for engine in engines]
    cluster.replace_worker(1, engines[1])
    assert wait_until(lambda: cluster.status().state == "ready", SOON_S)
    with cluster.client() as client:
        client.wait_applied(client.step(EMPTY).step)
    os.kill(cluster.status().coordinator_process_id, signal.SIGKILL)
    assert wait_until(lambda: answered(cluster, "ready"), SOON_S)
    ray.get(polling, timeout=SOON_S)
    cluster.stop()
    for engine in engines:
        ray.kill(engine)


def test_waits_are_reported_with_their_age(launch: Any, make_config: Any) -> None:
    deadlines = {"worker_silence_s": 1.0, "worker_kill_s": 0.0}
    cluster = launch(make_config(deadlines=deadlines))
    with cluster.client() as client:
        client.wait_finished(client.step(EMPTY).step)
        victim = cluster.status().ranks[1].process_id
        os.kill(victim, signal.SIGSTOP)
        try:
            step = client.submit(EMPTY)

            def stuck() -> set[str]:
                return {work.what for work in cluster.pending() if work.is_stuck}

            assert wait_until(lambda: len(stuck()) >= 2, SOON_S)
            assert "rank 1 has not been heard from" in stuck()
            assert any(
                re.fullmatch(r"message \d+:\d+ is not applied by rank 1", w) for w in stuck()
            )
            assert cluster.status().ranks[1].problem == ""
        finally:
            os.kill(victim, signal.SIGCONT)
        client.wait_finished(step)
        assert wait_until(lambda: not stuck(), SOON_S)


DRIVER = """
import sys, time, os, signal
import ray
from actors import KVCacheCluster
from actors.clusters.placement import wait_until
from kvcache.config import parse_config
import json

ray.init(address=sys.argv[1], log_to_driver=False)
cluster = KVCacheCluster.launch(parse_config(json.loads(sys.argv[2])))
victim = cluster.status().ranks[1].process_id
os.kill(victim, signal.SIGKILL)

def is_replaced():
    status = cluster.status()
    return status.state == "ready" and status.ranks[1].process_id != victim

assert wait_until(is_replaced, float(sys.argv[3]))
print("served by", *(rank.process_id for rank in cluster.status().ranks), flush=True)
time.sleep(600)
"""


def test_a_process_that_took_a_lost_ones_place_ends_with_the_driver_too(
    ray_cluster: str, make_config: Any, traces: Any
) -> None:
    config = make_config()
    arguments = [ray_cluster, config.model_dump_json(), str(SOON_S)]
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout is not None
        lines = (line for line in driver.stdout if line.startswith("served by"))
        process_ids = [int(text) for text in next(lines).split()[2:]]
        assert len(process_ids) == 2
    finally:
        driver.kill()
        driver.communicate()
    assert wait_until(lambda: not any(map(psutil.pid_exists, process_ids)), SOON_S)
    traces.check(config.name)


def test_the_command_line_names_stuck_waits_and_exits_with_1(
    launch: Any, make_config: Any, ray_cluster: str
) -> None:
    cluster = launch(make_config(deadlines={"worker_silence_s": 1.0, "worker_kill_s": 0.0}))

    def run(*options: str) -> tuple[int, str]:
        command = [sys.executable, "-c", "from actors.cli import main; main()", "status", "--stuck"]
        done = subprocess.run(
            [*command, "--name", cluster.name, *options],
            capture_output=True,
            text=True,
            check=False,
            timeout=SOON_S,
            env={**os.environ, "RAY_ADDRESS": ray_cluster},
        )
        return done.returncode, done.stdout

    exit_code, shown = run()
    assert (exit_code, "nothing is stuck" in shown) == (0, True), shown
    victim = cluster.status().ranks[1].process_id
    os.kill(victim, signal.SIGSTOP)
    try:
        assert wait_until(lambda: any(work.is_stuck for work in cluster.pending()), SOON_S)
        exit_code, shown = run("--json")
    finally:
        os.kill(victim, signal.SIGCONT)
    assert exit_code == 1
    stuck = [work for work in json.loads(shown)["pending"] if work["is_stuck"]]
    assert [work["what"] for work in stuck] == ["rank 1 has not been heard from"]


def test_actors_keep_compiled_code_where_the_launching_process_does(
    launch: Any, make_config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Ray was started without it. If numba cannot use it, nothing needs to be compiled for this.
    place = tmp_path / "file"
    place.touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(place))
    cluster = launch(make_config(offload={"host_memory_per_rank": "1MiB"}))
    first = cluster.status().ranks[1].process_id
    kill(cluster, 1)
    assert wait_until(lambda: cluster.status().ranks[1].process_id != first, SOON_S)
    assert wait_until(lambda: cluster.status().state == "ready", SOON_S)
    actors = [cluster._parts.coordinator, *find_memory_services(cluster.name), *cluster.workers]
    told = [
        ray.get(actor.__ray_call__.remote(lambda self: os.environ.get("NUMBA_CACHE_DIR")))
        for actor in actors
    ]
    assert told == [str(place)] * 4
