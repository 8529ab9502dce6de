"""Plans of many ranks unified: minima, order, layout, fingerprints, and refusals."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.base.errors import ConfigurationError, PlanMismatchError
from kvcache.config import parse_config
from kvcache.planner import (
    PlanOptions,
    RankCoordinates,
    get_kv_cache_config,
    get_kv_cache_configs,
    layout_fingerprint,
    plan_cluster,
    plan_fingerprint,
    plan_kv_cache,
    rank_coordinates,
    report_plan,
    unify_kv_cache_configs,
)
from kvcache.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64)  # 8192 bytes a page
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, sliding_window=128)
PAGE = 8192
OPTIONS = PlanOptions(max_model_len=160, max_num_batched_tokens=64)
PATTERN = "wwwfwwwf"


def model(pattern: str, start: int = 0) -> dict[str, KVCacheSpec]:
    kinds = {"f": FULL, "w": WINDOW}
    return {f"l.{index}": kinds[letter] for index, letter in enumerate(pattern, start)}


def own_plan(specs: dict[str, KVCacheSpec], num_blocks: int, **changes: Any) -> KVCacheConfig:
    """The plan of one rank that has room for exactly `num_blocks`."""
    memory = num_blocks * (PAGE if len(set(specs.values())) > 1 else PAGE * len(specs))
    return replace(get_kv_cache_config(OPTIONS, specs, memory), **changes)


def shuffled(config: KVCacheConfig, rng: random.Random) -> KVCacheConfig:
    """The same plan with its groups, their pools' sharers and its tensors in another order."""
    groups = list(config.kv_cache_groups)
    tensors = [
        replace(tensor, shared_by=rng.sample(tensor.shared_by, len(tensor.shared_by)))
        for tensor in config.kv_cache_tensors
    ]
    rng.shuffle(groups)
    rng.shuffle(tensors)
    return replace(config, kv_cache_groups=groups, kv_cache_tensors=tensors)


# ---------------------------------------------------------------------------------------------
# Worked examples
# ---------------------------------------------------------------------------------------------


def test_full_attention_has_a_pool_per_layer_side_by_side_in_a_block() -> None:
    config = get_kv_cache_config(OPTIONS, model("ff"), 50 * 2 * PAGE)
    strides = {"size": 50 * PAGE, "block_stride": 2 * PAGE, "layer_stride": PAGE}
    assert config == KVCacheConfig(
        num_blocks=50,
        kv_cache_tensors=(
            KVCacheTensor(shared_by=("l.0",), offset=0, **strides),
            KVCacheTensor(shared_by=("l.1",), offset=PAGE, **strides),
        ),
        kv_cache_groups=(KVCacheGroupSpec(("l.0", "l.1"), FULL),),
    )


def test_layer_first_puts_all_blocks_of_a_pool_together() -> None:
    options = replace(OPTIONS, layout="layer_first")
    config = get_kv_cache_config(options, model("ff"), 50 * 2 * PAGE)
    strides = {"size": 50 * PAGE, "block_stride": PAGE, "layer_stride": 50 * PAGE}
    assert config.kv_cache_tensors == (
        KVCacheTensor(shared_by=("l.0",), offset=0, **strides),
        KVCacheTensor(shared_by=("l.1",), offset=50 * PAGE, **strides),
    )


def test_a_pool_is_shared_by_one_layer_of_each_group() -> None:
    config = get_kv_cache_config(OPTIONS, model(PATTERN), 100 * 2 * PAGE)
    assert [tensor.shared_by for tensor in config.kv_cache_tensors] == [
        ("l.0", "l.1", "l.2", "l.3"),
        ("l.4", "l.5", "l.6", "l.7"),
    ]
    assert config.num_blocks == 100


def test_pipeline_stages_are_planned_apart_and_agree_on_the_fewest_blocks() -> None:
    # Stage 0 holds three of five layers: its blocks are larger, so it has the fewest.
    stages = [model("fff"), model("ff", start=3)]
    first, second = get_kv_cache_configs(OPTIONS, stages, [60 * 2 * PAGE, 60 * 2 * PAGE])
    assert (first.num_blocks, second.num_blocks) == (40, 40)
    assert second.total_size_bytes == 40 * 2 * PAGE
    assert [group.layer_names for group in second.kv_cache_groups] == [("l.3", "l.4")]


