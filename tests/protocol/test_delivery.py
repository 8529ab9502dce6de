"""Windows and receivers: exactly once, in order, bounded, each rank for itself."""

from __future__ import annotations

import random

import pytest

from kvcache.base.errors import BacklogFullError, MalformedMessageError, StaleEpochError
from kvcache.protocol.delivery import CommandReceiver, CommandWindow
from kvcache.protocol.messages import Ack, Call, Grant, Granted, Nack, Refused, StepCommands
from kvcache.protocol.step import StepRequest, StepResult
from kvcache.protocol.step_delivery import ReceivedStep, StepReceiver, StepWindow


def commands(seq: int, epoch: int = 1, nonce: str = "n", fingerprint: str = "f") -> StepCommands:
    return StepCommands(nonce, fingerprint, epoch, seq, "", 0, ())


def make_receiver(epoch: int = 1, max_buffered: int = 4) -> CommandReceiver:
    receiver = CommandReceiver(0, "p", "f", max_buffered)
    if epoch:
        assert isinstance(receiver.on_grant(Grant("n", "p", epoch, "f"), False), Granted)
    return receiver


def take(receiver: CommandReceiver, message: StepCommands) -> tuple[list[int], list[object]]:
    """Pass a message on and apply ready ones; return the numbers and the other replies."""
    received = receiver.on_commands(message)
    for ready in received.ready:
        receiver.confirm_applied(ready.seq)
    return [ready.seq for ready in received.ready], list(received.replies)


def test_nothing_is_applied_before_a_grant() -> None:
    receiver = make_receiver(epoch=0)
    for epoch, nonce in ((0, ""), (1, "n"), (0, "n")):
        assert take(receiver, commands(1, epoch, nonce)) == ([], [])


def test_messages_are_handed_out_once_and_in_order() -> None:
    receiver = make_receiver()
    missing = Nack("n", "p", 0, 1, 1)
    assert take(receiver, commands(2)) == ([], [missing])
    assert take(receiver, commands(3)) == ([], [])
    assert take(receiver, commands(1)) == ([1, 2, 3], [])
    assert take(receiver, commands(2)) == ([], [Ack("n", "p", 0, 1, 3)])
    assert receiver.applied_seq == 3


def test_a_repeat_of_an_unapplied_message_gets_no_answer() -> None:
    receiver = make_receiver()
    receiver.on_commands(commands(1))
    assert receiver.on_commands(commands(1)).replies == ()


def test_a_gap_is_asked_for_once_and_again_when_repeats_show_it_open() -> None:
    receiver = make_receiver()
    missing = Nack("n", "p", 0, 1, 1)
    assert take(receiver, commands(3))[1] == [missing]
    assert take(receiver, commands(4))[1] == []
    assert take(receiver, commands(4))[1] == [missing]
    assert take(receiver, commands(1)) == ([1], [Nack("n", "p", 0, 1, 2)])


def test_early_messages_are_buffered_up_to_a_limit() -> None:
    receiver = make_receiver(max_buffered=2)
    take(receiver, commands(2))
    take(receiver, commands(3))
    assert take(receiver, commands(1))[0] == [1, 2, 3]
    receiver = make_receiver(max_buffered=2)
    take(receiver, commands(4))
    assert receiver.statistics().num_overflowed == 1


@pytest.mark.parametrize(
    "message",
    [
        commands(1, epoch=2),
        commands(1, epoch=0),
        commands(1, nonce="other"),
        commands(1, fingerprint="other"),
    ],
)
def test_messages_of_another_epoch_coordinator_or_plan_are_dropped(message: StepCommands) -> None:
    receiver = make_receiver()
    assert take(receiver, message) == ([], [])
    statistics = receiver.statistics()
    assert statistics.num_foreign + statistics.num_stale == 1


def test_confirming_out_of_order_is_an_error() -> None:
    receiver = make_receiver()
    receiver.on_commands(commands(1))
    with pytest.raises(MalformedMessageError, match="2 confirmed as applied after 0"):
        receiver.confirm_applied(2)


