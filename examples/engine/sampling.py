"""Chooses tokens: the parameters of a request, and the choice from a row of logits.

The ranks of the last stage choose, so no logits are sent. A choice depends on the logits, the
parameters and the position of the new token, never on the batch, the step or the rank. So a token
that is computed again, elsewhere or ahead of time is the same. Invalid parameters are refused.

    logits ── / temperature ── keep top k ── keep top p ── + Gumbel noise of (seed, index, position)
                                                           ──▶ the largest is a fair draw
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvcache.base.errors import RequestError

_NO_SEED = 0


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of a request.

    At most `max_tokens` are generated. `temperature` 0: always the likeliest token. Otherwise only
    the `top_k` likeliest count (0: all), and among these the likeliest that together have a
    probability of `top_p`. Equal seeds give equal tokens. A token of `stop_token_ids` ends the
    request and is its last one; so does text that contains one of `stop`, and the text ends before
    it. `n` samples share the prompt. `beam_width`: beam search for the `n` likeliest of this many
    beams (0: none), which ranks by sums of log probabilities and ignores temperature, `top_k`,
    `top_p`. `num_draft_tokens`: at most this many tokens per step are guessed from the earlier
    tokens, and checked in one forward; the output is the same. `logprobs`: how many of the
    likeliest tokens are reported with each token.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = _NO_SEED
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    n: int = 1
    beam_width: int = 0
    num_draft_tokens: int = 0
    logprobs: int = 0

    def __post_init__(self) -> None:
        """Raise RequestError for invalid parameters."""
        for name, least in (
            ("max_tokens", 1),
            ("top_k", 0),
            ("seed", 0),
            ("n", 1),
            ("beam_width", 0),
            ("num_draft_tokens", 0),
            ("logprobs", 0),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise RequestError(f"{name} is {value!r}: give a whole number of at least {least}")
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise RequestError(f"temperature is {self.temperature!r}: give 0 or more")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p!r}: give more than 0 and at most 1")
        if self.beam_width and self.n > self.beam_width:
            raise RequestError(
                f"n is {self.n}, more than beam_width ({self.beam_width}): search more beams, or "
                "ask for fewer"
            )
        if self.beam_width and self.num_draft_tokens:
            raise RequestError(
                f"beam_width is {self.beam_width} and num_draft_tokens {self.num_draft_tokens}: "
                "beams have no drafts, set one of them to 0"
            )
        stop: object = self.stop
        if isinstance(stop, str):
            raise RequestError(f"stop is the text {self.stop!r}: give a tuple of texts")
        if any(not text for text in self.stop):
            raise RequestError("stop has an empty text, which every output contains: leave it out")

    def choice(self, index: int) -> Choice:
        """Return how the tokens of sample `index` are chosen."""
        num_top = max(self.logprobs, 2 * self.beam_width)
        temperature = 0.0 if self.beam_width else self.temperature
        return Choice(temperature, self.top_k, self.top_p, self.seed, index, num_top)


@dataclass(frozen=True)
class Choice:
    """How ranks choose the tokens of one sample. `num_top`: number of likeliest to report."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = _NO_SEED
    index: int = 0
    num_top: int = 0


@dataclass(frozen=True)
class ChosenToken:
    """A token, its log probability, and the likeliest ones with theirs, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def choose(logits: torch.Tensor, choice: Choice, position: int) -> ChosenToken:
    """Choose the token at `position` from `logits`, `(vocabulary,)`."""
    scores = logits.double()
    logprobs = scores.log_softmax(dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if choice.num_top:
        values, ids = logprobs.topk(min(choice.num_top, len(logprobs)))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    if choice.temperature == 0:
        token_id = int(scores.argmax())
    else:
        # Subtract the largest, so that the lowest temperature makes the others, not all, infinite.
        kept = _keep((scores - scores.max()) / choice.temperature, choice)
        # Every rank of a stage draws the same numbers, on any device.
        random = np.random.default_rng((choice.seed, choice.index, position))
        noise = torch.from_numpy(random.gumbel(size=len(kept))).to(kept.device)
        token_id = int((kept + noise).argmax())
    return ChosenToken(token_id, float(logprobs[token_id]), top)


def _keep(scores: torch.Tensor, choice: Choice) -> torch.Tensor:
    """Return the scores with those that may not be drawn at minus infinity."""
    if choice.top_k and choice.top_k < len(scores):
        least = scores.topk(choice.top_k).values[-1]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if choice.top_p < 1:
        ordered, order = scores.softmax(dim=-1).sort(descending=True, stable=True)
        # A token counts while those before it have less than the share; the first always counts.
        is_out = ordered.cumsum(dim=-1) - ordered >= choice.top_p
        scores = scores.masked_fill(torch.zeros_like(is_out).scatter(0, order, is_out), -torch.inf)
    return scores
