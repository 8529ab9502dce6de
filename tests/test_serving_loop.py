"""Threads that serve: the cost of errors, and the statistics."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvcache.base.serving_loop import Faults, ServingLoop, describe_error

DEADLINE_S = 30.0


class Turns:
    """Turns with given effects, one after the other; after the last, turns wait."""

    def __init__(self, *actions: Callable[[], object]) -> None:
        self.actions = list(actions)
        self.has_done_all = threading.Event()

    def __call__(self) -> None:
        if self.actions:
            self.actions.pop(0)()
        else:
            self.has_done_all.set()


def raising(error: BaseException) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize(
    "error", [KeyError("x"), MemoryError(), RecursionError("deep"), SystemExit(3)]
)
def test_an_error_costs_one_turn_and_is_counted(error: BaseException) -> None:
    turns = Turns(raising(error), raising(error))
    loop = ServingLoop("some loop", turns)
    loop.start()
    assert turns.has_done_all.wait(DEADLINE_S)
    told = loop.statistics()
    assert (told.is_running, told.num_faults, told.num_restarts) == (True, 2, 0)
    assert told.last_fault == f"a turn: {describe_error(error)}"
    assert told.problem() == f"some loop survived 2 errors, the last: {told.last_fault}"
    loop.stop()
    assert loop.join(DEADLINE_S)
    assert loop.statistics().problem().startswith("some loop does not run; some loop survived")


def test_only_so_many_errors_in_a_row_end_a_loop_that_is_to_end() -> None:
    failures: list[BaseException] = []
    errors = [ValueError(str(number)) for number in range(5)]
    turns = Turns(raising(errors[0]), raising(errors[1]), lambda: None, *map(raising, errors[2:]))
    loop = ServingLoop("some loop", turns, max_failures=3, on_failure=failures.append)
    loop.start()
    assert loop.join(DEADLINE_S)
    assert loop.failure is errors[4]
    assert failures == [errors[4]]
    loop.ensure_running()
    assert not loop.is_running


def test_a_thread_that_has_ended_all_the_same_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = Turns(raising(ValueError("first")))
    loop = ServingLoop("some loop", turns)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda arguments: None)
        patch.setattr(Faults, "note", lambda *_: raising(RuntimeError("no note can be made"))())
        loop.start()
        assert loop.join(DEADLINE_S)
    assert not loop.statistics().is_running
    loop.ensure_running()
    assert turns.has_done_all.wait(DEADLINE_S)
    loop.ensure_running()
    told = loop.statistics()
    assert (told.is_running, told.num_restarts) == (True, 1)
    loop.stop()
    assert loop.join(DEADLINE_S)
    loop.ensure_running()
    assert not loop.is_running


def test_errors_of_single_messages_are_contained(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults("a reader")
    with caplog.at_level(logging.ERROR):
        for number in range(3):
            with faults.contained(f"message {number}"):
                [][number]
    assert (faults.count, faults.last) == (3, "message 2: IndexError: list index out of range")
    assert caplog.messages[0] == (
        "a reader: error in message 0: IndexError: list index out of range"
    )
    with pytest.raises(KeyboardInterrupt), faults.contained("an interruption"):
        raise KeyboardInterrupt


def test_an_error_whose_text_cannot_be_made_is_described() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    try:
        assert describe_error(KeyError(nested)) == (
            "KeyError: its text cannot be made (RecursionError)"
        )
    finally:
        while nested:  # freed level by level: all at once may be too deep, too
            nested = nested.pop()
    assert describe_error(ValueError()) == "ValueError"
    assert len(describe_error(ValueError("x" * 1000))) == 300
