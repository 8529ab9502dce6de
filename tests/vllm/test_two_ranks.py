"""Everything at once with two ranks: memory, files, preemptions, an adapter, damage, a kill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvcache.metrics.engine_socket import ask_engine
from tests.vllm.conftest import Segment, Starter, make_adapter
from tests.vllm.test_connector import BLOCK, FAMILIES, HITS, PROMPTS, SMALL_POOL, damage

pytestmark = pytest.mark.vllm

OPTIONS = {"tensor_parallel_size": 2, "enable_lora": True, "max_lora_rank": 8}


def test_two_ranks_with_little_memory_files_preemptions_and_an_adapter_change_no_token(
    start: Starter, new_name: Callable[[], str], python: str, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    adapter = make_adapter(python, tmp_path, 1)
    engine = start(**OPTIONS)
    expected = engine.generate(FAMILIES, 16).tokens
    adapted = engine.generate(PROMPTS, adapter=adapter).tokens
    assert adapted != engine.generate(PROMPTS).tokens
    engine.kill()
    disk = {"directory": str(files), "capacity_per_rank": "8MiB"}
    name = new_name()
    extra = {"name": name, "offload": {"host_memory_per_rank": "2MiB", "disk": disk}}
    engine = start(extra, **OPTIONS, **SMALL_POOL)
    for order in (1, -1, 1):
        assert engine.generate(FAMILIES[::order], 16).tokens == expected[::order]
        engine.reset()
    cold = engine.generate(PROMPTS, adapter=adapter)
    engine.reset()
    warm = engine.generate(PROMPTS, adapter=adapter)
    assert (cold.cached, warm.cached) == ([0, 0, 0], HITS)
    assert cold.tokens == warm.tokens == adapted
    assert engine.count()["num_preemptions"] > 0
    found = ask_engine(name, 0, {"do": "status"})["requests"]
    assert found["num_file_tokens"] > 10 * BLOCK, "from files"
    assert found["num_loaded_tokens"] - found["num_file_tokens"] > 10 * BLOCK, "from memory"

    engine.reset()
    per_rank = [sorted(files.rglob(f"rank{rank}/??/*.kvb")) for rank in (0, 1)]
    assert min(map(len, per_rank)) > 64
    for paths, first in zip(per_rank, (0, 1), strict=True):
        damage(paths[first::2])  # of each block, on one rank only
    for slot in Segment(name, 1).sealed_slots()[::3]:
        Segment(name, 1).flip_byte(slot)
    assert engine.generate(FAMILIES, 16).tokens == expected
    engine.kill()
    engine = start(extra, **OPTIONS, **SMALL_POOL)
    answer = engine.generate(FAMILIES, 16)
    assert answer.tokens == expected
    assert sum(answer.cached) > 20 * BLOCK
    engine.kill()
