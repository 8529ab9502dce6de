"""Invalid requests fail alone, with a reason, and all others continue."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from examples.engine import Engine, SamplingParams
from kvcache.base.errors import ConfigurationError, NotRunningError, RequestError
from tests.engine.support import (
    GREEDY,
    expected,
    launch,
    require_nothing_is_held,
    run,
    run_one,
    settle,
    tokens,
)

PROMPT = tokens(1, 40)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            tokens(1, 256),
            "the prompt has 256 tokens, the model takes 256 with at least one of output: "
            "shorten it",
        ),
        (
            [],
            "the prompt has shape (0,) of float64: give a row of whole numbers, at least one",
        ),
        ([1, 256], "token 256 is not in the vocabulary: use 0 to 255"),
        ([1, -1], "token -1 is not in the vocabulary: use 0 to 255"),
        ([1, 2**40], f"token {2**40} is not in the vocabulary: use 0 to 255"),
        (
            [[1, 2]],
            "the prompt has shape (1, 2) of int64: give a row of whole numbers, at least one",
        ),
        (
            [1.5],
            "the prompt has shape (1,) of float64: give a row of whole numbers, at least one",
        ),
        ("text", "the prompt has shape () of <U4: give a row of whole numbers, at least one"),
    ],
)
def test_a_prompt_that_is_none_is_refused_and_others_go_on(prompt: Any, message: str) -> None:
    with launch() as engine:
        request_id = engine.add_request(PROMPT, GREEDY)
        engine.step()
        with pytest.raises(RequestError, match=f"^{re.escape(message)}$"):
            engine.add_request(prompt, GREEDY)
        assert run(engine)[request_id, 0].token_ids == expected("llama", PROMPT, GREEDY)
        require_nothing_is_held(engine)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0: give a whole number of at least 1"),
        ({"max_tokens": True}, "max_tokens is True: give a whole number of at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0: give 0 or more"),
        ({"temperature": float("nan")}, "temperature is nan: give 0 or more"),
        ({"top_p": 0.0}, "top_p is 0.0: give more than 0 and at most 1"),
        ({"seed": -1}, "seed is -1: give a whole number of at least 0"),
        ({"stop": "end"}, "stop is the text 'end': give a tuple of texts"),
        ({"stop": ("",)}, "stop has an empty text, which every output contains: leave it out"),
        (
            {"n": 3, "beam_width": 2},
            "n is 3, more than beam_width (2): search more beams, or ask for fewer",
        ),
        (
            {"beam_width": 2, "num_draft_tokens": 1},
            "beam_width is 2 and num_draft_tokens 1: beams have no drafts, set one of them to 0",
        ),
    ],
)
def test_parameters_that_cannot_be_meant_are_refused(params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{re.escape(message)}$"):
        SamplingParams(**params)


@pytest.mark.parametrize("bad", [5, "", "\ud800"])
@pytest.mark.parametrize("name", ["cache_salt", "request_id"])
def test_names_that_cannot_be_sent_are_refused_and_others_go_on(name: str, bad: Any) -> None:
    with launch() as engine:
        request_id = engine.add_request(PROMPT, GREEDY)
        engine.step()
        with pytest.raises(RequestError, match="give a text that UTF-8 can write"):
            engine.add_request(PROMPT, GREEDY, **{name: bad})
        assert run(engine)[request_id, 0].token_ids == expected("llama", PROMPT, GREEDY)
        require_nothing_is_held(engine)


def test_the_coldest_temperature_chooses_the_likeliest_token() -> None:
    cold = SamplingParams(max_tokens=8, temperature=5e-324, top_p=0.9, seed=3)
    with launch() as engine:
        assert run_one(engine, PROMPT, cold).token_ids == expected("llama", PROMPT, GREEDY)


def test_what_this_engine_cannot_do_is_refused() -> None:
    with launch("mamba-hybrid", max_num_seqs=3) as engine:
        for more, params, message in (
            ({"lora_name": "klingon"}, GREEDY, "there is no adapter 'klingon': use one of french"),
            ({}, SamplingParams(n=4), "4 sequences of one request, the engine runs 3"),
            ({}, SamplingParams(num_draft_tokens=1), "this model keeps states for 0"),
        ):
            with pytest.raises(RequestError, match=re.escape(message)):
                engine.add_request(PROMPT, params, **more)
        engine.add_request(PROMPT, GREEDY, request_id="twice")
        with pytest.raises(RequestError, match=r"^request twice runs already: use another id$"):
            engine.add_request(PROMPT, GREEDY, request_id="twice")
        assert len(run(engine)) == 1
        assert run_one(engine, PROMPT, GREEDY, request_id="twice").reason == "length"


def test_an_engine_that_is_shut_down_says_so() -> None:
    engine = launch()
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(NotRunningError, match="the engine is shut down"):
        engine.step()
    with pytest.raises(NotRunningError, match="the engine is shut down"):
        engine.add_request(PROMPT)


def test_swapping_to_nowhere_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="preemption is 'swap', but nothing is offloaded"):
        launch(preemption="swap")


def until(engine: Engine, holds: Callable[[], bool]) -> None:
    for _ in range(500):
        if holds():
            return
        engine.step()
    raise AssertionError("it has never been so")


SWAP = {
    "preemption": "swap",
    "sections": {"offload": {"host_memory_per_rank": "1MiB", "swap": "always"}},
}


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding", "preempted", "swapped"])
def test_a_request_can_be_aborted_in_every_state(state: str, is_pipelined: bool) -> None:
    more = SWAP if state == "swapped" else {}
    long = SamplingParams(max_tokens=60)
    with launch(
        num_blocks=34, max_num_seqs=4, max_chunk_tokens=8, is_pipelined=is_pipelined, **more
    ) as engine:
        kept = engine.add_request(PROMPT, long)
        if state in ("preempted", "swapped"):
            others = [engine.add_request(tokens(seed, 60), long) for seed in (2, 3)]
            scheduler = engine._scheduler
            until(engine, lambda: engine.statistics().num_preemptions > 0)
            gone = scheduler.waiting[0].request_id
            assert scheduler.waiting[0].is_known
        else:
            others = []
            gone = engine.add_request(tokens(2, 60), long)
            if state == "prefilling":
                engine.step()
                engine.step()
            elif state == "decoding":
                sequence = engine._table.requests[gone].samples[0].sequence
                until(engine, lambda: sequence.num_output > 2)
        assert engine.abort(gone)
        assert not engine.abort(gone)
        told = run(engine)
        assert told[gone, 0].reason == "abort"
        if gone != kept:
            assert told[kept, 0].reason == "length"
        for other in others:
            assert told[other, 0].reason == ("abort" if other == gone else "length")
        require_nothing_is_held(engine)


@pytest.mark.parametrize("params", [{"n": 3}, {"beam_width": 3, "n": 2}])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_all_samples_of_a_request_are_aborted(params: dict[str, int], num_steps: int) -> None:
    with launch() as engine:
        gone = engine.add_request(PROMPT, SamplingParams(max_tokens=30, **params))
        kept = engine.add_request(PROMPT, GREEDY)
        for _ in range(num_steps):
            engine.step()
        engine.abort(gone)
        told = run(engine)
        assert {t.reason for (name, _), t in told.items() if name == gone} == {"abort"}
        assert told[kept, 0].token_ids[-3:] == expected("llama", PROMPT, GREEDY)[-3:]
        require_nothing_is_held(engine)


def test_closing_a_stream_aborts_its_request() -> None:
    with launch() as engine:
        closed = engine.stream(engine.add_request(PROMPT, SamplingParams(max_tokens=100)))
        next(closed)
        closed.close()
        closed.close()
        dropped = engine.stream(engine.add_request(PROMPT, SamplingParams(max_tokens=100)))
        next(dropped)
        del dropped
        settle_after = [output.finish_reason for output in engine.step()]
        assert settle_after == ["abort"]
        settle(engine)
        assert not engine.has_unfinished
        assert run_one(engine, PROMPT, GREEDY).token_ids == expected("llama", PROMPT, GREEDY)
        require_nothing_is_held(engine)


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_a_request_that_can_never_fit_fails_alone(is_pipelined: bool) -> None:
    with launch(num_blocks=34, no_room_s=0.0, is_pipelined=is_pipelined) as engine:
        # Pins of another client, which are never released.
        pinned = engine.add_request(tokens(0, 120), SamplingParams(max_tokens=1))
        run(engine)
        engine.executor.client.pin_prefix(tokens(0, 120), ttl_s=600.0)
        before = engine.add_request(PROMPT, GREEDY)
        large = engine.add_request(tokens(5, 200), SamplingParams(max_tokens=8))
        growing = engine.add_request(tokens(6, 100), SamplingParams(max_tokens=120))
        behind = engine.add_request(tokens(7, 20), GREEDY)
        told = run(engine)
        assert (pinned, 0) not in told
        for name in (large, growing):
            assert told[name, 0].reason == "error"
            assert f"request {name} finds no room for its" in told[name, 0].error
        assert told[before, 0].token_ids == expected("llama", PROMPT, GREEDY)
        assert told[behind, 0].token_ids == expected("llama", tokens(7, 20), GREEDY)


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_a_request_beyond_its_tenants_limit_ends_while_others_run(is_pipelined: bool) -> None:
    sections = {"tenants": {"by": "salt", "default": {"limit": 0.25}}}
    with launch(num_blocks=41, is_pipelined=is_pipelined, sections=sections) as engine:
        other = engine.add_request(PROMPT, SamplingParams(max_tokens=40), cache_salt="other")
        large = engine.add_request(tokens(5, 200), GREEDY, cache_salt="large")
        growing = engine.add_request(
            tokens(6, 100), SamplingParams(max_tokens=120), cache_salt="growing"
        )
        behind = engine.add_request(tokens(7, 20), GREEDY, cache_salt="behind")
        told = run(engine)
        for name in (large, growing):
            assert told[name, 0].reason == "error"
            assert "limit" in told[name, 0].error
        assert len(told[other, 0].token_ids) == 40
        assert told[behind, 0].reason == "length"
        require_nothing_is_held(engine)
