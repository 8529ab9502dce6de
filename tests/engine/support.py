"""Common parts of the engine's tests: engines, oracles, and a way to run requests to their end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from examples.engine import MODELS, DenseModel, Engine, EngineConfig, Output, SamplingParams
from examples.engine.executor import LocalExecutor
from examples.engine.model_config import DecoderConfig
from examples.engine.weights import RandomWeights
from kvcache.coordinator import Coordinator

MAX_STEPS = 20_000

ALL_MODELS = [
    pytest.param(name, marks=pytest.mark.long) if name == "llama" else name for name in MODELS
]
"""What the first one has, the hybrids have as well."""

ADAPTERS = ("french", "german")

TIGHT: dict[str, dict[str, int]] = {
    "llama": {"num_blocks": 34},
    "gemma-hybrid": {"num_blocks": 60, "max_num_batched_tokens": 32},
    "latent": {"num_blocks": 34},
    "mamba-hybrid": {"num_blocks": 38},
}
"""By model, a pool that barely holds one request of full length."""

GREEDY = SamplingParams(max_tokens=8)
SAMPLED = SamplingParams(max_tokens=8, temperature=1.0, top_k=50, top_p=0.9, seed=7)

torch.set_num_threads(1)


@cache
def model(name: str) -> DecoderConfig:
    """The small model of that name."""
    return MODELS[name]()


@cache
def oracle(name: str) -> DenseModel:
    """The same model without a cache."""
    return DenseModel(model(name), RandomWeights(0), ADAPTERS)


@cache
def _expected(
    name: str, prompt: tuple[int, ...], params: SamplingParams, index: int, adapter: str | None
) -> tuple[int, ...]:
    return tuple(oracle(name).generate(prompt, params, index=index, adapter=adapter))


def expected(
    name: str,
    prompt: Sequence[int],
    params: SamplingParams,
    index: int = 0,
    adapter: str | None = None,
) -> list[int]:
    """The expected output, computed without a cache."""
    return list(_expected(name, tuple(prompt), params, index, adapter))


def launch(name: str = "llama", **changes: Any) -> Engine:
    """An engine in this process: blocks of 8 tokens, chunks of 24."""
    settings: dict[str, Any] = {"block_size": 8, "max_chunk_tokens": 24, "adapters": ADAPTERS}
    return Engine.launch(EngineConfig(model=model(name), **{**settings, **changes}))


def coordinator(engine: Engine) -> Coordinator:
    """The coordinator of an engine in this process."""
    assert isinstance(engine.executor, LocalExecutor)
    return engine.executor.cluster.coordinator


def tokens(seed: int, count: int) -> list[int]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


@dataclass
class Told:
    """An engine's output of a sample."""

    token_ids: list[int]
    text: str = ""
    reason: str | None = None
    error: str = ""
    num_cached: int = 0
    score: float = 0.0


def collect(outputs: Iterable[Output], into: dict[tuple[str, int], Told]) -> None:
    """Combine outputs by request and sample."""
    for output in outputs:
        told = into[output.request_id, output.index]
        assert told.reason is None, "nothing comes after the end"
        told.token_ids += output.token_ids
        told.text += output.text
        told.reason, told.error = output.finish_reason, output.error
        told.num_cached, told.score = output.num_cached_tokens, output.score


def run(engine: Engine) -> dict[tuple[str, int], Told]:
    """Step until every request has ended and the last step is sealed."""
    told: dict[tuple[str, int], Told] = defaultdict(lambda: Told([]))
    for _ in range(MAX_STEPS):
        if not engine.has_unfinished:
            break
        collect(engine.step(), told)
    assert not engine.has_unfinished, "the engine has come to rest"
    settle(engine)
    return told


def settle(engine: Engine) -> None:
    """Let the engine report finished requests."""
    for _ in range(3):
        assert engine.step() == []


def run_one(engine: Engine, prompt: Sequence[int], params: SamplingParams, **more: Any) -> Told:
    """Run one request alone."""
    request_id = engine.add_request(prompt, params, **more)
    return run(engine)[request_id, 0]


def require_nothing_is_held(engine: Engine) -> None:
    """Fail unless every block is free or cached, and no request is known any more."""
    manager = coordinator(engine).manager
    manager.check()
    statistics = manager.statistics()
    assert (statistics.num_running_requests, statistics.num_preempted_requests) == (0, 0)
    assert manager.usage == 0.0
    assert isinstance(engine.executor, LocalExecutor)
    for worker in engine.executor.cluster.workers:
        worker.worker.check()
