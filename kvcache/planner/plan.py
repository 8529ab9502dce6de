"""From the specs and memory of all ranks to one plan.

Merges the specs, groups layers once, projects the groups to each rank, plans its memory, unifies:

    specs of all ranks -> groups of the model -> groups per rank -> blocks per rank -> the minimum

Allocates nothing. The resulting plan fits every rank and can run a request of `max_model_len`
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any

from kvcache.base.arguments import as_int, as_text, as_tuple, check_fields, check_kind
from kvcache.base.errors import ConfigurationError, NotEnoughMemoryError
from kvcache.config import ClusterConfig, layer_specs
from kvcache.planner.grouping import (
    get_kv_cache_groups,
    layer_order,
    merge_rank_specs,
    project_groups,
)
from kvcache.planner.memory import (
    RankCapacity,
    get_max_concurrency_for_kv_cache_config,
    longest_model_len,
    rank_capacity,
    require_capacity,
    tightest,
)
from kvcache.planner.options import (
    LayerSpecs,
    PlanOptions,
    RankMemory,
    Warn,
    as_rank_memories,
    as_rank_specs,
    check_options,
    check_warn,
    log_warning,
)
from kvcache.planner.unify import lay_out, pools_of, unify_kv_cache_configs
from kvcache.specs import KVCacheConfig, KVCacheGroupSpec, require_count

FINGERPRINT_VERSION = 1
"""Part of every fingerprint: raised when the meaning of a plan's fields changes."""


