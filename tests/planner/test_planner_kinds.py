"""Plans of every kind of layer: what fits, which length fits, and stages without a kind."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from kvcache.base.errors import ConfigurationError, NotEnoughMemoryError
from kvcache.planner import (
    PlanOptions,
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    get_kv_cache_config,
    get_kv_cache_configs,
    get_max_concurrency_for_kv_cache_config,
    max_memory_usage_bytes,
    plan_kv_cache,
    report_plan,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_configs,
)
from kvcache.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

PAGE = 8192
FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64)
WINDOW = SlidingWindowSpec(16, 2, 64, sliding_window=128)
CHUNK = ChunkedLocalAttentionSpec(16, 2, 64, attention_chunk_size=128)
CROSS = CrossAttentionSpec(16, 2, 64, max_encoder_tokens=100)
MLA = MLAAttentionSpec(16, 1, 256)
STATE = MambaSpec(16, shapes=((PAGE,),), dtypes=("int8",))
ALIGNED = MambaSpec(
    16,
    shapes=((PAGE,),),
    dtypes=("int8",),
    mamba_cache_mode="align",
    num_speculative_blocks=1,
)
KINDS: dict[str, KVCacheSpec] = {
    "f": FULL,
    "w": WINDOW,
    "c": CHUNK,
    "x": CROSS,
    "m": MLA,
    "s": STATE,
    "a": ALIGNED,
}


def options(max_model_len: Any = 1600, **changes: Any) -> PlanOptions:
    return PlanOptions(max_model_len=max_model_len, **{"max_num_batched_tokens": 64, **changes})


def model(pattern: str) -> dict[str, KVCacheSpec]:
    return {f"l.{index}": KINDS[letter] for index, letter in enumerate(pattern)}


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [
        ("f", 100),  # 1600 / 16
        ("m", 100),
        ("w", 13),  # ceil((128 - 1 + 64) / 16) and one
        ("c", 12),  # (128 + 64) / 16
        ("x", 7),  # ceil(100 / 16)
        ("s", 1),  # one state
        ("a", 3),  # one to read, one to write, one for a draft
    ],
)
def test_a_request_of_full_length_takes_its_blocks_and_the_null_block(
    kind: str, blocks: int
) -> None:
    specs = model(kind * 2)
    assert max_memory_usage_bytes(options(), specs.values()) == 2 * blocks * PAGE
    check_enough_kv_cache_memory(options(), specs, (blocks + 1) * 2 * PAGE)
    config = get_kv_cache_config(options(), specs, (blocks + 1) * 2 * PAGE)
    assert config.num_blocks == blocks + 1
    concurrency = get_max_concurrency_for_kv_cache_config(options(), config)
    assert concurrency == (blocks + 1) / blocks
    with pytest.raises(NotEnoughMemoryError, match=f"needs {(blocks + 1) * 2 * PAGE} bytes"):
        check_enough_kv_cache_memory(options(), specs, (blocks + 1) * 2 * PAGE - 1)


def test_every_kind_together_adds_up() -> None:
    # One layer of each kind: one pool, with all blocks above and the null block.
    plan = plan_kv_cache(options(), [model("fwcxmsa")], [237 * PAGE])
    assert plan.num_blocks == 237
    assert plan.max_concurrency == 237 / (100 + 13 + 12 + 7 + 100 + 1 + 3)
    assert not plan.can_prefix_cache
    with pytest.raises(NotEnoughMemoryError, match="at most 1584 tokens"):
        plan_kv_cache(options(), [model("fwcxmsa")], [236 * PAGE])


def test_what_does_not_grow_fits_any_length() -> None:
    for pattern, blocks in (("s", 1), ("a", 3), ("x", 7), ("c", 12), ("w", 13)):
        longest = estimate_max_model_len(options(10**9), model(pattern), (blocks + 1) * PAGE)
        assert longest == 10**9
        report = report_plan(plan_kv_cache(options(10**9), [model(pattern)], [(blocks + 1) * PAGE]))
        assert report.largest_model_len is None


def test_a_length_that_is_found_leaves_room_for_states_and_the_encoder() -> None:
    # 30 blocks: the null block, 3 states, 7 blocks of the encoder, 19 blocks of 16 tokens.
    plan = plan_kv_cache(options("auto"), [model("fax")], [30 * PAGE])
    assert plan.max_model_len == 19 * 16
    assert report_plan(plan).largest_model_len == 19 * 16


def test_stages_without_a_kind_have_its_group_and_bound_the_length_all_the_same() -> None:
    stages = [
        {"l.0": FULL, "l.1": FULL},
        {"l.2": ALIGNED, "l.3": ALIGNED},
        {},
    ]
    plan = plan_kv_cache(options("auto"), stages, [2 * 50 * PAGE, 2 * 40 * PAGE, 0])
    assert [[len(g.layer_names) for g in c.kv_cache_groups] for c in plan.configs] == [
        [2, 0],
        [0, 2],
        [0, 0],
    ]
    # The second stage has no full attention, but its 40 blocks are all there are for it.
    assert plan.num_blocks == 40
    assert plan.max_model_len == (40 - 1 - 3) * 16


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "fs",
            "layer l.1 of kind mamba cannot be turned into full attention, because it keeps a "
            "state instead of tokens",
        ),
        (
            "fx",
            "layer l.1 of kind cross cannot be turned into full attention, because it keeps an "
            "encoder's tokens, not those of the request",
        ),
        ("fm", "layers l.0 and l.1 differ even as full attention in kind (full, mla)"),
        (
            "ca",
            "layers l.0 (chunked_local), l.1 (mamba) cannot become one type, because no layer of "
            "the model has full attention",
        ),
    ],
)
def test_kinds_that_cannot_be_combined_into_one_are_named(pattern: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        unify_hybrid_kv_cache_specs(model(pattern))
    assert str(caught.value) == f"{message}: leave disable_hybrid_kv_cache_manager off"


def test_chunks_become_full_attention_with_a_warning() -> None:
    warnings: list[str] = []
    unified = unify_hybrid_kv_cache_specs(model("fcf"), warnings.append)
    assert [spec.kind for spec in unified.values()] == ["full"] * 3
    assert re.match(r"1 of 3 layers keep every token although they read only", warnings[0])
    without = plan_kv_cache(
        options(disable_hybrid_kv_cache_manager=True), [model("fcf")], [101 * 3 * PAGE]
    )
    (group,) = without.model_groups
    assert group.kv_cache_spec == FullAttentionSpec(16, 2, 64, attention_chunk_size=128)


def test_padding_of_pages_and_of_groups_is_what_a_request_wastes() -> None:
    # Pages of 8192: a state of 5000 bytes and three layers of attention, each 16 tokens. Groups of
    # one layer: 1 + 3 * 10 blocks for 160 tokens; only the state's is not full.
    state = MambaSpec(16, shapes=((5000,),), dtypes=("int8",))
    plan = plan_kv_cache(options(160), [{**model("fff"), "l.3": state}], [100 * PAGE])
    report = report_plan(plan)
    assert [group.real_page_size_bytes for group in report.groups] == [PAGE] * 3 + [5000]
    assert report.request_bytes == 31 * PAGE
    assert report.request_padding_bytes == PAGE - 5000
    # Groups of two, as many as there are windows: the three full layers make two of them, and the
    # second leaves a page of each of its ten blocks empty.
    plan = plan_kv_cache(options(160), [model("wwfff")], [100 * 2 * PAGE])
    report = report_plan(plan)
    assert [group.num_layers for group in report.groups] == [2, 2, 1]
    assert report.request_bytes == (11 + 10 + 10) * 2 * PAGE
    assert report.request_padding_bytes == 10 * PAGE


# ---------------------------------------------------------------------------------------------
# Any model
# ---------------------------------------------------------------------------------------------


def any_model(rng: random.Random) -> dict[str, KVCacheSpec]:
    letters = rng.sample(sorted(KINDS), rng.randint(1, 4))
    return model("".join(rng.choice(letters) for _ in range(rng.randint(1, 10))))


@pytest.mark.seeds(60)
def test_the_length_that_fits_is_the_longest(seed: int) -> None:
    rng = random.Random(seed)
    specs, memory = any_model(rng), rng.randint(1, 800) * PAGE
    batched = rng.randint(1, 300)

    def fits(length: int) -> bool:
        asked = options(length, max_num_batched_tokens=batched)
        try:
            plan_kv_cache(asked, [specs], [memory])
        except NotEnoughMemoryError:
            return False
        return True

    limit = rng.choice([50, 2000, 10**6])
    asked = options(limit, max_num_batched_tokens=batched)
    longest = estimate_max_model_len(asked, specs, memory)
    assert longest == 0 or fits(longest)
    assert longest == limit or not fits(longest + 1)
    if longest:
        auto = options("auto", max_num_batched_tokens=batched, max_position_embeddings=limit)
        assert plan_kv_cache(auto, [specs], [memory]).max_model_len == longest


@pytest.mark.seeds(60)
def test_a_plan_over_any_stages_fits_every_rank_and_every_order(seed: int) -> None:
    rng = random.Random(seed)
    specs = any_model(rng)
    stages: list[dict[str, KVCacheSpec]] = [{} for _ in range(rng.randint(1, 4))]
    for name, spec in specs.items():
        rng.choice(stages)[name] = spec
    by_rank = [stage for stage in stages for _ in range(rng.choice([1, 2]))]
    memories = [rng.randint(200, 400) * 10 * PAGE for _ in by_rank]
    plan = plan_kv_cache(options("auto"), by_rank, memories)
    for config, own, memory in zip(plan.configs, by_rank, memories, strict=True):
        assert config.total_size_bytes <= memory
        assert config.num_blocks == plan.num_blocks
        placed = [name for tensor in config.kv_cache_tensors for name in tensor.shared_by]
        assert sorted(placed) == sorted(own)
        for tensor in config.kv_cache_tensors:
            for group in config.kv_cache_groups:
                alignment = group.kv_cache_spec.alignment_bytes
                assert tensor.offset % alignment == tensor.block_stride % alignment == 0
    order = list(range(len(by_rank)))
    rng.shuffle(order)
    shuffled = get_kv_cache_configs(
        options(plan.max_model_len),
        [by_rank[rank] for rank in order],
        [memories[rank] for rank in order],
        warn=lambda _: None,
    )
    assert shuffled == [plan.configs[rank] for rank in order]
    assert unify_kv_cache_configs(shuffled) == shuffled
