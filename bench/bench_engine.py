"""The benefit and the cost of the cache for an engine. Row E1.

The example engine runs a Llama in one process. Measured against the same engine without
prefix caching: the time to the first token of a prompt with a long cached prefix, and requests that
share a prefix. Measured against the whole step: the engine's time for the coordinator, including
the coding of messages. Everything runs in one thread, and times are its processor time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress

from bench.cores import OURS, PEER
from bench.measure import Figure, Row, alternate

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stopwatch import now_s

from examples.engine import Engine, EngineConfig, SamplingParams, llama

NO_CACHE = "no cache"
WHOLE_STEP = "whole step"
BLOCK_SIZE = 16
NUM_OUTPUT_TOKENS = 16
TAIL_TOKENS = 32


class Served:
    """An engine, and prompts that begin alike."""

    def __init__(self, prefix_tokens: int, num_requests: int, *, has_cache: bool) -> None:
        model = llama(
            layers=("full",) * 4,
            hidden_size=128,
            intermediate_size=256,
            num_heads=8,
            num_kv_heads=2,
            head_size=16,
            max_model_len=prefix_tokens + 256,
            dtype="float32",
        )
        self.engine = Engine.launch(
            EngineConfig(
                model=model,
                block_size=BLOCK_SIZE,
                memory_per_rank="256MiB",
                max_num_batched_tokens=1024,
                max_chunk_tokens=512,
                max_num_seqs=32,
                enable_prefix_caching=has_cache,
            ),
            now_s=now_s,
        )
        self._random = np.random.default_rng(3)
        self._prefix = self._random.integers(0, 256, prefix_tokens).tolist()
        self._num_requests = num_requests
        self.engine.generate([self._prompt()], SamplingParams(max_tokens=1))

    def first_token_s(self) -> float:
        """Return the seconds until a request that comes alone has its first token."""
        start_s = now_s()
        self.engine.generate([self._prompt()], SamplingParams(max_tokens=1))
        return now_s() - start_s

    def request_s(self) -> float:
        """Return the seconds per request of several that come together."""
        prompts = [self._prompt() for _ in range(self._num_requests)]
        start_s = now_s()
        self.engine.generate(prompts, SamplingParams(max_tokens=NUM_OUTPUT_TOKENS))
        return (now_s() - start_s) / self._num_requests

    def shares(self) -> tuple[float, float]:
        """Serve several; return the seconds of a step, with the coordinator's and in all."""
        before = self.engine.statistics()
        self.request_s()
        after = self.engine.statistics()
        count = after.num_steps - before.num_steps
        coordinator_s = after.coordinator_s - before.coordinator_s
        return coordinator_s / count, (after.step_s - before.step_s) / count

    def _prompt(self) -> list[int]:
        return [*self._prefix, *self._random.integers(0, 256, TAIL_TOKENS).tolist()]


def measure_engine(is_smoke: bool, progress: Progress) -> list[Row]:
    """Return the rows of e1: with the cache in the first column, without in the peer's."""
    torch.set_num_threads(1)
    prefix, num_requests, repetitions = (64, 4, 2) if is_smoke else (4096, 4, 5)
    task = progress.add_task("e1", total=3 * repetitions)
    sides = {
        OURS: Served(prefix, num_requests, has_cache=True),
        PEER: Served(prefix, num_requests, has_cache=False),
    }

    def tick() -> None:
        progress.advance(task)

    try:
        first = alternate({n: s.first_token_s for n, s in sides.items()}, repetitions, tick)
        each = alternate({n: s.request_s for n, s in sides.items()}, repetitions, tick)
        steps = []
        for _ in range(repetitions):
            steps.append(sides[OURS].shares())
            tick()
    finally:
        for side in sides.values():
            side.engine.shutdown()
    share = {
        OURS: Figure(tuple(coordinator for coordinator, _ in steps)),
        PEER: Figure(tuple(whole for _, whole in steps)),
    }
    what = f"of {prefix + TAIL_TOKENS} tokens, {prefix} of them shared"
    return [
        Row("e1", f"first token of a prompt {what}", first, NO_CACHE, ""),
        Row("e1", f"a request of {num_requests}, prompts {what}", each, NO_CACHE, ""),
        Row("e1", "coordinator's part of an engine step", share, WHOLE_STEP, ""),
    ]
