"""Features of requests besides tokens: namespaces, beams, stops, text, streams."""

from __future__ import annotations

import asyncio
import random

import pytest

from examples.engine import ByteTokenizer, SamplingParams
from examples.engine.weights import RandomWeights, RankPlace, rank_weights
from kvcache.base.errors import RequestError
from kvcache.requests.hints import CacheHint
from tests.engine.support import (
    ALL_MODELS,
    GREEDY,
    TIGHT,
    coordinator,
    expected,
    launch,
    model,
    oracle,
    require_nothing_is_held,
    run,
    run_one,
    tokens,
)


def test_hints_reach_the_coordinator_for_all_samples_of_a_request() -> None:
    hints = [CacheHint(returns_in_s=5.0)]
    with launch("llama") as engine:
        manager = coordinator(engine).manager
        assert manager is not None
        engine.add_request(tokens(1, 40), SamplingParams(max_tokens=8, n=2), "r", hints=hints)
        seen = []
        while engine.has_unfinished:
            engine.step()
            seen += [r.hints for slot in (0, 1) if (r := manager.request_in_slot(slot)) is not None]
        assert len(seen) > 8
        assert set(seen) == {tuple(hints)}
        with pytest.raises(RequestError, match="has 17 hints, at most 16"):
            engine.add_request(tokens(1, 40), hints=hints * 17)


@pytest.mark.parametrize("name", ALL_MODELS)
def test_namespaces_share_nothing(name: str) -> None:
    prompt = tokens(1, 40)
    with launch(name) as engine:
        plain = run_one(engine, prompt, GREEDY)
        salted = run_one(engine, prompt, GREEDY, cache_salt="a tenant")
        french = run_one(engine, prompt, GREEDY, lora_name="french")
        german = run_one(engine, prompt, GREEDY, lora_name="german")
        again = [
            run_one(engine, prompt, GREEDY, cache_salt="a tenant"),
            run_one(engine, prompt, GREEDY, lora_name="french"),
        ]
        assert [t.num_cached for t in (plain, salted, french, german)] == [0] * 4
        assert min(t.num_cached for t in again) > 0
        assert plain.token_ids == salted.token_ids == expected(name, prompt, GREEDY)
        wanted = expected(name, prompt, GREEDY, adapter="french")
        assert french.token_ids == again[1].token_ids == wanted
        assert german.token_ids == expected(name, prompt, GREEDY, adapter="german")
        assert plain.token_ids != french.token_ids != german.token_ids


@pytest.mark.parametrize("name", ALL_MODELS)
@pytest.mark.parametrize("is_tight", [False, True])
def test_beams_are_those_of_a_search_without_a_cache(name: str, is_tight: bool) -> None:
    params = SamplingParams(max_tokens=7, n=3, beam_width=4)
    prompt = tokens(2, 29)
    with launch(name, **(TIGHT[name] if is_tight else {})) as engine:
        request_id = engine.add_request(prompt, params)
        other = engine.add_request(tokens(9, 30), GREEDY)
        told = run(engine)
        beams = oracle(name).beam_search(prompt, params)
        said = [told[request_id, index] for index in range(3)]
        assert [t.token_ids for t in said] == [list(beam.token_ids) for beam in beams]
        assert [t.score for t in said] == pytest.approx([beam.score for beam in beams])
        assert told[other, 0].token_ids == expected(name, tokens(9, 30), GREEDY)
        require_nothing_is_held(engine)


def test_beams_that_end_are_kept_aside() -> None:
    prompt = tokens(5, 20)
    first = oracle("llama").beam_search(prompt, SamplingParams(max_tokens=3, beam_width=3))[0]
    stops = SamplingParams(
        max_tokens=9, n=2, beam_width=3, stop_token_ids=(first.token_ids[1], 17, 35, 62)
    )
    with launch() as engine:
        request_id = engine.add_request(prompt, stops)
        told = run(engine)
        beams = oracle("llama").beam_search(prompt, stops)
        assert [told[request_id, i].token_ids for i in range(2)] == [
            list(beam.token_ids) for beam in beams
        ]
        require_nothing_is_held(engine)


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_a_stop_token_ends_a_request_and_is_its_last(is_pipelined: bool) -> None:
    prompt = tokens(6, 20)
    free = expected("llama", prompt, GREEDY)
    params = SamplingParams(max_tokens=8, stop_token_ids=(free[4],))
    end = free.index(free[4]) + 1
    with launch(is_pipelined=is_pipelined) as engine:
        told = run_one(engine, prompt, params)
        assert (told.token_ids, told.reason) == (free[:end], "stop")
        assert run_one(engine, prompt, GREEDY).reason == "length"
        require_nothing_is_held(engine)


def test_a_stop_text_ends_the_text_before_it() -> None:
    prompt = tokens(6, 20)
    params = SamplingParams(max_tokens=40, temperature=3.0, seed=5)
    free = expected("llama", prompt, params)
    text = ByteTokenizer().detokenizer().add(free)
    stop = text[11:13]
    with launch() as engine:
        whole = run_one(engine, prompt, params)
        told = run_one(
            engine, prompt, SamplingParams(max_tokens=40, temperature=3.0, seed=5, stop=(stop,))
        )
        assert whole.text == text
        assert told.text == text[: text.index(stop)]
        assert told.reason == "stop"
        assert told.token_ids == free[: len(told.token_ids)]


