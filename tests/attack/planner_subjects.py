"""Part of the table: specs, plans, and the functions that make plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kvcache import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HFChoices,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    Plan,
    PlanOptions,
    RankMemory,
    SlidingWindowSpec,
    check_enough_kv_cache_memory,
    cluster_from_hf_config,
    create_kv_cache_group_specs,
    estimate_max_model_len,
    get_kv_cache_config,
    get_kv_cache_configs,
    get_manager_for_kv_cache_spec,
    get_max_concurrency_for_kv_cache_config,
    get_num_blocks,
    get_uniform_page_size,
    is_kv_cache_page_size_uniform,
    is_kv_cache_type_attention_free,
    is_kv_cache_type_uniform,
    layout_fingerprint,
    max_memory_usage_bytes,
    model_from_hf_config,
    plan_fingerprint,
    plan_kv_cache,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_configs,
)
from kvcache.config import ClusterConfig, parse_config
from kvcache.planner import (
    RankCoordinates,
    get_kv_cache_groups,
    layer_order,
    merge_rank_specs,
    plan_cluster,
    plan_options,
    project_groups,
    rank_coordinates,
    rank_layout_fingerprint,
    rank_memory,
    report_plan,
    unify_page_sizes,
)
from kvcache.specs import (
    SPEC_KINDS,
    KVCacheSpec,
    can_cache_prefixes,
    dtype_size_bytes,
    first_difference,
    require_eagle_support,
    spec_from_dict,
)
from kvcache.tables.single_type_managers import MANAGERS
from tests.attack.argument_kinds import (
    BOOL,
    COUNT,
    DTYPE,
    HOSTILE,
    INTEGER,
    MAPPING,
    NAME,
    NO_LIST,
    OBJECT,
    POSITIVE,
    TEXT,
    THING,
    Kind,
    instance_of,
    list_of,
)
from tests.attack.parameter_kinds import CONFIG, SPEC
from tests.attack.type_table import Arguments, Builder, Case, Subject, function_case
from tests.planner.public_models import LLAMA_3_8B

# --- specs ---------------------------------------------------------------------------------------

SPEC_ARGUMENTS: Arguments = {
    "block_size": 4,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": "float16",
    "page_size_padded": 512,
}
SPECS: dict[type[KVCacheSpec], Arguments] = {
    FullAttentionSpec: {
        **SPEC_ARGUMENTS,
        "use_mla": False,
        "sliding_window": 8,
        "attention_chunk_size": None,
    },
    MLAAttentionSpec: {
        **SPEC_ARGUMENTS,
        "use_mla": True,
        "sliding_window": None,
        "attention_chunk_size": 8,
    },
    SlidingWindowSpec: {**SPEC_ARGUMENTS, "sliding_window": 8},
    ChunkedLocalAttentionSpec: {**SPEC_ARGUMENTS, "attention_chunk_size": 8},
    CrossAttentionSpec: {**SPEC_ARGUMENTS, "max_encoder_tokens": 8},
    MambaSpec: {
        "block_size": 4,
        "shapes": ((8,),),
        "dtypes": ("float16",),
        "mamba_cache_mode": "align",
        "num_speculative_blocks": 2,
        "page_size_padded": 512,
    },
}
DATA = Kind("plain values", (*MAPPING.wrong, {}, {"kind": 1}, {"unknown": 1}, {1: 2}))


def spec_cases() -> list[Case]:
    limits = {"sliding_window": POSITIVE, "attention_chunk_size": POSITIVE}
    kinds = {
        "num_kv_heads": POSITIVE,
        "head_size": POSITIVE,
        "dtype": DTYPE,
        "page_size_padded": POSITIVE.without(None).also(5),
        "use_mla": BOOL,
        "max_encoder_tokens": POSITIVE,
        "shapes": Kind(
            "shapes", (*NO_LIST, [5], [(1.5,)], [("8",)], [(True,)], [(0,)], [(None,)], ["8"])
        ),
        "dtypes": list_of("dtypes", ["no such"]),
        "mamba_cache_mode": NAME,
        "num_speculative_blocks": COUNT,
        "max_model_len": COUNT,
        "max_num_batched_tokens": COUNT,
        "num_computed_tokens": COUNT,
        "block_size": POSITIVE,
        "page_size_bytes": POSITIVE,
    }
    cases = []
    for cls, arguments in SPECS.items():
        spec = cls(**arguments)
        remembers = issubclass(cls, FullAttentionSpec)
        allowed = {name: k.without(None) if remembers else k for name, k in limits.items()}
        of = Builder(cls, lambda world, spec=spec: spec, {**kinds, **allowed})
        of.made(arguments)
        of.method("max_memory_usage_bytes", {"max_model_len": 64, "max_num_batched_tokens": 8})
        of.method("max_table_blocks", {"max_model_len": 64})
        of.method("num_skipped_tokens", {"num_computed_tokens": 17})
        of.method("with_block_size", {"block_size": 4})
        of.method("with_page_size_padded", {"page_size_bytes": 1024})
        of.method("merge", {"specs": [spec, spec]})
        cases += of.cases
    return cases


def plain_spec_cases() -> tuple[Case, ...]:
    spec = FullAttentionSpec(**SPECS[FullAttentionSpec])
    return (
        function_case(
            spec_from_dict,
            {"data": spec.to_dict(), "kinds": SPEC_KINDS},
            data=DATA,
            kinds=MAPPING,
        ).of_message(),
        function_case(first_difference, {"one": spec, "other": spec}, one=SPEC, other=SPEC),
        function_case(dtype_size_bytes, {"dtype": "float16"}, dtype=DTYPE),
        function_case(require_eagle_support, {"specs": [spec]}),
        function_case(can_cache_prefixes, {"specs": [spec]}),
    )


# --- plans ---------------------------------------------------------------------------------------

FULL = FullAttentionSpec(4, num_kv_heads=2, head_size=8)
WINDOW = SlidingWindowSpec(4, num_kv_heads=2, head_size=8, sliding_window=8)
LAYERS = MappingProxyType({"layers.0": FULL, "layers.1": WINDOW})
OPTIONS = PlanOptions(64, 32)
PLANNED: Plan = plan_kv_cache(OPTIONS, [LAYERS], [1 << 20])
RANK: KVCacheConfig = PLANNED.configs[0]

LAYER_SPECS = Kind("specs of layers", (*MAPPING.wrong, {5: FULL}, {"a": 5}, {"": FULL}))
RANK_SPECS = list_of("specs of ranks", [{"a": 5}], [{5: FULL}])
NAMES = Kind(
    "names of layers",
    (*NO_LIST, {"a"}, ["a", "a"], ["a", 5], [b"a"], [""], ["\ud800"]),
    lambda good: (list(good), tuple(good)),
)
LAYOUT = NAME.also("none")
OPTIONS_KIND = instance_of(PlanOptions)
GROUPS = list_of("groups")
MEMORIES = Kind(
    "memories",
    (*NO_LIST, [None], [1.5], [True], ["1"], [-1], [OBJECT], [[]], (HOSTILE,), []),
    lambda good: (list(good), tuple(good)),
)


def plan_cases() -> list[Case]:
    tensor = Builder(KVCacheTensor)
    tensor.made(
        vars(RANK.kv_cache_tensors[0]),
        size=COUNT,
        shared_by=NAMES,
        block_stride=COUNT,
        layer_stride=COUNT,
    )
    group = Builder(KVCacheGroupSpec)
    group.made(
        {"layer_names": ["a", "b"], "kv_cache_spec": FULL}, layer_names=NAMES, kv_cache_spec=SPEC
    )
    config = Builder(KVCacheConfig)
    config.made(
        vars(replace(RANK, host_blocks=3, disk_blocks=4)),
        num_blocks=COUNT.also(2**31),
        kv_cache_tensors=list_of("tensors"),
        kv_cache_groups=GROUPS,
        host_blocks=COUNT,
        disk_blocks=COUNT,
        layout=LAYOUT,
    )
    memory = Builder(RankMemory)
    memory.made(
        {"device_bytes": 1, "host_bytes": 2, "disk_bytes": 3}, host_bytes=COUNT, disk_bytes=COUNT
    )
    options = Builder(PlanOptions, lambda world: OPTIONS)
    lengths = POSITIVE.also("automatic")
    options.made(
        {**vars(OPTIONS), "num_gpu_blocks_override": 9},
        max_model_len=lengths,
        max_num_batched_tokens=POSITIVE,
        num_gpu_blocks_override=POSITIVE.without(None),
        disable_hybrid_kv_cache_manager=BOOL,
        layout=LAYOUT,
        max_position_embeddings=POSITIVE,
    )
    options.method("with_max_model_len", {"max_model_len": 9}, max_model_len=lengths)
    coordinates = Builder(RankCoordinates, lambda world: RankCoordinates)
    coordinates.made(
        vars(RankCoordinates(1, 2, 1, 2)), tensor_rank=COUNT.also(2), pipeline_rank=COUNT.also(2)
    )
    coordinates.method(
        "of_rank",
        {"rank": 3, "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        rank=COUNT.also(4),
    )
    made = (tensor, group, config, memory, options, coordinates)
    return [*(case for each in made for case in each.cases), *_read_cases()]


def _read_cases() -> list[Case]:
    """The functions that read messages."""
    cases = []
    for made, kinds in (
        (RANK, MAPPING),
        (RANK.kv_cache_groups[0], MAPPING),
        (RANK.kv_cache_tensors[0], None),
    ):
        of = Builder(type(made), lambda world, made=made: made)
        good = {"data": made.to_dict()}
        if kinds is None:
            of.method("from_dict", good, data=DATA)
        else:
            of.method("from_dict", {**good, "kinds": SPEC_KINDS}, data=DATA, kinds=kinds)
        cases += [case.of_message() for case in of.cases]
    return cases


def planner_cases() -> list[Case]:
    """Functions of layer specs, by their other arguments."""
    specs: Arguments = {"specs": LAYERS}
    kinds: dict[str, Kind] = {
        "specs": LAYER_SPECS,
        "options": OPTIONS_KIND,
        "available_memory": COUNT,
        "memory": COUNT.also([1]),
        "specs_by_rank": RANK_SPECS,
        "memories": MEMORIES,
        "warn": THING,
        "groups": GROUPS,
        "config": CONFIG,
        "configs": list_of("plans"),
        "disable_hybrid_kv_cache_manager": BOOL,
        "grouped_layer_names": Kind("lists of names", (*NO_LIST, ["a"], [[5]], [["no such"]])),
    }
    memory: Arguments = {"options": OPTIONS, **specs, "available_memory": 1 << 20}
    ranks: Arguments = {"options": OPTIONS, "specs_by_rank": [LAYERS], "memories": [1 << 20]}
    every: list[tuple[Callable[..., Any], Arguments]] = [
        (is_kv_cache_type_attention_free, specs),
        (is_kv_cache_page_size_uniform, specs),
        (is_kv_cache_type_uniform, specs),
        (create_kv_cache_group_specs, {**specs, "grouped_layer_names": [["layers.0"]]}),
        (
            get_kv_cache_groups,
            {**specs, "disable_hybrid_kv_cache_manager": False, "warn": print},
        ),
        (unify_hybrid_kv_cache_specs, {**specs, "warn": WARNINGS.append}),
        (unify_page_sizes, {**specs, "warn": WARNINGS.append}),
        (project_groups, {"groups": RANK.kv_cache_groups, **specs}),
        (merge_rank_specs, {"specs_by_rank": [LAYERS, LAYERS]}),
        (check_enough_kv_cache_memory, memory),
        (estimate_max_model_len, memory),
        (plan_kv_cache, ranks),
        (get_kv_cache_configs, {**ranks, "warn": WARNINGS.append}),
        (
            get_kv_cache_config,
            {"options": OPTIONS, **specs, "memory": 1 << 20, "warn": WARNINGS.append},
        ),
        (get_max_concurrency_for_kv_cache_config, {"options": OPTIONS, "config": RANK}),
        (plan_fingerprint, {"configs": [RANK]}),
        (unify_kv_cache_configs, {"configs": [RANK, RANK]}),
    ]
    return [
        *(
            function_case(call, good, **{name: kinds[name] for name in good})
            for call, good in every
        ),
        function_case(layer_order, {"layer_name": "layers.0"}, layer_name=TEXT),
        function_case(get_uniform_page_size, {"specs": [FULL]}),
        function_case(
            max_memory_usage_bytes, {"options": OPTIONS, "specs": [FULL]}, options=OPTIONS_KIND
        ),
        function_case(
            get_num_blocks,
            {"options": OPTIONS, "num_layers": 2, "available_memory": 100, "page_size": 4},
            options=OPTIONS_KIND,
            num_layers=POSITIVE,
            available_memory=INTEGER,
            page_size=POSITIVE,
        ),
        function_case(
            layout_fingerprint,
            {
                "config": RANK,
                "model": "m",
                "seed": "s",
                "algorithm": "sha256",
                "coordinates": RankCoordinates(),
            },
            config=CONFIG,
            model=TEXT,
            algorithm=TEXT,
            coordinates=instance_of(RankCoordinates),
        ),
        function_case(
            report_plan, {"plan": PLANNED, "name": "a"}, plan=instance_of(Plan), name=TEXT
        ),
        function_case(get_manager_for_kv_cache_spec, {"spec": FULL, "managers": MANAGERS}),
    ]


WARNINGS: list[str] = []


# --- from configurations -------------------------------------------------------------------------

CLUSTER: ClusterConfig = parse_config(
    {
        "model": {
            "name": "m",
            "max_model_len": 64,
            "layers": [{"kind": "full", "num_kv_heads": 2, "head_size": 8}],
        },
        "cache": {"memory_per_rank": "1MiB"},
        "parallel": {"tensor_parallel_size": 2},
    }
)
RANK_NUMBER = COUNT.also(2, 10**9)


def cluster_cases() -> list[Case]:
    plan = plan_cluster(CLUSTER)
    source = Kind(
        "a config.json",
        (None, 5, 1.5, True, b"x", OBJECT, HOSTILE, [1], {1: 2}, {}, "", "no such", "a\0b", dict),
    )
    choices = Builder(HFChoices)
    choices.handed_to(
        lambda world, chosen: cluster_from_hf_config(LLAMA_3_8B, chosen),
        {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "max_model_len": 64,
            "dtype": "float16",
            "mamba_cache_mode": "align",
        },
        tensor_parallel_size=POSITIVE.also(10**9),
        pipeline_parallel_size=POSITIVE.also(10**9),
        max_model_len=POSITIVE.also("long", 2**31),
        dtype=DTYPE.without(None),
        mamba_cache_mode=NAME,
    )
    read: Arguments = {"source": LLAMA_3_8B, "choices": HFChoices()}
    chosen = instance_of(HFChoices).without(None)
    return [
        *choices.cases,
        function_case(model_from_hf_config, read, source=source, choices=chosen),
        Case(
            "cluster_from_hf_config",
            {
                "source": source,
                "choices": chosen,
                "sections": Kind("a section", (5, "x", [1], {"no such": 1}, {1: 2}, HOSTILE)),
            },
            lambda world: {**read, "sections": {}},
            lambda world, given: cluster_from_hf_config(
                given["source"], given["choices"], cache=given["sections"]
            ),
        ),
        function_case(plan_options, {"config": CLUSTER}),
        function_case(rank_coordinates, {"config": CLUSTER, "rank": 1}, rank=RANK_NUMBER),
        function_case(
            rank_layout_fingerprint,
            {"config": CLUSTER, "plan": plan, "rank": 1},
            plan=instance_of(Plan),
            rank=RANK_NUMBER,
        ),
        function_case(rank_memory, {"config": CLUSTER, "device_bytes": 5}),
        function_case(
            plan_cluster,
            {"config": CLUSTER, "memory_per_rank": [1 << 20, 1 << 20]},
            memory_per_rank=MEMORIES.without(None).also([1 << 20]),
        ),
    ]


PLANNER_SUBJECTS = (
    Subject("specs", cases=(*spec_cases(), *plain_spec_cases())),
    Subject("plans", cases=tuple(plan_cases())),
    Subject("planner", cases=tuple(planner_cases())),
    Subject("configurations", cases=tuple(cluster_cases())),
)
