"""Rows that run from step to step: their requests, and the tokens that a core sees."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcache.base.errors import RequestError
from tests.manager.managers_under_test import FULL, make_manager
from tests.manager.steps import Engine, ints, new, resume, row, running


def test_a_row_whose_request_has_left_is_refused_in_the_next_step() -> None:
    manager = make_manager()
    engine = Engine(manager)
    engine.step(new=(new("a", [1] * 5), new("b", [2] * 5)))
    engine.step(row(0, [7]), row(1, [7]))
    engine.step(row(0, [7]), row(1, [7]))
    engine.step(finished=("b",))
    with pytest.raises(RequestError) as raised:
        engine.step(row(0, [7]), row(1, [7]))
    assert str(raised.value) == (
        "step 5 of engine#1: slot 1 does not run a request of this client: name slots of its "
        "running requests only"
    )


def test_a_row_that_another_client_has_taken_is_refused() -> None:
    manager = make_manager()
    engine, other = Engine(manager), Engine(manager, "other#1")
    engine.step(new=(new("a", [1] * 5), new("b", [2] * 5)))
    engine.step(row(0, [7]), row(1, [7]))
    engine.step(row(0, [7]), finished=("b",))
    other.step(new=(new("c", [3] * 5),))
    assert manager.slot_of("c") == 1
    for client in (engine, other):
        with pytest.raises(RequestError, match="does not run a request of this client"):
            client.step(row(0, [7]), row(1, [7]))
    other.step(row(1, [7]))
    engine.step(row(0, [7]))


def test_a_row_runs_on_for_the_request_in_its_slot() -> None:
    manager = make_manager()
    engine = Engine(manager)
    engine.step(new=(new("a", [1] * 5),))
    engine.step(row(0, [7]))
    engine.step(preempted_recompute=("a",), new=(new("b", [2] * 6),))
    engine.step(row(0, [8]), completed_step=3)
    tokens = {name: manager.get_request(name) for name in "ab"}
    assert [r.all_token_ids.tolist() for r in tokens.values() if r is not None] == [
        [1, 1, 1, 1, 1, 7],
        [2, 2, 2, 2, 2, 2, 8],
    ]
    engine.step(row(0, [9]), failed_step=4, resumed=(resume("a"),))
    assert manager.slot_of("a") == 1


def test_an_engine_may_use_its_arrays_again() -> None:
    manager = make_manager()
    engine = Engine(manager)
    engine.step(new=(new("a", [1] * 5), new("b", [2] * 6)))
    rows = running(row(0, [7]), row(1, [8]))
    engine.step(running=rows, completed_step=1)
    rows.slots[:] = [1, 0]
    rows.token_ids[:] = [9, 10]
    engine.step(running=rows)
    rows.slots[:] = [0, 1]
    result = engine.step(failed_step=2)
    assert result.rolled_back_slots.tolist() == [0, 1]
    assert result.rolled_back_tokens.tolist() == [5, 6]
    engine.step(running=rows)
    rows.slots[:] = [1, 0]
    patches = engine.step(row(0, [3] * 8, num_new=8), row(1, [4], num_new=1)).patches
    assert patches.slots.tolist() == [0]
    a = manager.get_request("a")
    assert a is not None and a.all_token_ids.tolist() == [1] * 5 + [9] + [3] * 8


def test_a_row_may_use_the_whole_length_of_the_model_and_no_token_more() -> None:
    manager = make_manager()
    engine = Engine(manager)
    most = FULL.max_model_len
    engine.step(new=(new("a", [1] * (most - 2)),))
    engine.step(row(0, [7], num_new=1), completed_step=1)
    far = replace(running(row(0, [8, 9])), num_new_tokens=ints([2]))
    with pytest.raises(
        RequestError, match="slot 0 has num_new_tokens 2: the model takes 80 tokens"
    ):
        engine.step(running=far)
    engine.step(row(0, [8], num_new=1))
