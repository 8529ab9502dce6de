"""Greedy tokens of the real vLLM with our connector, against those without it."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.memory_service.client import MemoryServiceClient, service_address
from kvcache.metrics.engine_socket import ask_engine
from kvcache.simulate import MooncakeTrace
from tests.cli.commands import KVCACHE
from tests.vllm.conftest import (
    Answer,
    Engine,
    Segment,
    Starter,
    await_memory,
    signal_service,
)

pytestmark = pytest.mark.vllm

BLOCK = 32
PROMPTS = [[(7 * i * i + 3 * i + k) % 500 + 4 for i in range(200)] for k in range(3)]
FULL_BLOCKS = 200 // BLOCK
MEMORY: dict[str, Any] = {"offload": {"host_memory_per_rank": "64MiB"}}
HITS = [FULL_BLOCKS * BLOCK] * len(PROMPTS)

REPETITIVE = [[10 + (i + k) % 7 for i in range(200)] for k in range(3)]
"""Prompts with repeated n-grams, which lead to drafts."""

SMALL_POOL = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 128}
"""Room for five of the eight requests that run at a time: prefills in chunks, and preemptions."""


def families() -> list[list[int]]:
    """100 prompts of ten shared prefixes, in random order."""
    draw = random.Random(5)
    prefixes = [[draw.randrange(4, 500) for _ in range(128)] for _ in range(10)]
    tails = [[draw.randrange(4, 500) for _ in range(draw.randrange(1, 100))] for _ in range(100)]
    prompts = [prefixes[i % 10] + tail for i, tail in enumerate(tails)]
    draw.shuffle(prompts)
    return prompts


FAMILIES = families()


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def num_ranks(request: pytest.FixtureRequest) -> int:
    ranks: int = request.param
    return ranks


@pytest.fixture(scope="module")
def one_rank(num_ranks: int) -> None:
    if num_ranks > 1:
        pytest.skip("the same with one rank")


@pytest.fixture(scope="module")
def reference(start: Starter, num_ranks: int) -> dict[str, list[list[int]]]:
    """vLLM's output without a connector."""
    engine = start(tensor_parallel_size=num_ranks)
    found = {
        "prompts": engine.generate(PROMPTS).tokens,
        "repetitive": engine.generate(REPETITIVE, 100).tokens,
    }
    if num_ranks == 1:
        found["families"] = engine.generate(FAMILIES, 16).tokens
    engine.kill()
    return found


@pytest.fixture(scope="module")
def expected(reference: dict[str, list[list[int]]]) -> list[list[int]]:
    return reference["prompts"]


@pytest.fixture(scope="module")
def name(new_name: Callable[[], str], num_ranks: int) -> str:
    return new_name()


@pytest.fixture(scope="module")
def killed(
    start: Starter, num_ranks: int, name: str, expected: list[list[int]]
) -> dict[str, Answer]:
    """An engine's output before it was killed, after its memory service: cold, after a reset, after
    another."""
    extra = {"name": name, "adopt_after_reset": True, **MEMORY}
    engine = start(extra, tensor_parallel_size=num_ranks, is_forked=num_ranks > 1)
    found = {"cold": engine.generate(PROMPTS)}
    engine.reset()
    found["warm"] = engine.generate(PROMPTS)
    engine.reset(connector=True)
    found["after a reset of the connector"] = engine.generate(PROMPTS)
    engine.generate(PROMPTS[:1], 1)  # a step after the last one brings its seals
    kept = MemoryServiceClient(service_address(name).address).list("")
    signal_service(name, signal.SIGKILL)  # first; the engine starts another one
    await_memory(name, num_ranks)
    assert MemoryServiceClient(service_address(name).address).list("") == kept
    engine.kill()
    return found


@pytest.fixture(scope="module")
def num_sealed(killed: dict[str, Answer], name: str, num_ranks: int) -> int:
    """How many blocks a killed engine has left, equally many on each rank."""
    counts = {len(Segment(name, rank).sealed_slots()) for rank in range(num_ranks)}
    assert len(counts) == 1
    return counts.pop()


@pytest.fixture(scope="module")
def restarted(start: Starter, num_ranks: int, name: str, num_sealed: int) -> Iterator[Engine]:
    engine = start({"name": name, **MEMORY}, tensor_parallel_size=num_ranks)
    yield engine
    engine.kill()


