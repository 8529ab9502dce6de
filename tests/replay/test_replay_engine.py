"""The replay engine on a bare manager: small pools, everything finishes, nothing leaks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvcache.base.arrays import Int32Array
from kvcache.base.clock import VirtualClock
from kvcache.base.errors import OutOfBlocksError, RequestError, WrongBytesError
from kvcache.manager import KVCacheManager
from kvcache.protocol.messages import FailedForward
from kvcache.protocol.step import StepRequest, StepResult
from kvcache.replay import EngineLimits, ForwardProgress, ReplayEngine
from kvcache.simulate import Conversations, ConversationShape, WorkloadRequest
from kvcache.simulate.tokens import answer_token_ids
from kvcache.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from tests.replay.manager_stepper import ManagerStepper

BLOCK_SIZE = 4
LIMITS = EngineLimits(max_model_len=4096, max_num_batched_tokens=64, max_num_seqs=8)
FULL = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1)
WINDOW = SlidingWindowSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, sliding_window=6)


class ListedWorkload:
    """Requests in the given order."""

    name = "a list"
    total_input_tokens = None
    block_size = BLOCK_SIZE

    def __init__(self, requests: list[WorkloadRequest]) -> None:
        self.requests = requests

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[WorkloadRequest]:
        return iter(self.requests)


class RecordingStepper(ManagerStepper):
    """A bare manager that records steps and answers, and checks its state."""

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        lag: int = 0,
        fails: Callable[[int], bool] = lambda step: False,
    ) -> None:
        super().__init__(manager, lag=lag, fails=fails)
        self.manager = manager
        self.steps: list[tuple[StepRequest, StepResult]] = []

    def submit(self, step: StepRequest) -> int:
        number = super().submit(step)
        self.steps.append((step, self._results[number]))
        self.manager.check()
        return number


def make_manager(num_blocks: int, *specs: KVCacheSpec) -> KVCacheManager:
    groups = tuple(KVCacheGroupSpec((f"layer.{i}",), spec) for i, spec in enumerate(specs))
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=(), kv_cache_groups=groups)
    return KVCacheManager(config, LIMITS.max_model_len, max_num_seqs=LIMITS.max_num_seqs)


def tokens_of(*parts: tuple[int, int]) -> Int32Array:
    """Return `count` tokens for each `(start, count)`, counting up from `start`."""
    return np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in parts])


def listed(*prompts_and_outputs: tuple[Int32Array, int]) -> ListedWorkload:
    return ListedWorkload(
        [
            WorkloadRequest(f"r{i}", len(prompt), outputs, partial(np.copy, prompt))
            for i, (prompt, outputs) in enumerate(prompts_and_outputs)
        ]
    )


def random_workload(rng: random.Random, num_requests: int) -> ListedWorkload:
    prompts = []
    for i in range(num_requests):
        shared = (rng.randrange(3) * 1000, rng.randrange(0, 40))
        own = (10_000 + 1000 * i, rng.randrange(1, 60))
        prompts.append((tokens_of(shared, own), rng.choice([0, 1, 2, 7, 30])))
    return listed(*prompts)


def seatings(stepper: RecordingStepper) -> list[str]:
    """Return the requests that entered and left, in order."""
    events = []
    for request, result in stepper.steps:
        admitted = iter(result.admitted_slots.tolist())
        events += [f"preempt {name}" for name in request.preempted_swap]
        events += [f"finish {name}" for name in request.finished]
        events += [f"resume {r.request_id}" for r in request.resumed if next(admitted) >= 0]
        events += [f"admit {r.request_id}" for r in request.new if next(admitted) >= 0]
    return events


def assert_nothing_leaks(manager: KVCacheManager) -> None:
    statistics = manager.statistics()
    assert statistics.num_running_requests == statistics.num_preempted_requests == 0
    assert statistics.core.num_free_blocks == statistics.core.num_blocks
    assert manager.usage == 0.0


def test_one_request_takes_its_prompt_in_chunks_and_then_a_token_per_step() -> None:
    stepper = RecordingStepper(make_manager(64, FULL))
    prompt = tokens_of((0, 150))
    report = ReplayEngine(listed((prompt, 4)), stepper, LIMITS, VirtualClock()).run()
    new = stepper.steps[0][0].new[0]
    assert (new.max_new_tokens, new.token_ids.tolist()) == (64, prompt.tolist())
    rows = [request.running for request, _ in stepper.steps[1:]]
    assert [row.num_new_tokens.tolist() for row in rows] == [[64], [22], [1], [1], [1], [], []]
    sampled = [token for row in rows for token in row.token_ids.tolist()]
    assert sampled == answer_token_ids("r0", 4).tolist()[:3]
    assert stepper.steps[6][0].finished == ("r0",)
    assert (report.num_requests, report.num_output_tokens) == (1, 4)
    assert (report.num_prompt_tokens, report.num_computed_tokens) == (150, 153)
    assert report.num_steps == len(stepper.steps) == 8


def test_the_last_step_is_reported_complete_by_an_empty_one() -> None:
    stepper = RecordingStepper(make_manager(64, FULL), lag=1)
    ReplayEngine(listed((tokens_of((0, 9)), 2)), stepper, LIMITS, VirtualClock()).run()
    last, _ = stepper.steps[-1]
    assert last.completed_step == len(stepper.steps) - 1
    assert not (last.finished or last.new or last.resumed or len(last.running.slots))
    statistics = stepper.manager.statistics()
    assert statistics.core.num_sealed_blocks == statistics.core.num_cached_blocks == 2


def test_a_step_is_complete_only_when_its_forward_has_finished() -> None:
    for lag in (0, 1, 2):
        limits = replace(LIMITS, pipeline_depth=2)
        stepper = RecordingStepper(make_manager(64, FULL), lag=lag)
        ReplayEngine(listed((tokens_of((0, 9)), 9)), stepper, limits, VirtualClock()).run()
        completed = [request.completed_step for request, _ in stepper.steps[:-1]]
        assert completed == [max(0, i - lag) for i in range(len(completed))]


def test_the_budget_and_the_seats_are_never_exceeded() -> None:
    workload = random_workload(random.Random(3), 40)
    stepper = RecordingStepper(make_manager(400, FULL))
    ReplayEngine(workload, stepper, LIMITS, VirtualClock()).run()
    num_full = 0
    for request, result in stepper.steps:
        admitted = int(result.num_scheduled_tokens.sum())
        asked = int(request.running.num_new_tokens.sum())
        assert asked + admitted <= LIMITS.max_num_batched_tokens
        assert len(request.running.slots) <= LIMITS.max_num_seqs
        num_full += asked + admitted == LIMITS.max_num_batched_tokens
    assert num_full > 3


def test_a_request_that_quotes_an_answer_comes_after_it() -> None:
    shape = ConversationShape(
        num_conversations=5,
        num_turns=3,
        num_system_prompts=2,
        system_prompt_tokens=24,
        question_tokens=(4, 30),
        answer_tokens=(2, 12),
        document_share=0.0,
    )
    workload = Conversations(shape, seed=1)
    stepper = RecordingStepper(make_manager(400, FULL))
    report = ReplayEngine(workload, stepper, LIMITS, VirtualClock()).run()
    finished: set[str] = set()
    by_id = {request.request_id: request for request in workload}
    for request, _ in stepper.steps:
        finished.update(request.finished)
        for new in request.new:
            after = by_id[new.request_id].after
            assert after is None or after in finished
    assert len(finished) == 15
    # With room for everything, a turn finds all full blocks of the turn before it.
    expected = sum(
        (by_id[r.after].num_prompt_tokens + by_id[r.after].num_output_tokens - 1) // 4 * 4
        for r in by_id.values()
        if r.after is not None
    )
    assert report.num_hit_tokens >= expected
    assert report.num_hit_tokens + report.num_computed_tokens == sum(
        r.num_prompt_tokens + r.num_output_tokens - 1 for r in by_id.values()
    )


def test_hits_of_single_requests_agree_with_a_slow_model() -> None:
    # One seat, so that requests come one after another, and room for everything.
    limits = replace(LIMITS, max_num_seqs=1)
    workload = random_workload(random.Random(11), 30)
    stepper = RecordingStepper(make_manager(1500, FULL))
    report = ReplayEngine(workload, stepper, limits, VirtualClock()).run()
    prefixes: set[tuple[int, ...]] = set()
    num_hit_tokens = 0
    for request in workload.requests:
        prompt = request.token_ids.tolist()
        computed = prompt + answer_token_ids(request.request_id, request.num_output_tokens).tolist()
        num_hit = 0
        while num_hit + 4 < len(prompt) and tuple(prompt[: num_hit + 4]) in prefixes:
            num_hit += 4
        num_hit_tokens += num_hit
        computed = computed[: len(prompt) + max(request.num_output_tokens, 1) - 1]
        prefixes.update(tuple(computed[:end]) for end in range(4, len(computed) + 1, 4))
    assert num_hit_tokens > 200
    assert report.num_hit_tokens == num_hit_tokens
    assert report.hit_rate == num_hit_tokens / report.num_prompt_tokens


@pytest.mark.seeds(4, long=16)
@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW)], ids=["full", "hybrid"])
def test_everything_finishes_in_a_tiny_pool(seed: int, specs: tuple[KVCacheSpec, ...]) -> None:
    rng = random.Random(seed)
    workload = random_workload(rng, 30)
    num_blocks = rng.randrange(36, 60) * len(specs)
    stepper = RecordingStepper(make_manager(num_blocks, *specs), lag=rng.randrange(3))
    limits = replace(LIMITS, pipeline_depth=rng.randrange(1, 4))
    report = ReplayEngine(workload, stepper, limits, VirtualClock()).run()
    assert report.num_requests == 30
    assert report.num_preemptions == stepper.manager.statistics().num_preemptions
    assert report.num_output_tokens == sum(r.num_output_tokens for r in workload.requests)
    assert report.num_evictions == stepper.manager.statistics().core.num_evictions
    assert_nothing_leaks(stepper.manager)


def test_under_pressure_the_last_request_is_preempted_and_resumed_first() -> None:
    # Each of the two fits alone; together they run out of blocks while decoding.
    workload = listed(
        (tokens_of((0, 30)), 40), (tokens_of((500, 30)), 40), (tokens_of((900, 4)), 1)
    )
    stepper = RecordingStepper(make_manager(25, FULL))
    limits = replace(LIMITS, max_num_seqs=2)
    report = ReplayEngine(workload, stepper, limits, VirtualClock()).run()
    assert seatings(stepper) == [
        "admit r0",
        "admit r1",
        "preempt r1",
        "finish r0",
        "resume r1",
        "admit r2",
        "finish r2",
        "finish r1",
    ]
    assert (report.num_preemptions, report.num_requests) == (1, 3)
    assert report.num_recomputed_tokens > 0
    assert_nothing_leaks(stepper.manager)


def test_of_several_preempted_requests_the_one_that_came_first_is_resumed_first() -> None:
    workload = listed(*[(tokens_of((500 * i, 8)), 60) for i in range(3)])
    stepper = RecordingStepper(make_manager(22, FULL))
    ReplayEngine(workload, stepper, LIMITS, VirtualClock()).run()
    assert seatings(stepper) == [
        "admit r0",
        "admit r1",
        "admit r2",
        "preempt r2",
        "preempt r1",
        "finish r0",
        "resume r1",
        "resume r2",
        "preempt r2",
        "finish r1",
        "resume r2",
        "finish r2",
    ]


def test_no_request_overtakes_one_that_waits_for_room() -> None:
    # r1 does not fit while r0 runs; the small ones after it would.
    small = [(tokens_of((2000 + 100 * i, 4)), 2) for i in range(14)]
    workload = listed((tokens_of((0, 40)), 9), (tokens_of((500, 60)), 2), *small)
    stepper = RecordingStepper(make_manager(25, FULL))
    limits = replace(LIMITS, max_num_batched_tokens=128)
    ReplayEngine(workload, stepper, limits, VirtualClock()).run()
    refused = next(i for i, (_, result) in enumerate(stepper.steps) if "r1" in result.no_room)
    asked = [[new.request_id for new in request.new] for request, _ in stepper.steps[refused + 1 :]]
    first_asked = next(ids for ids in asked if ids)
    assert first_asked == ["r1"]
    # It is sent again only after a request has ended.
    later = [request for request, _ in stepper.steps[refused + 1 :]]
    assert all(request.finished for request in later if "r1" in [r.request_id for r in request.new])
    events = seatings(stepper)
    assert events.index("admit r1") < events.index("admit r15")
    assert_nothing_leaks(stepper.manager)


def test_a_request_that_can_never_fit_is_named() -> None:
    workload = listed((tokens_of((0, 9)), 2), (tokens_of((100, 99)), 2))
    stepper = RecordingStepper(make_manager(11, FULL))
    with pytest.raises(OutOfBlocksError) as caught:
        ReplayEngine(workload, stepper, LIMITS, VirtualClock()).run()
    assert str(caught.value).startswith(
        "request r1 of a list needs room for 100 tokens and finds none, though nothing else runs: "
        "the pool has 10 blocks, "
    )


def test_a_request_longer_than_the_model_is_named() -> None:
    limits = replace(LIMITS, max_model_len=100)
    stepper = RecordingStepper(make_manager(64, FULL))
    with pytest.raises(RequestError) as caught:
        ReplayEngine(listed((tokens_of((0, 98)), 3)), stepper, limits, VirtualClock()).run()
    assert str(caught.value) == (
        "request r0 of a list has 98 prompt and 3 output tokens, 101 in all, but max_model_len is "
        "100: raise it, or leave such requests out (`kvcache replay --skip-too-long`)"
    )


def test_requests_longer_than_the_model_are_skipped_and_counted_where_that_is_wanted() -> None:
    limits = replace(LIMITS, max_model_len=100, skips_too_long=True)
    stepper = RecordingStepper(make_manager(64, FULL))
    workload = listed((tokens_of((0, 98)), 3), (tokens_of((0, 20)), 3), (tokens_of((0, 101)), 0))
    report = ReplayEngine(workload, stepper, limits, VirtualClock()).run()
    assert (report.num_requests, report.num_skipped_requests) == (1, 2)
    assert report.num_prompt_tokens == 20
    assert_nothing_leaks(stepper.manager)


@pytest.mark.seeds(7, long=28)
def test_failed_steps_are_taken_back_and_done_again(seed: int) -> None:
    rng = random.Random(1000 + seed)
    workload = random_workload(rng, 25)
    failing = set(rng.sample(range(1, 150), 40))
    stepper = RecordingStepper(
        make_manager(rng.randrange(36, 80), FULL),
        lag=rng.randrange(3),
        fails=failing.__contains__,
    )
    limits = replace(LIMITS, pipeline_depth=rng.randrange(1, 4))
    report = ReplayEngine(workload, stepper, limits, VirtualClock()).run()
    assert report.num_failed_steps > 0
    assert report.num_requests == 25
    assert stepper.manager.statistics().num_failed_step_reports > 0
    assert_nothing_leaks(stepper.manager)


class WrongBytesStepper(ManagerStepper):
    """Finds wrong bytes from step 3 on."""

    def progress(self) -> ForwardProgress:
        progress = super().progress()
        if progress.finished_step < 3:
            return progress
        failure = FailedForward(3, 1, "block 7 holds 0x00 at byte 12: written by step 2")
        return replace(progress, bytes_checked=640, failures=(failure,))


def test_a_wrong_byte_ends_the_replay_with_the_blocks_history() -> None:
    stepper = WrongBytesStepper(make_manager(64, FULL))
    engine = ReplayEngine(listed((tokens_of((0, 9)), 9)), stepper, LIMITS, VirtualClock())
    with pytest.raises(WrongBytesError) as caught:
        engine.run()
    history = "step 3, rank 1: block 7 holds 0x00 at byte 12: written by step 2"
    assert str(caught.value) == (
        "a list: wrong bytes in 1 blocks, the replay has ended; what happened to them:\n  "
        + history
    )
    report = engine.report()
    assert (report.num_wrong_blocks, report.bytes_checked) == (1, 640)
    assert report.history == history


class RefusingStepper(ManagerStepper):
    """A manager that refuses the second step."""

    def wait_result(self, step: int) -> StepResult:
        result = super().wait_result(step)
        return replace(result, error="step 2: no") if step == 2 else result


def test_a_refused_step_is_an_error() -> None:
    stepper = RefusingStepper(make_manager(64, FULL))
    engine = ReplayEngine(listed((tokens_of((0, 9)), 9)), stepper, LIMITS, VirtualClock())
    with pytest.raises(RequestError) as caught:
        engine.run()
    assert str(caught.value) == "step 2 was refused: step 2: no"


def test_the_same_replay_twice_asks_the_same() -> None:
    steps = []
    for _ in range(2):
        stepper = RecordingStepper(make_manager(48, FULL))
        workload = random_workload(random.Random(8), 20)
        ReplayEngine(workload, stepper, LIMITS, VirtualClock()).run()
        steps.append([(r.running.token_ids.tolist(), r.finished) for r, _ in stepper.steps])
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"pipeline_depth": 0}, "pipeline_depth is 0: give at least 1"),
        (
            {"max_num_batched_tokens": 8, "max_num_seqs": 9},
            "max_num_batched_tokens is 8, less than max_num_seqs (9): raise it, or running "
            "requests would get no token",
        ),
    ],
)
def test_limits_that_cannot_be_meant_are_refused(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        EngineLimits(max_model_len=64, **limits)
    assert str(caught.value) == message
