"""A tiny transformer with random weights; each step of the guide brings its own attention.

This module has everything except attention over earlier tokens. Where keys and values are stored is
the subject of the steps. Each calls `run` with its own `attention`: a function of layer, query, key
and value of the new tokens, `(new, heads, size)` each, that returns `(new, heads, size)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

NUM_LAYERS = 2
NUM_HEADS = 4
HEAD_SIZE = 8
HIDDEN_SIZE = NUM_HEADS * HEAD_SIZE
VOCABULARY = 64
MAX_TOKENS = 128
ALL_HEADS = slice(0, NUM_HEADS)

Attention: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class TinyModel:
    """The same weights every time, because the seed is fixed. In double precision, so that a token
    is the same however it is computed."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)

        def weights(*shape: int) -> torch.Tensor:
            drawn = torch.randn(*shape, generator=random, dtype=torch.float64)
            return drawn / HIDDEN_SIZE**0.5

        self._embedding = weights(VOCABULARY, HIDDEN_SIZE)
        self._positions = weights(MAX_TOKENS, HIDDEN_SIZE)
        self._to_qkv = weights(NUM_LAYERS, 3, NUM_HEADS, HIDDEN_SIZE, HEAD_SIZE)
        self._to_hidden = 8 * weights(NUM_LAYERS, NUM_HEADS, HEAD_SIZE, HIDDEN_SIZE)
        self._to_scores = weights(VOCABULARY, HIDDEN_SIZE)

    def embed(self, tokens: Sequence[int], start: int) -> torch.Tensor:
        """Return the hidden states, `(n, hidden)`, of tokens at positions [start, start + n)."""
        return self._embedding[list(tokens)] + self._positions[start : start + len(tokens)]

    def project(self, layer: int, hidden: torch.Tensor, heads: slice = ALL_HEADS) -> torch.Tensor:
        """Return query, key and value of these heads: `(3, n, heads, size)`."""
        normal = torch.nn.functional.rms_norm(hidden, (HIDDEN_SIZE,))
        return torch.einsum("kheq,ne->knhq", self._to_qkv[layer][:, heads], normal)

    def merge(self, layer: int, seen: torch.Tensor, heads: slice = ALL_HEADS) -> torch.Tensor:
        """Return the contribution of these heads, `(n, heads, size)`, to the hidden states."""
        return torch.einsum("nhq,hqe->ne", seen, self._to_hidden[layer][heads])

    def next_token(self, hidden: torch.Tensor) -> int:
        """Return the likeliest token after the last of these hidden states."""
        last = torch.nn.functional.rms_norm(hidden[-1], (HIDDEN_SIZE,))
        return int((self._to_scores @ last).argmax())

    def run(self, tokens: Sequence[int], start: int, attention: Attention) -> int:
        """Compute tokens at positions [start, start + n); return the next token."""
        hidden = self.embed(tokens, start)
        for layer in range(NUM_LAYERS):
            query, key, value = self.project(layer, hidden)
            hidden = hidden + self.merge(layer, attention(layer, query, key, value))
        return self.next_token(hidden)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return causal attention of the last n positions over all m: `(n, heads, size)`."""
    num_new, num_all = len(query), len(key)
    scores = torch.einsum("nhq,mhq->hnm", query, key) / HEAD_SIZE**0.5
    is_visible = torch.ones(num_new, num_all).tril(num_all - num_new).bool()
    return torch.einsum(
        "hnm,mhq->nhq", scores.masked_fill(~is_visible, -torch.inf).softmax(-1), value
    )


def generate_from_scratch(model: TinyModel, prompt: Sequence[int], num_new: int) -> list[int]:
    """Return the generated tokens, recomputing everything each time: the reference."""
    tokens = list(prompt)
    for _ in range(num_new):
        tokens.append(model.run(tokens, 0, lambda layer, *qkv: attend(*qkv)))
    return tokens[len(prompt) :]


def promise(holds: bool, what: str) -> None:
    """End the step with exit status 1 unless the promise `what` holds."""
    if not holds:
        sys.exit(f"not as promised: {what}")
