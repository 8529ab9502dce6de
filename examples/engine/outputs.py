"""Outputs and statistics of an engine. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Output:
    """The output of one step for sample `index` of a request.

    `token_ids` are new, and `text` is their text. `finish_reason` is None while the
    sample runs; "error" comes with a message in `error`. `num_cached_tokens` of the prompt were
    found in the cache. `logprobs[i]` are the likeliest tokens at the position of `token_ids[i]`,
    if requested. `score`: sum of log probabilities, only for beams.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str = ""
    num_cached_tokens: int = 0
    logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    score: float = 0.0


@dataclass(frozen=True)
class EngineStatistics:
    """Statistics since the launch; requests are counted now. Seconds: spent in `step`, and of those
    waiting for the coordinator, and computing on the rank that chooses tokens."""

    num_running: int
    num_waiting: int
    num_finished: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_accepted_drafts: int
    num_rejected_drafts: int
    num_preemptions: int
    num_restarts: int
    step_s: float
    coordinator_s: float
    compute_s: float
