"""The client's side: numbers, repeats, progress, and the end of an epoch."""

from __future__ import annotations

import pytest

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import (
    BacklogFullError,
    DeadlineError,
    MalformedMessageError,
    NotRunningError,
    RequestError,
    StaleEpochError,
)
from kvcache.client.session import ClientSession, SessionSettings, SessionState
from kvcache.protocol.messages import (
    Acknowledge,
    Attach,
    Attached,
    Call,
    CallResult,
    Detach,
    Detached,
    MissingSteps,
    Progress,
    Unattached,
)
from kvcache.protocol.step import StepRequest, StepResult

SETTINGS = SessionSettings(window=4, resend_s=1.0, heartbeat_s=3.0, step_s=10.0, forward_s=20.0)


def attached(epoch: int = 1, next_step: int = 1) -> Attached:
    return Attached("c", epoch, 0, "plan", next_step, True, "n")


class Bench:
    def __init__(self, is_attached: bool = True) -> None:
        self.clock = VirtualClock()
        self.session = ClientSession("c", SETTINGS, self.clock)
        if is_attached:
            assert self.session.attach() == [Attach("c", 1)]
            self.session.on_message(attached())

    def submit(self) -> int:
        return self.session.submit(StepRequest("", 0, 0)).step

    def answer(self, step: int) -> StepResult:
        result = StepResult("c", step, self.session.epoch, step)
        self.session.on_message(result)
        return result


def test_nothing_can_be_submitted_before_attaching() -> None:
    bench = Bench(is_attached=False)
    with pytest.raises(
        StaleEpochError, match="client c is new: attach, and schedule the requests again"
    ):
        bench.submit()


def test_attaching_is_repeated_and_ends_with_what_was_heard() -> None:
    bench = Bench(is_attached=False)
    bench.session.attach()
    assert bench.session.on_tick() == []
    bench.clock.advance(1.0)
    assert bench.session.on_tick() == [Attach("c", 1)]
    bench.session.on_message(Unattached("c", 3, "waiting for ranks [1]"))
    bench.clock.advance(10.0)
    error = bench.session.not_attached(bench.session.stalled_s)
    assert str(error) == "client c is not attached after 11.0 s: waiting for ranks [1]"


def test_a_client_whose_id_has_gone_is_closed_and_says_why() -> None:
    bench = Bench(is_attached=False)
    bench.session.attach()
    bench.session.on_message(Unattached("c", 3, "it was given up", is_final=True))
    for attempt in (bench.session.require_open, bench.session.attach):
        with pytest.raises(NotRunningError) as raised:
            attempt()
        assert str(raised.value) == "client c is closed (it was given up): make a new one"
    bench.clock.advance(1.0)
    assert bench.session.on_tick() == [] == bench.session.detach()


def test_steps_carry_client_number_and_epoch() -> None:
    bench = Bench()
    (message,) = bench.session.submit(StepRequest("x", 9, 9)).messages
    assert isinstance(message, StepRequest)
    assert (message.client_id, message.step, message.epoch) == ("c", 1, 1)
    (call,) = bench.session.call("usage", b"").messages
    assert call == Call("c", 2, 1, -1, "usage", b"")


def test_the_first_answer_counts_and_a_repeat_changes_nothing() -> None:
    bench = Bench()
    step = bench.submit()
    assert bench.session.result(step) is None
    first = bench.answer(step)
    bench.answer(step)
    assert bench.session.result(step) is first


def test_answers_may_come_in_any_order_and_of_any_kind() -> None:
    bench = Bench()
    steps = [bench.submit(), bench.submit()]
    answer = CallResult("c", steps[1], 1, 2, b"")
    bench.session.on_message(answer)
    assert [bench.session.result(step) for step in steps] == [None, answer]


def test_the_window_limits_unanswered_steps() -> None:
    bench = Bench()
    for _ in range(4):
        bench.submit()
    with pytest.raises(BacklogFullError, match="4 steps have no answer yet"):
        bench.submit()
    bench.answer(1)
    assert bench.submit() == 5


def test_a_step_that_cannot_be_sent_is_taken_back_and_its_number_given_again() -> None:
    bench = Bench()
    first, second = bench.submit(), bench.submit()
    message = (
        "step 1 taken back, the next one is 3: only the last one can be, before it is answered"
    )
    with pytest.raises(MalformedMessageError, match=message):
        bench.session.take_back(first)
    bench.session.take_back(second)
    with pytest.raises(MalformedMessageError):
        bench.session.take_back(second)
    bench.clock.advance(SETTINGS.resend_s)
    assert [m.step for m in bench.session.on_tick() if isinstance(m, StepRequest)] == [first]
    with pytest.raises(RequestError, match="step 2 of c was not submitted"):
        bench.session.result(second)
    assert bench.submit() == second


