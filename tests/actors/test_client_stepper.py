"""A refused step: sent again while its epoch lasts, given up when it has ended."""

from __future__ import annotations

from typing import Any

import pytest

from actors.cli import playground
from actors.cli.playground import ClientStepper
from kvcache.base.errors import WorkerLostError
from kvcache.protocol.step import StepRequest, StepResult


class RefusingClient:
    """Refuses the first steps because a rank is silent; then takes one, or the epoch ends."""

    def __init__(self, num_refusals: int, *, is_over_then: bool = False) -> None:
        self.sent: list[StepRequest] = []
        self.is_attached = True
        self._num_refusals = num_refusals
        self._is_over_then = is_over_then

    def submit(self, step: StepRequest) -> int:
        self.sent.append(step)
        return len(self.sent)

    def wait_result(self, step: int) -> Any:
        if step > self._num_refusals and not self._is_over_then:
            return StepResult(client_id="c", step=step, epoch=1, seq=step)
        self.is_attached = step <= self._num_refusals
        raise WorkerLostError("rank 1 has not been heard from for 12.0 s")


def stepper_on(
    client: RefusingClient, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> ClientStepper:
    monkeypatch.setattr(playground, "_SEND_AGAIN_S", 0.0)
    made: Any = client
    return ClientStepper(made, lambda: (None, ()), return_s=60.0, tell=told.append)


STEP = StepRequest(finished=("a",))


def test_a_refused_step_is_sent_again_and_the_answer_says_under_which_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = RefusingClient(num_refusals=2)
    told: list[str] = []
    stepper = stepper_on(client, monkeypatch, told)
    result = stepper.wait_result(stepper.submit(STEP))
    assert result.step == 3
    assert client.sent == [STEP] * 3
    assert told == ["rank 1 has not been heard from for 12.0 s: waiting, 60 s at most"]


def test_a_step_whose_epoch_is_over_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    client = RefusingClient(num_refusals=1, is_over_then=True)
    stepper = stepper_on(client, monkeypatch, [])
    with pytest.raises(WorkerLostError, match="rank 1 has not been heard from"):
        stepper.wait_result(stepper.submit(STEP))
    assert client.sent == [STEP] * 2
