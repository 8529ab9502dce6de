"""Prompts as passages: which prompts share text, without making tokens.

Generators describe prompts by passages. Passages become tokens (for a replay) or block ids (for a
trace). Both share exactly the same blocks.

    prompt     [ system prompt ][ document 17 ............ ][ question ]
    blocks     [ 0       ][ 1       ][ 2       ][ 3       ][ 4  ]        an id fixes all before it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from kvcache.base.arrays import Int32Array
from kvcache.requests.hints import CacheHint
from kvcache.simulate.tokens import token_stream
from kvcache.simulate.workload import WorkloadRequest

_NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class Passage:
    """The first `num_tokens` tokens of the stream `seed`."""

    seed: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """A request with a prompt of passages; otherwise like `WorkloadRequest`.

    Other sessions may share the first `num_common` passages.
    """

    request_id: str
    arrival_s: float
    passages: tuple[Passage, ...]
    num_output_tokens: int
    after: str | None = None
    num_common: int = 0
    hints: tuple[CacheHint, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        return sum(passage.num_tokens for passage in self.passages)

    @property
    def num_common_tokens(self) -> int:
        """Tokens that other sessions may share."""
        return sum(passage.num_tokens for passage in self.passages[: self.num_common])

    def to_workload_request(self) -> WorkloadRequest:
        """Return it for a player; its tokens are made on demand."""
        return WorkloadRequest(
            request_id=self.request_id,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            make_token_ids=partial(passage_tokens, self.passages),
            arrival_s=self.arrival_s,
            after=self.after,
            hints=self.hints,
        )


def passage_tokens(passages: tuple[Passage, ...]) -> Int32Array:
    """Return the tokens of all passages, joined. Shape `(num_prompt_tokens,)`."""
    return np.concatenate([token_stream(p.seed, p.num_tokens) for p in passages])


_Piece: TypeAlias = "tuple[int, int, int]"
"""Stream, first token, number of tokens."""


class BlockNames:
    """Names blocks by their content and that of all blocks before: 0, 1, 2, in order of appearance.

    Blocks of equal content after equal prefixes have the same name; a partial one has another name
    than a full one. Grows with the number of distinct blocks.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._names: dict[tuple[int, tuple[_Piece, ...]], int] = {}

    def name(self, passages: tuple[Passage, ...]) -> list[int]:
        """Return the names of a prompt's blocks, including a partly filled last one."""
        names = []
        parent = _NO_PARENT
        for pieces in _cut(passages, self._block_size):
            parent = self._names.setdefault((parent, pieces), len(self._names))
            names.append(parent)
        return names


def _cut(passages: tuple[Passage, ...], block_size: int) -> Iterator[tuple[_Piece, ...]]:
    pieces: list[_Piece] = []
    room = block_size
    for passage in passages:
        start = 0
        while start < passage.num_tokens:
            length = min(room, passage.num_tokens - start)
            pieces.append((passage.seed, start, length))
            start += length
            room -= length
            if not room:
                yield tuple(pieces)
                pieces, room = [], block_size
    if pieces:
        yield tuple(pieces)