def test_a_stage_without_layers_of_a_group_has_the_group_all_the_same() -> None:
    first, second = get_kv_cache_configs(OPTIONS, [model("fw"), model("w", 2)], [100 * PAGE] * 2)
    assert [len(group.layer_names) for group in first.kv_cache_groups] == [1, 1, 0]
    assert [len(group.layer_names) for group in second.kv_cache_groups] == [0, 1, 0]
    assert [g.kv_cache_spec for g in first.kv_cache_groups] == [
        g.kv_cache_spec for g in second.kv_cache_groups
    ]


def test_a_rank_without_layers_bounds_nothing() -> None:
    memories = [50 * PAGE, 0]
    first, second = get_kv_cache_configs(OPTIONS, [model("f"), {}], memories)
    assert (first.num_blocks, second.num_blocks) == (50, 50)
    assert second.kv_cache_tensors == ()


def test_the_coordinator_gets_the_groups_of_the_whole_model() -> None:
    plan = plan_kv_cache(OPTIONS, [model("wf"), model("wf", start=2)], [100 * PAGE] * 2)
    assert [g.layer_names for g in plan.model_config.kv_cache_groups] == [
        ("l.0", "l.2"),
        ("l.1", "l.3"),
    ]
    assert plan.model_config.num_blocks == plan.num_blocks == 100
    assert plan.can_prefix_cache


@settings(max_examples=60, deadline=None)
@given(
    pattern=st.text("fw", max_size=8),
    num_blocks=st.integers(60, 70),
    layout=st.sampled_from(["block_first", "layer_first"]),
)
def test_no_two_pages_overlap_and_every_byte_has_a_page(
    pattern: str, num_blocks: int, layout: Any
) -> None:
    options = PlanOptions(max_model_len=16, max_num_batched_tokens=1, layout=layout)
    config = get_kv_cache_config(options, model(pattern), num_blocks * PAGE)
    pages = sorted(
        tensor.offset + block * tensor.block_stride
        for tensor in config.kv_cache_tensors
        for block in range(config.num_blocks)
    )
    assert pages == [index * PAGE for index in range(len(pages))]
    assert config.total_size_bytes == len(pages) * PAGE


# ---------------------------------------------------------------------------------------------
# Unifying
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["num_blocks", "host_blocks", "disk_blocks"])
@pytest.mark.parametrize("smallest", range(4))
def test_every_rank_counts_in_every_tier(field: str, smallest: int) -> None:
    configs = [own_plan(model("ff"), 64, host_blocks=64, disk_blocks=64) for _ in range(4)]
    configs[smallest] = replace(configs[smallest], **{field: 50 + smallest})
    for config in unify_kv_cache_configs(configs):
        assert getattr(config, field) == 50 + smallest
        assert config.total_size_bytes == config.num_blocks * 2 * PAGE
        others = {"num_blocks", "host_blocks", "disk_blocks"} - {field}
        assert {getattr(config, other) for other in others} == {64}


def test_tensors_are_laid_out_again_for_fewer_blocks() -> None:
    options = replace(OPTIONS, layout="layer_first")
    large = get_kv_cache_config(options, model("ff"), 90 * 2 * PAGE)
    small = get_kv_cache_config(options, model("ff"), 50 * 2 * PAGE)
    assert unify_kv_cache_configs([large, small]) == [small, small]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(50, 60), min_size=1, max_size=3))
def test_order_of_groups_and_ranks_never_changes_the_plan(seed: int, blocks: list[int]) -> None:
    rng = random.Random(seed)
    stages = [dict(list(model(PATTERN * 2).items())[:k]) for k in (5, 16)]
    stages[1] = {name: spec for name, spec in stages[1].items() if name not in stages[0]}
    # Two stages of len(blocks) ranks each, every rank with room of its own.
    configs = [
        replace(config, num_blocks=count)
        for config in get_kv_cache_configs(OPTIONS, stages, [100 * 4 * PAGE] * 2)
        for count in blocks
    ]
    expected = unify_kv_cache_configs(configs)
    assert {config.num_blocks for config in expected} == {min(blocks)}
    order = rng.sample(range(len(configs)), len(configs))
    unified = unify_kv_cache_configs([shuffled(configs[rank], rng) for rank in order])
    assert unified == [expected[rank] for rank in order]
    assert unify_kv_cache_configs(expected) == expected


