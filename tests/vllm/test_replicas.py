"""Two real vLLM engines of one name on a node: each loads what the other one has computed."""

from __future__ import annotations

import fcntl
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvcache.memory_service.client import service_address
from kvcache.memory_service.process import end
from kvcache.metrics.engine_socket import ask_engine
from tests.vllm.conftest import Engine, Segment, Starter
from tests.vllm.test_connector import FULL_BLOCKS, HITS, MEMORY, PROMPTS

pytestmark = pytest.mark.vllm

PROBES = [[(11 * i + 5 * k) % 400 + 50 for i in range(40)] for k in range(50)]
"""Prompts that show whether one engine has seen the other."""


def test_what_one_engine_computes_the_other_loads_even_when_the_first_is_killed(
    start: Starter, new_name: Callable[[], str]
) -> None:
    name = new_name()
    first, second = (start({"name": name, "replica": i, **MEMORY}) for i in (0, 1))
    cold = first.generate(PROMPTS)
    assert cold.cached == [0, 0, 0]
    first.generate(PROBES, 1)
    await_peer(second)

    before = set(Segment(name, 0, 1).digests())
    loaded = second.generate(PROMPTS[:1])
    assert (loaded.cached, loaded.tokens) == (HITS[:1], cold.tokens[:1])
    second.generate([[*PROMPTS[0], *cold.tokens[0], *PROMPTS[1]]], 1)
    second.generate(PROBES[-1:], 1)  # a step after the last one brings its seals
    stored = await_sealed(name, 1, before)
    assert not stored & set(Segment(name, 0, 0).digests())

    first.kill()
    second.reset()
    loaded = second.generate(PROMPTS[:2])
    assert (loaded.cached, loaded.tokens) == (HITS[:2], cold.tokens[:2])

    kept = Segment(name, 0, 0)
    for slot in kept.sealed_slots():
        kept.flip_byte(slot, tensor=slot % len(kept.shape.widths))
    second.reset()
    assert second.generate(PROMPTS).tokens == cold.tokens
    assert "could not load" in second.errors()
    second.reset()
    again = second.generate(PROMPTS)
    assert (again.cached, again.tokens) == (HITS, cold.tokens)
    second.kill()


def test_two_engines_share_one_directory_and_write_each_block_once(
    start: Starter, new_name: Callable[[], str], tmp_path: Path
) -> None:
    disk = {"directory": str(tmp_path), "capacity_per_rank": "64MiB", "write": "on_store"}
    offload = {"host_memory_per_rank": "64MiB", "keeps_memory": False, "disk": disk}
    name = new_name()
    first, second = (start({"name": name, "replica": i, "offload": offload}) for i in (0, 1))
    cold = first.generate(PROMPTS)
    for probe in PROBES[:20]:  # steps, in which blocks go on to files
        first.generate([probe], 1)
    written = {path: path.stat().st_ino for path in tmp_path.rglob("*.kvb")}
    assert len(written) > len(PROMPTS) * FULL_BLOCKS
    assert len({path.parents[1] for path in written}) == 1
    first.kill()
    loaded = second.generate(PROMPTS)
    assert (loaded.cached, loaded.tokens) == (HITS, cold.tokens)
    second.generate(PROBES[:3], 1)
    assert {path: path.stat().st_ino for path in written} == written
    second.kill()