def test_an_epoch_is_granted_once_and_repeats_get_the_same_answer() -> None:
    receiver = make_receiver(epoch=3)
    granted = Granted("n", "p", 0, 3)
    assert receiver.on_grant(Grant("n", "p", 3, "f"), False) == granted
    refused = receiver.on_grant(Grant("other", "p", 3, "f"), False)
    assert refused == Refused("other", "p", 0, 3, "epoch 3 is not above 3")
    assert isinstance(receiver.on_grant(Grant("other", "p", 4, "f"), False), Granted)
    assert (receiver.epoch, receiver.nonce, receiver.applied_seq) == (4, "other", 0)


def test_a_late_grant_of_the_same_coordinator_is_ignored() -> None:
    receiver = make_receiver(epoch=3)
    assert receiver.on_grant(Grant("n", "p", 2, "f"), False) is None


def test_a_grant_to_another_process_is_ignored_and_one_of_another_plan_refused() -> None:
    receiver = make_receiver()
    assert receiver.on_grant(Grant("n", "q", 2, "f"), False) is None
    assert receiver.on_grant(Grant("n", "p", 2, "g"), False) == Refused(
        "n", "p", 0, 1, "plan g, this worker has f"
    )
    assert receiver.epoch == 1


def test_a_grant_waits_for_the_forward_and_fences_the_old_epoch_at_once() -> None:
    receiver = make_receiver()
    grant = Grant("m", "p", 2, "f")
    assert receiver.on_grant(grant, is_busy=True) is None
    assert receiver.pending_grant == grant
    assert take(receiver, commands(1)) == ([], [])
    assert receiver.on_grant(Grant("n", "p", 1, "f"), False) is None
    assert isinstance(receiver.on_grant(Grant("x", "p", 2, "f"), False), Refused)
    assert receiver.on_grant(grant, is_busy=False) == Granted("m", "p", 0, 2)
    assert take(receiver, commands(1, 2, "m"))[0] == [1]


def make_window(max_unacknowledged: int = 3) -> CommandWindow:
    window = CommandWindow(1, {0: "p", 1: "q"}, max_unacknowledged, resend_s=1.0)
    for seq in range(1, max_unacknowledged + 1):
        window.append(commands(seq), now_s=0.0)
    return window


def test_a_full_window_refuses_and_every_rank_must_acknowledge() -> None:
    window = make_window()
    assert window.is_full
    with pytest.raises(BacklogFullError, match="3 command messages of epoch 1 are not"):
        window.append(commands(4), 0.0)
    assert window.on_applied(0, "p", 1, 3, 0.0)
    assert not window.on_applied(0, "p", 1, 3, 0.0)
    assert (window.applied_by_all, len(window)) == (0, 3)
    assert window.on_applied(1, "q", 1, 2, 0.0)
    assert (window.applied_by_all, len(window), window.is_full) == (2, 1, False)


def test_an_answer_counts_for_no_other_rank() -> None:
    window = make_window()
    with pytest.raises(StaleEpochError, match="rank 0 process q in epoch 1"):
        window.on_applied(0, "q", 1, 1, 0.0)
    with pytest.raises(StaleEpochError):
        window.on_applied(0, "p", 2, 1, 0.0)
    with pytest.raises(MalformedMessageError, match="an answer of rank 2, the ranks are"):
        window.on_applied(2, "p", 1, 1, 0.0)
    with pytest.raises(MalformedMessageError, match="rank 0 acknowledges 4, only 3 were sent"):
        window.on_applied(0, "p", 1, 4, 0.0)
    assert window.applied_by_all == 0


def test_numbers_must_follow_each_other() -> None:
    window = CommandWindow(1, {0: "p"}, 3, 1.0)
    with pytest.raises(MalformedMessageError, match="message 1:2 appended to a window that"):
        window.append(commands(2), 0.0)


def test_unacknowledged_messages_are_repeated_by_the_clock_to_their_ranks() -> None:
    window = make_window()
    window.on_applied(0, "p", 1, 3, 0.5)
    window.on_applied(1, "q", 1, 1, 0.5)
    assert window.due_for_resend(1.4) == {}
    assert {rank: [m.seq for m in due] for rank, due in window.due_for_resend(1.5).items()} == {
        1: [2, 3]
    }
    assert window.due_for_resend(2.0) == {}
    assert window.num_resent == 2


