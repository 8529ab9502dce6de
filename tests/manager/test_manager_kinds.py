"""States and encoders through calls and steps: limits, failures, and kept blocks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvcache.base.errors import RequestError
from kvcache.manager import KVCacheManager
from kvcache.protocol.step import NO_SLOT
from kvcache.requests.request import Request
from tests.manager.managers_under_test import (
    CHUNKED,
    ENCODER,
    FULL,
    ONE_STATE,
    STATES,
    STATES_HYBRID,
    Shape,
    make_manager,
)
from tests.manager.steps import Engine, new, resume, row

# --- states that failed steps wrote over ---


@pytest.mark.parametrize("shape", [STATES, ONE_STATE, STATES_HYBRID], ids=lambda s: s.name)
def test_a_row_with_states_is_preempted_when_a_step_it_ran_in_fails(shape: Shape) -> None:
    manager = make_manager(shape)
    engine = Engine(manager)
    engine.step(new=(new("a", range(9)), new("b", range(20, 29))))
    engine.step(row(0, [5]), completed_step=1)
    result = engine.step(failed_step=2)
    assert result.withdrawn == ("a",)
    assert result.rolled_back_slots.tolist() == []
    request = manager.get_request("a")
    assert request.all_token_ids.tolist() == list(range(9))
    assert (request.num_computed_tokens, request.num_preemptions) == (0, 1)
    assert manager.slot_of("a") is None
    assert manager.slot_of("b") == 1
    again = engine.step(resumed=(resume("a"),))
    assert again.admitted_slots.tolist() == [0]
    engine.step(finished=("a", "b"))
    assert manager.statistics().core.num_free_blocks == 63


def test_a_row_with_states_can_be_resumed_in_the_step_that_reports_the_failure() -> None:
    engine = Engine(make_manager(STATES))
    engine.step(new=(new("a", range(9)),))
    engine.step(row(0, [5]), completed_step=1)
    result = engine.step(failed_step=2, resumed=(resume("a"),))
    assert result.withdrawn == ("a",)
    assert result.admitted_slots.tolist() == [0]


def test_an_earlier_step_that_fails_later_takes_its_tokens_back_as_well() -> None:
    manager = make_manager(STATES)
    engine = Engine(manager)
    engine.step(new=(new("a", range(9)),))
    engine.step(row(0, [5]), completed_step=1)
    engine.step(row(0, [6]))
    engine.step(failed_step=3, resumed=(resume("a"),))
    result = engine.step(failed_step=2)
    assert result.withdrawn == ("a",)
    request = manager.get_request("a")
    assert request.num_tokens == 9


def test_a_step_that_reports_a_failure_cannot_run_rows_with_states_on() -> None:
    engine = Engine(make_manager(STATES))
    engine.step(new=(new("a", range(9)),))
    engine.step(row(0, [5]), completed_step=1)
    with pytest.raises(RequestError, match="slot 0 does not run a request of this client"):
        engine.step(row(0, [5]), failed_step=2)


def test_rows_without_states_run_on_after_a_failure() -> None:
    engine = Engine(make_manager(CHUNKED))
    engine.step(new=(new("a", range(9)),))
    engine.step(row(0, [5]), completed_step=1)
    result = engine.step(row(0, [5]), failed_step=2)
    assert (result.withdrawn, result.rolled_back_slots.tolist()) == ((), [0])


# --- how many states there are ---


@pytest.mark.seeds(4)
@pytest.mark.parametrize("shape", [STATES, ONE_STATE], ids=lambda s: s.name)
def test_a_request_fits_where_the_states_of_one_request_do(shape: Shape, seed: int) -> None:
    rng = random.Random(seed)
    (group,) = shape.groups
    num_blocks = 1 + group.num_drafts + (2 if group.states == "align" else 1)
    manager = make_manager(shape, num_blocks=num_blocks)
    engine = Engine(manager)
    for name in ("a", "b", "c"):
        first = rng.randint(1, 40)
        assert engine.step(
            completed_step=engine.next_step - 1,
            new=(new(name, [rng.randrange(99) for _ in range(40)], first),),
        ).admitted_slots.tolist() == [0]
        computed, drafts, num_tokens = first, 0, 40
        while num_tokens < 70:
            rejected = rng.randint(0, drafts)
            appended = [0] * (drafts - rejected + 1) if computed >= num_tokens else []
            num_tokens += len(appended)
            computed -= rejected
            num_new = rng.randint(1, num_tokens - computed)
            is_decode = computed + num_new == num_tokens
            drafts = rng.randint(0, group.num_drafts) if is_decode else 0
            step = engine.step(
                row(0, appended, num_new + drafts, drafts, rejected),
                completed_step=engine.next_step - 1,
            )
            assert step.running_scheduled.tolist() == [1]
            computed += num_new + drafts
        engine.step(finished=(name,))
    assert manager.statistics().core.num_free_blocks == num_blocks - 1


def test_more_drafts_than_states_are_refused_in_a_step() -> None:
    manager = make_manager(STATES)
    engine = Engine(manager)
    engine.step(new=(new("a", range(9)),))
    before = manager.dump_state()
    with pytest.raises(RequestError) as raised:
        engine.step(row(0, [5], 4, 3))
    assert str(raised.value) == (
        "step 2 of engine#1: slot 0 has num_draft_tokens 3: states of at most 2 drafts are kept, "
        "schedule fewer or raise num_speculative_blocks"
    )
    assert manager.dump_state() == before


def test_a_row_that_only_settles_at_a_boundary_leaves_no_state_there() -> None:
    manager = make_manager(STATES)
    engine = Engine(manager)
    engine.step(new=(new("a", range(6)),))
    engine.step(row(0, [6], 2, 1))
    engine.step(row(0, [7], 0))
    engine.step(finished=("a",), completed_step=3)
    result = engine.step(new=(new("b", range(9)),))
    assert result.num_hit_tokens.tolist() == [0]


def test_states_of_the_same_step_are_no_hits_but_those_of_the_one_before_are() -> None:
    engine = Engine(make_manager(STATES_HYBRID))
    first = engine.step(new=(new("a", range(8)), new("b", range(9))))
    assert first.num_hit_tokens.tolist() == [0, 0]
    assert engine.step(new=(new("c", range(9)),)).num_hit_tokens.tolist() == [8]


# --- encoder tokens ---


def test_encoder_tokens_are_remembered_for_a_request_that_is_resumed() -> None:
    manager = make_manager(ENCODER)
    engine = Engine(manager)
    engine.step(new=(new("a", range(9), num_encoder_tokens=30),))
    assert [len(ids) for ids in manager.get_block_ids("a")] == [3, 8]
    engine.step(row(0, [5], 1), preempted_recompute=())
    engine.step(preempted_recompute=("a",))
    assert manager.get_block_ids("a") == ([], [])
    assert engine.step(resumed=(resume("a"),)).admitted_slots.tolist() == [0]
    assert [len(ids) for ids in manager.get_block_ids("a")] == [3, 8]
    engine.step(finished=("a",))
    assert manager.statistics().core.num_free_blocks == 63


def test_a_request_without_encoder_tokens_is_served_where_others_have_some() -> None:
    manager = make_manager(ENCODER)
    Engine(manager).step(new=(new("a", range(9)),))
    assert [len(ids) for ids in manager.get_block_ids("a")] == [3, 0]


def test_encoder_tokens_without_room_are_not_admitted() -> None:
    engine = Engine(make_manager(ENCODER, num_blocks=8))
    result = engine.step(new=(new("a", range(9), num_encoder_tokens=30),))
    assert (result.admitted_slots.tolist(), result.no_room) == ([NO_SLOT], ("a",))


@pytest.mark.parametrize(
    ("shape", "num_encoder_tokens", "message"),
    [
        (
            FULL,
            7,
            "request a: 7 encoder tokens, but no KV cache group keeps encoder tokens: pass 0",
        ),
        (
            ENCODER,
            65,
            "request a: 65 encoder tokens, the model keeps at most 64: shorten its input",
        ),
        (ENCODER, -1, "request a: num_encoder_tokens is -1: pass an integer of at least 0"),
    ],
)
def test_encoder_tokens_that_no_layer_keeps_are_refused(
    shape: Shape, num_encoder_tokens: int, message: str
) -> None:
    manager = make_manager(shape)
    with pytest.raises(RequestError) as raised:
        Engine(manager).step(new=(new("a", range(9), num_encoder_tokens=num_encoder_tokens),))
    assert str(raised.value).removeprefix("step 1 of engine#1: ") == message
    with pytest.raises(RequestError) as raised:
        manager.allocate_slots(
            Request("a", list(range(9))), 9, num_encoder_tokens=num_encoder_tokens
        )
    assert str(raised.value) == message


# --- calls ---


def run(manager: KVCacheManager, request: Request, num_new: int, **rest: int) -> None:
    assert manager.allocate_slots(request, num_new, **rest) is not None
    request.num_computed_tokens += num_new - rest.get("num_draft_tokens", 0)


MISTAKES: dict[str, tuple[Shape, Callable[[KVCacheManager, Request], object], str]] = {
    "more drafts than states": (
        STATES,
        lambda m, r: m.allocate_slots(r, 5, num_draft_tokens=3),
        "request a: num_draft_tokens is 3: states of at most 2 drafts are kept, schedule fewer or "
        "raise num_speculative_blocks",
    ),
    "going back behind a state": (
        STATES,
        lambda m, r: (setattr(r, "num_computed_tokens", 5), m.allocate_slots(r, 1)),
        "request a has 5 computed tokens, but its last slots were for 6 and 1 drafts, and states "
        "are written over: count what was computed, or free it and begin again",
    ),
    "accepting drafts that there were not": (
        STATES,
        lambda m, r: (setattr(r, "num_computed_tokens", 8), m.allocate_slots(r, 1)),
        "request a has 8 computed tokens, but its last slots were for 6 and 1 drafts, and states "
        "are written over: count what was computed, or free it and begin again",
    ),
    "other encoder tokens": (
        ENCODER,
        lambda m, r: m.allocate_slots(r, 1, num_encoder_tokens=4),
        "request a was admitted with 9 encoder tokens, not 4: pass that number or 0",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistaken_call_is_refused_and_changes_nothing(name: str) -> None:
    shape, make, message = MISTAKES[name]
    manager = make_manager(shape)
    request = Request("a", list(range(12)))
    num_encoder_tokens = 9 if shape is ENCODER else 0
    run(manager, request, 7, num_draft_tokens=1, num_encoder_tokens=num_encoder_tokens)
    before = manager.dump_state()["core"]
    with pytest.raises(RequestError) as raised:
        make(manager, request)
    assert str(raised.value) == message
    assert manager.dump_state()["core"] == before


def test_a_call_names_the_encoder_tokens_again_or_leaves_them_out() -> None:
    manager = make_manager(ENCODER)
    request = Request("a", list(range(12)))
    run(manager, request, 4, num_encoder_tokens=9)
    run(manager, request, 4, num_encoder_tokens=9)
    run(manager, request, 4)
    assert [len(ids) for ids in manager.get_block_ids("a")] == [3, 3]
    manager.check()


def test_external_tokens_of_a_running_request_bring_their_state_along() -> None:
    manager = make_manager(STATES)
    request = Request("a", list(range(40)))
    run(manager, request, 6)
    assert manager.allocate_slots(request, 10, num_external_computed_tokens=9) is not None
    (table,) = manager.get_block_ids("a")
    assert [int(b > 0) for b in table] == [0, 0, 0, 1, 0, 0, 1, 1, 1]
    request.num_computed_tokens = 25
    run(manager, request, 3)
    manager.free(request)
    manager.check()
    assert manager.statistics().core.num_free_blocks == 63


def test_new_blocks_say_which_states_have_a_hash() -> None:
    manager = make_manager(STATES)
    request = Request("a", list(range(12)))
    blocks = manager.allocate_slots(request, 8)
    (ids,) = blocks.get_block_ids()
    assert [int(b > 0) for b in ids] == [0, 1, 1, 1]
    assert blocks.get_unhashed_block_ids() == (ids[2:],)