def refusal(*configs: KVCacheConfig) -> str:
    with pytest.raises(PlanMismatchError) as caught:
        unify_kv_cache_configs(configs)
    return str(caught.value)


def test_a_rank_with_another_spec_is_refused_by_rank_group_and_field() -> None:
    config = own_plan(model("wf"), 100)
    groups = list(config.kv_cache_groups)
    groups[1] = replace(groups[1], kv_cache_spec=replace(FULL, dtype="bfloat16"))
    other = replace(config, kv_cache_groups=groups)
    assert refusal(config, config, other) == (
        "rank 2, group 1: dtype is bfloat16, but rank 0 has float16: give all ranks the same specs"
    )


def test_a_rank_with_another_number_of_groups_is_refused() -> None:
    assert refusal(own_plan(model("wf"), 100), own_plan(model("f"), 100)) == (
        "rank 1: number of KV cache groups is 1, but rank 0 has 2: plan all ranks from the merged "
        "specs of the model"
    )


def test_ranks_that_group_shared_layers_differently_are_refused() -> None:
    one = own_plan(model("ff"), 100)
    other = replace(one, kv_cache_groups=[KVCacheGroupSpec(["l.0", "l.2"], FULL)])
    assert refusal(one, other) == (
        "rank 1, group 0: layer_names are l.0, l.2, but rank 0 has l.0 in group 0 of l.0, l.1: "
        "ranks that hold the same layers must group them alike"
    )


def test_a_layer_that_is_in_different_groups_of_equal_specs_is_refused() -> None:
    one = own_plan(model("wwf"), 100)
    assert [g.layer_names for g in one.kv_cache_groups] == [("l.0",), ("l.1",), ("l.2",)]
    groups = [
        KVCacheGroupSpec(["l.1"], WINDOW),
        KVCacheGroupSpec(["l.5"], WINDOW),
        one.kv_cache_groups[2],
    ]
    assert refusal(one, replace(one, kv_cache_groups=groups, kv_cache_tensors=[])) == (
        "rank 1, group 0: layer_names are l.1, but rank 0 has l.1 in group 1 of l.1: ranks that "
        "hold the same layers must group them alike"
    )


def test_ranks_of_different_layouts_are_refused() -> None:
    one = own_plan(model("ff"), 100)
    assert refusal(one, replace(one, layout="layer_first")) == (
        "rank 1: layout is layer_first, but rank 0 has block_first: plan all ranks with one layout"
    )


def test_a_tensor_of_no_group_is_refused() -> None:
    one = own_plan(model("f"), 100)
    other = replace(one, kv_cache_tensors=[KVCacheTensor(PAGE, ["ghost"])])
    assert refusal(one, other) == (
        "rank 1, tensor 0: layer ghost is in none of the rank's KV cache groups: plan the rank "
        "again"
    )


def test_no_plans_are_refused() -> None:
    assert refusal() == "there are no plans to unify: give the plan of every rank"


# ---------------------------------------------------------------------------------------------
# Fingerprints
# ---------------------------------------------------------------------------------------------


def fingerprint(config: KVCacheConfig, **changes: Any) -> str:
    identity: dict[str, Any] = {
        "model": "m",
        "seed": "s",
        "algorithm": "sha256",
        "coordinates": RankCoordinates(0, 2, 0, 1),
    }
    return layout_fingerprint(config, **{**identity, **changes})


def test_a_plan_fingerprint_covers_counts_and_ranks() -> None:
    one, other = own_plan(model("ff"), 100), own_plan(model("ff"), 99)
    marks = [[one], [other], [one, one], [one, other], [other, one]]
    assert len({plan_fingerprint(configs) for configs in marks}) == len(marks)
    assert plan_fingerprint([one]) == plan_fingerprint([KVCacheConfig.from_dict(one.to_dict())])
    assert re.fullmatch("[0-9a-f]{32}", plan_fingerprint([one]))


