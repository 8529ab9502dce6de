"""The worker's side of the protocol: grants, numbers, repeats, forwards, fences."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvcache.base.errors import (
    ClusterError,
    ConfigurationError,
    DeadlineError,
    RequestError,
    StaleEpochError,
)
from kvcache.protocol.commands import Fence, Store
from kvcache.protocol.messages import (
    Ack,
    ClientStep,
    CollectLabels,
    Detach,
    Finished,
    FinishedAck,
    Grant,
    Granted,
    Heartbeat,
    Hello,
    JobReport,
    LabelReport,
    Message,
    Nack,
    Ping,
    Refused,
)
from tests.worker.worker_support import (
    Harness,
    full_groups,
    ids,
    label,
    make_config,
    patch,
    write_expected,
)


def applied(seq: int, epoch: int = 1, nonce: str = "coordinator-1") -> Ack:
    return Ack(nonce, "process-a", 0, epoch, seq)


def test_nothing_is_applied_before_a_grant() -> None:
    harness = Harness.make(is_granted=False)
    assert harness.send(label(3)) == []
    assert harness.worker.statistics().num_labels == 0
    with pytest.raises(StaleEpochError):
        harness.worker.begin_forward(0, 1, timeout_s=0.0)


def test_an_ungranted_worker_introduces_itself_until_it_is_granted() -> None:
    harness = Harness.make(is_granted=False)
    hello = Hello("process-a", 0, 0, "plan")
    assert harness.worker.on_tick() == [hello]
    assert harness.worker.on_tick() == []
    harness.clock.advance(0.2)
    assert harness.worker.on_tick() == [hello]
    assert harness.grant() == [Granted("coordinator-1", "process-a", 0, 1)]
    harness.clock.advance(0.2)
    assert harness.worker.on_tick() == []


def test_a_grant_is_idempotent_and_lower_or_equal_epochs_of_others_are_refused() -> None:
    harness = Harness.make()
    harness.send(label(3))
    assert harness.grant() == [Granted("coordinator-1", "process-a", 0, 1)]
    assert harness.worker.applied_seq == 1
    refused = harness.worker.on_message(Grant("other", "process-a", 1, "plan"))
    assert refused == [Refused("other", "process-a", 0, 1, "epoch 1 is not above 1")]
    foreign = harness.worker.on_message(Grant("other", "process-b", 9, "plan"))
    assert foreign == []
    plan = harness.worker.on_message(Grant("other", "process-a", 9, "other plan"))
    assert isinstance(plan[0], Refused)
    assert harness.worker.epoch == 1


def test_each_number_is_applied_once_and_a_repeat_gets_the_stored_answer() -> None:
    harness = Harness.make()
    message = harness.message(label(3), seq=1)
    assert harness.worker.on_message(message) == [applied(1)]
    harness.worker.on_message(harness.message(seq=2))
    harness.worker.labels.reset()
    assert harness.worker.on_message(message) == [applied(2)]
    assert harness.worker.statistics().num_labels == 0


def test_numbers_are_applied_in_order_and_a_gap_is_asked_for() -> None:
    harness = Harness.make()
    missing = Nack("coordinator-1", "process-a", 0, 1, 1)
    assert harness.worker.on_message(harness.message(label(3, b"new!"), seq=2)) == [missing]
    assert harness.worker.statistics().num_labels == 0
    assert harness.worker.on_message(harness.message(label(3, b"old!"), seq=1)) == [applied(2)]
    assert harness.worker.labels.digest(3) == b"new!"


@pytest.mark.parametrize(
    "change", [{"nonce": "other"}, {"epoch": 2}, {"epoch": 0}, {"fingerprint": "other"}]
)
def test_messages_of_others_are_dropped_and_counted(change: dict[str, Any]) -> None:
    harness = Harness.make()
    message = replace(harness.message(label(3), seq=1), **change)
    assert [reply for reply in harness.worker.on_message(message) if reply == applied(1)] == []
    counted = harness.worker.statistics().receiver
    assert counted.num_foreign + counted.num_stale == 1
    assert harness.worker.statistics().num_labels == 0


def test_messages_that_are_not_for_workers_are_dropped_and_counted() -> None:
    harness = Harness.make()
    assert harness.worker.on_message(Detach("client", 1)) == []
    assert harness.worker.on_message(Ping("other", 2)) == []
    assert harness.worker.on_message(FinishedAck("coordinator-1", 9, (1,))) == []
    assert harness.worker.statistics().num_foreign_messages == 3


def test_reports_are_repeated_until_they_are_acknowledged() -> None:
    harness = Harness.make()
    replies = harness.send(Store(5, "host", ids(1), ids(0)))
    report = replies[-1]
    assert isinstance(report, Finished)
    assert harness.worker.on_tick() == []
    harness.clock.advance(0.5)
    assert harness.worker.on_tick() == [report]
    heartbeat = Heartbeat("coordinator-1", "process-a", 0, 1, 1)
    assert harness.worker.on_message(Ping("coordinator-1", 1)) == [heartbeat, report]
    harness.worker.on_message(FinishedAck("coordinator-1", 1, (5, 6)))
    harness.clock.advance(0.5)
    assert harness.worker.on_tick() == []
    assert harness.worker.statistics().num_unacknowledged_reports == 0


def test_a_silent_worker_sends_heartbeats() -> None:
    harness = Harness.make()
    harness.clock.advance(1.0)
    assert harness.worker.on_tick() == [Heartbeat("coordinator-1", "process-a", 0, 1, 0)]
    assert harness.worker.on_tick() == []


def test_a_new_epoch_voids_what_the_old_one_left_and_keeps_labels() -> None:
    harness = Harness.make(is_content_checking=True)
    harness.send(label(3), patch(0, [7]), Store(5, "host", ids(1), ids(0)), write_expected(6))
    harness.nonce, harness.epoch, harness.seq = "coordinator-2", 2, 0
    assert harness.grant() == [Granted("coordinator-2", "process-a", 0, 2)]
    assert harness.worker.run_due_forwards() == []
    harness.clock.advance(0.5)
    assert harness.worker.on_tick() == []
    assert harness.send() == [applied(1, 2, "coordinator-2")]
    harness.forward()
    assert harness.worker.block_tables[0][0, 0] == 0
    assert harness.worker.labels.digest(3) == b"abcd"
    (report,) = harness.worker.on_message(CollectLabels("coordinator-2", 2, 0))
    assert isinstance(report, LabelReport)
    assert report.client_steps == (ClientStep("engine", 1),)
    assert report.labels.block_ids.tolist() == [3]
    harness.worker.check()


# --- forwards


def test_a_grant_is_answered_when_the_old_forward_has_ended() -> None:
    harness = Harness.make()
    harness.send()
    harness.send()
    harness.worker.begin_forward(1, 1, timeout_s=0.0)
    harness.nonce, harness.epoch = "coordinator-2", 2
    assert harness.grant() == []
    assert harness.worker.epoch == 1
    harness.worker.end_forward(1, 1)
    assert harness.worker.on_tick() == [Granted("coordinator-2", "process-a", 0, 2)]
    with pytest.raises(StaleEpochError, match="forward of epoch 1 on rank 0, which is in epoch 2"):
        harness.worker.begin_forward(1, 2, timeout_s=0.0)


def test_forwards_begin_in_order_and_one_at_a_time() -> None:
    harness = Harness.make()
    for _ in range(3):
        harness.send()
    harness.worker.begin_forward(1, 2, timeout_s=0.0)
    with pytest.raises(
        RequestError, match=r"^forward 3 of rank 0 begins while 2 is open: end that one first$"
    ):
        harness.worker.begin_forward(1, 3, timeout_s=0.0)
    with pytest.raises(RequestError, match="forward 3 of rank 0 is not open"):
        harness.worker.end_forward(1, 3)
    with pytest.raises(StaleEpochError):
        harness.worker.end_forward(2, 2)
    harness.worker.end_forward(1, 2)
    for seq in (1, 2):
        with pytest.raises(RequestError, match="forwards begin once and in order"):
            harness.worker.begin_forward(1, seq, timeout_s=0.0)
    harness.forward()


def test_a_fenced_client_runs_no_forward_any_more() -> None:
    harness = Harness.make()
    harness.send(client_id="dead")
    harness.send(client_id="alive")
    harness.send(Fence("dead"), client_id="")
    with pytest.raises(
        RequestError,
        match=r"^forward 1 of rank 0 belongs to client 'dead', which was given up: attach again$",
    ):
        harness.worker.begin_forward(1, 1, timeout_s=0.0)
    harness.worker.begin_forward(1, 2, timeout_s=0.0)
    harness.worker.end_forward(1, 2)


def test_a_fence_is_acknowledged_when_the_clients_forward_has_ended() -> None:
    harness = Harness.make()
    harness.send(client_id="dead")
    harness.worker.begin_forward(1, 1, timeout_s=0.0)
    assert harness.send(Fence("dead"), client_id="") == []
    assert harness.send(client_id="alive") == []
    harness.worker.end_forward(1, 1)
    assert harness.worker.on_tick() == [applied(3)]


def test_what_waits_for_a_forward_is_void_when_a_grant_waits_too() -> None:
    harness = Harness.make()
    harness.send(client_id="dead")
    harness.worker.begin_forward(1, 1, timeout_s=0.0)
    harness.send(Fence("dead"), label(3), client_id="")
    harness.nonce, harness.epoch = "coordinator-2", 2
    assert harness.grant() == []
    harness.worker.end_forward(1, 1)
    assert harness.worker.on_tick() == [Granted("coordinator-2", "process-a", 0, 2)]
    assert harness.worker.statistics().num_labels == 0


def test_a_fenced_clients_content_checked_forward_is_reported_as_failed() -> None:
    harness = Harness.make(is_content_checking=True)
    harness.send(write_expected(4), client_id="dead")
    harness.send(Fence("dead"), client_id="")
    harness.note(harness.worker.run_due_forwards())
    assert "belongs to client 'dead', which was given up" in harness.reports[4].detail


def test_a_worker_that_runs_its_own_forwards_refuses_to_let_others_begin_them() -> None:
    harness = Harness.make(is_content_checking=True)
    harness.send(write_expected(4))
    with pytest.raises(RequestError, match="itself, call run_due_forwards"):
        harness.worker.begin_forward(1, 1, timeout_s=0.0)


def test_a_wait_without_a_feeding_thread_polls() -> None:
    inbox: list[Callable[[], None]] = []
    harness = Harness.make(poll=lambda timeout_s: inbox.pop(0)())
    inbox.append(lambda: None)
    inbox.append(lambda: harness.note(harness.send()) and None)
    harness.worker.begin_forward(1, 1, timeout_s=5.0)
    harness.worker.end_forward(1, 1)
    inbox.append(lambda: harness.clock.advance(5.0))
    with pytest.raises(
        DeadlineError,
        match=r"^forward 2 cannot begin within 5.0 s: rank 0 has applied 1 of epoch 1: ask ",
    ):
        harness.worker.begin_forward(1, 2, timeout_s=5.0)


def test_a_polling_wait_ends_at_once_when_the_epoch_changes() -> None:
    def change_epoch(timeout_s: float) -> None:
        harness.nonce, harness.epoch = "coordinator-2", 2
        harness.grant()

    harness = Harness.make(poll=change_epoch)
    with pytest.raises(StaleEpochError):
        harness.worker.begin_forward(1, 1, timeout_s=5.0)


class Waiter:
    """A thread in `begin_forward`, and its result."""

    def __init__(self, harness: Harness, epoch: int, seq: int) -> None:
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(harness, epoch, seq))
        self._thread.start()

    def _run(self, harness: Harness, epoch: int, seq: int) -> None:
        try:
            harness.worker.begin_forward(epoch, seq, timeout_s=30.0)
        except Exception as error:
            self.error = error

    def has_ended(self) -> bool:
        self._thread.join(timeout=0.01)
        return not self._thread.is_alive()

    def join(self) -> Exception | None:
        self._thread.join(timeout=20.0)
        assert not self._thread.is_alive()
        return self.error


def test_a_waiting_thread_goes_on_when_its_step_is_applied() -> None:
    harness = Harness.make()
    waiter = Waiter(harness, 1, 2)
    harness.send(patch(0, [3]))
    harness.send(patch(1, [4]))
    assert waiter.join() is None
    assert harness.worker.block_tables[0][:2, 0].tolist() == [3, 4]


def test_a_waiting_thread_is_told_of_another_epoch() -> None:
    harness = Harness.make()
    waiter = Waiter(harness, 1, 1)
    harness.nonce, harness.epoch = "coordinator-2", 2
    harness.grant()
    assert isinstance(waiter.join(), StaleEpochError)


def test_a_waiting_thread_is_told_when_the_worker_closes() -> None:
    harness = Harness.make()
    waiter = Waiter(harness, 1, 1)
    harness.worker.close()
    harness.worker.close()
    error = waiter.join()
    assert isinstance(error, ClusterError)
    assert str(error) == "rank 0 is closed: no forward can begin"
    assert harness.send() == harness.worker.on_tick() == harness.worker.run_due_forwards() == []


def test_a_waiting_thread_ends_when_its_time_is_over() -> None:
    harness = Harness.make()
    waiter = Waiter(harness, 1, 1)
    harness.clock.advance(31.0)
    for _ in range(1000):
        harness.worker.on_tick()
        if waiter.has_ended():
            break
        harness.clock.advance(31.0)
    assert isinstance(waiter.join(), DeadlineError)


def test_forwards_of_one_thread_see_their_own_tables_while_another_feeds() -> None:
    harness = Harness.make()
    num_steps = 300

    def feed() -> None:
        for seq in range(1, num_steps + 1):
            harness.send(patch(seq % 4, [seq % 15 + 1]))

    feeder = threading.Thread(target=feed)
    feeder.start()
    for seq in range(1, num_steps + 1):
        harness.worker.begin_forward(1, seq, timeout_s=1e9)
        assert harness.worker.block_tables[0][seq % 4, 0] == seq % 15 + 1
        harness.worker.end_forward(1, seq)
    feeder.join(timeout=20.0)
    assert harness.worker.statistics().num_forwards == num_steps
    harness.worker.check()


def test_settings_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^incarnation is empty: give every process a"):
        Harness.make(incarnation="")
    with pytest.raises(ConfigurationError, match=r"^hello_interval_s is 0: set it above 0$"):
        Harness.make(hello_interval_s=0)
    with pytest.raises(ConfigurationError, match="max_num_seqs is 0"):
        Harness.make(make_config(full_groups()), max_num_seqs=0)


# --- two coordinators


def test_a_granted_worker_introduces_itself_again_when_it_is_told_to() -> None:
    harness = Harness.make()
    harness.clock.advance(0.3)
    assert harness.worker.on_tick() == []
    harness.worker.introduce()
    hello = Hello("process-a", 0, 1, "plan")
    assert harness.worker.on_tick() == [hello]
    harness.clock.advance(0.2)
    assert harness.worker.on_tick() == [hello]
    harness.nonce, harness.epoch = "coordinator-2", 2
    assert harness.grant() == [Granted("coordinator-2", "process-a", 0, 2)]
    harness.clock.advance(0.2)
    assert harness.worker.on_tick() == []


def test_a_superseded_coordinator_is_told_and_changes_nothing() -> None:
    harness = Harness.make()
    old = harness.message(label(3), seq=1)
    harness.nonce, harness.epoch = "coordinator-2", 2
    harness.grant()
    reason = "epoch 2 of another coordinator is obeyed"
    refused = Refused("coordinator-1", "process-a", 0, 2, reason)
    assert harness.worker.on_message(old) == [refused]
    assert harness.worker.on_message(Ping("coordinator-1", 1)) == [refused]
    assert harness.worker.on_message(replace(old, epoch=3)) == []
    assert harness.worker.statistics().num_labels == 0


def test_refusals_do_not_keep_the_present_coordinator_waiting_for_a_sign_of_life() -> None:
    harness = Harness.make()
    for _ in range(4):
        harness.clock.advance(0.25)
        assert isinstance(harness.worker.on_message(Ping("another", 1))[0], Refused)
    assert harness.worker.on_tick() == [Heartbeat("coordinator-1", "process-a", 0, 1, 0)]


def test_an_epoch_that_leaves_no_room_for_another_is_not_granted() -> None:
    harness = Harness.make()
    (refused,) = harness.worker.on_message(Grant("rogue", "process-a", 2**53 + 1, "plan"))
    assert isinstance(refused, Refused)
    assert refused.reason == f"epoch {2**53 + 1} is above {2**53}, the last one"
    assert harness.worker.epoch == 1


def test_old_grants_and_commands_after_a_new_grant_change_nothing() -> None:
    harness = Harness.make()
    grant = Grant("coordinator-1", "process-a", 1, "plan")
    old = [harness.message(label(3), seq=seq) for seq in (1, 2)]
    harness.nonce, harness.epoch = "coordinator-2", 2
    harness.grant()
    harness.send(label(4))
    messages: list[Message] = [grant, *old, grant]
    for message in messages:
        harness.worker.on_message(message)
    assert (harness.worker.epoch, harness.worker.applied_seq) == (2, 1)
    assert not harness.worker.labels.is_labelled(3)
    harness.worker.check()


# --- forwards of steps and of calls


def test_the_forward_of_a_call_begins_behind_the_content_checked_ones_before_it() -> None:
    harness = Harness.make(is_content_checking=True)
    harness.send(write_expected(4))
    harness.send(client_id="caller")
    harness.worker.begin_forward(1, 2, timeout_s=0.0)
    harness.send(write_expected(5))
    assert harness.worker.run_due_forwards() == []
    assert harness.reports == {4: JobReport(4, True)}
    harness.worker.end_forward(1, 2)
    harness.note(harness.worker.run_due_forwards())
    assert harness.reports[5].ok


def test_fences_do_not_gather_and_hold_for_the_steps_before_them() -> None:
    harness = Harness.make()
    for number in range(50):
        harness.send(client_id=f"client-{number}")
        harness.send(Fence(f"client-{number}"), client_id="")
        with pytest.raises(RequestError, match="which was given up"):
            harness.worker.begin_forward(1, 2 * number + 1, timeout_s=0.0)
    harness.send(client_id="client-0")
    harness.forward()
    harness.worker.check()
