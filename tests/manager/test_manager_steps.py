"""The rules of a step, one by one; and a step of one request equals the calls."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvcache.base.clock import VirtualClock
from kvcache.base.errors import RequestError
from kvcache.core import CoreSettings
from kvcache.core.flat_core import FlatCore
from kvcache.manager import KVCacheManager, request_table
from kvcache.policies import hinted
from kvcache.protocol.step import Fork, RequestHints, StepResult
from kvcache.requests.hints import CacheHint
from kvcache.requests.request import Request
from tests.manager.managers_under_test import (
    ENCODER,
    FULL,
    HYBRID,
    MORE_SHAPES,
    STATES,
    THREE_KINDS,
    WINDOW,
    Shape,
    make_manager,
)
from tests.manager.steps import Engine, new, resume, row


def test_requests_of_one_step_share_blocks() -> None:
    manager = make_manager()
    result = Engine(manager).step(new=(new("r1", [1] * 9), new("r2", [1] * 9)))
    assert result.num_hit_tokens.tolist() == [0, 8]
    assert result.num_scheduled_tokens.tolist() == [9, 1]
    first, second = (manager.get_block_ids(name)[0] for name in ("r1", "r2"))
    assert first[:2] == second[:2]


def test_what_is_not_complete_is_found_by_its_own_client_only() -> None:
    manager = make_manager()
    mine, other = Engine(manager, "mine#1"), Engine(manager, "other#1")
    mine.step(new=(new("r1", [1] * 9),))
    assert other.step(new=(new("r2", [1] * 9),)).num_hit_tokens.tolist() == [0]
    assert mine.step(new=(new("r3", [1] * 9),)).num_hit_tokens.tolist() == [8]
    mine.step(completed_step=1)
    assert other.step(new=(new("r4", [1] * 9),)).num_hit_tokens.tolist() == [8]


def test_a_failed_step_is_void_but_for_what_it_ended() -> None:
    manager = make_manager()
    engine = Engine(manager)
    engine.step(new=(new("old", [1] * 6), new("done", [2] * 6), new("out", [3] * 6)))
    engine.step(
        row(0, [7, 8, 9], num_new=3),
        completed_step=1,
        finished=("done",),
        preempted_recompute=("out",),
        new=(new("young", [4] * 6),),
    )
    engine.step(row(0, [7], num_new=1), row(1, [5]))
    result = engine.step(failed_step=2)
    assert result.withdrawn == ("young",)
    assert result.rolled_back_slots.tolist() == [0]
    assert result.rolled_back_computed.tolist() == [6]
    assert result.rolled_back_tokens.tolist() == [6]
    assert manager.get_request("young") is None
    assert manager.get_request("done") is None
    assert manager.slot_of("out") is None
    old = manager.get_request("old")
    assert old is not None and old.all_token_ids.tolist() == [1] * 6
    assert engine.step(new=(new("young", [4] * 6),)).num_hit_tokens.tolist() == [0]


def test_a_request_resumed_by_a_failed_step_is_preempted_again() -> None:
    manager = make_manager()
    engine = Engine(manager)
    engine.step(new=(new("r1", [1] * 6),))
    engine.step(preempted_swap=("r1",), completed_step=1)
    engine.step(resumed=(resume("r1"),), completed_step=2)
    engine.step(row(0, [5]))
    result = engine.step(failed_step=3)
    assert result.withdrawn == ("r1",)
    held = manager.get_request("r1")
    assert (held.num_tokens, held.num_preemptions, manager.slot_of("r1")) == (6, 1, None)
    assert engine.step(resumed=(resume("r1"),)).num_hit_tokens.tolist() == [4]


def test_tokens_of_a_preempted_request_go_with_the_failed_step_that_brought_them() -> None:
    manager = make_manager()
    engine = Engine(manager)
    engine.step(new=(new("r1", [1] * 6),))
    engine.step(row(0, [5]), completed_step=1)
    engine.step(preempted_recompute=("r1",))
    engine.step(failed_step=3)
    engine.step(failed_step=2)
    held = manager.get_request("r1")
    assert held is not None and held.num_tokens == 6


def test_a_window_keeps_what_an_unfinished_step_may_need_again() -> None:
    manager = make_manager(WINDOW)
    engine = Engine(manager)
    engine.step(new=(new("r1", list(range(40)), max_new_tokens=8),))
    engine.step(row(0, num_new=16), completed_step=1)
    engine.step(row(0, num_new=8))
    assert 0 not in manager.get_block_ids("r1")[0]
    engine.step(failed_step=2)
    engine.step(row(0, num_new=16))
    assert 0 not in manager.get_block_ids("r1")[0]
    engine.step(row(0, num_new=1), completed_step=5)
    table = manager.get_block_ids("r1")[0]
    assert table[:3] == [0, 0, 0] and 0 not in table[3:]


def test_a_step_without_room_appends_tokens_and_schedules_nothing() -> None:
    manager = make_manager(num_blocks=4)
    engine = Engine(manager)
    engine.step(new=(new("r1", [1] * 4), new("r2", [2] * 8)))
    result = engine.step(row(0, [5]), row(1, [6]))
    assert result.running_scheduled.tolist() == [0, 0]
    assert result.no_room == ()
    held = manager.get_request("r1")
    assert held is not None and (held.num_tokens, held.num_computed_tokens) == (5, 4)
    result = engine.step(row(0), finished=("r2",), new=(new("r3", [3] * 12),))
    assert result.running_scheduled.tolist() == [1]
    assert result.no_room == ("r3",)
    assert manager.get_request("r3") is None


def test_external_tokens_are_not_computed_and_the_last_token_always_is() -> None:
    manager = make_manager()
    engine = Engine(manager)
    result = engine.step(new=(new("r1", [1] * 10, num_external_computed_tokens=6),))
    assert result.num_scheduled_tokens.tolist() == [4]
    result = engine.step(new=(new("r2", [1] * 10, num_external_computed_tokens=6),))
    assert result.num_hit_tokens.tolist() == [8]
    assert result.num_scheduled_tokens.tolist() == [1]


def test_a_delayed_request_is_hit_after_its_next_step() -> None:
    engine = Engine(make_manager())
    engine.step(new=(new("r1", [1] * 9, delay_cache_blocks=True),))
    assert engine.step(new=(new("r2", [1] * 9),)).num_hit_tokens.tolist() == [0]
    engine.step(finished=("r2",), failed_step=2)
    engine.step(row(0, [5]))
    assert engine.step(new=(new("r3", [1] * 9),)).num_hit_tokens.tolist() == [8]


def test_a_slot_is_reused_lowest_first_also_within_a_step() -> None:
    manager = make_manager()
    engine = Engine(manager)
    engine.step(new=(new("r1", [1]), new("r2", [2]), new("r3", [3])))
    result = engine.step(finished=("r2",), new=(new("r4", [4]), new("r5", [5])))
    assert result.admitted_slots.tolist() == [1, 3]
    held = manager.request_in_slot(1)
    assert held is not None and held.request_id == "r4"
    assert manager.request_in_slot(7) is None


@pytest.mark.parametrize("seed", range(6))
def test_tokens_stay_right_when_steps_fail_and_come_again(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_table, "_RING_TOKENS", 8)
    draw = random.Random(seed)
    manager = make_manager(replace(FULL, max_model_len=4000), num_blocks=2100)
    engine = Engine(manager)
    engine.step(new=(new("r1", [1] * 3, 4000), new("r2", [2] * 6, 4000)))
    tokens = {0: [1] * 3, 1: [2] * 6}
    failed: tuple[int, ...] = ()
    again: list[list[int]] = []
    for _ in range(60):
        before = {slot: list(known) for slot, known in tokens.items()}
        slots = draw.sample([0, 1], draw.randint(1, 2))
        appended = [[draw.randrange(9) for _ in range(draw.randint(1, 12))] for _ in slots]
        if failed and draw.random() < 0.7:
            slots, appended = list(failed), again
        rows = [row(s, a, num_new=len(a)) for s, a in zip(slots, appended, strict=True)]
        engine.step(*rows, **({"failed_step": engine.next_step - 1} if failed else {}))
        for slot, more in zip(slots, appended, strict=True):
            tokens[slot] += more
        for name, slot in (("r1", 0), ("r2", 1)):
            request = manager.get_request(name)
            assert request is not None and request.all_token_ids.tolist() == tokens[slot]
        manager.check()
        failed = ()
        if draw.random() < 0.4:
            tokens, failed, again = before, tuple(slots), appended
    engine.step(**({"failed_step": engine.next_step - 1} if failed else {}))
    engine.step(completed_step=engine.next_step - 1)
    for name, slot in (("r1", 0), ("r2", 1)):
        request = Request(f"again {name}", [*tokens[slot], 5])
        assert manager.get_computed_blocks(request)[1] >= len(tokens[slot]) // 4 * 4 - 4


def test_a_client_that_is_gone_leaves_nothing() -> None:
    manager = make_manager()
    gone, other = Engine(manager, "gone#1"), Engine(manager, "other#1")
    gone.step(new=(new("r1", [1] * 9), new("r2", [2] * 9)))
    gone.step(preempted_recompute=("r2",))
    other.step(new=(new("r3", [3] * 5),))
    assert manager.release_client("gone#1") == ("r1", "r2")
    assert manager.release_client("gone#1") == ()
    statistics = manager.statistics()
    assert (statistics.num_running_requests, statistics.num_clients) == (1, 1)
    assert other.step(new=(new("r4", [1] * 9),)).num_hit_tokens.tolist() == [0]


class Twin:
    """One manager by calls, one by steps of one request each, both doing the same."""

    def __init__(self, shape: Shape, seed: int, *, has_hints: bool = False) -> None:
        self.rng = random.Random(f"twin {shape.name} {seed}")
        self.has_hints = has_hints
        self.clock = VirtualClock()
        num_blocks = self.rng.choice([24, 60])
        self.calls = make_manager(shape, num_blocks=num_blocks, clock=self.clock)
        self.steps = make_manager(shape, num_blocks=num_blocks, clock=self.clock)
        self.engine = Engine(self.steps)
        self.requests: dict[str, Request] = {}
        self.num_made = 0

    def act(self) -> None:
        choice = self.rng.random()
        if choice < 0.3 or not self.requests:
            self.admit()
        elif choice < 0.85:
            self.extend(self.rng.choice(list(self.requests.values())))
        else:
            self.finish(self.rng.choice(list(self.requests)))
        # Calls seal at once; a step is sealed when the next one says that it is complete.
        self.step()
        self.clock.advance(1.0)
        assert visible(self.calls) == visible(self.steps)

    def step(self, *rows: tuple[int, Sequence[int], int, int, int], **rest: Any) -> StepResult:
        return self.engine.step(*rows, completed_step=self.engine.next_step - 1, **rest)

    def hints(self) -> tuple[CacheHint, ...]:
        """Draw hints."""
        if not self.has_hints or self.rng.random() < 0.3:
            return ()
        start, seconds = self.rng.choice([0, 5]), self.rng.choice([2.0, 9.0])
        return self.rng.choice(
            [
                (CacheHint(start, is_over=True),),
                (CacheHint(returns_in_s=seconds),),
                (CacheHint(0, 8, priority=90), CacheHint(8, returns_in_s=seconds)),
                (CacheHint(start, priority=20, duration_s=seconds),),
            ]
        )

    def admit(self) -> None:
        self.num_made += 1
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 30))]
        request = Request(f"r{self.num_made}", tokens)
        request.hints = hints = self.hints()
        most = self.rng.randint(1, 30)
        found, num_hit = self.calls.get_computed_blocks(request)
        num_new = min(most, len(tokens) - num_hit)
        blocks = self.calls.allocate_slots(request, num_new, num_hit, found)
        result = self.step(new=(new(request.request_id, tokens, most, hints=hints),))
        assert (blocks is None) == (result.no_room == (request.request_id,))
        if blocks is not None:
            request.num_computed_tokens = num_hit + num_new
            self.requests[request.request_id] = request

    def extend(self, request: Request) -> None:
        appended = []
        if request.num_computed_tokens == request.num_tokens:
            appended = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 6))]
        if request.num_tokens + len(appended) > FULL.max_model_len:
            self.finish(request.request_id)
            return
        request.append_output_token_ids(appended)
        changed = ()
        if self.has_hints and self.rng.random() < 0.2:
            request.hints = hints = self.hints()
            changed = (RequestHints(request.request_id, hints),)
        num_new = self.rng.randint(1, request.num_tokens - request.num_computed_tokens)
        slot = self.calls.slot_of(request.request_id)
        assert slot is not None
        blocks = self.calls.allocate_slots(request, num_new)
        result = self.step(row(slot, appended, num_new), hints=changed)
        assert result.running_scheduled.tolist() == [int(blocks is not None)]
        if blocks is not None:
            request.num_computed_tokens += num_new

    def finish(self, request_id: str) -> None:
        changed = ()
        if self.has_hints and self.rng.random() < 0.5:
            self.requests[request_id].hints = hints = self.hints()
            changed = (RequestHints(request_id, hints),)
        self.calls.free(self.requests.pop(request_id))
        self.step(finished=(request_id,), hints=changed)


def visible(manager: KVCacheManager) -> tuple[object, object, list[object]]:
    """The equal state of two managers that did the same: all but client and step."""
    state = manager.dump_state()
    core = state["core"]
    assert isinstance(core, dict)
    return state["requests"], state["cache"], [core[k] for k in sorted(core) if k not in APART]


APART = {"ledger", "clients", "steps"}


@pytest.mark.parametrize(
    "shape", [FULL, WINDOW, HYBRID, THREE_KINDS, *MORE_SHAPES], ids=lambda s: s.name
)
@pytest.mark.seeds(3)
def test_calls_and_steps_of_one_give_identical_states(shape: Shape, seed: int) -> None:
    twin = Twin(shape, seed)
    for _ in range(60):
        twin.act()


@pytest.mark.parametrize("shape", [FULL, WINDOW, HYBRID, STATES], ids=lambda s: s.name)
def test_calls_and_steps_follow_the_same_hints(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hinted, "_FEW_CLAIMS", 1)
    twin = Twin(shape, 7, has_hints=True)
    for _ in range(100):
        twin.act()
    twin.steps.check()
    assert twin.steps.statistics().core.num_evictions


FIRST, LAST = CacheHint(priority=0), CacheHint(priority=100)


def kept_after(num_blocks: int, engine: Engine, *prompts: Sequence[int]) -> list[int]:
    """Serve new contents of so many blocks; return how many tokens of the prompts are cached."""
    for i in range(num_blocks):
        name = f"other {engine.next_step} {i}"
        engine.step(new=(new(name, [100 + i] * 4),), completed_step=engine.next_step - 1)
        engine.step(finished=(name,), completed_step=engine.next_step - 1)
    manager = engine.manager
    return [manager.get_computed_blocks(Request("probe", [*p, 9]))[1] for p in prompts]


def hinted_engine() -> Engine:
    """An engine with 12 free blocks of 4 tokens."""
    return Engine(make_manager(num_blocks=13, clock=VirtualClock()))


def test_hints_of_a_new_request_are_followed_when_it_finishes() -> None:
    engine = hinted_engine()
    engine.step(new=(new("a", [1] * 8, hints=(LAST,)), new("b", [2] * 8)))
    engine.step(finished=("a", "b"), completed_step=1)
    assert kept_after(10, engine, [1] * 8, [2] * 8) == [8, 0]


def test_hints_that_come_with_the_end_replace_the_earlier_ones() -> None:
    engine = hinted_engine()
    engine.step(new=(new("a", [1] * 8, hints=(LAST,)), new("b", [2] * 8)))
    hints = (RequestHints("a", ()), RequestHints("b", (LAST,)))
    engine.step(finished=("a", "b"), completed_step=1, hints=hints)
    assert kept_after(10, engine, [1] * 8, [2] * 8) == [0, 8]


def test_a_preempted_request_keeps_its_hints_also_with_new_weights() -> None:
    engine = hinted_engine()
    engine.step(new=(new("a", [1] * 8, hints=(FIRST,)),))
    engine.step(preempted_recompute=("a",), hints=(RequestHints("a", (LAST,)),), completed_step=1)
    engine.manager.begin_model_epoch()
    engine.step(resumed=(resume("a"),), completed_step=2)
    request = engine.manager.get_request("a")
    assert request is not None and request.hints == (LAST,)


@pytest.mark.parametrize("comes_late", [False, True])
def test_hints_of_a_request_that_ends_while_it_is_preempted_are_followed(comes_late: bool) -> None:
    engine = hinted_engine()
    early = () if comes_late else (LAST,)
    engine.step(new=(new("a", [1] * 8, hints=early), new("b", [2] * 8)))
    engine.step(preempted_recompute=("a",), finished=("b",), completed_step=1)
    hints = (RequestHints("a", (LAST,)),) if comes_late else ()
    engine.step(finished=("a",), hints=hints, completed_step=2)
    assert kept_after(10, engine, [1] * 8, [2] * 8) == [8, 0]


def test_hints_of_a_preempted_request_whose_blocks_are_gone_change_nothing() -> None:
    engine = hinted_engine()
    engine.step(new=(new("a", [1] * 8, hints=(FIRST,)), new("b", [2] * 8)))
    engine.step(preempted_recompute=("a",), finished=("b",), completed_step=1)
    assert engine.manager.reset_prefix_cache()
    engine.step(finished=("a",), completed_step=2)
    engine.step(new=(new("c", [1] * 4),), completed_step=3)
    engine.step(finished=("c",), completed_step=4)
    assert kept_after(11, engine, [1] * 8) == [4]
    assert kept_after(12, engine, [1] * 8) == [0]


def test_the_child_of_a_fork_has_its_parent_s_hints() -> None:
    engine = hinted_engine()
    engine.step(new=(new("a", [1] * 8, hints=(LAST,)),))
    engine.step(forks=(Fork("a", "child"),), completed_step=1)
    child = engine.manager.get_request("child")
    assert child is not None and child.hints == (LAST,)


def test_hints_of_a_request_whose_step_failed_are_not_followed() -> None:
    engine = hinted_engine()
    engine.step(new=(new("old", [1] * 8),))
    engine.step(finished=("old",), completed_step=1)
    engine.step(new=(new("void", [1] * 8, hints=(FIRST,)), new("b", [2] * 8)), completed_step=2)
    engine.step(failed_step=3)
    assert kept_after(11, engine, [1] * 8) == [4]


def test_invalid_hints_of_a_step_are_refused() -> None:
    engine = hinted_engine()
    other = Engine(engine.manager, "other#1")
    engine.step(new=(new("a", [1] * 8, hints=(LAST,)),))
    before = engine.manager.dump_state()
    many = (LAST,) * 17
    for act, message in (
        (
            lambda: engine.request(hints=(RequestHints("no", (LAST,)),)),
            "'no' is to be hinted but is",
        ),
        (lambda: other.request(hints=(RequestHints("a", (LAST,)),)), "belongs to another client"),
        (lambda: engine.request(hints=(RequestHints("a", ()),) * 2), "a is hinted twice"),
        (lambda: engine.request(hints=(RequestHints("a", many),)), "has 17 hints, at most 16"),
        (lambda: engine.request(new=(new("b", [1], hints=many),)), "has 17 hints, at most 16"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.manager.step(act())
    assert engine.manager.dump_state() == before


def test_a_view_of_a_request_of_steps_refuses_to_be_changed() -> None:
    manager = make_manager()
    engine = Engine(manager)
    engine.step(new=(new("r1", range(6)),))
    engine.step(row(0, [6]))
    view = manager.get_request("r1")
    assert view.all_token_ids.tolist() == list(range(7))
    assert (view.num_computed_tokens, view.num_prompt_tokens) == (7, 6)
    assert len(view.block_hashes) == 1
    before = manager.dump_state()
    for change in (
        lambda: view.append_output_token_ids([1]),
        lambda: view.append_checked_token_ids([1]),
        lambda: view.truncate_tokens(6),
        lambda: setattr(view, "num_computed_tokens", 3),
        lambda: setattr(view, "num_preemptions", 3),
        lambda: setattr(view, "hints", [CacheHint(is_over=True)]),
    ):
        with pytest.raises(RequestError, match=r"belongs to the manager: cannot .* in a view"):
            change()
    seated = manager.request_in_slot(0)
    with pytest.raises(RequestError, match="r1 was admitted by a step: change it by steps"):
        manager.free(seated or view)
    assert manager.dump_state() == before
    engine.step(row(0, [7]))
    assert view.num_tokens == 7, "the view is of the moment when it was taken"
    manager.check()


def test_a_request_of_a_call_is_its_caller_s_own_object() -> None:
    manager = make_manager()
    request = Request("a", list(range(6)))
    manager.allocate_slots(request, 6)
    assert manager.get_request("a") is request
    assert manager.request_in_slot(0) is request


def one_by_one(settings: CoreSettings) -> FlatCore:
    """A core that admits the new requests of a step one by one."""
    core = FlatCore(settings)
    vars(core)["admit_rows"] = lambda *rows: None
    return core


@pytest.mark.parametrize("shape", [FULL, WINDOW, HYBRID, *MORE_SHAPES], ids=lambda s: s.name)
@pytest.mark.seeds(1, long=8)
def test_requests_let_in_together_are_let_in_as_one_by_one(shape: Shape, seed: int) -> None:
    rng = random.Random(seed)
    settings = {"watermark": rng.choice([0.0, 0.1]), "log_stats": True, "max_num_seqs": 6}
    together = make_manager(shape, 40, **settings)
    singly = make_manager(shape, 40, core_factory=one_by_one, **settings)
    engines, names, num_named = (Engine(together), Engine(singly)), [], 0
    for step in range(1, 60):
        fresh = []
        for _ in range(rng.randrange(5)):
            tokens = [rng.choice([0, 0, 0, 1])] * rng.randint(1, 24)
            tokens += [rng.randrange(9)] * rng.randint(0, 9)
            num_named += 1
            fresh.append(
                new(
                    f"r{num_named}",
                    tokens,
                    rng.choice([1, 5, 1000, 1 << 40]),
                    num_external_computed_tokens=rng.choice([0, 0, len(tokens) - 1]),
                    num_lookahead_tokens=rng.choice([0, 3, 1 << 40]) if shape is FULL else 0,
                    skip_reading_prefix_cache=rng.random() < 0.2,
                    delay_cache_blocks=rng.random() < 0.2,
                    num_encoder_tokens=rng.choice([0, 5]) if shape is ENCODER else 0,
                )
            )
        ended = tuple(name for name in names if rng.random() < 0.3)
        fields = {"new": tuple(fresh), "finished": ended, "completed_step": max(0, step - 2)}
        mine, other = (engine.step(**fields) for engine in engines)
        for name in ("admitted_slots", "num_hit_tokens", "num_scheduled_tokens"):
            assert getattr(mine, name).tolist() == getattr(other, name).tolist()
        for name in vars(mine.patches):
            assert getattr(mine.patches, name).tolist() == getattr(other.patches, name).tolist()
        assert mine.no_room == other.no_room
        assert together.dump_state() == singly.dump_state()
        together.check()
        names = [name for name in names if name not in ended]
        slots = mine.admitted_slots.tolist()
        names += [n.request_id for n, slot in zip(fresh, slots, strict=True) if slot >= 0]
    assert num_named > len(names) > 0
