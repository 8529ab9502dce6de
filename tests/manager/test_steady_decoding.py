"""Decoding steps that differ only in tokens: results of the last step are reused."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache.base.errors import RequestError
from kvcache.core.flat_core import FlatCore
from kvcache.manager import KVCacheManager
from kvcache.protocol.step import EMPTY_RUNNING, Fork
from tests.core.builders import run_one_by_one
from tests.manager.managers_under_test import FULL, HYBRID, Shape, make_manager
from tests.manager.steps import Engine, new, row

NUM_LONG_STEPS = 700  # more than rows hold back before their requests are brought up to date


def tokens_of(manager: KVCacheManager, request_id: str) -> list[int]:
    request = manager.get_request(request_id)
    tokens: list[int] = request.all_token_ids.tolist()
    return tokens


def test_tokens_of_many_equal_steps_all_arrive() -> None:
    manager = make_manager(Shape("long", FULL.groups, 2000), num_blocks=1000)
    engine = Engine(manager)
    engine.step(new=(new("a", [1] * 5), new("b", [2] * 7)))
    for i in range(NUM_LONG_STEPS):
        result = manager.step(engine.request(row(0, [i % 50]), row(1, [i % 70])))
        engine.next_step += 1
        assert result.running_scheduled.tolist() == [1, 1]
        if i % 40 == 0:
            manager.step(engine.request(completed_step=engine.next_step - 1))
            engine.next_step += 1
    manager.check()
    assert tokens_of(manager, "a") == [1] * 5 + [i % 50 for i in range(NUM_LONG_STEPS)]
    assert tokens_of(manager, "b") == [2] * 7 + [i % 70 for i in range(NUM_LONG_STEPS)]


@pytest.mark.parametrize("shape", [FULL, HYBRID], ids=lambda shape: shape.name)
def test_the_model_length_ends_equal_steps_where_it_ends_others(shape: Shape) -> None:
    manager = make_manager(shape, num_blocks=200)
    engine = Engine(manager)
    engine.step(new=(new("a", [1] * 70), new("b", [2] * 5)))
    for i in range(10):
        engine.step(row(0, [i]), row(1, [i]), completed_step=engine.next_step - 1)
    with pytest.raises(RequestError) as raised:
        engine.step(row(0, [1]), row(1, [1]))
    assert str(raised.value) == (
        "step 12 of engine#1: slot 0 has num_new_tokens 1: the model takes 80 tokens, schedule "
        "fewer"
    )
    assert len(tokens_of(manager, "b")) == 15
    engine.step(row(1, [1]), finished=("a",))


def test_equal_steps_are_checked_again_after_a_failure_took_rows_back() -> None:
    manager = make_manager()
    engine = Engine(manager)
    engine.step(new=(new("a", [1] * 5),))
    engine.step(row(0, [7], num_new=3, num_draft=2), completed_step=1)
    engine.step(row(0, [7], rejected=2), completed_step=2)
    for _ in range(4):
        engine.step(row(0, [7]))
    engine.step(failed_step=3, running=EMPTY_RUNNING)  # 8 computed, the drafts of step 2 included
    assert tokens_of(manager, "a") == [1] * 5 + [7]
    with pytest.raises(RequestError) as raised:
        engine.step(row(0, [7]))
    assert str(raised.value) == (
        "step 9 of engine#1: slot 0 would have 9 computed tokens, but has 7 tokens: append the "
        "tokens first, or schedule fewer"
    )
    engine.step(row(0, [9], rejected=2))
    assert tokens_of(manager, "a") == [1] * 5 + [7, 9]


def test_a_negative_token_is_refused_in_a_step_like_the_last() -> None:
    manager = make_manager()
    engine = Engine(manager)
    engine.step(new=(new("a", [1] * 5),))
    engine.step(row(0, [7]))
    engine.step(row(0, [7]))
    with pytest.raises(RequestError) as raised:
        engine.step(row(0, [-7]))
    assert str(raised.value) == (
        "step 4 of engine#1: running.token_ids[0] is -7: token ids are not negative"
    )
    assert tokens_of(manager, "a") == [1] * 5 + [7, 7]


def test_rows_that_change_places_take_their_tokens_along() -> None:
    manager = make_manager()
    engine = Engine(manager)
    engine.step(new=(new("a", [1] * 5), new("b", [2] * 5)))
    for i in range(6):
        rows = [row(0, [3]), row(1, [4])]
        engine.step(*(rows if i % 2 else rows[::-1]))
    assert tokens_of(manager, "a") == [1] * 5 + [3] * 6
    assert tokens_of(manager, "b") == [2] * 5 + [4] * 6


@pytest.mark.parametrize("shape", [FULL, HYBRID], ids=lambda shape: shape.name)
def test_what_many_steps_have_filled_is_found_by_forks_and_others(shape: Shape) -> None:
    """No audit in between: filled units of rows stay deferred."""
    manager = make_manager(
        Shape("long", shape.groups, 2000),
        num_blocks=400,
    )
    engine = Engine(manager)

    def decode(num_steps: int, *slots: int, **rest: Any) -> None:
        for i in range(num_steps):
            rows = [row(slot, [10 * slot + i % 7]) for slot in slots]
            manager.step(engine.request(*rows, completed_step=engine.next_step - 1 or -1, **rest))
            engine.next_step += 1
            rest = {}

    manager.step(engine.request(new=(new("a", [1] * 6), new("b", [2] * 6))))
    engine.next_step += 1
    decode(30, 0, 1)
    decode(1, 0, 1, forks=(Fork("a", "c"),))
    decode(25, 0, 1, 2)
    decode(1, 1, finished=("a", "c"))
    for request_id in ("a", "c"):
        assert manager.get_request(request_id) is None
    shared = [1] * 6 + [i % 7 for i in range(30)]
    of_parent, of_child = ([at + i % 7 for i in range(25)] for at in (0, 20))
    for tokens in ([*shared, 0, *of_parent], [*shared, *of_child]):
        result = manager.step(engine.request(new=(new("again", tokens),)))
        engine.next_step += 1
        assert result.num_hit_tokens.tolist() == [(len(tokens) - 1) // 4 * 4]
        decode(1, finished=("again",))
    manager.check()


def test_rows_that_run_together_after_others_one_by_one_are_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The changes of a step are kept in case it fails, however many rows ran."""
    manager = make_manager()
    engine = Engine(manager)
    engine.step(new=tuple(new(name, [i, i, i]) for i, name in enumerate("abcd")))
    with monkeypatch.context() as patch:
        patch.setattr(FlatCore, "run_rows", run_one_by_one)
        engine.step(*[row(slot, [7], num_new=1) for slot in range(4)], completed_step=1)
    engine.step(completed_step=2)
    engine.step(*[row(slot, [8], num_new=1) for slot in range(4)])
    engine.step(*[row(slot, [8] * 3, num_new=3) for slot in range(4)])
    assert cached(manager) == 8
    engine.step(failed_step=5)
    assert cached(manager) == 4
    engine.step(*[row(slot, [9] * 3, num_new=3) for slot in range(4)])
    assert cached(manager) == 8


def cached(manager: KVCacheManager) -> int:
    return manager.statistics().core.num_cached_blocks
