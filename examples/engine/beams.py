"""Beam search: the likeliest continuations of several beams continue, the others are dropped.

    beams ──forward──▶ 2 x width likeliest next tokens of each ──▶ the best `width` continue
                          finished ones are kept aside                 a beam chosen twice is forked

Beams are ordinary sequences, and share blocks as far as they agree. A beam with two continuations
is forked, and its partly filled block is copied before a write. All beams wait for the slowest, so
that each choice is made among all of them. This module schedules nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from examples.engine.outputs import FinishReason
from examples.engine.sampling import ChosenToken
from examples.engine.sequence import Phase, Sequence


@dataclass(frozen=True)
class FoundBeam:
    """A beam that has ended: its output, and the sum of its log probabilities."""

    token_ids: tuple[int, ...]
    score: float
    reason: FinishReason


@dataclass(frozen=True)
class BeamDecision:
    """Sequences that end, and new ones whose parent can no longer share blocks."""

    dropped: tuple[Sequence, ...]
    loose: tuple[Sequence, ...]


@dataclass(frozen=True)
class _Candidate:
    parent: Sequence
    token_id: int
    score: float


class BeamSearch:
    """The beams of one request, likeliest first. `is_over` once `best` is final."""

    def __init__(
        self, first: Sequence, max_model_len: int, new_key: Callable[[Sequence], str]
    ) -> None:
        """Begin with the prompt alone. `new_key` names children."""
        self._params = first.params
        self._max_model_len = max_model_len
        self._new_key = new_key
        self._first = first
        self._chosen: dict[Sequence, ChosenToken] = {}
        self._ended: list[FoundBeam] = []
        self.sequences: list[Sequence] = [first]
        self.is_over = False

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that were found in the cache."""
        return self._first.num_cached

    def take(self, sequence: Sequence, chosen: ChosenToken) -> None:
        """Record the likeliest tokens after a beam, which then waits for the others."""
        if sequence in self.sequences and not sequence.is_held:
            self._chosen[sequence] = chosen
            sequence.is_held = True

    @property
    def is_ready(self) -> bool:
        """Whether every beam has its likeliest tokens."""
        return not self.is_over and len(self._chosen) == len(self.sequences)

    def decide(self) -> BeamDecision:
        """Choose the beams that continue, and append their tokens; parents have their children."""
        params, width = self._params, self._params.beam_width
        candidates = [
            _Candidate(sequence, token_id, sequence.score + logprob)
            for sequence in self.sequences
            for token_id, logprob in self._chosen[sequence].top[: 2 * width]
        ]
        candidates.sort(key=lambda candidate: -candidate.score)
        for candidate in candidates[: 2 * width]:
            if candidate.token_id in params.stop_token_ids:
                self._note_end(candidate, "stop")
        going = [c for c in candidates if c.token_id not in params.stop_token_ids][:width]
        self._chosen.clear()
        length = self._first.num_prompt + self._num_output() + 1
        is_longest = length >= self._first.num_prompt + params.max_tokens
        if len(self._ended) < width and (is_longest or length >= self._max_model_len):
            for candidate in going:
                self._note_end(candidate, "length")
            self.is_over = True
        if self.is_over or len(self._ended) >= width:
            self.is_over = True
            dropped, self.sequences = tuple(self.sequences), []
            return BeamDecision(dropped, ())
        return self._go_on(going)

    def best(self) -> list[FoundBeam]:
        """Return the likeliest beams, as many as requested."""
        return sorted(self._ended, key=lambda beam: -beam.score)[: self._params.n]

    def _num_output(self) -> int:
        return self.sequences[0].num_output

    def _note_end(self, candidate: _Candidate, reason: FinishReason) -> None:
        parent = candidate.parent
        token_ids = (*parent.tokens[parent.num_prompt :], candidate.token_id)
        self._ended.append(FoundBeam(token_ids, candidate.score, reason))

    def _go_on(self, going: list[_Candidate]) -> BeamDecision:
        before = {sequence: list(sequence.tokens) for sequence in self.sequences}
        beams, loose = [], []
        kept: set[Sequence] = set()
        for candidate in going:
            parent = candidate.parent
            tokens = [*before[parent], candidate.token_id]
            if parent not in kept:
                kept.add(parent)
                parent.tokens, parent.score, parent.is_held = tokens, candidate.score, False
                beams.append(parent)
                continue
            child = replace(
                parent, key=self._new_key(parent), tokens=tokens, score=candidate.score, children=[]
            )
            child.forget()
            beams.append(child)
            if parent.phase is Phase.RUNNING:
                parent.children.append(child)
            else:
                loose.append(child)
        dropped = tuple(sequence for sequence in self.sequences if sequence not in kept)
        self.sequences = beams
        return BeamDecision(dropped, tuple(loose))
