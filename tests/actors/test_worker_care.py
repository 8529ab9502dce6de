"""Parts of the worker supervisor, without Ray: silence, patience, compatibility, signals."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RaySystemError

from actors.coordinator import CoordinatorActor
from actors.processes import end_local_process, started_ticks
from actors.reports import NodeAddress, WorkerReport
from actors.workers import embedding, health
from actors.workers.health import DeathWatch, SilenceWatch
from actors.workers.replacement import (
    LONGEST_PAUSE_S,
    STABLE_S,
    Patience,
    patience_for,
    require_fit,
)
from actors.workers.supervisor import WorkerSupervisor
from kvcache.base.errors import (
    ClusterError,
    ConfigurationError,
    NotEnoughMemoryError,
    PlanMismatchError,
)
from kvcache.base.serving_loop import ServingLoop
from kvcache.config import layer_specs, load_config
from kvcache.planner import RankMemory
from kvcache.planner.plan import plan_cluster

DEADLINE_S = 30.0
"""Time for a thread to end. Tests wait for that before they restore `ray`."""


def test_a_process_is_silent_since_it_was_heard_last() -> None:
    watch = SilenceWatch(look_s=1.0)
    assert watch.look({0: ("p", 5.0), 1: ("q", 5.0)}, 10.0) == {0: 0.0, 1: 0.0}
    assert watch.look({0: ("p", 5.0), 1: ("q", 10.9)}, 11.0) == {0: 1.0, 1: 0.0}
    assert watch.look({0: ("p", 5.0), 1: ("q", 10.9)}, 12.0) == {0: 2.0, 1: 1.0}
    assert watch.look({0: ("another", 5.0)}, 13.0) == {0: 0.0}
    assert watch.look({}, 14.0) == {}


def test_a_listener_that_was_stopped_itself_takes_no_rank_for_silent() -> None:
    watch = SilenceWatch(look_s=1.0)
    watch.look({0: ("p", 5.0)}, 10.0)
    assert watch.look({0: ("p", 5.0)}, 1000.0) == {0: 2.0}


def test_a_process_is_watched_as_soon_as_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    is_asked, is_over = Event(), Event()

    class Sentinel:
        def remote(self, epoch: int) -> str:
            is_asked.set()
            return "a call"

    def wait(calls: object, **options: object) -> tuple[list[object], list[object]]:
        is_over.wait(60.0)
        return [], []

    monkeypatch.setattr(health, "WAIT_S", 3600.0)
    monkeypatch.setattr(health.ray, "wait", wait)
    watch = DeathWatch(lambda: 1, lambda rank, incarnation, cause: None)
    watch.watch(0, "p", SimpleNamespace(kvcache_watch=Sentinel()))
    try:
        assert is_asked.wait(10.0)
    finally:
        watch.stop()
        is_over.set()
        assert watch.loop.join(DEADLINE_S)


def test_a_sentinel_that_cannot_be_sent_or_read_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    is_watched = Event()

    class Sentinel:
        def remote(self, epoch: int) -> str:
            tried.append(epoch)
            if len(tried) == 1:
                raise ConnectionError("Ray is away")
            return "a call"

    def wait(calls: list[object], **options: object) -> tuple[list[object], list[object]]:
        if len(tried) < 4:
            return calls, []
        is_watched.set()
        return [], calls

    def get(call: object) -> object:
        raise ValueError("an answer that cannot be read")

    monkeypatch.setattr(health, "WAIT_S", 0.01)
    monkeypatch.setattr(health.ray, "wait", wait)
    monkeypatch.setattr(health.ray, "get", get)
    watch = DeathWatch(lambda: 1, lambda rank, incarnation, cause: None)
    watch.watch(0, "p", SimpleNamespace(kvcache_watch=Sentinel()))
    try:
        assert is_watched.wait(10.0)
        assert watch.loop.statistics().num_faults == 3
        assert watch.loop.is_running
    finally:
        watch.stop()
        assert watch.loop.join(DEADLINE_S)


def test_a_call_of_ray_starts_no_cluster_in_the_process_of_the_tests() -> None:
    if ray.is_initialized():
        pytest.skip("this process has a cluster")
    with pytest.raises(RaySystemError, match="Ray has not been started yet"):
        ray.get_actor("nobody")


def test_processes_that_die_repeatedly_are_replaced_at_growing_intervals_and_not_forever(
    make_config: Any,
) -> None:
    config = make_config(deadlines={"replacement_s": 100.0})
    assert patience_for(config, None, 50.0) == Patience(0.0, 150.0)
    delays = []
    before: Any = SimpleNamespace(patience=Patience(0.0, 150.0), ended_s=50.0)
    for _ in range(10):
        before = SimpleNamespace(patience=patience_for(config, before, 51.0), ended_s=50.0)
        delays.append(before.patience.delay_s)
        assert before.patience.give_up_s == 150.0
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[LONGEST_PAUSE_S] * 4]
    now_s = 50.0 + STABLE_S
    assert patience_for(config, before, now_s) == Patience(0.0, now_s + 100.0)


def test_a_process_fits_when_it_keeps_the_same_and_has_the_memory(make_config: Any) -> None:
    config = make_config()
    plan, specs = plan_cluster(config), layer_specs(config)[1]
    needed = plan.configs[1].total_size_bytes
    node = NodeAddress("n", "10.0.0.7")
    report = WorkerReport(1, "p", 7, node, (), specs, RankMemory(0), free_bytes=needed)
    require_fit(plan, 1, report, specs)
    with pytest.raises(NotEnoughMemoryError) as small:
        require_fit(plan, 1, replace(report, free_bytes=needed - 1), specs)
    assert str(small.value) == (
        f"the plan needs {needed} bytes on rank 1, {needed - 1} are available on 10.0.0.7: free "
        "memory there, or stop the cluster and launch it again, which makes a new plan"
    )
    fewer = {name: spec for name, spec in specs.items() if name != "layers.3"}
    with pytest.raises(PlanMismatchError, match=r"its layer layers\.3 keeps None, the plan was"):
        require_fit(plan, 1, replace(report, specs=fewer), specs)


def test_a_stopped_process_is_ended_and_one_that_started_later_under_its_id_is_not() -> None:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        ticks = started_ticks(process.pid)
        assert ticks > started_ticks(os.getpid())
        assert end_local_process(process.pid, ticks + 1) == ""
        process.stdin.write(b"alive\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"alive\n"
        process.send_signal(signal.SIGSTOP)
        assert end_local_process(process.pid, ticks) == ""
        assert process.wait(30) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()
    assert end_local_process(process.pid, ticks) == ""


def test_a_process_whose_ending_went_wrong_is_ended_again() -> None:
    def fail(*_: object) -> None:
        raise ConnectionError("Ray is away")

    loop = ServingLoop("supervisor", lambda: None)
    care: Any = SimpleNamespace(
        _loop=loop, _end_and_prove=fail, _dead={}, _ending={"p": "silent for 40 s"}
    )
    report = WorkerReport(0, "p", 7, NodeAddress("n", "10.0.0.7"), (), {}, RankMemory(0))
    WorkerSupervisor._end(care, 0, None, report)
    assert care._ending == {}
    assert loop.statistics().last_fault == "the ending of rank 0: ConnectionError: Ray is away"


def test_a_coordinator_that_cannot_write_down_where_it_is_has_taken_over_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise ClusterError("the state store is away")

    monkeypatch.setattr("actors.coordinator.save_endpoint", fail)
    actor: Any = SimpleNamespace(
        _is_running=lambda: True,
        _closed=Event(),
        _config=SimpleNamespace(name="x"),
        _node=NodeAddress("n", "10.0.0.7"),
        _endpoint_for=lambda node: None,
    )
    CoordinatorActor._tell_clients(actor, give_up_s=0.0)


def test_a_rank_on_cpu_offers_the_memory_that_is_available_and_says_if_it_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_config("cpu_tp2")
    config = config.model_copy(
        update={"cache": config.cache.model_copy(update={"memory_per_rank": None})}
    )
    monkeypatch.setattr(embedding, "available_memory_bytes", lambda: 1000)
    assert embedding.plannable_bytes(config, embedding.free_memory_bytes(config), 2) == 400
    monkeypatch.setattr(embedding, "available_memory_bytes", lambda: None)
    with pytest.raises(ConfigurationError, match=r"set cache\.memory_per_rank"):
        embedding.free_memory_bytes(config)
