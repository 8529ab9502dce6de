"""A request as its owner sees it: samples, their text, how they ended, and unread outputs.

Takes a sample's chosen tokens and returns the text to show. Text that could become one of the
`stop` texts is held back until it cannot. Schedules nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from examples.engine.outputs import FinishReason, Output
from examples.engine.sampling import ChosenToken, SamplingParams
from examples.engine.sequence import Sequence
from examples.engine.tokenizer import Detokenizer


class SampleText:
    """The text of one sample."""

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...]) -> None:
        """Begin without text."""
        self._detokenizer = detokenizer
        self._stop = stop
        self._held = ""
        self._num_holdable = max((len(text) for text in stop), default=1) - 1

    def add(self, token_id: int) -> tuple[str, bool]:
        """Return the text to show now, and whether it ended with a stop text."""
        self._held += self._detokenizer.add((token_id,))
        found = [at for text in self._stop if (at := self._held.find(text)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        cut = max(0, len(self._held) - self._num_holdable)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def rest(self) -> str:
        """Return the text that was held back, at the end of the sample."""
        shown, self._held = self._held, ""
        return shown


@dataclass(eq=False)
class Sample:
    """One sequence of a request, and its text."""

    sequence: Sequence
    text: SampleText
    new_tokens: list[int] = field(default_factory=list)
    new_text: str = ""
    new_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    reason: FinishReason | None = None

    def take(self, chosen: ChosenToken, max_model_len: int) -> bool:
        """Append a token; return whether the sample has ended with it."""
        sequence, params = self.sequence, self.sequence.params
        sequence.tokens.append(chosen.token_id)
        self.new_tokens.append(chosen.token_id)
        if params.logprobs:
            self.new_logprobs.append(chosen.top[: params.logprobs])
        is_stop = chosen.token_id in params.stop_token_ids
        if not is_stop:
            shown, is_stop = self.text.add(chosen.token_id)
            self.new_text += shown
        if is_stop:
            self.reason = "stop"
        elif sequence.num_output >= params.max_tokens or len(sequence.tokens) >= max_model_len:
            self.reason = "length"
        return self.reason is not None

    def output(self, error: str = "") -> Output | None:
        """Return the new output since the last call; None if there is none."""
        if not (self.new_tokens or self.reason):
            return None
        sequence = self.sequence
        text = self.new_text + (self.text.rest() if self.reason else "")
        output = Output(
            sequence.request_id,
            sequence.index,
            tuple(self.new_tokens),
            text,
            self.reason,
            error,
            sequence.num_cached,
            tuple(self.new_logprobs),
        )
        self.new_tokens, self.new_text, self.new_logprobs = [], "", []
        return output


@dataclass(eq=False)
class EngineRequest:
    """A request and its samples. `unread`: outputs for a stream, None without streaming."""

    request_id: str
    params: SamplingParams
    samples: list[Sample]
    unread: deque[Output] | None = None