def test_unanswered_steps_are_repeated_by_the_clock_and_on_request() -> None:
    bench = Bench()
    for _ in range(2):
        bench.submit()
    bench.clock.advance(1.0)
    assert [m.step for m in bench.session.on_tick() if isinstance(m, StepRequest)] == [1, 2]
    again = bench.session.on_message(MissingSteps("c", 1, 2))
    assert [m.step for m in again if isinstance(m, StepRequest)] == [2]


def test_progress_only_grows() -> None:
    bench = Bench()
    steps = [bench.submit() for _ in range(3)]
    bench.session.on_message(Progress("c", 1, 3, 2, 100))
    bench.session.on_message(Progress("c", 1, 2, 1, 50))
    assert [bench.session.is_applied(step) for step in steps] == [True, True, True]
    assert [bench.session.is_finished(step) for step in steps] == [True, True, False]
    assert bench.session.bytes_checked == 100


def test_answered_and_finished_steps_are_acknowledged() -> None:
    bench = Bench()
    bench.submit()
    bench.answer(1)
    assert bench.session.on_tick() == []
    out = bench.session.on_message(Progress("c", 1, 1, 1))
    assert out == [Acknowledge("c", 1, 1)]
    assert bench.session.on_tick() == []


def test_a_repeated_step_comes_with_messages_that_may_be_lost_too() -> None:
    """A coordinator without acknowledgements of its answers may have no room for the step."""
    bench = Bench()
    bench.submit()
    bench.answer(1)
    bench.session.on_message(Progress("c", 1, 1, 1))
    bench.submit()
    for _ in range(3):
        bench.clock.advance(1.0)
        step, acknowledged = bench.session.on_tick()
        assert isinstance(step, StepRequest)
        assert step.step == 2
        assert acknowledged == Acknowledge("c", 1, 1)


def test_an_idle_client_gives_a_sign_of_life() -> None:
    bench = Bench()
    bench.clock.advance(3.0)
    assert bench.session.on_tick() == [Acknowledge("c", 1, 0)]
    assert bench.session.on_tick() == []


def test_a_new_epoch_voids_everything_and_numbers_go_on() -> None:
    bench = Bench()
    bench.submit()
    bench.answer(1)
    bench.submit()
    bench.session.on_message(Unattached("c", 2, "rank 1 is lost"))
    assert bench.session.state is SessionState.VOID
    for step in (1, 2):
        with pytest.raises(StaleEpochError, match=f"step {step} of c is void: rank 1 is lost"):
            bench.session.result(step)
        with pytest.raises(StaleEpochError):
            bench.session.is_finished(step)
    with pytest.raises(StaleEpochError):
        bench.submit()
    assert bench.session.attach() == [Attach("c", 3)]
    bench.session.on_message(attached(2, 1))
    assert bench.session.state is SessionState.ATTACHING
    bench.session.on_message(attached(2, 3))
    assert bench.submit() == 3


def test_messages_of_another_epoch_or_client_are_ignored() -> None:
    bench = Bench()
    step = bench.submit()
    bench.session.on_message(StepResult("c", step, 2, 1))
    bench.session.on_message(StepResult("d", step, 1, 1))
    bench.session.on_message(Progress("c", 2, 1, 1))
    bench.session.on_message(Unattached("c", 0, "old"))
    assert bench.session.result(step) is None
    assert bench.session.finished_step == 0
    assert bench.session.state is SessionState.ATTACHED


def test_an_old_refusal_in_the_same_epoch_is_asked_about_before_it_is_believed() -> None:
    bench = Bench()
    bench.submit()
    bench.submit()
    refusal = Unattached("c", 1, "attach first")
    assert bench.session.on_message(refusal) == [Attach("c", 1, "n")]
    bench.session.on_message(attached())
    assert bench.session.result(1) is None
    bench.session.on_message(refusal)
    for _ in range(6):
        bench.clock.advance(1.0)
        assert Attach("c", 1, "n") in bench.session.on_tick()
        bench.session.on_message(refusal)
    assert bench.session.state is SessionState.VOID


def test_a_coordinator_that_lost_all_state_is_believed_when_it_repeats_itself() -> None:
    bench = Bench(is_attached=False)
    bench.session.attach()
    bench.session.on_message(attached(epoch=5))
    bench.submit()
    refusal = Unattached("c", 1, "another coordinator has taken its place")
    assert bench.session.on_message(refusal) == [Attach("c", 1, "n")]
    for _ in range(6):
        assert bench.session.state is SessionState.ATTACHED
        bench.clock.advance(1.0)
        bench.session.on_tick()
        bench.session.on_message(refusal)
    assert bench.session.state is SessionState.VOID
    assert bench.session.attach() == [Attach("c", 2)]
    bench.session.on_message(attached(epoch=4, next_step=2))
    assert bench.session.state is SessionState.ATTACHING
    bench.session.on_message(Attached("c", 1, 0, "plan", 2, True, "another"))
    assert (bench.session.state, bench.session.epoch) == (SessionState.ATTACHED, 1)
    assert bench.submit() == 2