def test_a_request_ends_where_the_model_does() -> None:
    prompt = tokens(8, 250)
    params = SamplingParams(max_tokens=50)
    with launch() as engine:
        told = run_one(engine, prompt, params)
        assert told.token_ids == expected("llama", prompt, params)
        assert (len(told.token_ids), told.reason) == (6, "length")


@pytest.mark.parametrize("is_pipelined", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_hundred_requests_in_any_order_say_what_each_says_alone(is_pipelined: bool) -> None:
    order = random.Random(3)
    system = tokens(0, 33)
    wanted = {}
    with launch(num_blocks=34, max_num_seqs=24, is_pipelined=is_pipelined) as engine:
        waiting = []
        for number in range(100):
            prompt = [*system, *tokens(number % 20, 1 + number % 13)]
            params = SamplingParams(
                max_tokens=1 + 5 * (number % 6),
                temperature=0.0 if number % 3 else 1.0,
                seed=number % 4,
                num_draft_tokens=2 * (number % 5 == 0),
            )
            waiting.append((prompt, params))
        order.shuffle(waiting)
        for prompt, params in waiting:
            wanted[engine.add_request(prompt, params)] = expected("llama", prompt, params)
        told = run(engine)
        assert {key[0]: t.token_ids for key, t in told.items()} == wanted
        assert engine.statistics().num_preemptions > 0
        require_nothing_is_held(engine)


def test_a_stream_brings_a_request_s_outputs_in_order() -> None:
    prompts = [tokens(seed, 20) for seed in range(3)]
    with launch() as engine:
        ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
        streams = [engine.stream(request_id) for request_id in ids]
        said = [[t for output in stream for t in output.token_ids] for stream in streams]
        assert said == [expected("llama", prompt, GREEDY) for prompt in prompts]


def test_streams_of_one_engine_can_be_read_by_tasks() -> None:
    prompts = [tokens(seed, 20) for seed in range(3)]

    async def read_all() -> list[list[int]]:
        async def read(prompt: list[int]) -> list[int]:
            stream = engine.stream(engine.add_request(prompt, GREEDY))
            return [token async for output in stream for token in output.token_ids]

        return await asyncio.gather(*map(read, prompts))

    with launch() as engine:
        said = asyncio.run(read_all())
        assert said == [expected("llama", prompt, GREEDY) for prompt in prompts]


def test_the_likeliest_tokens_are_reported_where_asked_for() -> None:
    prompt = tokens(1, 12)
    with launch() as engine:
        engine.add_request(prompt, SamplingParams(max_tokens=3, logprobs=5))
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        said = [token for output in outputs for token in output.token_ids]
        reported = [top for output in outputs for top in output.logprobs]
        assert [top[0][0] for top in reported] == said
        row = oracle("llama").logits(prompt)[-1].log_softmax(-1)
        values, ids = row.topk(5)
        assert [token for token, _ in reported[0]] == ids.tolist()
        assert [logprob for _, logprob in reported[0]] == pytest.approx(values.tolist())


@pytest.mark.parametrize("name", ALL_MODELS)
def test_ranks_together_hold_every_weight(name: str) -> None:
    whole = rank_weights(model(name), RandomWeights(0), RankPlace())
    parts = [rank_weights(model(name), RandomWeights(0), RankPlace(r, 2)) for r in range(2)]
    for weight, tensor in whole.items():
        shapes = [part[weight].shape for part in parts]
        assert shapes[0] == shapes[1]
        assert tensor.numel() in (shapes[0].numel(), 2 * shapes[0].numel())


@pytest.mark.parametrize("merges", [False, True])
def test_equal_prompts_that_are_computed_at_once_end_in_the_same_blocks(merges: bool) -> None:
    prompt = tokens(7, 90)
    params = SamplingParams(max_tokens=12)
    with launch(sections={"cache": {"merge_duplicates": merges}}) as engine:
        ids = [engine.add_request(prompt, params) for _ in range(2)]
        samples = [engine._table.requests[name].samples[0].sequence for name in ids]
        manager = coordinator(engine).manager
        assert manager is not None
        while min(sequence.num_output for sequence in samples) < 8:
            engine.step()
        first, second = (manager.get_block_ids(sequence.key)[0] for sequence in samples)
        shared = [mine == yours for mine, yours in zip(first, second, strict=False)]
        # The first chunk is hit; both compute the later ones at the same time.
        assert shared[:3] == [True] * 3
        assert shared[3:11] == [merges] * 8
        assert not all(shared), "the last block is written by both"
        told = run(engine)
        assert all(
            sequence.tokens[len(prompt) :] == expected("llama", prompt, params)
            for sequence in samples
        )
        assert {t.reason for t in told.values()} == {"length"}
        require_nothing_is_held(engine)
