"""The waits of a coordinator, and their ages."""

from __future__ import annotations

from kvcache.coordinator.parts import OffloadParts
from kvcache.coordinator.settings import AuditSettings, OffloadSettings
from kvcache.coordinator.tier_hits import TierHitFinder
from kvcache.coordinator.watchdog import (
    PendingWork,
    Watchdog,
    WatchLimits,
    signs_of_life,
    signs_of_progress,
)
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.offload.jobs import Deadlines
from kvcache.offload.options import HierarchyOptions, TierOptions
from kvcache.offload.registry import make_tier
from kvcache.offload.specs import HOST_MEDIUM
from kvcache.protocol.commands import Audit, Store
from kvcache.protocol.messages import (
    CollectLabels,
    Granted,
    Heartbeat,
    JobReport,
    Outgoing,
    StepCommands,
)
from tests.protocol.scenario import make_config
from tests.protocol.test_coordinator import NUM_BLOCKS, Bench, new, only

LIMITS = WatchLimits(rank_s=10.0, client_s=5.0, step_s=30.0, forward_s=20.0)


def look(watchdog: Watchdog, bench: Bench) -> dict[str, PendingWork]:
    return {work.what: work for work in watchdog.look(bench.coordinator, bench.clock.now())}


def test_a_running_cluster_waits_for_nothing_but_the_next_sign_of_life() -> None:
    bench, watchdog = Bench().run(), Watchdog(LIMITS)
    assert look(watchdog, bench) == {
        f"rank {rank} has not been heard from": PendingWork(
            "silence", f"rank {rank} has not been heard from", 0.0, 10.0
        )
        for rank in (0, 1)
    }
    bench.clock.advance(10.5)
    bench.applied(0, 1)
    pending = watchdog.look(bench.coordinator, bench.clock.now())
    assert [(work.what, work.age_s, work.is_stuck) for work in pending] == [
        ("rank 1 has not been heard from", 10.5, True),
        ("rank 0 has not been heard from", 0.0, False),
    ]


def test_a_grant_is_waited_for_since_it_was_first_seen() -> None:
    bench, watchdog = Bench(), Watchdog(LIMITS)
    bench.coordinator.start()
    bench.hello(0)
    assert set(look(watchdog, bench)) == {
        "rank 0 has not granted epoch 1",
        "rank 1 has no process to grant epoch 1",
    }
    bench.clock.advance(11.0)
    late = look(watchdog, bench)
    assert {work.age_s for work in late.values()} == {11.0}
    assert all(work.is_stuck for work in late.values())
    bench.hello(1)
    assert not look(watchdog, bench)["rank 1 has not granted epoch 1"].is_stuck
    assert signs_of_life(bench.coordinator) == {
        0: ("p", 0.0 + bench.clock.now() - 11.0),
        1: ("q", bench.clock.now()),
    }


def test_a_rank_that_speaks_but_applies_nothing_shows_no_progress() -> None:
    bench = Bench().run()
    bench.step(1)
    bench.applied(0, 2)
    before = signs_of_progress(bench.coordinator)
    bench.clock.advance(5.0)
    for rank, process in enumerate("pq"):
        bench.coordinator.on_worker_message(rank, Heartbeat("n", process, rank, 1, 2 - rank))
    after = signs_of_progress(bench.coordinator)
    assert after[0] == ("p", bench.clock.now()) != before[0]
    assert after[1] == before[1] == ("q", -2.0)
    bench.applied(1, 2)
    assert signs_of_progress(bench.coordinator)[1] != before[1]


def test_labels_that_a_rank_does_not_tell_are_named() -> None:
    bench, watchdog = Bench(), Watchdog(LIMITS)
    bench.coordinator.start()
    for rank in (0, 1):
        bench.hello(rank)
    bench.coordinator.on_worker_message(0, Granted("n", "p", 0, 1))
    asked = bench.coordinator.on_worker_message(1, Granted("n", "q", 1, 1))
    assert len(only(asked, CollectLabels)) == 2
    bench.labels(0)
    bench.clock.advance(10.5)
    work = look(watchdog, bench)["rank 1 has not sent its labels in epoch 1"]
    assert (work.age_s, work.limit_s, work.is_stuck) == (10.5, 10.0, True)


def test_messages_and_forwards_name_the_ranks_that_are_behind() -> None:
    bench, watchdog = Bench(is_content_checking=True).run(), Watchdog(LIMITS)
    bench.step(1, new=(new("r"),))
    bench.applied(0, 2)
    bench.finished(0, JobReport(1, True, "", 0))
    message = "message 1:2 is not applied by rank 1"
    forward = "the forward of step 1 of c (job 1) has not ended on rank 1"
    assert {message, forward} <= set(look(watchdog, bench))
    bench.clock.advance(15.0)
    pending = look(watchdog, bench)
    assert (pending[message].is_stuck, pending[forward].is_stuck) == (True, False)
    bench.applied(1, 2)
    bench.finished(1, JobReport(1, True, "", 0))
    assert not {message, forward} & set(look(watchdog, bench))


def test_a_job_is_named_by_its_kind_with_the_limit_of_that_kind() -> None:
    options = HierarchyOptions(deadlines=Deadlines(store_s=3.0))
    parts = OffloadParts(
        OffloadSettings(adoption_s=1.0),
        TierHitFinder(make_config(NUM_BLOCKS, is_hybrid=False), 4),
        lambda new_job_id: TierHierarchy(
            make_tier(TierOptions(HOST_MEDIUM, 8)), None, new_job_id, options
        ),
    )
    bench = Bench(offload=parts, audit=AuditSettings("on")).run()
    bench.clock.advance(2.0)  # no rank tells what its host memory holds
    bench.coordinator.on_tick()

    def job_id(out: list[Outgoing], kind: type[Audit | Store]) -> int:
        commands = [c for message in only(out, StepCommands) for c in message.commands]
        return next(command.job_id for command in commands if isinstance(command, kind))

    sent = bench.step(1, new=(new("r"),))
    for rank in (0, 1):
        bench.applied(rank, only(sent, StepCommands)[-1].seq)
    sent = bench.step(2, completed_step=1)  # seals its blocks
    store, audit = job_id(sent, Store), job_id(sent, Audit)
    waits = look(Watchdog(LIMITS), bench)
    what = f"the store of tiers (job {store}) has not ended on rank 0, 1"
    assert waits[what] == PendingWork("store", what, 0.0, 3.0)
    what = f"the audit (job {audit}) has not ended on rank 0, 1"
    assert waits[what] == PendingWork("audit", what, 0.0, 10.0)


def test_a_client_that_has_lost_its_connection_is_named_until_it_is_heard() -> None:
    bench, watchdog = Bench(reattach_s=20.0).run(), Watchdog(LIMITS)
    bench.coordinator.on_client_lost("c")
    bench.clock.advance(7.0)
    what = "client c has lost its connection"
    assert look(watchdog, bench)[what] == PendingWork("client", what, 7.0, 20.0)
    bench.attach()
    assert what not in look(watchdog, bench)


def test_steps_that_wait_for_room_or_for_one_before_them_are_named() -> None:
    bench, watchdog = Bench(max_unacknowledged=1).run(), Watchdog(LIMITS)
    bench.step(1)
    bench.step(2)
    assert "step 2 of c has not been executed" in look(watchdog, bench)
    bench.attach("d")
    bench.step(3, client_id="d")
    missing = "step 1 of d has not arrived, but later ones have"
    assert missing in look(watchdog, bench)
    bench.clock.advance(31.0)
    assert look(watchdog, bench)[missing].is_stuck
