"""Greedy tokens of the real vLLM with our connector, against those without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.vllm.conftest import Answer, Engine, Segment, Starter

pytestmark = pytest.mark.vllm

BLOCK = 32
PROMPTS = [[(7 * i * i + 3 * i + k) % 500 + 4 for i in range(200)] for k in range(3)]
FULL_BLOCKS = 200 // BLOCK
MEMORY = {"offload": {"host_memory_per_rank": "64MiB"}}
HITS = [FULL_BLOCKS * BLOCK] * len(PROMPTS)


REPETITIVE = [[10 + (i + k) % 7 for i in range(200)] for k in range(3)]
"""Prompts with repeated n-grams, so that there are drafts."""


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def num_ranks(request: pytest.FixtureRequest) -> int:
    ranks: int = request.param
    return ranks


@pytest.fixture(scope="module")
def expected(start: Starter, num_ranks: int) -> list[list[int]]:
    """vLLM's output without a connector."""
    engine = start(tensor_parallel_size=num_ranks)
    tokens = engine.generate(PROMPTS).tokens
    engine.kill()
    return tokens


@pytest.fixture(scope="module")
def name(new_name: Callable[[], str], num_ranks: int) -> str:
    return new_name()


@pytest.fixture(scope="module")
def killed(
    start: Starter, num_ranks: int, name: str, expected: list[list[int]]
) -> dict[str, Answer]:
    """An engine's output before it was killed: cold, after a reset, after another."""
    engine = start({"name": name, **MEMORY}, tensor_parallel_size=num_ranks)
    found = {"cold": engine.generate(PROMPTS)}
    engine.reset()
    found["warm"] = engine.generate(PROMPTS)
    engine.reset(connector=True)
    found["after a reset of the connector"] = engine.generate(PROMPTS)
    engine.generate(PROMPTS[:1], 1)  # a step after the last one brings its seals
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


def test_another_weight_revision_sees_no_old_block(
    start: Starter, new_name: Callable[[], str], expected: list[list[int]], num_ranks: int
) -> None:
    if num_ranks > 1:
        pytest.skip("the same with one rank")
    name = new_name()
    for revision in ("a", "b"):
        engine = start({"name": name, "weight_revision": revision, **MEMORY})
        answer = engine.generate(PROMPTS)
        engine.kill()
        assert (answer.cached, answer.tokens) == ([0, 0, 0], expected)


def test_rejected_drafts_are_never_stored(
    start: Starter, new_name: Callable[[], str], num_ranks: int
) -> None:
    if num_ranks > 1:
        pytest.skip("the same with one rank")
    name = new_name()
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    engine = start({"name": name, **MEMORY}, speculative_config=drafts)
    spoken = engine.generate(REPETITIVE, 100)
    engine.generate(REPETITIVE[:1], 1)
    engine.kill()
    engine = start({"name": name, **MEMORY})
    whole = [[*prompt, *tokens] for prompt, tokens in zip(REPETITIVE, spoken.tokens, strict=True)]
    loaded = engine.generate(whole, 20)
    assert min(loaded.cached) >= 288 - BLOCK
    engine.reset(connector=True)
    computed = engine.generate(whole, 20)
    assert computed.cached == [0, 0, 0]
    assert loaded.tokens == computed.tokens
    engine.reset(connector=True)
    assert engine.generate(REPETITIVE, 100).tokens == spoken.tokens
    engine.kill()


def test_a_wrong_option_ends_the_start_with_one_sentence(
    start: Starter, new_name: Callable[[], str], num_ranks: int
) -> None:
    if num_ranks > 1:
        pytest.skip("the same with one rank")
    with pytest.raises(AssertionError) as ended:
        start({"name": new_name(), "offload": {"host_memory_per_rank": "1KiB"}})
    assert (
        "offload.host_memory_per_rank is 1024 bytes, a block of this model has 65536 on each "
        "rank: set it to many times that"
    ) in str(ended.value)


def test_noise_in_loaded_blocks_changes_tokens(
    start: Starter, new_name: Callable[[], str], expected: list[list[int]], num_ranks: int
) -> None:
    if num_ranks > 1:
        pytest.skip("the same with one rank")
    engine = start({"name": new_name(), **MEMORY}, module="tests.vllm.noisy_connector")
    assert engine.generate(PROMPTS).tokens == expected
    engine.reset()
    noisy = engine.generate(PROMPTS)
    engine.kill()
    assert noisy.cached == HITS
    assert noisy.tokens != expected
