"""Memory services are watched: missing memory is registered again, a hanging service is ended, and
the status reports both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors import memory_service
from actors.memory_service import MemoryServiceActor, MemoryServiceWatch
from actors.processes import ProcessIdentity
from actors.reports import MemoryServiceStatus, NodeAddress, WorkerReport
from kvcache.base.clock import VirtualClock
from kvcache.base.errors import AlreadyRunningError
from kvcache.base.serving_loop import LoopStatistics
from kvcache.memory_service import HostMemoryService, MemoryServiceClient, MemoryServiceStatistics
from kvcache.planner import RankMemory
from tests.waiting import wait_until

DEADLINE_S = 30.0
NODE = NodeAddress("node-1", "10.0.0.7")
SERVING = MemoryServiceStatus(
    "node-1", "10.0.0.7", process_id=70, started_ticks=5, kept_ranks=(0, 1)
)
AWAY = MemoryServiceStatus("node-1", "10.0.0.7", problem="it died", missing_ranks=(0, 1))
EMPTY = replace(SERVING, process_id=71, kept_ranks=(), missing_ranks=(0, 1))


class Site:
    """Two ranks on a node, and a memory service controlled by the test."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.seen = SERVING
        self.num_looks = 0
        self.put: list[int] = []
        self.answers = {0: "", 1: ""}
        self.rules = True
        self.ended: list[ProcessIdentity] = []
        reports = [WorkerReport(r, f"p{r}", r, NODE, (), {}, RankMemory(0)) for r in (0, 1)]
        actors = [self.worker(rank) for rank in (0, 1)]
        self.worker_set: Any = SimpleNamespace(reports=tuple(reports), actors=tuple(actors))

    def worker(self, rank: int) -> Any:
        def put_again() -> str:
            self.put.append(rank)
            return self.answers[rank]

        return SimpleNamespace(kvcache_keep_memory=SimpleNamespace(remote=put_again))

    def look(self, cluster: str, reports: object, *_: object) -> list[MemoryServiceStatus]:
        self.num_looks += 1
        return [self.seen]

    def end(self, process: ProcessIdentity) -> str:
        self.ended.append(process)
        return ""


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site()
    monkeypatch.setattr(memory_service, "LOOK_S", 0.001)
    monkeypatch.setattr(memory_service, "look_at_memory_services", made.look)
    monkeypatch.setattr(memory_service, "end_process", made.end)
    monkeypatch.setattr(memory_service.ray, "get", lambda call, timeout: call)
    return made


@pytest.fixture
def watch(site: Site, make_config: Any) -> Iterator[MemoryServiceWatch]:
    config = make_config(
        offload={"host_memory_per_rank": "1MiB"}, deadlines={"worker_kill_s": 30.0}
    )
    made = MemoryServiceWatch(config, lambda: site.worker_set, lambda: site.rules, site.clock)
    yield made
    made.stop()
    assert made.loop.join(DEADLINE_S)


def look_again(site: Site) -> None:
    """Wait until two more looks have begun: the findings of the first are reported then."""
    number = site.num_looks
    wait_until(lambda: site.num_looks > number + 2)


def test_memory_is_put_again_when_its_service_has_come_back(
    site: Site, watch: MemoryServiceWatch
) -> None:
    wait_until(lambda: bool(watch.statuses()))
    assert watch.statuses()[0].warnings() == []
    site.seen = AWAY
    look_again(site)
    assert site.put == []
    site.clock.advance(7.0)
    look_again(site)
    assert watch.statuses()[0].warnings() == [
        "the memory service of node 10.0.0.7 does not serve for 7 s (it died): host memory of "
        "ranks 0, 1 now ends with their processes"
    ]
    site.answers[1] = "no memory service answers"
    site.seen = EMPTY
    look_again(site)
    assert {0, 1} <= set(site.put)
    assert watch.statuses()[0].num_restarts == 1
    assert watch.statuses()[0].warnings() == [
        "host memory of rank 0 ends with its process: the memory service of node 10.0.0.7 does not "
        "have it yet",
        "host memory of rank 1 ends with its process: the memory service of node 10.0.0.7 does not "
        "have it: no memory service answers",
    ]
    site.seen = replace(SERVING, process_id=71)
    look_again(site)
    site.put.clear()
    look_again(site)
    assert site.put == []
    assert watch.statuses()[0].warnings() == []


def test_a_coordinator_that_was_taken_over_from_does_nothing(
    site: Site, watch: MemoryServiceWatch
) -> None:
    site.rules = False
    site.seen = EMPTY
    look_again(site)
    assert site.put == []


def test_a_memory_service_that_hangs_is_ended_once(site: Site, watch: MemoryServiceWatch) -> None:
    wait_until(lambda: bool(watch.statuses()))
    site.seen = replace(AWAY, problem="it does not answer", is_silent=True)
    look_again(site)
    assert site.ended == []
    site.clock.advance(30.5)
    wait_until(lambda: bool(site.ended))
    look_again(site)
    assert site.ended == [ProcessIdentity("node-1", "10.0.0.7", 70, 5)]


def test_errors_that_a_memory_service_survived_are_reported() -> None:
    loop = LoopStatistics("kvcache-memory-service", True, 2, "a question: KeyError: 'x'")
    told = MemoryServiceStatistics(2, 100, 5, 2, ("a", "b"), loop)
    assert replace(SERVING, statistics=told).warnings() == [
        "node 10.0.0.7: kvcache-memory-service survived 2 errors, the last: a question: KeyError: "
        "'x'"
    ]


def test_without_memory_to_keep_nothing_is_watched(site: Site, make_config: Any) -> None:
    config = make_config(offload={"host_memory_per_rank": "1MiB", "keeps_memory": False})
    for each in (config, make_config()):
        made = MemoryServiceWatch(each, lambda: site.worker_set, lambda: True, site.clock)
        assert not made.loop.is_running
        assert made.statuses() == ()
        made.stop()


def test_an_actor_that_is_made_again_waits_until_it_can_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = SimpleNamespace(was_current_actor_reconstructed=False)
    monkeypatch.setattr(memory_service.ray, "get_runtime_context", lambda: context)
    address = f"unix:@kvcache-test-actor-{threading.get_native_id()}"
    before = HostMemoryService(address, max_segments=1, max_bytes=1)
    with pytest.raises(AlreadyRunningError):
        MemoryServiceActor(address, 1, 4096)
    context.was_current_actor_reconstructed = True
    actor = MemoryServiceActor(address, 1, 4096)
    report = actor.report()
    assert report.statistics is None
    assert report.problem.startswith(f"no memory service can listen at {address} ")
    before.close()
    report = actor.report()
    assert (report.statistics.names, report.problem) == ((), "")
    assert MemoryServiceClient(address).attach("a") is None
    actor._service.close()
