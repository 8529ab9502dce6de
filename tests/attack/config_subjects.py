"""Part of the table: every section of a configuration, and the functions that read
configurations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcache.config import (
    ClusterConfig,
    DiskConfig,
    layer_specs,
    load_config,
    parse_config,
)
from kvcache.config.layer_kinds import LAYER_KINDS
from kvcache.config.models import WorkersConfig
from kvcache.config.sections import Section
from kvcache.config.tenants import TenantConfig, TenantsConfig, TierAmounts
from tests.attack.argument_kinds import (
    BOOL,
    COUNT,
    HOSTILE,
    MAPPING,
    NAME,
    NO_LIST,
    NUMBER,
    OBJECT,
    POSITIVE,
    SECONDS,
    SHARE,
    TEXT,
    TIME_LIMIT,
    Kind,
    instance_of,
)
from tests.attack.type_table import Arguments, Builder, Case, Subject, function_case

# --- kinds of fields, by name --------------------------------------------------------------------

SECTION = Kind("section", (*MAPPING.wrong, {"no such": 1}, {1: 2}, Section))
ADDRESS = TEXT.also("nowhere", "tcp://host", "tcp://host:65536")
DIRECTORY = TEXT.also("a/b")
BYTES = POSITIVE.also("1", "1 MB", "-1MiB", 2**63)
COUNT_OF_32 = POSITIVE.also(2**31)
AMOUNT = Kind(
    "amount",
    (
        *(wrong for wrong in NUMBER.wrong if not isinstance(wrong, dict)),
        *(-1, 1.5, 2**31, {"no such": 1}, {"device": True}),
    ),
)
BOUNDS = Kind(
    "bounds", (*NO_LIST, {1.0}, [], ["1"], [True], [None], [[1]], [2.0, 1.0], [0.0], [1.0] * 65)
)


def _each(names: str, kind: Kind) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


KINDS: dict[str, Kind] = {
    **_each(
        "block_size num_kv_heads head_size window_tokens chunk_tokens max_encoder_tokens window"
        " max_num_batched_tokens max_num_seqs min_load_tokens prefill_tokens_per_s history_batches"
        " max_position_embeddings",
        COUNT_OF_32,
    ),
    **_each(
        "count tensor_parallel_size pipeline_parallel_size data_parallel_size max_clients"
        " store_after blocks_per_slot",
        POSITIVE.also(4097),
    ),
    **_each("copy_threads num_threads", POSITIVE.also(65)),
    "num_blocks": COUNT_OF_32.without(None),
    "num_speculative_blocks": COUNT.also(4097),
    "data_parallel_rank": COUNT.also(4096),
    "max_tenants": COUNT.also(1001),
    "max_model_len": COUNT_OF_32.also("automatic"),
    **_each(
        "max_message_bytes segment_bytes max_bytes history_bytes queue_bytes capacity_per_rank"
        " swap_bandwidth_per_rank",
        BYTES,
    ),
    **_each("memory_per_rank host_memory_per_rank", BYTES.without(None)),
    **_each(
        "startup_s worker_silence_s step_s forward_s shutdown_s client_silence_s reattach_s"
        " resend_s heartbeat_s interval_s flush_s wait_s hold_s job_s",
        TIME_LIMIT,
    ),
    **_each(
        "worker_kill_s replacement_s log_interval_s num_cpus_per_rank num_gpus_per_rank", SECONDS
    ),
    **_each("max_pin_share spare_share", SHARE),
    "watermark": SHARE.also(1.0),
    "weight": TIME_LIMIT.also(1e7),
    **_each("guaranteed limit max_pinned", AMOUNT),
    **_each("device host disk", AMOUNT.without(None)),
    **_each("latency_bounds_s age_bounds_s", BOUNDS),
    **_each(
        "enabled enable_prefix_caching merge_duplicates use_eagle disable_hybrid_manager log_stats"
        " keeps_memory publish_one_block_per_event spans beside_previous",
        BOOL,
    ),
    **_each(
        "kind cache_mode hash_algorithm eviction_policy core layout curve mode policy verify"
        " copy_priority swap write encoding publish_groups by dtype",
        NAME,
    ),
    "name": TEXT,
    **_each("hash_seed bind_host", TEXT),
    "topic": TEXT.without(None).also("t" * 257),
    **_each("endpoint replay_endpoint", ADDRESS),
    "directory": DIRECTORY,
    "layers": Kind(
        "layers", (*NO_LIST, {1}, [], [5], [None], [{}], [{"kind": "no such"}], [OBJECT])
    ),
    "state_shapes": Kind(
        "shapes", (*NO_LIST, {1}, [], [5], [[1.5]], [["8"]], [[True]], [[0]], [{8}])
    ),
    "state_dtypes": Kind("dtypes", (*NO_LIST, {"a"}, [5], ["no such"], [None])).without(None),
    "named": Kind("tenants", (*MAPPING.wrong, {1: {}}, {"": {}}, {"a": 5}, {"a": {"no": 1}})),
    **_each(
        "model cache parallel workers transport deadlines scheduler content_check audit recorder"
        " offload events metrics default",
        SECTION,
    ),
    "tenants": SECTION.without(None),
}
OF_SECTION: dict[type[Section], dict[str, Kind]] = {
    WorkersConfig: {"device": NAME},
    DiskConfig: {"sync": NAME},
    **{kind: {"block_size": COUNT_OF_32.without(None)} for kind in LAYER_KINDS.values()},
}
"""Fields with another kind than their name's."""

