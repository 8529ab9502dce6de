"""A real router's indexer, subscribed to a real vLLM, sees the tiers below its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.interop.dynamo_indexer import DynamoIndexer
from tests.interop.published_cluster import Answer, Prompt, free_endpoint
from tests.interop.router_venv import OWN_VENV, find_python
from tests.vllm.conftest import Engine, Segment, Starter
from tests.vllm.test_connector import BLOCK, FAMILIES, HITS, PROMPTS
from tests.waiting import wait_until

pytestmark = pytest.mark.vllm

FULL_BLOCKS = (200 + 40 - 1) // BLOCK
"""Of each prompt with its answer."""

MEMORY_BLOCKS = 16
"""Fewer than the prompts have together: others are in files alone."""


@dataclass(frozen=True)
class Source:
    """An address to subscribe to."""

    endpoint: str
    replay_endpoint: str
    block_size: int = BLOCK


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[DynamoIndexer]:
    python = find_python()
    if python is None:
        pytest.skip(f"NOT COMPARED with a real router: {OWN_VENV} is absent, run make test-vllm")
    with DynamoIndexer(python, tmp_path / "indexer") as started:
        yield started


def sources() -> tuple[dict[str, Any], Source]:
    """Return what an engine is told of a publisher, and what its subscribers are."""
    source = Source(free_endpoint(), free_endpoint())
    return {"endpoint": source.endpoint, "replay_endpoint": source.replay_endpoint}, source


def test_a_router_sees_memory_and_files_below_the_device(
    start: Starter, new_name: Callable[[], str], indexer: DynamoIndexer, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    own, publisher = sources()
    streamed, stream = sources()
    name = new_name()
    disk = {"directory": str(files), "capacity_per_rank": "16MiB", "write": "on_store"}
    engine = start(
        {
            "name": name,
            "events": {"enabled": True, **own},
            "offload": {"host_memory_per_rank": f"{64 * MEMORY_BLOCKS}KiB", "disk": disk},
        },
        kv_events_config={
            "enable_kv_cache_events": True,
            # vLLM binds to addresses with a star, and connects to others.
            **{key: value.replace("127.0.0.1", "*") for key, value in streamed.items()},
        },
    )
    indexer.register(stream)
    for i, prompt in enumerate(PROMPTS):  # one by one: memory has room for two
        engine.generate([prompt])
        num_blocks = (i + 1) * FULL_BLOCKS
        agree(engine, indexer, name, files, num_blocks)
    assert [answer(indexer, prompt).device for prompt in PROMPTS] == HITS

    engine.reset()
    agree(engine, indexer, name, files)
    found = [answer(indexer, prompt) for prompt in PROMPTS]
    assert [(each.device, each.storage) for each in found] == [(0, hit) for hit in HITS]

    before = indexer.hashes()
    engine.generate(FAMILIES[:4], 1)
    agree(engine, indexer, name, files)
    after = indexer.hashes()
    assert before["CPU"] - after["CPU"], "nothing was removed from memory"
    assert before["CPU"] <= after["STORAGE"], "what left the memory is not in a file"

    with_tiers = {medium: after[medium] for medium in ("CPU", "STORAGE")}
    indexer.unregister()
    indexer.register(publisher)  # late: it gets the whole state
    wait_until(lambda: indexer.hashes() == with_tiers, lambda: (indexer.hashes(), with_tiers))
    engine.reset(connector=True)
    engine.generate([PROMPTS[0][:20]], 1)
    wait_until(lambda: not indexer.hashes(), indexer.hashes)
    engine.kill()


def agree(
    engine: Engine, indexer: DynamoIndexer, name: str, files: Path, num_files: int | None = None
) -> None:
    """Wait until the indexer knows what memory and files really hold, `num_files` if given."""

    def differences() -> list[Any]:
        engine.generate([PROMPTS[0][:20]], 1)  # less than a block, but a step: events come with it
        hashes = indexer.hashes()
        counts = {len(hashes.get("STORAGE", ())), len(list(files.rglob("*.kvb")))}
        if num_files is not None:
            counts.add(num_files)
        wrong = hashes.get("CPU", set()) ^ Segment(name, 0).event_hashes()
        return [wrong, counts] if wrong or len(counts) > 1 else []

    wait_until(lambda: not differences(), differences)


def answer(indexer: DynamoIndexer, prompt: list[int]) -> Answer:
    return indexer.answer(Prompt(np.array(prompt, np.int32)))
