"""The log of a schedule: a line for each event of a cluster, with ids, and few lines however much a
peer sends."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcache.base.arrays import int32_array
from kvcache.base.logs import MAX_LINES, PERIOD_S, LineLimit
from kvcache.coordinator import Phase
from kvcache.offload.disk_use import DiskUse
from kvcache.protocol.commands import Unlabel
from kvcache.protocol.messages import (
    Ack,
    Attach,
    Detach,
    Finished,
    Granted,
    Heartbeat,
    Hello,
    JobReport,
    Ping,
    StepCommands,
)
from kvcache.protocol.step import StepRequest
from tests.protocol.scenario import Scenario
from tests.protocol.simulation import Cluster
from tests.protocol.test_coordinator import BrokenStore
from tests.protocol.test_tier_schedules import faulty

MAX_STEPS = 2000


@pytest.fixture(autouse=True)
def all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvcache")


@contextmanager
def begun(scenario: Scenario) -> Iterator[Cluster]:
    """A cluster whose first epoch runs, with its clients attached."""
    cluster = Cluster(scenario)
    cluster._send_all(cluster.coordinator.start())
    for name, engine in cluster.engines.items():
        cluster._send(name, "coordinator", engine.session.attach())
    go_on(cluster, lambda: is_running(cluster))
    yield cluster
    cluster.close()


def go_on(cluster: Cluster, is_done: Callable[[], bool]) -> None:
    for _ in range(MAX_STEPS):
        if is_done():
            return
        cluster._step_on()
    raise AssertionError(cluster._describe())


def is_running(cluster: Cluster) -> bool:
    """Whether steps are served and every client is attached."""
    sessions = [engine.session.state.value for engine in cluster.engines.values()]
    return cluster.coordinator.phase is Phase.RUNNING and set(sessions) == {"attached"}


def lines(caplog: pytest.LogCaptureFixture, pattern: str) -> list[str]:
    found = [f"{r.levelname} {r.getMessage()}" for r in caplog.records]
    return [line for line in found if re.search(pattern, line)]


def require_one(caplog: pytest.LogCaptureFixture, *patterns: str) -> None:
    """Check that every pattern matches exactly one line."""
    for pattern in patterns:
        assert len(lines(caplog, pattern)) == 1, (pattern, lines(caplog, pattern), caplog.text)


SCENARIO = Scenario(7, num_ranks=2, num_clients=1, num_requests=40)


def test_an_epoch_is_told_phase_by_phase(caplog: pytest.LogCaptureFixture) -> None:
    with begun(SCENARIO) as cluster:
        nonce = cluster.coordinator._members.nonce
        require_one(
            caplog,
            rf"^INFO epoch 1 begins: coordinator {nonce} asks 2 ranks to obey",
            r"^INFO epoch 1: rank 0 obeys, process process-1$",
            r"^INFO epoch 1: rank 1 obeys, process process-2$",
            rf"^INFO rank 1 obeys epoch 1 of coordinator {nonce}, process process-2$",
            r"^INFO epoch 1: all 2 ranks obey after \d+\.\d{3} s",
            r"^INFO epoch 1 is ready after \d+\.\d{3} s: cold, no rank holds anything$",
            r"^INFO epoch 1: client engine-0 is attached, its next step is 1; 1 clients$",
        )
        cluster.coordinator.close()
        require_one(caplog, rf"^INFO epoch 1 ends: coordinator {nonce} closes$")


def test_a_healthy_schedule_says_nothing_of_its_steps(caplog: pytest.LogCaptureFixture) -> None:
    with begun(SCENARIO) as cluster:
        caplog.clear()
        before = cluster.coordinator.statistics().num_steps
        go_on(cluster, lambda: cluster.coordinator.statistics().num_steps >= before + 30)
        assert caplog.text == ""


def test_a_loss_and_the_replacement_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with begun(SCENARIO) as cluster:
        kept = cluster.coordinator.statistics().num_steps + 20
        go_on(cluster, lambda: cluster.coordinator.statistics().num_steps >= kept)
        incarnation = cluster.workers[1].settings.incarnation
        cluster._send_all(cluster.coordinator.on_worker_lost(1, incarnation, "it was killed"))
        cluster._lose_worker(1)
        cluster._send_all(cluster.coordinator.on_worker_lost(1, incarnation, "it was killed"))
        go_on(cluster, lambda: is_running(cluster))
        require_one(
            caplog,
            r"^WARNING epoch 1 ends: rank 1 is lost, process process-2: it was killed; "
            r"to attach again: engine-0$",
            r"^INFO epoch 2 begins: .* asks 2 ranks",
            r"^INFO epoch 2: rank 1 obeys, process process-3$",
            r"^INFO epoch 2 is ready after \d",
            r"^INFO epoch 2: client engine-0 is attached, its next step is \d+; 1 clients$",
        )


def test_a_takeover_is_told_by_all_who_see_it(caplog: pytest.LogCaptureFixture) -> None:
    with begun(SCENARIO) as cluster:
        kept = cluster.coordinator.statistics().num_steps + 20
        go_on(cluster, lambda: cluster.coordinator.statistics().num_steps >= kept)
        old = cluster.coordinator
        cluster.coordinator = cluster._make_coordinator()
        cluster._send_all(cluster.coordinator.start())
        for worker in cluster.workers.values():
            worker.introduce()
        go_on(cluster, lambda: is_running(cluster))
        for message in cluster.workers[0].on_message(Ping(old._members.nonce, old.epoch)):
            old.on_worker_message(0, message)
        new = cluster.coordinator._members.nonce
        require_one(
            caplog,
            rf"^INFO epoch 2 begins: coordinator {new} ",
            r"^INFO epoch 2: steps wait up to \d+\.\d s for clients engine-0$",
            r"^INFO epoch 2 is ready after .* s: \d+ blocks are kept",
            rf"^WARNING rank 0 does not obey epoch 1 of coordinator {old._members.nonce}: epoch 2 ",
            rf"^WARNING epoch 1 was superseded, coordinator {old._members.nonce} stops serving: "
            r"rank 0: epoch 2 of another coordinator is obeyed; to attach again: engine-0$",
        )


def test_refused_peers_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with begun(SCENARIO) as cluster:
        coordinator = cluster.coordinator
        coordinator.on_worker_message(0, Hello("stranger", 0, 0, "another plan"))
        coordinator.on_worker_message(0, Heartbeat("n", "stranger", 1, 1, 0))
        coordinator.on_client_message(Attach("engine-9", 0))
        nonce, incarnation = coordinator._members.nonce, cluster.workers[0].settings.incarnation
        ahead = Ack(nonce, incarnation, 0, 1, 10**6)
        coordinator.on_worker_message(0, ahead)
        unknown = Finished(nonce, incarnation, 0, 1, (JobReport(10**6, ok=True),))
        coordinator.on_worker_message(0, unknown)
        bad = StepCommands(nonce, "plan", 1, 10**6, "", 0, (Unlabel(int32_array([10**6])),))
        cluster.workers[0].on_message(bad)
        coordinator.on_client_message(Detach("engine-0", 1))
        require_one(
            caplog,
            r"^WARNING epoch 1: .* rank 0 process stranger has plan another plan",
            r"^WARNING epoch 1: .* rank 0 speaks for rank 1$",
            r"^WARNING epoch 1: client engine-9 is not attached: .* step 0 is invalid$",
            r"^WARNING epoch 1: .* rank 0 acknowledges 1000000",
            r"^WARNING epoch 1: a report is dropped: rank 0 reports job 1000000",
            r"^ERROR rank 0 refuses message 1:1000000: ",
            r"^INFO epoch 1: client engine-0 has detached$",
        )


def test_a_rank_that_is_silent_is_told_once_and_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with begun(SCENARIO) as cluster:
        caplog.clear()
        silence_s = cluster.coordinator.settings.worker_silence_s
        for _ in range(5):
            cluster.clock.advance(silence_s)
            cluster.coordinator.on_tick()
        require_one(caplog, r"^WARNING epoch 1: steps are refused: rank 0 has not been heard from")
        go_on(cluster, lambda: not cluster.coordinator.problem())
        cluster._step_on()
        require_one(caplog, r"^INFO epoch 1: all ranks are heard again$")


def test_a_state_that_cannot_be_saved_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with begun(SCENARIO) as cluster:
        store = cluster.coordinator._members._store = BrokenStore(
            cluster.coordinator._members._saved
        )
        store.is_broken = True
        incarnation = cluster.workers[0].settings.incarnation
        cluster._send_all(cluster.coordinator.on_worker_lost(0, incarnation, "killed"))
        cluster._lose_worker(0)
        for _ in range(20):
            cluster._step_on()
        require_one(caplog, r"^ERROR epoch 1: the state of the cluster cannot be saved: no room$")
        store.is_broken = False
        go_on(cluster, lambda: is_running(cluster))
        require_one(caplog, r"^INFO epoch 1: the state of the cluster can be saved again$")


def test_every_rest_of_a_tier_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Earlier schedules, in the same seconds, may have used up the limit of a line.
    monkeypatch.setattr(LineLimit, "filter", lambda self, record: True)
    counts: Counter[str] = Counter()
    rest, look = DiskUse.rest, DiskUse.look

    def counted_rest(self: DiskUse, reason: str, now_s: float) -> None:
        num_before = self.num_rests
        rest(self, reason, now_s)
        counts["begun"] += self.num_rests - num_before

    def counted_look(self: DiskUse, now_s: float) -> None:
        was_off = self.is_off
        look(self, now_s)
        counts["over"] += was_off and not self.is_off

    monkeypatch.setattr(DiskUse, "rest", counted_rest)
    monkeypatch.setattr(DiskUse, "look", counted_look)
    for seed in range(30):
        caplog.clear()
        counts.clear()
        directory = tmp_path / str(seed)
        directory.mkdir()
        cluster = Cluster(faulty(seed), directory)
        try:
            cluster.play()
        finally:
            cluster.close()
        if 0 < counts["over"] <= counts["begun"] < MAX_LINES:
            break
    rests = lines(caplog, r"^WARNING files are left alone for \d+(\.\d+)? s: fetch: rank \d+: ")
    assert len(rests) == counts["begun"] > 0
    assert len(lines(caplog, r"^INFO files are asked again after rest \d+$")) == counts["over"] > 0
    assert lines(caplog, r"^WARNING job \d+ of tiers failed: fetch: rank \d+: ")
    assert lines(caplog, r"^INFO epoch 1: ranks are asked for their tier contents: host, file$")
    assert lines(caplog, r"^INFO epoch 1: of the file tier \d+ blocks are taken over$")


def test_a_storm_of_bad_messages_writes_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    with begun(SCENARIO) as cluster:
        caplog.clear()
        coordinator, worker = cluster.coordinator, cluster.workers[0]
        nonce, incarnation = coordinator._members.nonce, worker.settings.incarnation
        began_s = time.monotonic()
        for number in range(2_500):
            coordinator.on_worker_message(0, Hello(f"stranger-{number}", 0, 0, "another plan"))
            coordinator.on_worker_message(0, Heartbeat(nonce, incarnation, 1, 1, 0))
            coordinator.on_client_message(Attach(f"client-{number}", 0))
            coordinator.on_worker_message(0, Granted("no", f"stranger-{number}", 0, 5))
            coordinator.on_client_message(StepRequest(client_id=f"client-{number}", step=1))
            bad = (Unlabel(int32_array([10**6])),)
            worker.on_message(StepCommands(nonce, "plan", 1, 10**6 + number, "", 0, bad))
            worker.on_message(Ping("another", 1))
        num_periods = 2 + (time.monotonic() - began_s) // PERIOD_S
        by_place = Counter((record.pathname, record.lineno) for record in caplog.records)
        assert 0 < max(by_place.values()) <= MAX_LINES * num_periods
        assert 3 <= len(by_place) <= 8
