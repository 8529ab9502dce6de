"""Checks whether a request can be served, before any other part of the engine gets it.

Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from examples.engine.config import EngineConfig
from examples.engine.model_config import DecoderConfig
from examples.engine.sampling import SamplingParams
from kvcache.base.errors import RequestError, shown


def checked_tokens(prompt: Sequence[int], model: DecoderConfig) -> list[int]:
    """Return the prompt as a list; raises RequestError if `model` cannot read it."""
    try:
        values = np.asarray(prompt)
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(f"the prompt is no row of token ids: {error}") from error
    if values.ndim != 1 or not len(values) or values.dtype.kind not in "iu":
        raise RequestError(
            f"the prompt has shape {values.shape} of {values.dtype}: give a row of whole "
            "numbers, at least one"
        )
    size, longest = model.vocab_size, model.max_model_len
    if int(values.min()) < 0 or int(values.max()) >= size:
        bad = values[(values < 0) | (values >= size)][0]
        raise RequestError(f"token {bad} is not in the vocabulary: use 0 to {size - 1}")
    if len(values) >= longest:
        raise RequestError(
            f"the prompt has {len(values)} tokens, the model takes {longest} with at least one "
            "of output: shorten it"
        )
    tokens: list[int] = values.tolist()
    return tokens


def check_names(request_id: object, cache_salt: object) -> None:
    """Raise RequestError unless these texts can be sent; a salt must not be empty."""
    for name, text in (("the request's id", request_id), ("cache_salt", cache_salt)):
        if text is None:
            continue
        try:
            is_text = isinstance(text, str) and bool(text.encode())
        except UnicodeEncodeError:
            is_text = False
        if not is_text:
            raise RequestError(f"{name} is {shown(text)}: give a text that UTF-8 can write")


def check_limits(params: SamplingParams, lora_name: str | None, config: EngineConfig) -> None:
    """Raise RequestError for parameters that this engine's configuration does not allow."""
    if lora_name is not None and lora_name not in config.adapters:
        raise RequestError(
            f"there is no adapter {lora_name!r}: use one of {', '.join(config.adapters)}"
        )
    if max(params.n, params.beam_width) > config.max_num_seqs:
        raise RequestError(
            f"{max(params.n, params.beam_width)} sequences of one request, the engine runs "
            f"{config.max_num_seqs}: ask for fewer, or raise max_num_seqs"
        )
    most = config.max_draft_tokens
    if config.model.keeps_states and params.num_draft_tokens > most:
        raise RequestError(
            f"num_draft_tokens is {params.num_draft_tokens}, this model keeps states for "
            f"{most}: ask for fewer, or raise max_draft_tokens"
        )