def test_a_complaint_about_a_gap_is_answered_at_once_but_not_over_and_over() -> None:
    window = make_window()
    assert [m.seq for m in window.on_missing(1, "q", 1, 2, 0.0)] == [2, 3]
    assert window.on_missing(1, "q", 1, 2, 0.1) == []


@pytest.mark.seeds(20)
def test_through_any_disorder_each_number_arrives_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    receiver, window = make_receiver(max_buffered=8), CommandWindow(1, {0: "p"}, 8, 1.0)
    wire: list[object] = []
    got: list[int] = []
    now_s = 0.0
    while len(got) < 60:
        now_s += 0.3
        if not window.is_full and window.next_seq <= 60:
            message = commands(window.next_seq)
            window.append(message, now_s)
            wire.append(message)
        wire += window.due_for_resend(now_s).get(0, [])
        rng.shuffle(wire)
        for item in [wire.pop() for _ in range(min(len(wire), rng.randint(0, 4)))]:
            if rng.random() < 0.3:
                wire.append(item)
            if isinstance(item, StepCommands) and rng.random() < 0.8:
                received = receiver.on_commands(item)
                got += [m.seq for m in received.ready]
                wire += [receiver.confirm_applied(m.seq) for m in received.ready]
                wire += received.replies
            elif isinstance(item, Ack):
                window.on_applied(0, "p", 1, item.seq, now_s)
            elif isinstance(item, Nack):
                wire += window.on_missing(0, "p", 1, item.from_seq, now_s)
    assert got == list(range(1, 61))


def step(number: int) -> StepRequest:
    return StepRequest("c", number, 1)


def answer(number: int) -> StepResult:
    return StepResult("c", number, 1, number)


def test_steps_are_taken_in_order_and_repeats_get_the_stored_answer() -> None:
    receiver = StepReceiver("c", max_stored=4)
    assert receiver.on_step(step(2)) == ReceivedStep(missing_from=1)
    assert receiver.take_ready() is None
    assert receiver.on_step(step(1)) == ReceivedStep()
    taken = [receiver.take_ready(), receiver.take_ready(), receiver.take_ready()]
    assert [m.step for m in taken if m is not None] == [1, 2]
    assert receiver.on_step(step(1)) == ReceivedStep()
    first = answer(1)
    receiver.store_answer(first)
    assert receiver.on_step(step(1)).answer is first
    receiver.on_acknowledge(1)
    assert receiver.on_step(step(1)) == ReceivedStep()


def test_answers_that_are_not_claimed_hold_the_next_steps_back() -> None:
    receiver = StepReceiver("c", max_stored=2)
    for number in (1, 2, 3):
        receiver.on_step(step(number))
    assert receiver.num_overflowed == 1
    for number in (1, 2):
        assert receiver.take_ready() is not None
        receiver.store_answer(answer(number))
    receiver.on_step(step(3))
    assert receiver.take_ready() is None
    receiver.on_acknowledge(1)
    assert receiver.take_ready() is not None


def test_skipped_steps_are_void() -> None:
    receiver = StepReceiver("c", max_stored=8)
    receiver.on_step(step(2))
    receiver.skip_to(4)
    assert receiver.on_step(step(3)) == ReceivedStep()
    assert receiver.take_ready() is None
    receiver.on_step(step(4))
    assert receiver.take_ready() is not None


def test_a_client_repeats_unanswered_steps_and_knows_how_far_all_are_answered() -> None:
    window = StepWindow(max_pending=3, resend_s=1.0)
    for number in (1, 2, 3):
        window.append(Call("c", number, 1, -1, "usage", b""), 0.0)
    with pytest.raises(BacklogFullError, match="3 steps have no answer yet, the window holds 3"):
        window.append(step(4), 0.0)
    assert window.on_answer(2, 0.5)
    assert not window.on_answer(2, 0.5)
    assert window.answered_step == 0
    assert [m.step for m in window.due_for_resend(1.5)] == [1, 3]
    assert [m.step for m in window.on_missing(3, 1.6)] == [3]
    assert window.on_missing(3, 1.7) == []
    assert window.on_answer(1, 1.8)
    assert window.answered_step == 2
    assert window.drop_all(7) == (3,)
    assert (window.next_step, window.answered_step) == (7, 6)
