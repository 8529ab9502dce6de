"""The coordinator, message by message, without a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from kvcache.base.arrays import int32_array
from kvcache.base.clock import Clock, StallAwareClock, VirtualClock
from kvcache.base.errors import ClusterError
from kvcache.coordinator import Coordinator, Phase
from kvcache.coordinator.membership import EPOCH_EVENTS
from kvcache.coordinator.parts import CoordinatorParts, OffloadParts
from kvcache.coordinator.remote_calls import pack_values, unpack_values
from kvcache.coordinator.settings import CoordinatorSettings
from kvcache.manager import KVCacheManager
from kvcache.protocol.commands import Fence, Label, Reset, WriteExpected
from kvcache.protocol.labels import BlockLabel, LabelTable
from kvcache.protocol.messages import (
    Ack,
    Acknowledge,
    Attach,
    Attached,
    Call,
    CallResult,
    CollectLabels,
    Detach,
    Detached,
    Finished,
    FinishedAck,
    Grant,
    Granted,
    Heartbeat,
    Hello,
    JobReport,
    LabelReport,
    MissingSteps,
    Outgoing,
    Ping,
    Progress,
    Refused,
    StepCommands,
    Unattached,
    WorkerAddress,
)
from kvcache.protocol.state_store import MemoryStateStore, SmallState
from kvcache.protocol.step import NewRequest, RunningRequests, RunningRow, StepRequest, StepResult
from tests.protocol.scenario import make_config

T = TypeVar("T")

NUM_BLOCKS = 24


def only(out: list[Outgoing], kind: type[T]) -> list[T]:
    return [item.message for item in out if isinstance(item.message, kind)]


def label_report(
    rank: int, process: str, epoch: int, labels: Sequence[BlockLabel], num_blocks: int
) -> LabelReport:
    """Return all labels of a rank in one report."""
    table = LabelTable(num_blocks, 32, 4)
    for label in labels:
        table.apply(
            Label(
                int32_array([label.block_id]),
                int32_array([label.group]),
                int32_array([label.slot]),
                label.digest,
                label.parent_digest,
                int32_array([len(label.token_ids)]),
                int32_array(label.token_ids),
                int32_array([0]),
                (label.namespace,),
                {0: label.extra_keys} if label.extra_keys else {},
            )
        )
    known = table.collect(rank, epoch, 0, "layout")
    return LabelReport(
        "n",
        process,
        rank,
        epoch,
        0,
        num_blocks,
        num_blocks,
        0,
        known.version,
        known.layout_fingerprint,
        known.digest_bytes,
        known.labels,
        known.checksums,
        (),
    )


class Bench:
    """A coordinator of two ranks, and helpers that feed it."""

    def __init__(
        self,
        store: MemoryStateStore | None = None,
        nonce: str = "n",
        seen_by: Callable[[VirtualClock], Clock] = lambda machine: machine,
        offload: OffloadParts | None = None,
        **changes: Any,
    ) -> None:
        """`seen_by` makes the coordinator's clock from the machine's."""
        self.clock = VirtualClock()
        self.store = store or MemoryStateStore()
        settings = CoordinatorSettings(2, "plan", resend_s=1.0, heartbeat_s=2.0)
        parts = CoordinatorParts(
            lambda model_epoch: KVCacheManager(
                make_config(24, is_hybrid=False),
                64,
                max_num_seqs=4,
                clock=self.clock,
                has_workers=True,
                model_epoch=model_epoch,
            ),
            seen_by(self.clock),
            self.store,
            offload=offload,
        )
        self.coordinator = Coordinator(replace(settings, **changes), parts, nonce)
        self.processes = ["p", "q"]

    def hello(self, rank: int, process: str | None = None, highest: int = 0) -> list[Outgoing]:
        process = process or self.processes[rank]
        return self.coordinator.on_worker_message(rank, Hello(process, rank, highest, "plan"))

    def granted(self, rank: int) -> list[Outgoing]:
        """Let a rank grant the epoch; after all have, each reports that it holds nothing."""
        message = Granted("n", self.processes[rank], rank, self.coordinator.epoch)
        out = self.coordinator.on_worker_message(rank, message)
        for asked in only(out, CollectLabels):
            assert asked == CollectLabels("n", self.coordinator.epoch, 0)
        if self.coordinator.phase is Phase.COLLECTING:
            for each in (0, 1):
                out += self.labels(each)
        return out

    def labels(self, rank: int, *labels: BlockLabel, **changes: Any) -> list[Outgoing]:
        """Let a rank report its 24 blocks."""
        report = label_report(
            rank, self.processes[rank], self.coordinator.epoch, labels, NUM_BLOCKS
        )
        return self.coordinator.on_worker_message(rank, replace(report, **changes))

    def applied(self, rank: int, seq: int, /, **changes: Any) -> list[Outgoing]:
        message = Ack("n", self.processes[rank], rank, self.coordinator.epoch, seq)
        return self.coordinator.on_worker_message(rank, replace(message, **changes))

    def finished(self, rank: int, /, *jobs: JobReport, **changes: Any) -> list[Outgoing]:
        message = Finished("n", self.processes[rank], rank, self.coordinator.epoch, jobs)
        return self.coordinator.on_worker_message(rank, replace(message, **changes))

    def run(self) -> Bench:
        """Start everything, with one client `c`."""
        self.coordinator.start()
        for rank in (0, 1):
            self.hello(rank)
            self.granted(rank)
        for rank in (0, 1):
            self.applied(rank, 1)
        assert only(self.attach(), Attached)
        return self

    def attach(self, client_id: str = "c", next_step: int = 1) -> list[Outgoing]:
        return self.coordinator.on_client_message(Attach(client_id, next_step))

    def step(self, number: int, client_id: str = "c", **fields: Any) -> list[Outgoing]:
        request = StepRequest(client_id, number, self.coordinator.epoch, **fields)
        return self.coordinator.on_client_message(request)


def new(request_id: str, num_tokens: int = 8) -> NewRequest:
    return NewRequest(request_id, int32_array(range(num_tokens)), num_tokens)


def test_an_epoch_is_saved_before_anybody_is_asked_for_it() -> None:
    bench = Bench(MemoryStateStore(SmallState(epoch=6, hash_seed="s")))
    assert bench.coordinator.start() == []
    end_of_events = 8 * EPOCH_EVENTS
    assert bench.store.load() == SmallState(7, 0, end_of_events, "s", owner="n")
    assert only(bench.hello(0), Grant) == [Grant("n", "p", 7, "plan")]


def test_processes_known_beforehand_are_asked_at_once() -> None:
    bench = Bench()
    out = bench.coordinator.start({0: "p", 1: "q"})
    assert [item.to for item in out] == [(WorkerAddress(0),), (WorkerAddress(1),)]


def test_a_higher_epoch_of_a_worker_is_exceeded() -> None:
    bench = Bench()
    bench.coordinator.start()
    bench.hello(0)
    out = bench.hello(1, highest=41)
    assert bench.coordinator.epoch == 42
    assert {grant.epoch for grant in only(out, Grant)} == {42}
    refused = Refused("n", "p", 0, 50, "epoch 42 is not above 50")
    assert only(bench.coordinator.on_worker_message(0, refused), Grant)[0].epoch == 51
    state = bench.store.load()
    assert state is not None and state.epoch == 51


def test_it_runs_when_every_rank_has_granted_and_begins_with_a_reset() -> None:
    bench = Bench()
    bench.coordinator.start()
    for rank in (0, 1):
        bench.hello(rank)
    assert bench.granted(0) == bench.granted(0) == []
    *asked, sent = bench.granted(1)
    assert [item.to for item in asked] == [(WorkerAddress(0),), (WorkerAddress(1),)]
    assert bench.coordinator.phase is Phase.RUNNING
    assert sent.to == (WorkerAddress(0), WorkerAddress(1))
    assert isinstance(sent.message, StepCommands)
    assert (sent.message.epoch, sent.message.seq) == (1, 1)
    assert sent.message.commands == (Reset(0),)


def test_a_request_without_room_counts_in_each_step_that_names_it() -> None:
    bench = Bench().run()
    (first,) = only(bench.step(1, new=tuple(new(f"r{i}") for i in range(6))), StepResult)
    assert first.no_room == ("r4", "r5")
    (second,) = only(bench.step(2, new=(new("r4"),)), StepResult)
    assert second.no_room == ("r4",)
    assert bench.coordinator.statistics().num_no_room == 3
    bench.coordinator.on_worker_lost(0, "p", "gone")
    assert bench.coordinator.statistics().num_no_room == 3


def test_grants_are_repeated_until_answered() -> None:
    bench = Bench()
    bench.coordinator.start()
    bench.hello(0)
    assert bench.coordinator.on_tick() == []
    bench.clock.advance(1.0)
    assert len(only(bench.coordinator.on_tick(), Grant)) == 1


def test_a_worker_of_another_plan_is_not_taken() -> None:
    bench = Bench()
    bench.coordinator.start()
    assert bench.coordinator.on_worker_message(0, Hello("p", 0, 0, "other plan")) == []
    assert "rank 0 process p has plan other plan" in bench.coordinator.statistics().last_dropped


def test_a_client_before_the_cluster_is_complete_is_told_whom_it_waits_for() -> None:
    bench = Bench()
    bench.coordinator.start()
    bench.hello(0)
    bench.granted(0)
    assert only(bench.attach(), Unattached) == [Unattached("c", 1, "waiting for ranks [1]")]


def test_a_step_is_executed_once_and_its_repeat_gets_the_same_answer() -> None:
    bench = Bench().run()
    out = bench.step(1, new=(new("r"),))
    (commands,), (result,) = only(out, StepCommands), only(out, StepResult)
    assert (result.epoch, result.seq, result.error) == (1, 2, "")
    assert (commands.seq, commands.client_id, commands.client_step) == (2, "c", 1)
    assert len(commands.commands) == 1
    again = bench.step(1, new=(new("r"),))
    assert only(again, StepResult) == [result]
    assert only(again, StepCommands) == []
    assert bench.coordinator.statistics().num_steps == 1


def test_a_gap_in_the_numbers_is_asked_for_and_steps_run_in_order() -> None:
    bench = Bench().run()
    assert only(bench.step(2), MissingSteps) == [MissingSteps("c", 1, 1)]
    assert [result.step for result in only(bench.step(1), StepResult)] == [1, 2]


def test_a_refused_step_says_why_and_changes_nothing() -> None:
    bench = Bench().run()
    out = bench.step(1, finished=("nobody",))
    (result,) = only(out, StepResult)
    assert result.error.startswith("RequestError: step 1 of c: request 'nobody' is to be finished")
    assert only(out, StepCommands) == []
    assert only(out, Progress)[0].finished_step == 1
    assert only(bench.step(2, new=(new("r"),)), StepResult)[0].error == ""


def test_progress_counts_ranks_and_not_acknowledgements() -> None:
    bench = Bench().run()
    bench.step(1)
    assert only(bench.applied(0, 2), Progress) == []
    assert only(bench.applied(0, 2), Progress) == []
    assert only(bench.applied(1, 2), Progress) == [Progress("c", 1, 1, 1)]


@pytest.mark.parametrize(
    "change", [{"nonce": "m"}, {"incarnation": "old"}, {"epoch": 2}, {"seq": 99}, {"rank": 1}]
)
def test_an_acknowledgement_of_somebody_else_is_dropped(change: dict[str, Any]) -> None:
    bench = Bench().run()
    bench.step(1)
    bench.applied(1, 2)
    assert bench.applied(0, 2, **change) == []
    assert bench.coordinator.statistics().applied_seq == 1
    assert bench.coordinator.statistics().num_dropped == 1


def test_a_forward_is_over_when_every_rank_has_reported_it() -> None:
    bench = Bench(is_content_checking=True).run()
    (commands,) = only(bench.step(1, new=(new("r"),)), StepCommands)
    job_id = next(c.job_id for c in commands.commands if isinstance(c, WriteExpected))
    bench.applied(0, 2)
    assert only(bench.applied(1, 2), Progress) == [Progress("c", 1, 1, 0)]
    report = JobReport(job_id, True, num_bytes=10)
    ack = [FinishedAck("n", 1, (job_id,))]
    for _ in range(2):
        out = bench.finished(0, report)
        assert only(out, FinishedAck) == ack and only(out, Progress) == []
    assert bench.finished(1, report, epoch=2) == []
    out = bench.finished(1, replace(report, ok=False, detail="torn"))
    (progress,) = only(out, Progress)
    assert (progress.finished_step, progress.bytes_checked) == (1, 20)
    assert [(f.step, f.rank, f.detail) for f in progress.failures] == [(1, 1, "torn")]
    assert only(bench.finished(1, report), FinishedAck) == ack


def test_nothing_is_sealed_that_a_rank_may_still_write() -> None:
    bench = Bench(is_content_checking=True).run()
    bench.step(1, new=(new("r"),))
    (result,) = only(bench.step(2, completed_step=1), StepResult)
    assert "completed_step 1, but only steps up to 0 have finished on every rank" in result.error
    (result,) = only(bench.step(3, failed_step=1), StepResult)
    assert "failed_step 1, but step 1 may still run on a rank" in result.error
    for rank in (0, 1):
        bench.applied(rank, 2)
        bench.finished(rank, JobReport(1, True))
    (commands,) = only(bench.step(4, completed_step=1), StepCommands)
    assert any(isinstance(command, Label) for command in commands.commands)


def test_drafts_without_ids_are_refused_where_their_bytes_are_checked() -> None:
    bench = Bench(is_content_checking=True).run()
    bench.step(1, new=(new("r"),))
    row = RunningRow(0, 3, (1,), num_draft_tokens=2)
    running = RunningRequests.from_rows([row])
    (result,) = only(bench.step(2, running=running), StepResult)
    assert result.error == (
        "RequestError: step 2 of c: 0 draft_token_ids for 2 drafts: content checking needs one for "
        "each"
    )
    told = replace(running, draft_token_ids=int32_array([7, 8]))
    assert only(bench.step(3, running=told), StepResult)[0].error == ""


def test_progress_is_repeated_until_the_client_has_it() -> None:
    bench = Bench().run()
    bench.step(1)
    bench.applied(0, 2)
    bench.applied(1, 2)
    assert only(bench.coordinator.on_tick(), Progress) == []
    bench.clock.advance(1.0)
    assert len(only(bench.coordinator.on_tick(), Progress)) == 1
    bench.coordinator.on_client_message(Acknowledge("c", 1, 1))
    bench.clock.advance(1.0)
    assert only(bench.coordinator.on_tick(), Progress) == []


def test_commands_are_repeated_to_the_rank_that_does_not_acknowledge() -> None:
    bench = Bench().run()
    bench.step(1)
    bench.applied(0, 2)
    bench.clock.advance(1.0)
    out = [item for item in bench.coordinator.on_tick() if isinstance(item.message, StepCommands)]
    assert [item.to for item in out] == [(WorkerAddress(1),)]


def test_a_full_window_delays_the_answer_and_loses_nothing() -> None:
    bench = Bench(max_unacknowledged=1).run()
    assert len(only(bench.step(1), StepResult)) == 1
    assert bench.step(2) == []
    bench.applied(0, 2)
    assert [result.step for result in only(bench.applied(1, 2), StepResult)] == [2]


def test_a_silent_rank_is_pinged_and_then_named_in_errors() -> None:
    bench = Bench(worker_silence_s=5.0).run()
    bench.clock.advance(2.0)
    (ping,) = bench.coordinator.on_tick()
    assert (ping.message, ping.to) == (Ping("n", 1), (WorkerAddress(0), WorkerAddress(1)))
    bench.clock.advance(3.5)
    bench.coordinator.on_worker_message(0, Heartbeat("n", "p", 0, 1, 1))
    (result,) = only(bench.step(1), StepResult)
    assert result.error == "WorkerLostError: rank 1 has not been heard from for 5.5 s"
    bench.coordinator.on_worker_message(1, Heartbeat("n", "q", 1, 1, 1))
    assert only(bench.step(2), StepResult)[0].error == ""


def test_another_process_of_a_rank_begins_a_new_epoch_that_is_cold() -> None:
    bench = Bench().run()
    bench.step(1, new=(new("r"),))
    out = bench.hello(1, "q2")
    bench.processes[1] = "q2"
    assert only(out, Unattached)[0].epoch == 2
    assert {grant.incarnation for grant in only(out, Grant)} == {"p", "q2"}
    bench.granted(0)
    (commands,) = only(bench.granted(1), StepCommands)
    assert (commands.epoch, commands.seq, commands.commands) == (2, 1, (Reset(0),))
    manager = bench.coordinator.manager
    assert manager is not None and manager.statistics().num_running_requests == 0
    bench.coordinator.check()
    stale = bench.coordinator.on_client_message(StepRequest("c", 2, 1))
    assert only(stale, Unattached)[0].epoch == 2
    assert only(bench.attach(next_step=2), Attached)[0].next_step == 2
    assert only(bench.step(2, new=(new("r"),)), StepResult)[0].error == ""


def test_a_replaced_process_cannot_talk_itself_back_in() -> None:
    bench = Bench().run()
    bench.hello(1, "q2")
    assert bench.hello(1, "q") == []
    bench.processes[1] = "q2"
    bench.granted(0)
    assert bench.granted(1)


def test_a_process_is_taken_back_when_its_successor_was_a_ghost() -> None:
    bench = Bench().run()
    bench.hello(1, "ghost")
    bench.granted(0)
    bench.clock.advance(5.0)
    late = Heartbeat("n", "q", 1, 1, 1)
    (grant,) = only(bench.coordinator.on_worker_message(1, late), Grant)
    assert (grant.incarnation, grant.epoch) == ("q", 2)
    bench.granted(1)
    assert bench.coordinator.phase is Phase.RUNNING


def test_a_lost_process_voids_the_epoch_until_the_rank_is_served_again() -> None:
    bench = Bench().run()
    assert bench.coordinator.on_worker_lost(1, "somebody else", "killed") == []
    out = bench.coordinator.on_worker_lost(1, "q", "killed by signal 9")
    (away,) = only(out, Unattached)
    assert away.reason == "rank 1 is lost, process q: killed by signal 9; waiting for ranks [0, 1]"
    bench.granted(0)
    bench.processes[1] = "q2"
    bench.hello(1)
    assert bench.granted(1)


def test_a_coordinator_that_was_superseded_stops() -> None:
    bench = Bench().run()
    out = bench.hello(0, highest=9)
    assert bench.coordinator.phase is Phase.SUPERSEDED
    assert "another coordinator took over" in only(out, Unattached)[0].reason
    assert bench.coordinator.on_tick() == []


class BrokenStore(MemoryStateStore):
    """A state that can be saved unless the test says otherwise."""

    is_broken = False

    def save(self, state: SmallState, replaces: SmallState | None) -> None:
        if self.is_broken:
            raise ClusterError("no room")
        super().save(state, replaces)


def test_an_epoch_that_cannot_be_saved_is_not_used() -> None:
    store = BrokenStore()
    bench = Bench(store).run()
    store.is_broken = True
    out = bench.coordinator.on_worker_lost(1, "q", "killed")
    assert only(out, Grant) == []
    assert bench.coordinator.epoch == 1
    assert bench.granted(0) == [] and bench.coordinator.phase is Phase.FENCING
    store.is_broken = False
    assert [grant.epoch for grant in only(bench.coordinator.on_tick(), Grant)] == [2]


def test_a_client_that_leaves_is_fenced_before_its_blocks_are_freed() -> None:
    bench = Bench().run()
    bench.step(1, new=(new("r"),))
    out = bench.coordinator.on_client_message(Detach("c", 1))
    (fence,) = only(out, StepCommands)
    assert fence.commands == (Fence("c"),)
    manager = bench.coordinator.manager
    assert manager is not None and manager.statistics().num_running_requests == 1
    for rank in (0, 1):
        bench.applied(rank, 3)
    assert manager.statistics().num_running_requests == 0
    assert manager.statistics().core.num_free_blocks == 23
    assert_gone(bench.attach())


def assert_gone(out: Any) -> None:
    """The client learns that its id cannot attach any more."""
    (answer,) = only(out, Unattached)
    assert answer.is_final and "use a new client id" in answer.reason


def test_detaching_is_confirmed_as_often_as_it_is_asked_for() -> None:
    bench = Bench().run()
    bench.step(1, new=(new("r"),))
    for _ in range(2):
        out = bench.coordinator.on_client_message(Detach("c", 1))
        assert only(out, Detached) == [Detached("c", 1)]
    for rank in (0, 1):
        bench.applied(rank, 3)
    assert bench.coordinator.statistics().num_clients == 0
    out = bench.coordinator.on_client_message(Detach("c", 1))
    assert [item.message for item in out] == [Detached("c", 1)]


def test_an_attach_that_arrives_after_the_detach_has_no_effect() -> None:
    bench = Bench().run()
    out = bench.coordinator.on_client_message(Detach("late", 0))
    assert [item.message for item in out] == [Detached("late", 1)]
    assert_gone(bench.attach("late"))
    assert bench.coordinator.statistics().num_clients == 1


def test_a_farewell_counts_in_whatever_epoch_it_was_said() -> None:
    bench = Bench().run()
    bench.hello(1, "q2")  # epoch 2 begins
    bench.processes[1] = "q2"
    assert bench.coordinator.phase is Phase.FENCING
    out = bench.coordinator.on_client_message(Detach("c", 1))
    assert only(out, Detached) == [Detached("c", 2)]
    for rank in (0, 1):
        bench.granted(rank)
    assert_gone(bench.attach())


LOST: dict[str, Any] = {"heartbeat_s": 2.0, "reattach_s": 3.0, "worker_silence_s": 1000.0}


def running(bench: Bench) -> int:
    """Let ranks apply everything; return how many requests run."""
    for rank in (0, 1):
        bench.applied(rank, bench.coordinator.statistics().last_seq)
    manager = bench.coordinator.manager
    return manager.statistics().num_running_requests


def test_a_client_whose_connection_has_ended_is_given_up_soon() -> None:
    bench = Bench(**LOST).run()
    assert bench.coordinator.settings.client_return_s == 4.0
    bench.attach("d")
    bench.step(1, new=(new("r"),))
    bench.step(1, "d", new=(new("s"),))
    running(bench)
    bench.coordinator.on_client_lost("c")
    bench.coordinator.on_client_lost("nobody")
    bench.clock.advance(4.0)
    assert only(bench.coordinator.on_tick(), Ping)
    assert running(bench) == 2
    bench.clock.advance(0.1)
    (fenced,) = [sent for sent in only(bench.coordinator.on_tick(), StepCommands) if sent.commands]
    assert fenced.commands == (Fence("c"),)
    assert running(bench) == 1
    assert_gone(bench.attach())


@pytest.mark.parametrize("is_silence_shorter", [False, True])
def test_a_connection_that_ended_gives_no_more_time_than_silence(is_silence_shorter: bool) -> None:
    settings = CoordinatorSettings(
        1, "plan", client_silence_s=3.0 if is_silence_shorter else 60.0, reattach_s=5.0
    )
    assert settings.client_return_s == (3.0 if is_silence_shorter else 5.0)


def test_a_client_that_connects_again_in_time_keeps_everything() -> None:
    bench = Bench(**LOST).run()
    bench.step(1, new=(new("r"),))
    for _ in range(5):
        bench.coordinator.on_client_lost("c")
        bench.coordinator.on_client_lost("c")
        bench.clock.advance(3.9)
        bench.coordinator.on_tick()
        bench.coordinator.on_client_message(Acknowledge("c", 1, 0))
    bench.clock.advance(10.0)
    bench.coordinator.on_tick()
    assert running(bench) == 1
    bench.coordinator.on_client_lost("c")
    bench.clock.advance(3.9)
    assert only(bench.attach(), Attached)
    bench.clock.advance(3.9)
    bench.coordinator.on_tick()
    assert running(bench) == 1


def test_a_coordinator_that_stood_still_blames_no_client_for_it() -> None:
    bench = Bench(seen_by=lambda machine: StallAwareClock(machine, 2.0), **LOST).run()
    bench.step(1, new=(new("r"),))
    bench.coordinator.on_client_lost("c")
    bench.clock.advance(1000.0)
    bench.coordinator.on_tick()
    assert running(bench) == 1
    bench.coordinator.on_client_message(Acknowledge("c", 1, 0))
    for _ in range(5):
        bench.clock.advance(2.0)
        bench.coordinator.on_tick()
    assert running(bench) == 1


def test_between_two_epochs_a_lost_connection_means_nothing() -> None:
    bench = Bench(**LOST)
    bench.coordinator.on_client_lost("c")
    bench.run().clock.advance(5.0)
    bench.coordinator.on_tick()
    assert bench.coordinator.statistics().num_clients == 1


def test_a_silent_client_is_given_up() -> None:
    bench = Bench(client_silence_s=30.0, worker_silence_s=1000.0).run()
    bench.attach("d")
    bench.clock.advance(20.0)
    bench.coordinator.on_client_message(Acknowledge("d", 1, 0))
    bench.clock.advance(20.0)
    (fence,) = only(bench.coordinator.on_tick(), StepCommands)[-1:]
    assert fence.commands == (Fence("c"),)
    assert only(bench.step(1, "c"), Unattached)
    assert only(bench.step(1, "d"), StepResult)


def test_there_is_a_limit_to_clients_and_strange_ids_are_refused() -> None:
    bench = Bench(max_clients=1).run()
    assert only(bench.attach("d"), Unattached)[0].reason == (
        "1 clients are attached, no more can attach: detach one or raise transport.max_clients"
    )
    assert only(bench.attach(""), Unattached) and only(bench.attach("x" * 300), Unattached)


def test_a_failing_step_of_one_client_leaves_another_one_alone() -> None:
    bench = Bench().run()
    bench.attach("d")
    bench.step(1, "c", new=(new("r"),))
    bench.step(1, "d", new=(new("s"),))
    (result,) = only(bench.step(2, "c", failed_step=1), StepResult)
    assert result.withdrawn == ("r",)
    manager = bench.coordinator.manager
    assert manager is not None and manager.get_request("s") is not None


def call(bench: Bench, number: int, method: str, **arguments: object) -> CallResult:
    message = Call("c", number, 1, -1, method, pack_values(arguments))
    out = bench.coordinator.on_client_message(message)
    for rank in (0, 1):
        bench.applied(rank, bench.coordinator.statistics().last_seq)
    return only(out, CallResult)[0]


def test_per_request_calls_use_the_same_numbers_and_send_their_commands() -> None:
    bench = Bench().run()
    request = {"request_id": "r", "token_ids": int32_array(range(9))}
    hit = call(bench, 1, "get_computed_blocks", request=request)
    assert unpack_values(hit.result) == {"block_ids": [b""], "num_computed_tokens": 0}
    message = Call(
        "c", 2, 1, -1, "allocate_slots", pack_values({"request": request, "num_new_tokens": 9})
    )
    out = bench.coordinator.on_client_message(message)
    (answer,), (commands,) = only(out, CallResult), only(out, StepCommands)
    assert len(unpack_values(answer.result)["block_ids"][0]) == 4 * 3
    assert (answer.seq, commands.seq) == (3, 3) and commands.commands
    again = only(bench.coordinator.on_client_message(message), CallResult)
    assert again == [answer]
    assert unpack_values(call(bench, 3, "usage").result) == pytest.approx(3 / 23)
    call(bench, 4, "free", request_id="r")
    assert unpack_values(call(bench, 5, "usage").result) == 0.0


@pytest.mark.parametrize(
    ("method", "arguments", "error"),
    [
        ("explode", {}, "there is no method 'explode': use one of allocate_slots,"),
        ("usage", {"x": 1}, "usage does not know x: leave it out"),
        ("free", {"request_id": 3}, "free: request_id is 3: pass str"),
        ("evict_blocks", {"block_ids": b"123"}, "evict_blocks: block_ids is not a packed int32"),
        ("get_computed_blocks", {"request": {"request_id": "r"}}, "request r: the prompt is empty"),
        ("get_computed_blocks", {"request": {"bogus": 1}}, "request does not know ['bogus']"),
    ],
)
def test_a_call_that_cannot_be_meant_returns_its_error(
    method: str, arguments: dict[str, object], error: str
) -> None:
    bench = Bench().run()
    answer = call(bench, 1, method, **arguments)
    assert (answer.error_type, answer.seq) == ("RequestError", 0)
    assert error in answer.error


def test_requests_of_calls_are_freed_when_their_client_leaves() -> None:
    bench = Bench().run()
    request = {"request_id": "r", "token_ids": int32_array(range(9))}
    call(bench, 1, "allocate_slots", request=request, num_new_tokens=9)
    bench.coordinator.on_client_message(Detach("c", 1))
    for rank in (0, 1):
        bench.applied(rank, bench.coordinator.statistics().last_seq)
    manager = bench.coordinator.manager
    assert manager is not None and manager.statistics().core.num_free_blocks == 23


def test_a_reset_advances_the_saved_model_epoch_before_it_is_answered() -> None:
    bench = Bench(MemoryStateStore(SmallState(model_epoch=5))).run()
    assert only(bench.attach(), Attached)[0].model_epoch == 5
    message = Call("c", 1, 1, -1, "reset_prefix_cache", pack_values({"drain": True}))
    out = bench.coordinator.on_client_message(message)
    assert unpack_values(only(out, CallResult)[0].result) is True
    assert only(out, StepCommands)[0].commands == (Reset(6),)
    state = bench.store.load()
    assert state is not None and state.model_epoch == 6


def test_new_weights_are_saved_before_they_are_answered_while_requests_run() -> None:
    bench = Bench(MemoryStateStore(SmallState(model_epoch=5))).run()
    bench.attach()
    request = {"request_id": "r", "token_ids": int32_array(range(9))}
    call(bench, 1, "allocate_slots", request=request, num_new_tokens=9)
    message = Call("c", 2, 1, -1, "begin_model_epoch", pack_values({}))
    out = bench.coordinator.on_client_message(message)
    assert unpack_values(only(out, CallResult)[0].result) == 6
    assert only(out, StepCommands)[0].commands[-1] == Reset(6)
    state = bench.store.load()
    assert state is not None and state.model_epoch == 6


def test_a_closed_coordinator_says_nothing_any_more() -> None:
    bench = Bench().run()
    bench.coordinator.close()
    bench.coordinator.close()
    assert bench.attach() == bench.hello(0) == bench.coordinator.on_tick() == []
    bench.coordinator.check()
