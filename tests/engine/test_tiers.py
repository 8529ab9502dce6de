"""Blocks that return from host memory and from files give the same output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.engine import Engine, SamplingParams
from examples.engine.executor import LocalExecutor
from kvcache.base.errors import RequestError
from tests.engine.support import (
    GREEDY,
    TIGHT,
    coordinator,
    expected,
    launch,
    require_nothing_is_held,
    run,
    run_one,
    tokens,
)
from tests.waiting import wait_until

MODELS_WITH_TIERS = (pytest.param("llama", marks=pytest.mark.long), "gemma-hybrid", "latent")
"""Models without states: tiers refuse those with states."""

PROMPTS = [tokens(seed, 60) for seed in range(10)]


def tiers(engine: Engine) -> Any:
    statistics = coordinator(engine).statistics().offload
    return statistics.tiers


def store_all(engine: Engine) -> None:
    """Wait until all stores have ended: blocks evicted earlier would be computed again."""
    assert isinstance(engine.executor, LocalExecutor)

    def is_pending() -> bool:
        return any(tier and tier.num_pending for tier in (tiers(engine).host, tiers(engine).disk))

    wait_until(lambda: not is_pending(), meanwhile=engine.executor.cluster.pump)


@pytest.mark.parametrize("name", MODELS_WITH_TIERS)
def test_a_prompt_comes_back_from_host_memory(name: str) -> None:
    sections = {"offload": {"host_memory_per_rank": "4MiB"}}
    with launch(name, **TIGHT[name], sections=sections) as engine:
        for prompt in PROMPTS:
            run_one(engine, prompt, GREEDY)
            store_all(engine)
        again = run_one(engine, PROMPTS[0], GREEDY)
        assert again.num_cached == 56, "all its full blocks"
        assert tiers(engine).host.num_loaded > 0
        assert again.token_ids == expected(name, PROMPTS[0], GREEDY)
        require_nothing_is_held(engine)


def test_a_prefetched_prompt_is_on_the_device_before_its_request_comes() -> None:
    sections = {"offload": {"host_memory_per_rank": "4MiB"}}
    with launch(**TIGHT["llama"], sections=sections) as engine:
        for prompt in PROMPTS:
            run_one(engine, prompt, GREEDY)
            store_all(engine)
        assert engine.prefetch(PROMPTS[0]) == 56, "all its full blocks"
        wait_until(lambda: not engine.prefetch(PROMPTS[0]), meanwhile=engine.step)
        num_loaded = tiers(engine).host.num_loaded
        again = run_one(engine, PROMPTS[0], GREEDY)
        assert (again.num_cached, tiers(engine).host.num_loaded) == (56, num_loaded)
        assert again.token_ids == expected("llama", PROMPTS[0], GREEDY)
        with pytest.raises(RequestError, match="token -1 is not in the vocabulary"):
            engine.prefetch([-1])
        require_nothing_is_held(engine)


@pytest.mark.parametrize("name", MODELS_WITH_TIERS)
def test_a_prompt_comes_back_from_files_also_in_the_next_engine(name: str, tmp_path: Path) -> None:
    offload = {
        "host_memory_per_rank": "128KiB",
        "spare_share": 0.5,
        "disk": {"directory": str(tmp_path), "capacity_per_rank": "8MiB", "write": "on_store"},
    }
    more = {**TIGHT[name], "sections": {"offload": offload}}
    want = expected(name, PROMPTS[0], GREEDY)
    with launch(name, **more) as engine:
        for prompt in PROMPTS:
            run_one(engine, prompt, GREEDY)
            store_all(engine)
        again = run_one(engine, PROMPTS[0], GREEDY)
        assert (again.num_cached, again.token_ids) == (56, want)
        assert tiers(engine).disk.num_loaded > 0
    with launch(name, **more) as engine:
        later = run_one(engine, PROMPTS[0], GREEDY)
        assert (later.num_cached, later.token_ids) == (56, want)
        require_nothing_is_held(engine)


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("name", MODELS_WITH_TIERS)
def test_a_swapped_request_goes_on_where_it_was(name: str, is_pipelined: bool) -> None:
    # Of different lengths, so that the preempted request has a partly filled block.
    prompts = [tokens(seed, 30 + seed) for seed in range(6)]
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=1)
    sections = {"offload": {"host_memory_per_rank": "4MiB", "swap": "always"}}
    with launch(
        name, **TIGHT[name], sections=sections, preemption="swap", is_pipelined=is_pipelined
    ) as engine:
        ids = [engine.add_request(prompt, params) for prompt in prompts]
        told = run(engine)
        for request_id, prompt in zip(ids, prompts, strict=True):
            assert told[request_id, 0].token_ids == expected(name, prompt, params)
        assert engine.statistics().num_preemptions > 0
        statistics = coordinator(engine).statistics().offload
        assert statistics.num_swapped_in > 0
        require_nothing_is_held(engine)


def test_a_request_can_be_aborted_while_its_prompt_is_loaded(tmp_path: Path) -> None:
    sections = {"offload": {"host_memory_per_rank": "4MiB", "hold_s": 0.01}}
    with launch(**TIGHT["llama"], sections=sections) as engine:
        for prompt in PROMPTS:
            run_one(engine, prompt, GREEDY)
        gone = engine.add_request(PROMPTS[0], GREEDY)
        sequence = engine._table.requests[gone].samples[0].sequence
        engine.step()
        assert sequence.is_loading
        assert engine.abort(gone)
        other = run_one(engine, PROMPTS[5], GREEDY)
        assert other.token_ids == expected("llama", PROMPTS[5], GREEDY)
