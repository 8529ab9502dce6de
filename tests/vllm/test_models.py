"""Models with several layer kinds, and stages of a model, on the real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.vllm.conftest import Engine, Segment, Starter, made_model
from tests.vllm.test_connector import BLOCK, FAMILIES, HITS, MEMORY, PROMPTS, SMALL_POOL, damage

pytestmark = pytest.mark.vllm

PIPELINE = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},  # traced, without a C++ compiler
}
"""On CPUs, vLLM makes the tensors between stages only where it compiles the model."""


class Hybrid(NamedTuple):
    """A model whose layers have sliding windows and full attention, and its output alone."""

    model: str
    expected: list[list[int]]
    of_families: list[list[int]]


def require_hits_after_a_reset(engine: Engine, expected: list[list[int]]) -> None:
    """Check that a new engine computes all, and loads all once vLLM has forgotten it."""
    cold = engine.generate(PROMPTS)
    engine.reset()
    warm = engine.generate(PROMPTS)
    assert (cold.cached, warm.cached) == ([0, 0, 0], HITS)
    assert cold.tokens == warm.tokens == expected


@pytest.fixture(scope="module")
def hybrid(start: Starter, python: str, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    model = made_model(python, tmp_path_factory.mktemp("gemma3"), "gemma3")
    engine = start(model=model, **SMALL_POOL)
    expected = engine.generate(PROMPTS).tokens
    of_families = engine.generate(FAMILIES[:40], 16).tokens
    engine.kill()
    return Hybrid(model, expected, of_families)


def test_groups_with_sliding_windows_are_kept_and_survive_a_kill(
    start: Starter, new_name: Callable[[], str], hybrid: Hybrid, tmp_path: Path
) -> None:
    model, expected, of_families = hybrid
    disk = {"directory": str(tmp_path), "capacity_per_rank": "24MiB"}
    extra = {"name": new_name(), "offload": {"host_memory_per_rank": "4MiB", "disk": disk}}
    engine = start(extra, model=model, **SMALL_POOL)
    for is_known in (False, True):
        answer = engine.generate(FAMILIES[:40], 16)
        assert answer.tokens == of_families
        assert not is_known or sum(answer.cached) > 100 * BLOCK
        engine.reset()
    require_hits_after_a_reset(engine, expected)
    engine.generate(PROMPTS[:1], 1)
    engine.kill()
    segment = Segment(extra["name"], 0)
    assert {0, 1} == set(segment.groups())
    engine = start(extra, model=model, **SMALL_POOL)
    adopted = engine.generate(PROMPTS)
    assert (adopted.cached, adopted.tokens) == (HITS, expected)
    engine.reset()
    for slot in segment.sealed_slots()[::3]:
        segment.flip_byte(slot, tensor=slot % len(segment.shape.widths))
    assert engine.generate(PROMPTS).tokens == expected
    assert "could not load" in engine.errors()
    damage(list(tmp_path.rglob("*.kvb"))[::3])
    assert engine.generate(FAMILIES[:40], 16).tokens == of_families
    engine.kill()


def test_groups_with_sliding_windows_only_load_their_last_blocks(
    start: Starter, new_name: Callable[[], str], python: str, tmp_path: Path
) -> None:
    model = made_model(python, tmp_path / "mistral", "mistral")
    engine = start(model=model)
    expected = engine.generate(PROMPTS).tokens
    engine.kill()
    name = new_name()
    engine = start({"name": name, **MEMORY}, model=model)
    require_hits_after_a_reset(engine, expected)
    segment = Segment(name, 0)
    for slot in segment.sealed_slots()[::2]:
        segment.flip_byte(slot)
    engine.reset()
    assert engine.generate(PROMPTS).tokens == expected
    assert "could not load" in engine.errors()
    engine.kill()


def test_pipeline_ranks_keep_their_layers_and_survive_a_kill(
    start: Starter, new_name: Callable[[], str], python: str, tmp_path: Path
) -> None:
    model = made_model(python, tmp_path / "llama3", "llama3")
    engine = start(model=model)
    expected = engine.generate(PROMPTS).tokens
    engine.kill()
    name = new_name()
    engine = start({"name": name, **MEMORY}, model=model, **PIPELINE)
    require_hits_after_a_reset(engine, expected)
    engine.generate(PROMPTS[:1], 1)
    engine.kill()
    segments = [Segment(name, rank) for rank in range(2)]
    assert [len(segment.shape.widths) for segment in segments] == [2, 1]
    engine = start({"name": name, **MEMORY}, model=model, **PIPELINE)
    for slot in segments[1].sealed_slots()[::3]:
        segments[1].flip_byte(slot)
    answer = engine.generate(PROMPTS)
    engine.kill()
    assert answer.tokens == expected
    assert "could not load" in engine.errors()


def test_noise_in_loaded_blocks_of_a_hybrid_changes_tokens(
    start: Starter, new_name: Callable[[], str], hybrid: Hybrid
) -> None:
    extra = {"name": new_name(), **MEMORY}
    engine = start(extra, module="tests.vllm.noisy_connector", model=hybrid.model)
    assert engine.generate(PROMPTS).tokens == hybrid.expected
    engine.reset()
    noisy = engine.generate(PROMPTS)
    engine.kill()
    assert noisy.cached == HITS
    assert noisy.tokens != hybrid.expected
