"""Every model generates the same with and without blocks."""

from __future__ import annotations

import pytest

from examples.engine import SamplingParams
from tests.engine.support import (
    ALL_MODELS,
    GREEDY,
    SAMPLED,
    TIGHT,
    expected,
    launch,
    require_nothing_is_held,
    run,
    run_one,
    tokens,
)

SYSTEM = tokens(0, 40)
PROMPTS = [[*SYSTEM, *tokens(seed, seed)] for seed in (5, 20, 9)] + [[3, 1, 2] * 7, [7]]


@pytest.mark.parametrize("is_pipelined", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ALL_MODELS)
def test_cold_and_cached_prompts_say_the_same(
    name: str, params: SamplingParams, is_pipelined: bool
) -> None:
    with launch(name, is_pipelined=is_pipelined) as engine:
        for round_number in range(2):
            ids = [engine.add_request(prompt, params) for prompt in PROMPTS]
            told = run(engine)
            for request_id, prompt in zip(ids, PROMPTS, strict=True):
                assert told[request_id, 0].token_ids == expected(name, prompt, params)
            cached = [told[request_id, 0].num_cached for request_id in ids]
            if round_number:
                assert min(cached[:3]) >= 40, "the prompt was found"
        require_nothing_is_held(engine)


@pytest.mark.parametrize("max_chunk_tokens", [1, 7, 8, 30, 0])
@pytest.mark.parametrize("name", ALL_MODELS)
def test_chunks_of_any_size_say_the_same(name: str, max_chunk_tokens: int) -> None:
    prompt = tokens(1, 45)
    with launch(name, max_chunk_tokens=max_chunk_tokens) as engine:
        for _ in range(2):
            assert run_one(engine, prompt, GREEDY).token_ids == expected(name, prompt, GREEDY)
        require_nothing_is_held(engine)


@pytest.mark.parametrize("is_pipelined", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("name", ALL_MODELS)
def test_preempted_requests_go_on_as_if_nothing_had_been(name: str, is_pipelined: bool) -> None:
    prompts = [tokens(seed, 30) for seed in range(6)]
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=1)
    with launch(name, **TIGHT[name], is_pipelined=is_pipelined) as engine:
        ids = [engine.add_request(prompt, params) for prompt in prompts]
        told = run(engine)
        for request_id, prompt in zip(ids, prompts, strict=True):
            assert told[request_id, 0].token_ids == expected(name, prompt, params)
        assert engine.statistics().num_preemptions > 0
        require_nothing_is_held(engine)


@pytest.mark.parametrize("name", ALL_MODELS)
def test_a_prompt_that_was_evicted_is_computed_again(name: str) -> None:
    prompts = [tokens(seed, 60) for seed in range(8)]
    with launch(name, **TIGHT[name]) as engine:
        first = run_one(engine, prompts[0], GREEDY)
        for prompt in prompts[1:]:
            run_one(engine, prompt, GREEDY)
        again = run_one(engine, prompts[0], GREEDY)
        warm = run_one(engine, prompts[0], GREEDY)
        assert again.num_cached < 48 <= warm.num_cached, "it was evicted, and is back"
        want = expected(name, prompts[0], GREEDY)
        assert first.token_ids == again.token_ids == warm.token_ids == want
        require_nothing_is_held(engine)


@pytest.mark.parametrize("is_pipelined", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("name", ALL_MODELS)
def test_samples_of_one_prompt_share_it_and_go_their_own_ways(
    name: str, is_pipelined: bool
) -> None:
    prompt = tokens(3, 37)  # ends inside a block, which is copied before a child writes it
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=3, n=4)
    with launch(name, is_pipelined=is_pipelined) as engine:
        request_id = engine.add_request(prompt, params)
        told = run(engine)
        said = [told[request_id, index].token_ids for index in range(4)]
        assert said == [expected(name, prompt, params, index) for index in range(4)]
        assert len({tuple(token_ids) for token_ids in said}) == 4
        assert engine.statistics().num_computed_tokens <= 37 + 4 * 9, "the prompt only once"
        require_nothing_is_held(engine)


@pytest.mark.parametrize("is_pipelined", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("name", ALL_MODELS)
def test_drafts_change_nothing_that_is_said(name: str, is_pipelined: bool) -> None:
    repeated = [5, 6, 7, 8] * 8
    params = SamplingParams(max_tokens=20, num_draft_tokens=3)
    sampled = SamplingParams(max_tokens=20, num_draft_tokens=3, temperature=0.7, seed=2)
    with launch(name, max_draft_tokens=3, is_pipelined=is_pipelined) as engine:
        for wanted in (params, sampled):
            for prompt in (repeated, tokens(4, 21), repeated):
                told = run_one(engine, prompt, wanted)
                assert told.token_ids == expected(name, prompt, wanted)
        assert engine.statistics().num_rejected_drafts > 0
        require_nothing_is_held(engine)


@pytest.mark.parametrize("is_pipelined", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("name", ALL_MODELS)
def test_drafts_may_be_right_up_to_any_token(
    name: str, is_pipelined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that knows the output, and errs after 0, 1, 2, 3 tokens in turn."""
    prompts = [tokens(seed, 21 + seed) for seed in range(3)]
    params = SamplingParams(max_tokens=30, num_draft_tokens=3)
    whole = [[*prompt, *expected(name, prompt, params)] for prompt in prompts]

    def propose(sequence: list[int], most: int) -> tuple[int, ...]:
        known = next(w for w in whole if w[: len(sequence)] == sequence)
        coming = known[len(sequence) : len(sequence) + most]
        num_right = len(sequence) % 4
        return tuple(t if i < num_right else (t + 1) % 256 for i, t in enumerate(coming))

    monkeypatch.setattr("examples.engine.scheduler.propose", propose)
    with launch(name, max_draft_tokens=3, is_pipelined=is_pipelined) as engine:
        for _ in range(2):
            ids = [engine.add_request(prompt, params) for prompt in prompts]
            told = run(engine)
            said = [[*p, *told[i, 0].token_ids] for i, p in zip(ids, prompts, strict=True)]
            assert said == whole
        statistics = engine.statistics()
        assert min(statistics.num_accepted_drafts, statistics.num_rejected_drafts) > 10
        require_nothing_is_held(engine)
