"""From the specs and memory of all ranks to one plan.

Merges the specs, groups layers once, projects the groups to each rank, plans its memory, unifies:

    specs of all ranks -> groups of the model -> groups per rank -> blocks per rank -> the minimum

Allocates nothing. The resulting plan fits every rank and can run a request of `max_model_len`
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcache.base.errors import ConfigurationError
from kvcache.planner.fingerprint import plan_fingerprint
from kvcache.planner.grouping import (
    get_kv_cache_groups,
    layer_order,
    merge_rank_specs,
    project_groups,
)
from kvcache.planner.layout import lay_out, pools_of
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
from kvcache.planner.unify import unify_kv_cache_configs
from kvcache.specs import KVCacheConfig, KVCacheGroupSpec


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
    options: PlanOptions,
    specs_by_rank: Sequence[LayerSpecs],
    memories: Sequence[int | RankMemory],
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
    options: PlanOptions,
    specs: LayerSpecs,
    memory: int | RankMemory,
    warn: Warn = log_warning,
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
