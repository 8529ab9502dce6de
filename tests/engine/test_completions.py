"""Bodies of completions: parsing, refusals, answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from examples.engine import ByteTokenizer, EngineConfig, Output, llama
from examples.engine.completions import CompletionBody, CompletionError, CompletionRequest, sse
from kvcache.requests.hints import CacheHint

CONFIG = EngineConfig(model=llama(name="tiny", max_model_len=64), max_num_seqs=8)
BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 4}


def parse(body: dict[str, Any] | bytes) -> CompletionRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return CompletionRequest.parse(data, CONFIG, ByteTokenizer())


def test_a_body_becomes_a_prompt_and_parameters() -> None:
    asked = parse(
        {
            **BODY,
            "temperature": 0,
            "top_p": 0.5,
            "n": 2,
            "seed": 3,
            "stop": "!",
            "stream": True,
            "stream_options": {"include_usage": True},
            "user": None,
            "hints": [{"priority": 90, "end": 3}, {"start": 3, "returns_in_s": 5}],
        }
    )
    assert asked.hints == (CacheHint(0, 3, priority=90), CacheHint(3, returns_in_s=5.0))
    assert asked.tokens == list(b"hello")
    assert (asked.params.max_tokens, asked.params.n, asked.params.seed) == (4, 2, 3)
    assert (asked.params.temperature, asked.params.top_p) == (0.0, 0.5)
    assert asked.params.stop == ("!",)
    assert (asked.is_stream, asked.includes_usage) == (True, True)
    assert not asked.is_prefetch
    assert parse({**BODY, "prefetch": True}).is_prefetch
    plain = parse({"model": "tiny", "prompt": [1, 2, 3]})
    assert plain.tokens == [1, 2, 3]
    assert (plain.params.max_tokens, plain.params.temperature, plain.is_stream) == (16, 1.0, False)


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"prompt": ""}, "prompt", "prompt is empty: give at least one token"),
        ({"prompt": []}, "prompt", "prompt is empty: give at least one token"),
        ({"prompt": None}, "prompt", "prompt is missing: give a text, or a list of tokens"),
        ({"prompt": ["a"]}, "prompt", "prompt is not a list of tokens: send one prompt a time"),
        ({"prompt": [True]}, "prompt", "prompt is not a list of tokens: send one prompt a time"),
        ({"prompt": "\ud800"}, "prompt", "prompt is not a text: 'utf-8' codec can't encode"),
        ({"prompt": 3}, "prompt", "prompt is 3: give str or list"),
        ({"prompt": [1 << 70]}, "prompt", "the prompt has shape (1,) of object: give a row"),
        ({"prompt": [-1]}, "prompt", "token -1 is not in the vocabulary: use 0 to 255"),
        ({"prompt": "a" * 64}, "prompt", "the prompt has 64 tokens, the model takes 64 with"),
        ({"prompt": "a" * 61}, "max_tokens", "61 tokens of a prompt and max_tokens 4 make 65"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0: give a whole number of at least 1"),
        ({"max_tokens": 2.5}, "max_tokens", "max_tokens is 2.5: give int"),
        ({"max_tokens": True}, "max_tokens", "max_tokens is True: give int"),
        ({"n": 0}, "n", "n is 0: give a whole number of at least 1"),
        ({"n": 9}, "n", "9 sequences of one request, the engine runs 8"),
        ({"n": "2"}, "n", "n is '2': give int"),
        ({"temperature": -1}, "temperature", "temperature is -1.0: give 0 or more"),
        ({"temperature": float("nan")}, "temperature", "temperature is nan: give 0 or more"),
        ({"temperature": 10**400}, "temperature", "temperature is inf: give 0 or more"),
        ({"top_p": 10**400}, "top_p", "top_p is inf: give more than 0 and at most 1"),
        ({"top_p": 0}, "top_p", "top_p is 0.0: give more than 0 and at most 1"),
        ({"seed": -1}, "seed", "seed is -1: give a whole number of at least 0"),
        ({"stop": [""]}, "stop", "stop is ['']: give up to four texts"),
        ({"stop": list("abcde")}, "stop", "stop is ['a', 'b', 'c', 'd', 'e']: give up to four"),
        ({"stream": 1}, "stream", "stream is 1: give bool"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream_options says"),
        (
            {"stream": True, "stream_options": {"include_usage": "yes"}},
            "stream_options",
            "stream_options says include_usage, true or false",
        ),
        ({"prefetch": 1}, "prefetch", "prefetch is 1: give bool"),
        ({"hints": "soon"}, "hints", "hints is 'soon': give list"),
        ({"hints": ["soon"]}, "hints", "the body: hints[0] is 'soon': pass a map such as"),
        ({"hints": [{"ttl": 3}]}, "hints", "the body: hints[0] has 'ttl': it may have start, end"),
        ({"hints": [{}]}, "hints", "the body: hints[0]: a hint has 0 of is_over, returns_in_s"),
        ({"best_of": 2}, "best_of", "'best_of' is not served: use model, prompt"),
        ({"model": None}, "model", "model is missing: name 'tiny'"),
    ],
)
def test_unsupported_fields_are_refused_by_name(
    changes: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(CompletionError) as refused:
        parse({**BODY, **changes})
    assert str(refused.value).startswith(message)
    assert refused.value.status == 400
    assert refused.value.body == {
        "error": {
            "message": str(refused.value),
            "type": "invalid_request_error",
            "param": param,
            "code": None,
        }
    }


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'"text"'])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(CompletionError, match=r"^the body is no JSON") as refused:
        parse(body)
    assert (refused.value.status, refused.value.param) == (400, None)


def test_another_model_is_not_found() -> None:
    with pytest.raises(CompletionError, match=r"^there is no model 'gpt': name 'tiny'$") as refused:
        parse({**BODY, "model": "gpt"})
    assert refused.value.status == 404
    assert refused.value.body["error"]["code"] == "model_not_found"


def test_outputs_become_chunks_and_a_whole() -> None:
    body = CompletionBody("cmpl-1", 17, "tiny", 5)
    chunk = body.add(Output("r", 1, (7,), "x", num_cached_tokens=4))
    assert chunk == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 17,
        "model": "tiny",
        "choices": [{"index": 1, "text": "x", "logprobs": None, "finish_reason": None}],
    }
    body.add(Output("r", 0, (8, 9), "yz", "stop", num_cached_tokens=4))
    body.add(Output("r", 1, (6,), "w", "length", num_cached_tokens=4))
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    whole = body.whole()
    assert [(c["index"], c["text"], c["finish_reason"]) for c in whole["choices"]] == [
        (0, "yz", "stop"),
        (1, "xw", "length"),
    ]
    assert whole["usage"] == usage
    last = body.usage_chunk()
    assert (last["choices"], last["usage"]) == ([], usage)
    assert sse({"a": 1}) == 'data: {"a": 1}\n\n'


def test_an_engine_that_cannot_go_on_is_an_error_of_the_server() -> None:
    body = CompletionBody("cmpl-1", 17, "tiny", 5)
    with pytest.raises(CompletionError, match=r"^no room$") as failed:
        body.add(Output("r", 0, finish_reason="error", error="no room"))
    assert failed.value.status == 500
    assert failed.value.body["error"]["type"] == "server_error"