def test_tokens_are_the_same_cold_and_after_resets(
    killed: dict[str, Answer], expected: list[list[int]]
) -> None:
    cached = {what: answer.cached for what, answer in killed.items()}
    assert cached == {
        "cold": [0, 0, 0],
        "warm": HITS,
        "after a reset of the connector": [0, 0, 0],
    }
    assert all(answer.tokens == expected for answer in killed.values())


def test_a_killed_engine_leaves_its_blocks_to_the_next(
    restarted: Engine, num_sealed: int, expected: list[list[int]]
) -> None:
    # 240 tokens of each; the last one was never computed.
    assert num_sealed >= 0.99 * len(PROMPTS) * ((240 - 1) // BLOCK)
    answer = restarted.generate(PROMPTS)
    assert answer.cached == HITS
    assert answer.tokens == expected
    whole = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    restarted.reset()
    assert sum(restarted.generate(whole, 1).cached) >= 0.99 * num_sealed * BLOCK


def test_a_changed_byte_is_computed_again(
    restarted: Engine, name: str, num_ranks: int, expected: list[list[int]]
) -> None:
    segment = Segment(name, num_ranks - 1)
    for slot in segment.sealed_slots()[::3]:
        segment.flip_byte(slot, tensor=slot % len(segment.shape.widths))
    restarted.reset()
    assert restarted.generate(PROMPTS).tokens == expected
    assert "could not load" in restarted.errors()
    restarted.reset()
    again = restarted.generate(PROMPTS)
    assert (again.tokens, again.cached) == (expected, HITS)


@pytest.mark.usefixtures("one_rank")
def test_a_salt_shares_with_itself_alone(restarted: Engine, expected: list[list[int]]) -> None:
    restarted.reset()
    cold = restarted.generate(PROMPTS, salts=["a", "b", "c"])
    restarted.reset()
    warm = restarted.generate(PROMPTS, salts=["a", "c", "c"])
    assert (cold.cached, warm.cached) == ([0, 0, 0], [HITS[0], 0, HITS[2]])
    assert cold.tokens == warm.tokens == expected
    restarted.kill()  # the last test that needs it


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_little_memory_large_files_and_preemptions_change_no_token(
    start: Starter,
    new_name: Callable[[], str],
    reference: dict[str, list[list[int]]],
    tmp_path: Path,
    is_asynchronous: bool,
) -> None:
    disk = {"directory": str(tmp_path), "capacity_per_rank": "8MiB"}
    extra = {
        "name": new_name(),
        "is_asynchronous": is_asynchronous,
        "offload": {"host_memory_per_rank": "4MiB", "disk": disk},
    }
    engine = start(extra, **SMALL_POOL)
    order = list(range(len(FAMILIES)))
    for round_ in range(3):
        answer = engine.generate([FAMILIES[i] for i in order], 16)
        assert answer.tokens == [reference["families"][i] for i in order]
        random.Random(round_).shuffle(order)
        engine.reset()
        assert size_of(tmp_path) <= 9 << 20
    counts = engine.count()
    assert counts["num_preemptions"] > 0
    assert counts["external_prefix_cache_hits"] > 100 * BLOCK
    files = list(tmp_path.rglob("*.kvb"))
    assert len(files) > 64
    damage(files[::2])
    for slot in Segment(extra["name"], 0).sealed_slots()[::3]:
        Segment(extra["name"], 0).flip_byte(slot)
    assert engine.generate(FAMILIES, 16).tokens == reference["families"]
    engine.kill()
    files = list(tmp_path.rglob("*.kvb"))
    damage(files[::3])
    engine = start(extra, **SMALL_POOL)
    answer = engine.generate(FAMILIES, 16)
    assert answer.tokens == reference["families"]
    assert sum(answer.cached) > 100 * BLOCK
    engine.kill()


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*.kvb"))


def damage(files: list[Path]) -> None:
    """Flip a byte of one file, cut another one, remove a third, and so on."""
    for i, path in enumerate(files):
        if i % 3 == 0:
            path.unlink(missing_ok=True)
            continue
        try:
            content = bytearray(path.read_bytes())
        except FileNotFoundError:
            continue
        content[-1000] ^= 4
        path.write_bytes(content[: -5000 if i % 3 == 1 else None])


@pytest.mark.usefixtures("one_rank")
def test_another_weight_revision_sees_no_old_block(
    start: Starter, new_name: Callable[[], str], expected: list[list[int]], tmp_path: Path
) -> None:
    name = new_name()
    disk = {"directory": str(tmp_path), "capacity_per_rank": "8MiB", "write": "on_store"}
    old = {"name": name, "weight_revision": "a", "offload": {**MEMORY["offload"], "disk": disk}}
    engine = start(old)
    assert engine.generate(PROMPTS).tokens == expected
    engine.kill()
    with pytest.raises(AssertionError) as ended:
        start({**old, "weight_revision": "b"})
    assert f"offload.disk.directory '{tmp_path}' keeps files of '{name}' for model" in str(
        ended.value
    )
    engine = start({"name": name, "weight_revision": "b", **MEMORY})  # the memory is dropped
    answer = engine.generate(PROMPTS)
    engine.kill()
    assert (answer.cached, answer.tokens) == ([0, 0, 0], expected)


@pytest.mark.usefixtures("one_rank")
def test_aborted_requests_change_no_token_and_leave_nothing_open(
    start: Starter,
    new_name: Callable[[], str],
    reference: dict[str, list[list[int]]],
    tmp_path: Path,
) -> None:
    name = new_name()
    disk = {"directory": str(tmp_path), "capacity_per_rank": "8MiB"}
    offload = {"host_memory_per_rank": "4MiB", "disk": disk}
    engine = start({"name": name, "offload": offload}, **SMALL_POOL)
    for i, num_steps in enumerate((0, 1, 2, 5, 13)):
        first = 10 * i
        found = engine.ask(
            do="abort",
            prompts=FAMILIES[first : first + 20],
            max_tokens=16,
            num_steps=num_steps,
        )
        assert found["tokens"] == reference["families"][first + 1 : first + 20 : 2]
        engine.reset()  # only possible when no block is held any more
    assert engine.count()["external_prefix_cache_hits"] > 20 * BLOCK
    assert engine.generate(FAMILIES[:20], 16).tokens == reference["families"][:20]
    status = ask_engine(name, 0, {"do": "status"})
    assert status["requests"]["num_waiting"] == 0
    engine.kill()


def test_rejected_drafts_are_never_stored(
    start: Starter,
    new_name: Callable[[], str],
    reference: dict[str, list[list[int]]],
    num_ranks: int,
) -> None:
    name = new_name()
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    ranks = {"tensor_parallel_size": num_ranks}
    engine = start({"name": name, **MEMORY}, speculative_config=drafts, **ranks)
    spoken = engine.generate(REPETITIVE, 100)
    assert spoken.tokens == reference["repetitive"]
    engine.generate(REPETITIVE[:1], 1)
    engine.kill()
    engine = start({"name": name, "is_asynchronous": False, **MEMORY}, **ranks)
    whole = [[*prompt, *tokens] for prompt, tokens in zip(REPETITIVE, spoken.tokens, strict=True)]
    loaded = engine.generate(whole, 20)
    assert min(loaded.cached) >= 288 - BLOCK
    engine.reset(connector=True)
    computed = engine.generate(whole, 20)
    assert computed.cached == [0, 0, 0]
    assert loaded.tokens == computed.tokens
    engine.kill()


@pytest.mark.usefixtures("one_rank")
def test_noise_in_loaded_blocks_changes_tokens(
    start: Starter, new_name: Callable[[], str], expected: list[list[int]]
) -> None:
    engine = start({"name": new_name(), **MEMORY}, module="tests.vllm.noisy_connector")
    assert engine.generate(PROMPTS).tokens == expected
    engine.reset()
    noisy = engine.generate(PROMPTS)
    engine.kill()
    assert noisy.cached == HITS
    assert noisy.tokens != expected


@pytest.mark.usefixtures("one_rank")
def test_a_load_that_hangs_and_writes_later_changes_no_token(
    start: Starter,
    new_name: Callable[[], str],
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hang = tmp_path / "hang"
    monkeypatch.setenv("KVCACHE_TEST_HANG", str(hang))
    engine = start(
        {"name": new_name(), "offload": {"host_memory_per_rank": "64MiB", "job_s": 3.0}},
        module="tests.vllm.hanging_connector",
        num_gpu_blocks_override=60,
    )
    assert engine.generate(PROMPTS).tokens == expected
    engine.reset()
    hang.touch()
    computed = engine.generate(PROMPTS)
    assert (computed.tokens, computed.cached) == (expected, [0, 0, 0])
    hang.unlink()
    assert engine.generate(PROMPTS).tokens == expected
    engine.reset()  # only possible when no block is held any more
    loaded = engine.generate(PROMPTS)
    assert (loaded.tokens, loaded.cached) == (expected, HITS)
    engine.kill()


@pytest.mark.usefixtures("one_rank")
def test_a_hinted_prompt_outlasts_others_in_host_memory(
    start: Starter, new_name: Callable[[], str], expected: list[list[int]]
) -> None:
    first, second, _ = PROMPTS
    engine = start(
        {"name": new_name(), "offload": {"host_memory_per_rank": "1536KiB"}}
    )  # 24 blocks
    hints = [{"end": 200, "priority": 100, "duration_s": 600}]
    assert engine.generate([first], transfer={"hints": hints}).tokens == expected[:1]
    bad = {"hints": [{"priority": 1000}]}
    assert engine.generate([second], transfer=bad).tokens == expected[1:2]
    for k in range(3):
        engine.generate([[(5 * i * i + 11 * i + k) % 500 + 4 for i in range(200)]], 1)
    engine.reset()
    again = engine.generate([first])
    assert (again.tokens, again.cached) == (expected[:1], [FULL_BLOCKS * BLOCK])
    assert engine.generate([second]).cached < [FULL_BLOCKS * BLOCK]
    engine.kill()


@pytest.mark.usefixtures("one_rank")
def test_a_prefetch_raises_a_prompt_from_files_and_computes_one_token(
    start: Starter, new_name: Callable[[], str], expected: list[list[int]], tmp_path: Path
) -> None:
    disk = {"directory": str(tmp_path), "capacity_per_rank": "64MiB", "write": "on_store"}
    name, memory = new_name(), {"host_memory_per_rank": "1536KiB", "disk": disk}
    engine = start({"name": name, "offload": memory})
    first, second, _ = PROMPTS
    assert engine.generate([first, second]).tokens == expected[:2]
    for k in range(8):  # 24 blocks in host memory: the others go to files
        engine.generate([[(5 * i * i + 11 * i + k) % 500 + 4 for i in range(200)]], 1)
        while ask_engine(name, 0, {"do": "status"})["tiers"]["host"]["num_dirty"]:
            engine.generate([[3] * 4], 1)  # what has no file yet leaves no room to fetch
    engine.reset()
    unknown = [7] * 300
    prefetch = {"prefetch": True}
    before = ask_engine(name, 0, {"do": "status"})["requests"]
    recorded = tmp_path / "recorded.jsonl"
    recording = subprocess.Popen([*KVCACHE, "record", str(recorded), "--vllm", name])
    while not recorded.exists():
        assert recording.poll() is None
        time.sleep(0.1)
    told = engine.generate([first + unknown, unknown, second], transfer=prefetch)
    after = ask_engine(name, 0, {"do": "status"})["requests"]
    assert told.cached == [FULL_BLOCKS * BLOCK, 0, FULL_BLOCKS * BLOCK]
    assert [len(tokens) for tokens in told.tokens] == [1, 1, 1]
    num_asked = after["num_asked_tokens"] - before["num_asked_tokens"]
    assert num_asked == 2 * FULL_BLOCKS * BLOCK + 3, "one token of each was computed"
    assert after["num_fetched_tokens"] > before["num_fetched_tokens"]
    hits = engine.count()["prefix_cache_hits"]
    again = engine.generate([first, second])
    assert (again.tokens, again.cached) == (expected[:2], HITS[:2])
    assert engine.count()["prefix_cache_hits"] == hits + sum(HITS[:2]), "all from the device"
    assert engine.generate([first + unknown], 8).cached == [FULL_BLOCKS * BLOCK]
    recording.send_signal(signal.SIGINT)
    assert recording.wait(30) == 0
    lengths = [request.input_length for request in MooncakeTrace(recorded).lines()]
    assert sorted(lengths) == sorted(len(each) for each in (first, second, first + unknown))
    engine.kill()
