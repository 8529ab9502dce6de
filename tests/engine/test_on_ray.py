"""Ranks as Ray actors: the same tokens, also after the coordinator was killed."""

from __future__ import annotations

import os
import signal
from collections import defaultdict

import pytest

from examples.engine import Engine, EngineConfig, SamplingParams
from examples.engine.ray_executor import RayExecutor
from tests.engine.support import ADAPTERS, Told, collect, expected, model, tokens

pytestmark = pytest.mark.ray

PROMPTS = [[*tokens(0, 30), *tokens(seed, 4 * seed)] for seed in range(1, 5)]
LONG = SamplingParams(max_tokens=24, temperature=1.0, seed=4)

DEADLINES = {"startup_s": 120.0, "step_s": 40.0, "shutdown_s": 4.0}
TRANSPORT = {"resend_s": 0.2, "heartbeat_s": 0.4}


def launch_on_ray(name: str, cluster: str, **changes: int) -> Engine:
    return Engine.launch(
        EngineConfig(
            model=model(name),
            executor="ray",
            name=cluster,
            block_size=8,
            max_chunk_tokens=24,
            adapters=ADAPTERS,
            sections={"deadlines": DEADLINES, "transport": TRANSPORT},
            **changes,
        )
    )


def finish(engine: Engine, told: dict[tuple[str, int], Told]) -> None:
    while engine.has_unfinished:
        collect(engine.step(), told)


def require_the_same(told: dict[tuple[str, int], Told], ids: list[str], name: str) -> None:
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        assert told[request_id, 0].token_ids == expected(name, prompt, LONG)


@pytest.mark.faults
def test_two_stages_of_two_ranks_survive_their_coordinator(ray_cluster: str) -> None:
    with launch_on_ray(
        "gemma-hybrid", "engine-four", tensor_parallel_size=2, pipeline_parallel_size=2
    ) as engine:
        executor = engine.executor
        assert isinstance(executor, RayExecutor)
        ids = [engine.add_request(prompt, LONG) for prompt in PROMPTS]
        told: dict[tuple[str, int], Told] = defaultdict(lambda: Told([]))
        for _ in range(8):
            collect(engine.step(), told)
        os.kill(executor.cluster.status().coordinator_process_id, signal.SIGKILL)
        finish(engine, told)
        require_the_same(told, ids, "gemma-hybrid")
        statistics = engine.statistics()
        assert statistics.num_restarts == 1
        assert statistics.num_cached_tokens >= 4 * 24, "what was sealed was found again"


@pytest.mark.faults
@pytest.mark.parametrize("tensor_size", [1, 2])
def test_lost_ranks_are_replaced_without_a_reader_noticing(
    ray_cluster: str, tensor_size: int
) -> None:
    with launch_on_ray(
        "llama", f"engine-lost-{tensor_size}", tensor_parallel_size=tensor_size
    ) as engine:
        executor = engine.executor
        assert isinstance(executor, RayExecutor)
        told: dict[tuple[str, int], Told] = defaultdict(lambda: Told([]))
        for number in range(2):  # a process that took a lost one's place can be lost as well
            ids = [engine.add_request(prompt, LONG) for prompt in PROMPTS]
            for _ in range(8):
                collect(engine.step(), told)
            os.kill(executor.cluster.status().ranks[-1].process_id, signal.SIGKILL)
            finish(engine, told)
            require_the_same(told, ids, "llama")
            assert engine.statistics().num_restarts > number
