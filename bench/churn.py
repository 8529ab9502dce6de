"""Conversations over shared system prompts, served step by step; W7. Runs in either environment.

A turn's prompt is all of the conversation so far and a new message; its answer is decoded a token
a step. When a turn ends, the conversation goes to the back of the line. The trace depends on the
seed alone: both sides serve the same turns in the same steps.
"""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from side_setup import Setup
from stopwatch import now_s
from workloads import VOCABULARY, Manager

NUM_SYSTEM_PROMPTS = 8
SYSTEM_TOKENS = 1024
MAX_CONVERSATION_TOKENS = 6000


@dataclass
class Conversation:
    """Its tokens up to the last answer."""

    tokens: np.ndarray


@dataclass
class Turn:
    """A prompt under way and the answer that will be decoded."""

    name: str
    prompt: np.ndarray
    answer: np.ndarray
    num_decoded: int = 0
    tokens: Any = field(default=None, repr=False)


class Churn:
    """Serves turns with a fixed number of requests running."""

    def __init__(self, make_manager: Any, setup: Setup) -> None:
        self.manager: Manager = make_manager(setup)
        self.random = np.random.default_rng(7)
        self.num_running = setup.size
        self.as_list = setup.is_list
        self.system = [self._fresh(SYSTEM_TOKENS) for _ in range(NUM_SYSTEM_PROMPTS)]
        self.line = deque(self._conversation() for _ in range(4 * setup.size))
        self.running: list[Turn] = []
        self.count = 0
        self.num_hit_tokens = 0
        self.serve(setup.num_warm_up)
        gc.collect()
        gc.freeze()

    def serve(self, num_turns: int) -> float:
        """Serve until `num_turns` more are done; return the seconds spent in the manager."""
        taken, num_done = 0.0, 0
        while num_done < num_turns:
            finished = [turn.num_decoded == len(turn.answer) for turn in self.running]
            kept = np.array([not is_done for is_done in finished], dtype=bool)
            done = [turn for turn, is_done in zip(self.running, finished, strict=True) if is_done]
            going = [
                turn for turn, is_done in zip(self.running, finished, strict=True) if not is_done
            ]
            for turn in done:
                self._end(turn)
            new = [self._begin() for _ in range(self.num_running - len(going))]
            sampled = np.array([turn.answer[turn.num_decoded] for turn in going], dtype=np.int32)
            arguments = (
                [turn.name for turn in done],
                kept,
                self.manager.tokens(sampled, False),
                [(turn.name, turn.tokens) for turn in new],
            )
            start = now_s()
            self.num_hit_tokens += self.manager.serve_step(*arguments)
            taken += now_s() - start
            for turn in going:
                turn.num_decoded += 1
            self.running = going + new
            num_done += len(done)
        return taken

    def hit_tokens(self) -> int:
        """Return all tokens found in the cache so far."""
        return self.num_hit_tokens

    def _begin(self) -> Turn:
        conversation = self.line.popleft()
        self.count += 1
        prompt = np.concatenate([conversation.tokens, self._fresh(self._length(32, 400))])
        turn = Turn(f"turn-{self.count}", prompt, self._fresh(self._length(20, 180)))
        turn.tokens = self.manager.tokens(prompt, self.as_list)
        return turn

    def _end(self, turn: Turn) -> None:
        tokens = np.concatenate([turn.prompt, turn.answer])
        is_over = len(tokens) > MAX_CONVERSATION_TOKENS
        self.line.append(self._conversation() if is_over else Conversation(tokens))

    def _conversation(self) -> Conversation:
        return Conversation(self.system[int(self.random.integers(NUM_SYSTEM_PROMPTS))])

    def _length(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high))

    def _fresh(self, count: int) -> np.ndarray:
        return self.random.integers(0, VOCABULARY, count, dtype=np.int32)
