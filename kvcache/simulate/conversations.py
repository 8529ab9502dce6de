"""The default workload: users talk to a few assistants, turn by turn.

Every conversation starts with the system prompt of one of a few assistants. Each turn's prompt is
the whole conversation so far, including the answers, and a new question:

    turn 1   [system prompt][question 1]
    turn 2   [system prompt][question 1][answer 1][question 2]
    turn 3   [system prompt][question 1][answer 1][question 2][answer 2][question 3]

So conversations share their system prompts with each other, and turns share the conversation. All
of it follows from a seed; nothing is read and nothing kept.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial

import numpy as np

from kvcache.base.arrays import Int32Array
from kvcache.base.errors import TraceError
from kvcache.simulate.tokens import answer_token_ids, token_seed, token_stream
from kvcache.simulate.workload import WorkloadRequest


@dataclass(frozen=True)
class ConversationShape:
    """Number, length and content of conversations. Lengths are in tokens, ranges inclusive.

    `document_share` of the first questions come with an attached document. The defaults fill a pool
    of two million tokens: there are evictions, a few preemptions, and a hit rate of about a third.

    Raises TraceError for an invalid number.
    """

    num_conversations: int = 136
    num_turns: int = 3
    num_system_prompts: int = 4
    system_prompt_tokens: int = 768
    question_tokens: tuple[int, int] = (24, 240)
    answer_tokens: tuple[int, int] = (300, 700)
    document_tokens: tuple[int, int] = (8_000, 22_000)
    document_share: float = 1.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, tuple) and not 1 <= value[0] <= value[1]:
                raise TraceError(
                    f"conversations: {f.name} is {value[0]} to {value[1]}: give a range of "
                    "positive lengths, the smaller first"
                )
            if type(value) is int and value < 1:
                raise TraceError(f"conversations: {f.name} is {value}: give at least 1")
        if not 0.0 <= self.document_share <= 1.0:
            raise TraceError(
                f"conversations: document_share is {self.document_share}: give 0.0 to 1.0"
            )


@dataclass(frozen=True)
class _Turn:
    """One turn: its lengths, and the number of tokens before it."""

    num_tokens_before: int
    num_question_tokens: int
    num_answer_tokens: int


@dataclass(frozen=True)
class _Conversation:
    """A whole conversation, as lengths: its tokens are made on demand."""

    index: int
    system_prompt: int
    turns: tuple[_Turn, ...]


class Conversations:
    """Conversations of `shape`, drawn by `seed`, in rounds: every first turn before any second.

    Within a round the order is shuffled, so that conversations continue after others have come in
    between.
    """

    def __init__(self, shape: ConversationShape | None = None, seed: int = 0) -> None:
        self.shape = ConversationShape() if shape is None else shape
        self.seed = seed
        rng = random.Random(token_seed("conversations", seed))
        self._conversations = [self._draw(index, rng) for index in range(self._num)]
        self._rounds = [
            rng.sample(range(self._num), self._num) for _ in range(self.shape.num_turns)
        ]

    @property
    def name(self) -> str:
        """A description, including the seed."""
        return f"{self._num:,} conversations of {self.shape.num_turns} turns (seed {self.seed})"

    @property
    def num_requests(self) -> int:
        """One request per turn."""
        return self._num * self.shape.num_turns

    @property
    def total_input_tokens(self) -> int:
        """Prompt tokens of all turns."""
        return sum(
            turn.num_tokens_before + turn.num_question_tokens
            for conversation in self._conversations
            for turn in conversation.turns
        )

    @property
    def block_size(self) -> int:
        """Tokens per block by default."""
        return 16

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """Yield the turns, round by round."""
        for turn_index, order in enumerate(self._rounds):
            for index in order:
                yield self._request(self._conversations[index], turn_index)

    @property
    def _num(self) -> int:
        return self.shape.num_conversations

    def _draw(self, index: int, rng: random.Random) -> _Conversation:
        shape = self.shape
        turns = []
        num_tokens = shape.system_prompt_tokens
        for turn_index in range(shape.num_turns):
            num_question_tokens = rng.randint(*shape.question_tokens)
            if turn_index == 0 and rng.random() < shape.document_share:
                num_question_tokens += rng.randint(*shape.document_tokens)
            turn = _Turn(num_tokens, num_question_tokens, rng.randint(*shape.answer_tokens))
            num_tokens += turn.num_question_tokens + turn.num_answer_tokens
            turns.append(turn)
        return _Conversation(index, rng.randrange(shape.num_system_prompts), tuple(turns))

    def _request(self, conversation: _Conversation, turn_index: int) -> WorkloadRequest:
        turn = conversation.turns[turn_index]
        return WorkloadRequest(
            request_id=_request_id(conversation.index, turn_index),
            num_prompt_tokens=turn.num_tokens_before + turn.num_question_tokens,
            num_output_tokens=turn.num_answer_tokens,
            make_token_ids=partial(self._prompt, conversation, turn_index),
            arrival_s=float(turn_index),
            after=_request_id(conversation.index, turn_index - 1) if turn_index else None,
        )

    def _prompt(self, conversation: _Conversation, turn_index: int) -> Int32Array:
        system_seed = token_seed("system prompt", self.seed, conversation.system_prompt)
        parts = [token_stream(system_seed, self.shape.system_prompt_tokens)]
        for index, turn in enumerate(conversation.turns[: turn_index + 1]):
            if index:
                answered = conversation.turns[index - 1].num_answer_tokens
                parts.append(answer_token_ids(_request_id(conversation.index, index - 1), answered))
            question_seed = token_seed("question", self.seed, conversation.index, index)
            parts.append(token_stream(question_seed, turn.num_question_tokens))
        return np.concatenate(parts)


def _request_id(conversation_index: int, turn_index: int) -> str:
    return f"conversation-{conversation_index}-turn-{turn_index + 1}"
