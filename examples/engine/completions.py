"""OpenAI's `/v1/completions`, as data: bodies become prompts and parameters, outputs become bodies.

    body ──parse──▶ CompletionRequest ──▶ engine ──Output──▶ chunks, or one body at the end
          ╲─▶ CompletionError: status and body as OpenAI's API has them

Independent of a server. The engine's own checks refuse invalid requests before they reach it.
Unknown fields are refused, too, because ignoring them would change the result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from examples.engine.config import EngineConfig
from examples.engine.outputs import Output
from examples.engine.request_checks import check_limits, checked_tokens
from examples.engine.sampling import SamplingParams
from examples.engine.tokenizer import Tokenizer
from kvcache.base.errors import RequestError, shown
from kvcache.requests.hints import CacheHint, hints_from_plain

MAX_BODY_BYTES = 1 << 20
MAX_TOKENS = 16
"""Default of `max_tokens`, as in OpenAI's API."""

_NUMBER = (int, float)
_FIELDS: Mapping[str, tuple[type, ...]] = {
    "model": (str,),
    "prompt": (str, list),
    "max_tokens": (int,),
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "n": (int,),
    "stream": (bool,),
    "stream_options": (dict,),
    "stop": (str, list),
    "seed": (int,),
    "user": (str,),
    "hints": (list,),
    "prefetch": (bool,),
}
"""The fields of a body. `user` is ignored; `hints` and `prefetch` are ours."""


class CompletionError(Exception):
    """A refused request: HTTP `status`, and a body with the reason."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400) -> None:
        """Refuse with `message`; `param` is the wrong field."""
        super().__init__(message)
        self.status = status
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The body, in OpenAI's format."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        code = "model_not_found" if self.param == "model" and self.status == 404 else None
        error = {"message": str(self), "type": kind, "param": self.param, "code": code}
        return {"error": error}


@dataclass(frozen=True)
class CompletionRequest:
    """A parsed request. `includes_usage`: a stream ends with a chunk that counts tokens. `hints`
    are for the tokens of prompt and answer. `is_prefetch`: raise the prompt's prefix, no answer."""

    tokens: list[int]
    params: SamplingParams
    is_stream: bool = False
    includes_usage: bool = False
    hints: tuple[CacheHint, ...] = ()
    is_prefetch: bool = False

    @classmethod
    def parse(cls, body: bytes, config: EngineConfig, tokenizer: Tokenizer) -> CompletionRequest:
        """Read the body of a request.

        Raises:
            CompletionError: it is no JSON, or this engine does not support it.
        """
        fields = _checked_fields(body)
        model = fields.get("model")
        if model is None:
            raise CompletionError(f"model is missing: name {config.model.name!r}", "model")
        if model != config.model.name:
            raise CompletionError(
                f"there is no model {shown(model)}: name {config.model.name!r}", "model", status=404
            )
        if "prompt" not in fields:
            raise CompletionError("prompt is missing: give a text, or a list of tokens", "prompt")
        prompt = fields["prompt"]
        if isinstance(prompt, list) and any(type(token) is not int for token in prompt):
            raise CompletionError(
                "prompt is not a list of tokens: send one prompt a time", "prompt"
            )
        try:
            given = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        except UnicodeEncodeError as error:
            raise CompletionError(f"prompt is not a text: {error}", "prompt") from None
        if not given:
            raise CompletionError("prompt is empty: give at least one token", "prompt")
        tokens = _checked("prompt", lambda: checked_tokens(given, config.model))
        params = _params(fields)
        _checked("n", lambda: check_limits(params, None, config))
        longest = config.model.max_model_len
        if len(tokens) + params.max_tokens > longest:
            raise CompletionError(
                f"{len(tokens)} tokens of a prompt and max_tokens {params.max_tokens} make "
                f"{len(tokens) + params.max_tokens}, the model takes {longest}: ask for less",
                "max_tokens",
            )
        is_stream = bool(fields.get("stream"))
        options = fields.get("stream_options", {})
        has_usage = options.get("include_usage", False)
        is_known = is_stream and set(options) == {"include_usage"} and type(has_usage) is bool
        if options and not is_known:
            raise CompletionError(
                "stream_options says include_usage, true or false, with stream, and nothing else",
                "stream_options",
            )
        hints = _checked("hints", lambda: hints_from_plain("the body", fields.get("hints", [])))
        is_prefetch = bool(fields.get("prefetch"))
        return cls(tokens, params, is_stream, has_usage, hints, is_prefetch)