def test_two_writers_keep_their_directory_within_the_limit(
    start: Starter, new_name: Callable[[], str], tmp_path: Path
) -> None:
    draw = random.Random(3)
    load = [[draw.randrange(4, 500) for _ in range(200)] for _ in range(80)]
    alone = start()
    expected = alone.generate(load, 4).tokens
    alone.kill()
    disk = {"directory": str(tmp_path), "capacity_per_rank": "4MiB", "write": "on_store"}
    offload = {"host_memory_per_rank": "2MiB", "disk": disk}
    name = new_name()
    engines = [start({"name": name, "replica": i, "offload": offload}) for i in (0, 1)]

    def answers_of(engine: Engine, order: list[int]) -> list[list[list[int]]]:
        return [engine.generate([load[i]], 4).tokens for i in order]

    orders = [[*range(80), *range(40)], [*range(79, -1, -1), *range(79, 39, -1)]]
    most_bytes = num_files = 0
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(answers_of, *each) for each in zip(engines, orders, strict=True)]
        while not all(each.done() for each in asked):
            sizes = sizes_of_blocks(tmp_path)
            most_bytes, num_files = max(most_bytes, sum(sizes)), max(num_files, len(sizes))
            time.sleep(0.01)
    for each, order in zip(asked, orders, strict=True):
        assert each.result() == [[expected[i]] for i in order]
    for replica in (0, 1):
        tier = ask_engine(name, replica, {"do": "status"})["tiers"]["disk"]
        assert tier["num_stored"] > 128, "each has written more than there is room for"
    head_bytes = max(sizes_of_blocks(tmp_path)) - (64 << 10)
    assert 56 < num_files <= 72  # 4 MiB of blocks of 64 KiB, and an eighth
    assert most_bytes <= (4 << 20) * 9 // 8 + 72 * head_bytes
    for engine in engines:
        engine.kill()


def sizes_of_blocks(directory: Path) -> list[int]:
    """Return the sizes of the files with blocks, finished or not, at one moment: all writers wait
    for the lock."""
    sizes = []
    for changes in directory.rglob("changes"):
        with changes.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            sizes += [path.stat().st_size for path in changes.parent.glob("??/*")]
    return sizes


def test_data_parallel_replicas_share_memory_and_files_and_store_each_block_once(
    start: Starter, new_name: Callable[[], str], tmp_path: Path
) -> None:
    alone = start()
    expected = alone.generate(PROMPTS).tokens
    alone.kill()
    name = new_name()
    disk = {"directory": str(tmp_path), "capacity_per_rank": "64MiB", "write": "on_store"}
    offload = {**MEMORY["offload"], "disk": disk}
    engine = start({"name": name, "offload": offload}, data_parallel_size=2)
    cold = engine.generate(PROMPTS, replicas=[0, 0, 0])
    assert (cold.cached, cold.tokens) == ([0, 0, 0], expected)
    engine.generate(PROBES, 1, replicas=[0] * len(PROBES))
    await_peer(engine, replicas=[1])
    held = [set(Segment(name, 0, replica).digests()) for replica in (0, 1)]
    assert len(held[0]) >= len(PROMPTS) * FULL_BLOCKS
    written = {path: path.stat().st_ino for path in tmp_path.rglob("*.kvb")}
    loaded = engine.generate(PROMPTS, replicas=[1, 1, 1])
    assert (loaded.cached, loaded.tokens) == (HITS, expected)

    whole = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    engine.generate([ids + ids[:100] for ids in whole], 1, replicas=[1, 1, 1])
    engine.generate(PROBES[-1:], 1, replicas=[1])  # a step after the last one brings its seals
    own = await_sealed(name, 1, held[1])
    assert not own & held[0]
    assert {path: path.stat().st_ino for path in written} == written
    engine.kill()
    end(service_address(name).address)

    engine = start({"name": name, "offload": offload}, data_parallel_size=2)
    again = engine.generate(PROMPTS, replicas=[0, 1, 0])
    assert (again.cached, again.tokens) == (HITS, expected)
    files = [path.name for path in tmp_path.rglob("*.kvb")]
    assert len(files) == len(set(files)) >= len(written)
    engine.kill()


def await_sealed(name: str, replica: int, before: set[bytes]) -> set[bytes]:
    """Return what a replica keeps and did not keep before."""
    deadline_s = time.monotonic() + 60
    while not (stored := set(Segment(name, 0, replica).digests()) - before):
        assert time.monotonic() < deadline_s, "the second engine stores nothing"
        time.sleep(0.05)
    return stored


def await_peer(engine: Engine, **options: Any) -> None:
    """Return when an engine loads what another one has computed."""
    deadline_s = time.monotonic() + 60
    for probe in PROBES:
        if engine.generate([probe], 1, **options).cached != [0]:
            return
        assert time.monotonic() < deadline_s, "the engine does not see the other one"
        time.sleep(0.2)
    raise AssertionError("the engine does not see the other one")
