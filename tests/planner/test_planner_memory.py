"""How many blocks fit: hand arithmetic, whole error messages, and a search checked by counting."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from kvcache.base.errors import ConfigurationError, NotEnoughMemoryError
from kvcache.planner import (
    PlanOptions,
    RankMemory,
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    get_kv_cache_config,
    get_kv_cache_configs,
    get_max_concurrency_for_kv_cache_config,
    get_num_blocks,
    max_memory_usage_bytes,
    plan_kv_cache,
)
from kvcache.specs import FullAttentionSpec, KVCacheConfig, KVCacheSpec, SlidingWindowSpec

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64)  # 8192 bytes a page
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, sliding_window=128)
PAGE = 8192


def options(max_model_len: Any = 160, **changes: Any) -> PlanOptions:
    return PlanOptions(max_model_len=max_model_len, **{"max_num_batched_tokens": 64, **changes})


def model(pattern: str) -> dict[str, KVCacheSpec]:
    kinds = {"f": FULL, "w": WINDOW}
    return {f"l.{index}": kinds[letter] for index, letter in enumerate(pattern)}


def test_blocks_are_what_fits_over_all_pools() -> None:
    assert get_num_blocks(options(), 2, 100 * 2 * PAGE, PAGE) == 100
    assert get_num_blocks(options(), 2, 100 * 2 * PAGE - 1, PAGE) == 99
    assert get_num_blocks(options(), 2, -5, PAGE) == 0
    assert get_num_blocks(options(num_gpu_blocks_override=7), 2, 100 * 2 * PAGE, PAGE) == 7
    with pytest.raises(ConfigurationError, match=r"^num_layers is 0: "):
        get_num_blocks(options(), 0, 100, PAGE)


def test_memory_of_a_request_is_summed_over_layers() -> None:
    # full: 160 / 16 = 10 blocks; window: min(128 - 1 + 64, 160) = 160 tokens, 10 blocks and one
    assert max_memory_usage_bytes(options(), [FULL, FULL]) == 20 * PAGE
    assert max_memory_usage_bytes(options(), [FULL, WINDOW]) == 21 * PAGE


def test_a_request_of_full_length_must_fit_together_with_the_null_block() -> None:
    check_enough_kv_cache_memory(options(), model("ff"), 11 * 2 * PAGE)
    message = (
        "rank 0: a request of 160 tokens needs 180224 bytes (11 blocks of 16384 bytes, the null "
        "block included), available are 180223 bytes (10 blocks): lower max_model_len to at most "
        "144 tokens, or give rank 0 more memory"
    )
    with pytest.raises(NotEnoughMemoryError, match=f"^{re.escape(message)}$"):
        check_enough_kv_cache_memory(options(), model("ff"), 11 * 2 * PAGE - 1)


def test_padding_of_groups_counts_as_needed() -> None:
    # Groups of 3: one full (10 blocks) and three windowed ones (11 each), two of them short.
    specs = model("fff" + "w" * 7)
    needed = (10 + 3 * 11 + 1) * 3 * PAGE
    check_enough_kv_cache_memory(options(), specs, needed)
    with pytest.raises(NotEnoughMemoryError, match=f"needs {needed} bytes"):
        check_enough_kv_cache_memory(options(), specs, needed - 1)


def test_no_room_at_all_is_said_so() -> None:
    with pytest.raises(
        NotEnoughMemoryError, match=r"not even one token fits; give rank 0 more memory$"
    ):
        check_enough_kv_cache_memory(options(), model("f"), PAGE)
    assert estimate_max_model_len(options(), model("f"), PAGE) == 0
    with pytest.raises(NotEnoughMemoryError, match="not even one token fits"):
        get_kv_cache_config(options("auto"), model("f"), PAGE)


def test_the_tightest_rank_is_named() -> None:
    with pytest.raises(NotEnoughMemoryError, match=r"^rank 2: .* give rank 2 more memory$"):
        get_kv_cache_configs(
            options(), [model("f")] * 4, [100 * PAGE, 9 * PAGE, 5 * PAGE, PAGE * 7]
        )


def test_the_length_that_fits_is_estimated_up_to_the_length_asked_for() -> None:
    assert estimate_max_model_len(options(10_000), model("ff"), 11 * 2 * PAGE) == 160
    assert estimate_max_model_len(options(100), model("ff"), 11 * 2 * PAGE) == 100
    assert estimate_max_model_len(options(100), {}, 0) == 100


def test_a_window_alone_fits_any_length() -> None:
    # 128 - 1 + 64 = 191 tokens: 12 blocks, one more, and the null block
    assert estimate_max_model_len(options(10**6), model("w"), 14 * PAGE) == 10**6
    assert estimate_max_model_len(options(10**6), model("w"), 13 * PAGE) == 176


def test_automatic_length_is_what_fits_on_the_tightest_rank() -> None:
    plan = plan_kv_cache(options("auto"), [model("f")] * 2, [50 * PAGE, 11 * PAGE])
    assert plan.max_model_len == 160
    assert plan.options.max_model_len == 160


def test_automatic_length_never_exceeds_what_the_model_was_trained_for() -> None:
    asked = options("auto", max_position_embeddings=100)
    assert plan_kv_cache(asked, [model("f")], [50 * PAGE]).max_model_len == 100


def test_an_override_makes_that_many_blocks() -> None:
    config = get_kv_cache_config(options(num_gpu_blocks_override=20), model("ff"), 100 * 2 * PAGE)
    assert config.num_blocks == 20
    assert config.total_size_bytes == 20 * 2 * PAGE


def test_an_override_beyond_memory_or_below_a_request_is_refused() -> None:
    message = (
        "rank 0: 20 blocks (num_gpu_blocks_override, cache.num_blocks) need 327680 bytes, 327679 "
        "are available: override with at most 19 blocks, or give the rank more memory"
    )
    with pytest.raises(NotEnoughMemoryError, match=f"^{re.escape(message)}$"):
        get_kv_cache_config(options(num_gpu_blocks_override=20), model("ff"), 327679)
    with pytest.raises(
        NotEnoughMemoryError,
        match=r"144 tokens, or raise num_gpu_blocks_override \(cache\.num_blocks\) above 10$",
    ):
        get_kv_cache_config(options(num_gpu_blocks_override=10), model("ff"), 100 * 2 * PAGE)


def test_concurrency_of_a_model_that_keeps_nothing_is_unlimited() -> None:
    config = get_kv_cache_config(options(), {}, 0)
    assert config == KVCacheConfig(1, (), ())
    assert get_max_concurrency_for_kv_cache_config(options(), config) == math.inf


def test_tiers_below_are_counted_in_the_same_blocks() -> None:
    memories = [
        RankMemory(100 * PAGE, host_bytes=50 * PAGE + 1, disk_bytes=70 * PAGE),
        RankMemory(90 * PAGE, host_bytes=60 * PAGE, disk_bytes=10 * PAGE),
    ]
    for config in get_kv_cache_configs(options(), [model("f")] * 2, memories):
        assert (config.num_blocks, config.host_blocks, config.disk_blocks) == (90, 50, 10)


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (
            RankMemory(100 * PAGE, host_bytes=PAGE - 1),
            f"its host memory has {PAGE - 1}: raise offload.host_memory_per_rank, ",
        ),
        (
            RankMemory(100 * PAGE, PAGE, disk_bytes=1),
            "its disk has 1: raise offload.disk.capacity_per_rank, ",
        ),
    ],
)
def test_a_tier_holds_at_least_one_block(memory: RankMemory, said: str) -> None:
    message = f"rank 0: a block needs {PAGE} bytes, {said}or leave this tier out"
    with pytest.raises(NotEnoughMemoryError, match=f"^{re.escape(message)}$"):
        plan_kv_cache(options(), [model("f")], [memory])


def test_memory_must_be_stated_once_per_rank() -> None:
    message = "2 ranks state specs and 1 state memory: give one of each per rank"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        plan_kv_cache(options(), [model("f")] * 2, [PAGE])
    with pytest.raises(ConfigurationError, match=r"^there are no ranks to plan for"):
        plan_kv_cache(options(), [], [])
    with pytest.raises(ConfigurationError, match=r"^device_bytes is -1: "):
        plan_kv_cache(options(), [model("f")], [-1])


@pytest.mark.parametrize(
    "changes",
    [
        {"max_model_len": 0},
        {"max_model_len": "automatic"},
        {"max_num_batched_tokens": 0},
        {"num_gpu_blocks_override": 0},
        {"layout": "blocks"},
    ],
)
def test_options_that_cannot_be_meant_are_refused(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ConfigurationError, match=f"^{name} "):
        PlanOptions(**{"max_model_len": 10, **changes})


def test_a_window_smaller_than_a_block_still_needs_two_of_them() -> None:
    tiny = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, sliding_window=3)
    settings_ = options(10_000, max_num_batched_tokens=1)
    assert max_memory_usage_bytes(settings_, [tiny]) == 2 * PAGE
    assert get_kv_cache_config(settings_, {"l.0": tiny}, 3 * PAGE).num_blocks == 3
    with pytest.raises(NotEnoughMemoryError, match="not even one token fits"):
        get_kv_cache_config(settings_, {"l.0": tiny}, 2 * PAGE)


@pytest.mark.parametrize("memory", [0, PAGE - 1, PAGE])
def test_a_single_block_is_the_null_block_and_serves_no_request(memory: int) -> None:
    for length in ("auto", 1, 160):
        with pytest.raises(NotEnoughMemoryError, match="not even one token fits; give rank 0 more"):
            get_kv_cache_config(options(length), model("f"), memory)


def test_blocks_of_different_sizes_are_counted_by_their_pages() -> None:
    # The narrow layer's page is a quarter: its blocks become 64 tokens. Length 160: full 10 blocks,
    # narrow ceil(160 / 64) = 3. One pool of 8192 bytes, 1 null block: 14 blocks for one request.
    narrow = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32)
    specs: dict[str, KVCacheSpec] = {"l.0": FULL, "l.1": narrow}
    config = get_kv_cache_config(options(), specs, 14 * PAGE)
    assert [group.kv_cache_spec.block_size for group in config.kv_cache_groups] == [16, 64]
    assert config.num_blocks == 14
    assert get_max_concurrency_for_kv_cache_config(options(), config) == 14 / 13
    with pytest.raises(NotEnoughMemoryError, match="at most 144 tokens"):
        get_kv_cache_config(options(), specs, 13 * PAGE)


@pytest.mark.parametrize(
    ("pattern", "layers_per_group", "blocks_of_groups"),
    [
        ("ff", 2, [10]),
        ("ffww", 2, [10, 11]),
        ("ffwww", 2, [10, 11, 11]),  # 3 is not below 1.5 times 2: the windows make two groups
        ("ffffwwwww", 5, [10, 11]),  # 5 is below 1.5 times 4: the full group is padded
    ],
)
def test_concurrency_follows_the_formula_written_out(
    pattern: str, layers_per_group: int, blocks_of_groups: list[int]
) -> None:
    config = get_kv_cache_config(options(), model(pattern), 100 * layers_per_group * PAGE)
    assert config.num_blocks == 100
    assert len(config.kv_cache_tensors) == layers_per_group
    max_bytes = layers_per_group * sum(blocks * PAGE for blocks in blocks_of_groups)
    blocks_of_request = math.ceil(max_bytes / (PAGE * layers_per_group))
    expected = 100 / blocks_of_request
    assert get_max_concurrency_for_kv_cache_config(options(), config) == expected