def _checked_fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a body that are not null, each of the type that it must have."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CompletionError(f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise CompletionError("the body is no JSON object: send the fields of a completion")
    for name, value in fields.items():
        if name not in _FIELDS:
            raise CompletionError(
                f"{shown(name)} is not served: use {', '.join(_FIELDS)}", str(name)
            )
        kinds = _FIELDS[name]
        is_wrong_bool = isinstance(value, bool) and bool not in kinds
        if value is not None and (is_wrong_bool or not isinstance(value, kinds)):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise CompletionError(f"{name} is {shown(value)}: give {wanted}", name)
    return {name: value for name, value in fields.items() if value is not None}


def _params(fields: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters; each is checked alone first, so that an error names its field."""
    stop = fields.get("stop", [])
    texts = [stop] if isinstance(stop, str) else stop
    if len(texts) > 4 or any(not isinstance(text, str) or not text for text in texts):
        raise CompletionError(f"stop is {shown(stop)}: give up to four texts", "stop")
    wanted: dict[str, Any] = {
        "max_tokens": fields.get("max_tokens", MAX_TOKENS),
        "temperature": _as_float(fields.get("temperature", 1.0)),
        "top_p": _as_float(fields.get("top_p", 1.0)),
        "n": fields.get("n", 1),
        "seed": fields.get("seed", 0),
    }
    for name, value in wanted.items():
        _checked(name, partial(SamplingParams, **{name: value}))
    return SamplingParams(**wanted, stop=tuple(texts))


def _as_float(number: float) -> float:
    """Return a JSON number, which may be an integer of any length."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _checked(param: str, check: Callable[[], Any]) -> Any:
    """Return the result of `check`; its errors name `param`."""
    try:
        return check()
    except RequestError as error:
        raise CompletionError(str(error), param) from None


@dataclass
class CompletionBody:
    """Builds the answer, as chunks or as one body."""

    completion_id: str
    created_s: int
    model: str
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_tokens: int = 0
    _texts: dict[int, str] = field(default_factory=dict)
    _reasons: dict[int, str] = field(default_factory=dict)

    def add(self, output: Output) -> dict[str, Any]:
        """Add one step's output; return it as a chunk.

        Raises:
            CompletionError: the engine failed, and there will be no more output.
        """
        if output.finish_reason in {"error", "abort"}:
            why = output.error or "the engine ended the request: send it again"
            raise CompletionError(why, status=500)
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.num_tokens += len(output.token_ids)
        self._texts[output.index] = self._texts.get(output.index, "") + output.text
        if output.finish_reason is not None:
            self._reasons[output.index] = output.finish_reason
        return self._body([_choice(output.index, output.text, output.finish_reason)])

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream that counts tokens."""
        return {**self._body([]), "usage": self._usage()}

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer without streaming."""
        choices = [
            _choice(index, text, self._reasons.get(index))
            for index, text in sorted(self._texts.items())
        ]
        return {**self._body(choices), "usage": self._usage()}

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.completion_id,
            "object": "text_completion",
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def sse(chunk: Mapping[str, Any]) -> str:
    """Return a chunk as an event of a stream."""
    return f"data: {json.dumps(chunk)}\n\n"


SSE_END = "data: [DONE]\n\n"
"""Ends a stream, after the last chunk."""