# --- valid values --------------------------------------------------------------------------------

LAYERS: dict[str, Arguments] = {
    "full": {},
    "sliding_window": {"window_tokens": 8},
    "chunked_local": {"chunk_tokens": 32},
    "mla": {},
    "mamba": {"state_shapes": ((4, 8),), "state_dtypes": ("float16",)},
    "cross": {"max_encoder_tokens": 8},
    "stateless": {},
}
DISK = DiskConfig(directory="/files", capacity_per_rank=1 << 20)
TENANT = TenantConfig(guaranteed=0.25, limit=0.5)
TENANTS = TenantsConfig(named={"a": TENANT})
PLAIN: Arguments = {
    "model": {
        "name": "m",
        "max_model_len": 64,
        "layers": [{"kind": "full", "num_kv_heads": 2, "head_size": 8}],
    },
    "cache": {"memory_per_rank": 1 << 20, "num_blocks": 64},
    "recorder": {"directory": "/recordings"},
    "offload": {"host_memory_per_rank": 1 << 20, "disk": DISK},
    "events": {"topic": "t"},
    "tenants": TENANTS,
}
CLUSTER = parse_config(PLAIN)


def sections() -> Iterator[Section]:
    """A section of every class, with a valid value for each of its fields."""
    yield CLUSTER
    yield from (value for value in vars(CLUSTER).values() if isinstance(value, Section))
    yield from (DISK, TENANT, TierAmounts(device=0.25, host=4, disk=0.5))
    for kind, more in LAYERS.items():
        cls = LAYER_KINDS[kind]
        common = {"count": 1, "block_size": 16, "num_kv_heads": 2, "head_size": 8}
        yield cls(**{name: v for name, v in common.items() if name in cls.model_fields}, **more)


def section_cases() -> list[Case]:
    cases = []
    for section in sections():
        cls = type(section)
        names = cls.model_fields
        of = Builder(cls)
        kinds = {**KINDS, **OF_SECTION.get(cls, {})}
        if cls is type(CLUSTER.offload):
            kinds["disk"] = SECTION.without(None)
        if cls is type(CLUSTER.recorder):
            kinds |= {"directory": DIRECTORY.without(None), "sync": BOOL}
        if cls is ClusterConfig:  # null means the defaults
            kinds = {n: k if n == "model" else k.without(None) for n, k in kinds.items()}
        of.made({name: getattr(section, name) for name in names}, **kinds)
        cases += [_compared(case) for case in of.cases]
    return cases


def _compared(case: Case) -> Case:
    """The case with a section as text, so that equal ones are equal results."""

    def call(world: Any, arguments: Arguments) -> object:
        made: Any = case.call(world, arguments)
        return made.model_dump_json()

    return Case(case.name, case.kinds, case.good, call)


def reading_cases() -> list[Case]:
    path = Kind("path", (None, 5, 1.5, True, b"x", [1], OBJECT, HOSTILE, {}, "", "no such", "a\0b"))
    return [
        function_case(load_config, {"path": "cpu_tp2"}, path=path),
        function_case(
            parse_config,
            {"data": PLAIN, "source": "here"},
            data=SECTION.also({}, {"model": 5}, {**PLAIN, "cache": {"num_blocks": True}}),
            source=TEXT,
        ),
        function_case(layer_specs, {"config": CLUSTER}, config=instance_of(ClusterConfig)),
    ]


CONFIG_SUBJECTS = (
    Subject("sections", cases=tuple(section_cases())),
    Subject("reading configurations", cases=tuple(reading_cases())),
)