def test_an_id_that_somebody_else_has_used_is_not_taken() -> None:
    bench = Bench(is_attached=False)
    bench.session.attach()
    bench.session.on_message(attached(next_step=4))
    bench.clock.advance(11.0)
    said = "client c is not attached after 11.0 s: another client has used its id: take a new one"
    assert str(bench.session.not_attached(bench.session.stalled_s)) == said


def test_a_step_without_an_answer_ends_in_a_deadline() -> None:
    bench = Bench()
    step = bench.submit()
    bench.clock.advance(10.5)
    with pytest.raises(DeadlineError, match=r"step 1 of c has no answer after 10.5 s: it may or"):
        bench.session.result(step)


def test_a_forward_that_never_ends_ends_in_a_deadline() -> None:
    bench = Bench()
    step = bench.submit()
    bench.answer(step)
    bench.session.on_message(Progress("c", 1, 1, 0))
    bench.clock.advance(20.5)
    assert bench.session.is_applied(step)
    with pytest.raises(DeadlineError, match=r"nothing has moved for 20.5 s \(applied 1, finished"):
        bench.session.is_finished(step)


def test_asking_for_a_step_that_was_never_submitted_is_a_mistake() -> None:
    with pytest.raises(RequestError, match="step 1 of c was not submitted, the next one is 1"):
        Bench().session.result(1)


def test_a_detached_client_is_gone_for_good() -> None:
    bench = Bench()
    bench.submit()
    assert bench.session.detach() == [Detach("c", 1)]
    assert bench.session.detach() == []
    with pytest.raises(RequestError, match="client c is detaching: it cannot attach"):
        bench.session.attach()
    with pytest.raises(StaleEpochError):
        bench.session.result(1)
    assert bench.session.on_tick() == []
    bench.session.on_message(Detached("c", 1))
    with pytest.raises(NotRunningError, match="is closed"):
        bench.session.attach()
    bench.clock.advance(10.0)
    assert bench.session.on_tick() == []


def test_detaching_is_repeated_until_it_is_confirmed() -> None:
    bench = Bench()
    bench.session.detach()
    bench.clock.advance(1.0)
    assert bench.session.stalled_s == 1.0
    assert bench.session.on_tick() == [Detach("c", 1)]
    assert bench.session.on_tick() == []
    for message in (Unattached("c", 7, "attach first"), attached(), Detached("other", 1)):
        assert bench.session.on_message(message) == []
        assert bench.session.state is SessionState.DETACHING
    bench.session.on_message(Detached("c", 2))
    assert bench.session.state is SessionState.CLOSED
    assert bench.session.stalled_s == 0.0


def test_a_client_that_has_gone_detaches_again_if_its_attach_arrives_late() -> None:
    bench = Bench()
    bench.session.detach()
    bench.session.on_message(Detached("c", 1))
    assert bench.session.on_message(attached(epoch=3)) == [Detach("c", 3)]
    assert bench.session.on_message(Attached("other", 3, 0, "plan", 1, True, "n")) == []
    assert bench.session.on_message(Unattached("c", 3, "attach first")) == []
    assert bench.session.state is SessionState.CLOSED


def test_a_client_that_may_be_attached_or_waited_for_says_that_it_goes() -> None:
    attaching = Bench(is_attached=False).session
    attaching.attach()
    assert attaching.detach() == [Detach("c", 0)]
    void = Bench().session
    void.on_message(Unattached("c", 2, "another epoch"))
    assert void.state is SessionState.VOID
    assert void.detach() == [Detach("c", 1)]


def test_a_client_that_has_said_nothing_has_nothing_to_take_back() -> None:
    session = Bench(is_attached=False).session
    assert session.detach() == []
    assert session.state is SessionState.CLOSED


def test_a_client_that_is_not_heard_goes_without_a_confirmation() -> None:
    bench = Bench()
    bench.session.detach()
    bench.session.give_up()
    bench.clock.advance(5.0)
    assert bench.session.on_tick() == []
    assert bench.session.state is SessionState.CLOSED


def test_a_confirmation_that_was_not_asked_for_means_nothing() -> None:
    bench = Bench()
    bench.session.on_message(Detached("c", 1))
    assert bench.session.state is SessionState.ATTACHED