@dataclass(frozen=True)
class RankCoordinates:
    """A rank's place: `tensor_rank` of `tensor_parallel_size` in its pipeline stage."""

    tensor_rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_rank: int = 0
    pipeline_parallel_size: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor_rank", "pipeline_rank"):
            check_fields(self, as_int, name, at_least=0)
        check_fields(self, as_int, "tensor_parallel_size", at_least=1)
        check_fields(self, as_int, "pipeline_parallel_size", at_least=1)
        for kind in ("tensor", "pipeline"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_parallel_size")
            if rank >= size:
                raise ConfigurationError(
                    f"{kind}_rank is {rank}, but {kind}_parallel_size is {size}: ranks count from 0"
                )

    @classmethod
    def of_rank(
        cls, rank: int, tensor_parallel_size: int, pipeline_parallel_size: int
    ) -> RankCoordinates:
        """Return the coordinates of global rank `pipeline_rank * tensor_parallel_size + tensor`."""
        size = require_count("tensor_parallel_size", tensor_parallel_size)
        rank = require_count("rank", rank, at_least=0)
        return cls(rank % size, size, rank // size, pipeline_parallel_size)


def plan_fingerprint(configs: Sequence[KVCacheConfig]) -> str:
    """Return 32 hex digits over the plans of all ranks, in rank order."""
    listed = as_tuple("configs", configs, ConfigurationError, KVCacheConfig)
    return _digest("plan", [config.to_dict() for config in listed])


def layout_fingerprint(
    config: KVCacheConfig, *, model: str, seed: str, algorithm: str, coordinates: RankCoordinates
) -> str:
    """Return 32 hex digits over the meaning of one rank's stored bytes.

    Covers the model, hash seed and algorithm, the rank's coordinates, the specs of its groups
    (dtype, heads, page size) and the order of its pools, but no capacity.
    """
    check_kind("config", config, KVCacheConfig, ConfigurationError)
    check_kind("coordinates", coordinates, RankCoordinates, ConfigurationError)
    return _digest(
        "layout",
        {
            "model": as_text("model", model, ConfigurationError),
            "seed": as_text("seed", seed, ConfigurationError, may_be_empty=True),
            "algorithm": as_text("algorithm", algorithm, ConfigurationError),
            "coordinates": asdict(coordinates),
            "layout": config.layout,
            "groups": [group.to_dict() for group in config.kv_cache_groups],
            "pools": [list(tensor.shared_by) for tensor in config.kv_cache_tensors],
        },
    )


def _digest(what: str, values: Any) -> str:
    text = json.dumps([what, FINGERPRINT_VERSION, values], sort_keys=True, separators=(",", ":"))
    return sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Plan:
    """The plan that all processes of a cluster obey: a configuration per rank, and shared values.

    `options` are those of the planner, with "auto" resolved. `memories` are those of each rank.
    """

    configs: tuple[KVCacheConfig, ...]
    options: PlanOptions
    memories: tuple[RankMemory, ...]
    fingerprint: str
    max_concurrency: float
    warnings: tuple[str, ...] = ()

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request."""
        return self.options.longest_model_len

    @property
    def num_blocks(self) -> int:
        """Blocks of every rank, including the null block."""
        return self.configs[0].num_blocks

    @property
    def can_prefix_cache(self) -> bool:
        """Whether requests can start from cached blocks in every group."""
        return all(group.kv_cache_spec.can_prefix_cache for group in self.model_groups)

    @property
    def model_groups(self) -> tuple[KVCacheGroupSpec, ...]:
        """The groups with the layers of all ranks."""
        groups = []
        for column in zip(*(config.kv_cache_groups for config in self.configs), strict=True):
            names = {name for group in column for name in group.layer_names}
            groups.append(replace(column[0], layer_names=tuple(sorted(names, key=layer_order))))
        return tuple(groups)

    @property
    def model_config(self) -> KVCacheConfig:
        """The plan without tensors and with the groups of the whole model, for the coordinator."""
        return replace(self.configs[0], kv_cache_tensors=(), kv_cache_groups=self.model_groups)


def plan_kv_cache(
    options: PlanOptions, specs_by_rank: Sequence[LayerSpecs], memories: Sequence[int | RankMemory]
) -> Plan:
    """Return the plan for ranks with these layers and this memory (plain numbers: device bytes).

    Raises PlanMismatchError for ranks that disagree on a layer, ConfigurationError for layers that
    cannot be combined, and NotEnoughMemoryError with the memory that is needed, the memory there
    is, and the length that would fit. The plan contains its warnings.
    """
    check_options(options)
    specs_by_rank = as_rank_specs(specs_by_rank)
    stated = as_rank_memories(memories, len(specs_by_rank))
    if not stated:
        raise ConfigurationError("there are no ranks to plan for: give specs of at least one")
    warnings: list[str] = []
    groups = get_kv_cache_groups(
        merge_rank_specs(specs_by_rank),
        disable_hybrid_kv_cache_manager=options.disable_hybrid_kv_cache_manager,
        warn=warnings.append,
    )
    projected = [project_groups(groups, specs) for specs in specs_by_rank]
    capacities = [
        rank_capacity(options, rank, own, memory.device_bytes)
        for rank, (own, memory) in enumerate(zip(projected, stated, strict=True))
    ]
    options = _resolve_max_model_len(options, groups, capacities)
    require_capacity(options, groups, capacities)
    for capacity, memory in zip(capacities, stated, strict=True):
        _require_tiers(capacity, memory)
    configs = unify_kv_cache_configs(_configs(options, projected, capacities, stated))
    return Plan(
        configs=tuple(configs),
        options=options,
        memories=tuple(stated),
        fingerprint=plan_fingerprint(configs),
        max_concurrency=get_max_concurrency_for_kv_cache_config(options, configs[0]),
        warnings=tuple(warnings),
    )


def get_kv_cache_configs(
    options: PlanOptions,
    specs_by_rank: Sequence[LayerSpecs],
    memories: Sequence[int | RankMemory],
    warn: Warn = log_warning,
) -> list[KVCacheConfig]:
    """Return the configuration of every rank, like `plan_kv_cache`; warnings go to `warn`."""
    check_warn(warn)
    plan = plan_kv_cache(options, specs_by_rank, memories)
    for warning in plan.warnings:
        warn(warning)
    return list(plan.configs)


def get_kv_cache_config(
    options: PlanOptions, specs: LayerSpecs, memory: int | RankMemory, warn: Warn = log_warning
) -> KVCacheConfig:
    """Return the configuration of a model on one rank, like `get_kv_cache_configs`."""
    return get_kv_cache_configs(options, [specs], [memory], warn)[0]


def _resolve_max_model_len(
    options: PlanOptions, groups: Sequence[KVCacheGroupSpec], capacities: Sequence[RankCapacity]
) -> PlanOptions:
    """Return `options` with a number for "auto": the most tokens that fit, at least 1."""
    if options.max_model_len != "auto":
        return options
    least = tightest(capacities)
    if least is None:
        return options.with_max_model_len(options.longest_model_len)
    # At least one token, so that a rank with no room at all raises the usual error.
    return options.with_max_model_len(max(1, longest_model_len(options, groups, least.num_blocks)))


def _require_tiers(capacity: RankCapacity, memory: RankMemory) -> None:
    """Raise NotEnoughMemoryError if a tier below the device holds no block of the rank."""
    for tier, num_bytes, key in (
        ("host memory", memory.host_bytes, "offload.host_memory_per_rank"),
        ("disk", memory.disk_bytes, "offload.disk.capacity_per_rank"),
    ):
        if 0 < num_bytes < capacity.block_bytes:
            raise NotEnoughMemoryError(
                f"rank {capacity.rank}: a block needs {capacity.block_bytes} bytes, its {tier} has "
                f"{num_bytes}: raise {key}, or leave this tier out"
            )


def _configs(
    options: PlanOptions,
    projected: Sequence[tuple[KVCacheGroupSpec, ...]],
    capacities: Sequence[RankCapacity],
    memories: Sequence[RankMemory],
) -> list[KVCacheConfig]:
    """Return each rank's own plan; a rank without layers does not bound the others."""
    limits = [capacity for capacity in capacities if capacity.is_limit]
    fewest = [
        min(memories[c.rank].host_bytes // c.block_bytes for c in limits) if limits else 0,
        min(memories[c.rank].disk_bytes // c.block_bytes for c in limits) if limits else 0,
    ]
    least = tightest(capacities)
    configs = []
    for capacity, groups, memory in zip(capacities, projected, memories, strict=True):
        bytes_each = capacity.block_bytes
        num_blocks = capacity.num_blocks if least is None or bytes_each else least.num_blocks
        configs.append(
            KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=lay_out(pools_of(groups), num_blocks, options.layout),
                kv_cache_groups=groups,
                host_blocks=memory.host_bytes // bytes_each if bytes_each else fewest[0],
                disk_blocks=memory.disk_bytes // bytes_each if bytes_each else fewest[1],
                layout=options.layout,
            )
        )
    return configs


def plan_options(config: ClusterConfig) -> PlanOptions:
    """Return the planner's options for `config`, without specs and memory."""
    _check_config(config)
    return PlanOptions(
        max_model_len=config.model.max_model_len,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        num_gpu_blocks_override=config.cache.num_blocks,
        disable_hybrid_kv_cache_manager=config.cache.disable_hybrid_manager,
        layout=config.cache.layout,
        max_position_embeddings=config.model.max_position_embeddings,
    )


def rank_coordinates(config: ClusterConfig, rank: int) -> RankCoordinates:
    """Return the coordinates of global rank `rank`; raises ConfigurationError if there is none."""
    _check_config(config)
    parallel = config.parallel
    rank = as_int("rank", rank, at_most=parallel.num_ranks - 1, error=ConfigurationError)
    return RankCoordinates.of_rank(
        rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    )


def rank_layout_fingerprint(config: ClusterConfig, plan: Plan, rank: int) -> str:
    """Return a fingerprint of the meaning of a rank's bytes. Ranks, or processes of a rank, with
    equal fingerprints can read each other's labels and files. Raises ConfigurationError for an
    unknown rank."""
    coordinates = rank_coordinates(config, rank)
    check_kind("plan", plan, Plan, ConfigurationError)
    rank = as_int("rank", rank, at_most=len(plan.configs) - 1, error=ConfigurationError)
    return layout_fingerprint(
        plan.configs[rank],
        model=config.model.name,
        seed=config.cache.hash_seed,
        algorithm=config.cache.hash_algorithm,
        coordinates=coordinates,
    )


def rank_memory(config: ClusterConfig, device_bytes: int) -> RankMemory:
    """Return the memory that one rank may use in each tier, `device_bytes` on its device."""
    _check_config(config)
    offload = config.offload
    disk_bytes = 0 if offload.disk is None else offload.disk.capacity_per_rank
    return RankMemory(device_bytes, offload.host_memory_per_rank or 0, disk_bytes)


def plan_cluster(
    config: ClusterConfig, memory_per_rank: Sequence[int | RankMemory] | None = None
) -> Plan:
    """Return the plan for `config`. `memory_per_rank` is the memory that each rank reported.

    Raises ConfigurationError if neither the ranks nor the configuration state any memory, and the
    errors of `plan_kv_cache`.
    """
    _check_config(config)
    memories = memory_per_rank
    if memories is None:
        configured = config.cache.memory_per_rank
        if configured is None:
            raise ConfigurationError(
                "cache.memory_per_rank is not set, and no rank has reported its memory: set it, "
                "for instance to 256MiB"
            )
        memories = [rank_memory(config, configured)] * config.parallel.num_ranks
    return plan_kv_cache(plan_options(config), layer_specs(config), memories)


def _check_config(config: ClusterConfig) -> None:
    check_kind("config", config, ClusterConfig, ConfigurationError)