@pytest.mark.parametrize("layout", ["block_first", "layer_first"])
def test_a_layout_fingerprint_covers_no_counts(layout: Any) -> None:
    options = replace(OPTIONS, layout=layout)
    plans = [get_kv_cache_config(options, model("ff"), count * 2 * PAGE) for count in (100, 99)]
    plans.append(replace(plans[0], host_blocks=7, disk_blocks=8))
    assert len({fingerprint(plan) for plan in plans}) == 1


def test_a_layout_fingerprint_covers_all_that_gives_bytes_their_meaning() -> None:
    one = own_plan(model("ff"), 100)
    dtype = {name: replace(FULL, dtype="bfloat16") for name in model("ff")}
    marks = [
        fingerprint(one),
        fingerprint(one, model="n"),
        fingerprint(one, seed="t"),
        fingerprint(one, algorithm="xxh3_128"),
        fingerprint(one, coordinates=RankCoordinates(1, 2, 0, 1)),
        fingerprint(one, coordinates=RankCoordinates(0, 1, 0, 2)),
        fingerprint(replace(one, layout="layer_first")),
        fingerprint(own_plan(dtype, 100)),
        fingerprint(own_plan(model("fff"), 100)),
        fingerprint(replace(one, kv_cache_tensors=one.kv_cache_tensors[::-1])),
    ]
    assert len(set(marks)) == len(marks)


# ---------------------------------------------------------------------------------------------
# A cluster's plan, and its report
# ---------------------------------------------------------------------------------------------


def cluster(**sections: Any) -> Any:
    layers = [
        {"kind": "full", "count": 3, "num_kv_heads": 4, "head_size": 64},
        {"kind": "sliding_window", "count": 7, "num_kv_heads": 4, "head_size": 64}
        | {"window_tokens": 128},
    ]
    data = {
        "model": {"name": "m", "max_model_len": 160, "layers": layers},
        "cache": {"memory_per_rank": 100 * 3 * PAGE},
        "parallel": {"tensor_parallel_size": 2},
        "scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 8},
    }
    return parse_config({**data, **sections})


def test_a_configuration_is_planned_from_stated_or_reported_memory() -> None:
    assert plan_cluster(cluster()).num_blocks == 100
    assert plan_cluster(cluster(), [90 * 3 * PAGE, 80 * 3 * PAGE]).num_blocks == 80
    with pytest.raises(ConfigurationError, match=r"^cache\.memory_per_rank is not set, "):
        plan_cluster(cluster(cache={}))
    with pytest.raises(ConfigurationError, match=r"^2 ranks state specs and 1 state memory"):
        plan_cluster(cluster(), [80 * 3 * PAGE])


def test_settings_of_the_cache_reach_the_planner() -> None:
    memory = {"memory_per_rank": 200 * 10 * PAGE}
    with_override = plan_cluster(cluster(cache={**memory, "num_blocks": 50}))
    assert with_override.num_blocks == 50
    without_hybrid = plan_cluster(cluster(cache={**memory, "disable_hybrid_manager": True}))
    assert len(without_hybrid.model_groups) == 1
    assert "hybrid manager is disabled" in without_hybrid.warnings[0]
    assert plan_cluster(cluster(cache={**memory, "layout": "layer_first"})).configs[0].layout == (
        "layer_first"
    )


def test_ranks_have_coordinates() -> None:
    config = cluster(parallel={"tensor_parallel_size": 2, "pipeline_parallel_size": 2})
    assert rank_coordinates(config, 3) == RankCoordinates(1, 2, 1, 2)
    assert rank_coordinates(config, 2) == RankCoordinates(0, 2, 1, 2)
    with pytest.raises(ConfigurationError, match=r"^rank is 4: pass an integer from 0 to 3$"):
        rank_coordinates(config, 4)


