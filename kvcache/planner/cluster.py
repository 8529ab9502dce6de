"""The plan of a cluster's configuration.

`kvcache plan` shows it before anything runs; a launch makes it from the memory that workers report.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.base.arguments import as_int, check_kind
from kvcache.base.errors import ConfigurationError
from kvcache.config import ClusterConfig, layer_specs
from kvcache.planner.fingerprint import RankCoordinates, layout_fingerprint
from kvcache.planner.options import PlanOptions, RankMemory
from kvcache.planner.plan import Plan, plan_kv_cache


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
