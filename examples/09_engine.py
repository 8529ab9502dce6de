"""A real model on the cache: an engine with the same output, token by token, as without one.

`examples/engine/` is a small inference engine: it schedules continuous batches, asks the
coordinator with one call per step, and its decoder keeps keys and values nowhere but in the pages
that the workers own. Each part below prints what happened, and compares every token with the same
model computed from the start, without blocks.

    .venv/bin/python examples/09_engine.py

Everything runs in this process, but for the last part: two ranks as Ray actors, whose coordinator
is killed while they generate.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from os import kill
from pathlib import Path

import numpy as np
import ray
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `examples.engine`

from examples.engine import MODELS, DenseModel, Engine, EngineConfig, SamplingParams
from examples.engine.ray_executor import RayExecutor
from examples.engine.weights import RandomWeights

SEED = 0


def main() -> None:
    torch.set_num_threads(1)  # the models are tiny
    print("Four models, each asked twice for the same four prompts, seeded sampling:")
    for name in MODELS:
        show_model(name)
    print("\nOne prompt of 200 tokens, continued in different ways (Llama):")
    show_ways()
    print("\nA pool that is too small for six requests, with host memory (Llama):")
    show_pressure()
    print("\nTwo ranks as Ray actors; after a few steps the coordinator's process is killed:")
    show_loss()
    print("\nAll as promised.")


def prompt_of(seed: int, count: int) -> list[int]:
    """Return random tokens."""
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def show_model(name: str) -> None:
    """Cold, then cached."""
    model = MODELS[name]()
    params = SamplingParams(max_tokens=10, temperature=0.8, top_p=0.95, seed=1)
    prompts = [[*prompt_of(0, 60), *prompt_of(seed, 5)] for seed in range(1, 5)]
    dense = DenseModel(model, RandomWeights(SEED))
    expected = [dense.generate(prompt, params) for prompt in prompts]
    with Engine.launch(EngineConfig(model=model, max_chunk_tokens=32)) as engine:
        compare(engine.generate(prompts, params), expected)
        cold = engine.statistics()
        compare(engine.generate(prompts, params), expected)
        warm = engine.statistics()
        first = cold.num_computed_tokens
        print(f"  {name}: layers {', '.join(model.layers)}")
        print(
            f"    {first} tokens computed, then {warm.num_computed_tokens - first}: the same text"
        )
        promise(warm.num_computed_tokens < 2 * first, "the second time less is computed")


def show_ways() -> None:
    """Samples that share a prompt, beams, drafts."""
    model = MODELS["llama"]()
    dense = DenseModel(model, RandomWeights(SEED))
    prompt = [*prompt_of(3, 40), *[9, 8, 7, 6] * 40]
    with Engine.launch(EngineConfig(model=model)) as engine:
        samples = SamplingParams(max_tokens=8, temperature=1.0, seed=5, n=3)
        said = run(engine, prompt, samples)
        compare(said, [dense.generate(prompt, samples, index=index) for index in range(3)])
        print(f"  3 samples: {engine.statistics().num_computed_tokens} tokens computed in all")
        beams = SamplingParams(max_tokens=6, n=2, beam_width=4)
        compare(
            run(engine, prompt, beams),
            [list(beam.token_ids) for beam in dense.beam_search(prompt, beams)],
        )
        print(
            "  the best 2 of 4 beams: those of a search without blocks that are forked and copied"
        )
        drafts = SamplingParams(max_tokens=30, num_draft_tokens=4)
        compare(run(engine, prompt, drafts), [dense.generate(prompt, drafts)])
        statistics = engine.statistics()
        accepted, rejected = statistics.num_accepted_drafts, statistics.num_rejected_drafts
        print(f"  drafts: {accepted} accepted, {rejected} taken back, and not a token differs")


def show_pressure() -> None:
    """Preemption by swap."""
    model = MODELS["llama"]()
    dense = DenseModel(model, RandomWeights(SEED))
    params = SamplingParams(max_tokens=40)
    prompts = [prompt_of(seed, 50 + seed) for seed in range(6)]
    offload = {"host_memory_per_rank": "4MiB", "swap": "always"}
    config = EngineConfig(
        model=model, num_blocks=18, preemption="swap", sections={"offload": offload}
    )
    with Engine.launch(config) as engine:
        compare(
            engine.generate(prompts, params), [dense.generate(prompt, params) for prompt in prompts]
        )
        num_preemptions = engine.statistics().num_preemptions
        print(f"  {num_preemptions} times a request gave way and came back: the same text")
        promise(num_preemptions > 0, "a request was preempted")


def show_loss() -> None:
    """A coordinator that is killed."""
    ray.init(include_dashboard=False, log_to_driver=False)
    model = MODELS["llama"]()
    dense = DenseModel(model, RandomWeights(SEED))
    params = SamplingParams(max_tokens=24)
    prompts = [prompt_of(seed, 40) for seed in range(3)]
    config = EngineConfig(
        model=model, executor="ray", tensor_parallel_size=2, name="engine-example"
    )
    with Engine.launch(config) as engine:
        ids = [engine.add_request(prompt, params) for prompt in prompts]
        said: dict[str, list[int]] = {request_id: [] for request_id in ids}
        num_steps = 0
        while engine.has_unfinished:
            for output in engine.step():
                said[output.request_id] += output.token_ids
            num_steps += 1
            if num_steps == 8 and isinstance(engine.executor, RayExecutor):
                process_id = engine.executor.cluster.status().coordinator_process_id
                kill(process_id, signal.SIGKILL)
        compare(list(said.values()), [dense.generate(prompt, params) for prompt in prompts])
        statistics = engine.statistics()
        print(
            f"  {statistics.num_restarts} restart; {statistics.num_cached_tokens} tokens were "
            "found again"
        )
        promise(statistics.num_restarts == 1, "it went on once")
        promise(statistics.num_cached_tokens > 0, "what was cached is still there")
    ray.shutdown()


def run(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> list[list[int]]:
    """Return the tokens of each sample."""
    engine.add_request(prompt, params)
    said: dict[int, list[int]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            said.setdefault(output.index, []).extend(output.token_ids)
    return [said[index] for index in sorted(said)]


def compare(said: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> None:
    """End with an error unless both are equal."""
    promise(list(said) == list(expected), f"without a cache it is the same: {said}, {expected}")


def promise(holds: bool, what: str) -> None:
    """End the example with exit status 1 unless `what` was promised holds."""
    if not holds:
        sys.exit(f"not as promised: {what}")


if __name__ == "__main__":
    main()