def test_a_report_says_what_a_plan_means() -> None:
    report = report_plan(plan_cluster(cluster()), "mine")
    assert (report.name, report.num_ranks, report.num_blocks) == ("mine", 2, 100)
    assert report.num_usable_blocks == 99
    assert [group.blocks_per_request for group in report.groups] == [10, 11, 11, 11]
    # 43 blocks serve 160 tokens; a block is 3 pages on each of 2 ranks.
    assert report.max_concurrency == 100 / 43
    assert report.capacity_tokens == 160 * 99 // 43
    assert report.bytes_per_token == 43 * 3 * 2 * PAGE / 160
    assert report.allocated_bytes == 100 * 3 * 2 * PAGE
    rank = report.ranks[1]
    assert (rank.num_layers, rank.block_bytes, rank.unused_bytes) == (10, 3 * PAGE, 0)
    assert rank.bytes_per_token == 43 * 3 * PAGE / 160
    assert rank.padding_waste == pytest.approx(2 / 12)  # ten layers in four groups of three
    assert len(report.warnings) == 1
    assert json.loads(report.to_json())["ranks"][1]["num_blocks"] == 100


def test_a_report_of_a_model_that_keeps_nothing_is_plain_json() -> None:
    report = report_plan(plan_kv_cache(OPTIONS, [{}], [0]))
    assert report.max_concurrency is None
    assert report.capacity_tokens is None
    assert json.loads(report.to_json())["ranks"][0]["allocated_bytes"] == 0


# ---------------------------------------------------------------------------------------------
# Plans that would let layers overwrite each other
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shared_by", "message"),
    [
        ([["l.0"], []], "rank 0, tensor 1: shared_by is empty"),
        ([["l.0"]], "rank 0, group 0: layer l.1 has no tensor"),
        ([["l.0"], ["l.1"], ["l.0"]], "rank 0, tensor 2: layer l.0 is in another tensor already"),
        (
            [["l.0", "l.1"]],
            "rank 0, tensor 0: layers l.0 and l.1 of group 0 share it, and would overwrite each "
            "other",
        ),
    ],
)
def test_every_layer_has_a_tensor_that_no_other_of_its_group_shares(
    shared_by: list[list[str]], message: str
) -> None:
    tensors = [KVCacheTensor(PAGE, names, offset=i) for i, names in enumerate(shared_by)]
    one = replace(own_plan(model("ff"), 100), kv_cache_tensors=tensors)
    assert refusal(one) == f"{message}: plan the rank again"


def test_coordinates_beyond_the_number_of_ranks_are_refused() -> None:
    message = "tensor_rank is 2, but tensor_parallel_size is 2: ranks count from 0"
    with pytest.raises(ConfigurationError, match=f"^{message}$"):
        RankCoordinates(2, 2, 0, 1)
    with pytest.raises(ConfigurationError, match=r"^pipeline_rank is 1, but pipeline_parallel_"):
        RankCoordinates.of_rank(4, 4, 1)
    with pytest.raises(ConfigurationError, match=r"^tensor_parallel_size is 0: "):
        RankCoordinates.of_rank(0, 0, 1)


@pytest.mark.seeds(20)
def test_any_split_over_stages_gives_every_layer_its_own_bytes(seed: int) -> None:
    rng = random.Random(seed)
    specs = model("".join(rng.choice("wwf") for _ in range(rng.randint(1, 12))))
    stages: list[dict[str, KVCacheSpec]] = [{} for _ in range(rng.randint(1, 5))]
    for name, spec in specs.items():
        rng.choice(stages)[name] = spec
    by_rank = [stage for stage in stages for _ in range(rng.choice([1, 2]))]
    rng.shuffle(by_rank)
    memories = [rng.randint(60, 100) * 12 * PAGE for _ in by_rank]
    plan = plan_kv_cache(OPTIONS, by_rank, memories)
    assert len({config.num_blocks for config in plan.configs}) == 1
    for config, own, memory in zip(plan.configs, by_rank, memories, strict=True):
        assert config.total_size_bytes <= memory
        placed = [name for tensor in config.kv_cache_tensors for name in tensor.shared_by]
        assert sorted(placed) == sorted(own)
        for group, whole in zip(config.kv_cache_groups, plan.model_groups, strict=True):
            assert group.kv_cache_spec == whole.kv_cache_spec
            assert set(group.layer_names) == set(whole.layer_names) & set(own)
    fewest = min(
        memory // (PAGE * len(config.kv_cache_tensors))
        for config, memory in zip(plan.configs, memories, strict=True)
        if config.kv_cache_tensors
    )
    assert plan.num_blocks == fewest
