"""The plan that a cluster's configuration means.

Stands between configuration and planner: what `kvcache plan` shows before anything runs, and what
a launch makes from the memory that workers report.
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
    """Return what the planner needs to know of `config`, besides specs and memory."""
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
    """Return where global rank `rank` stands; raises ConfigurationError for one there is not."""
    _check_config(config)
    parallel = config.parallel
    rank = as_int("rank", rank, at_most=parallel.num_ranks - 1, error=ConfigurationError)
    return RankCoordinates.of_rank(
        rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    )


def rank_layout_fingerprint(config: ClusterConfig, plan: Plan, rank: int) -> str:
    """Return what the bytes of `rank` mean: two ranks, or two lives of one, with equal fingerprints
    understand each other's labels and files. Raises ConfigurationError for no such rank."""
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
    """Return what one rank may use in each tier, `device_bytes` on its device."""
    _check_config(config)
    offload = config.offload
    disk_bytes = 0 if offload.disk is None else offload.disk.capacity_per_rank
    return RankMemory(device_bytes, offload.host_memory_per_rank or 0, disk_bytes)


def plan_cluster(
    config: ClusterConfig, memory_per_rank: Sequence[int | RankMemory] | None = None
) -> Plan:
    """Return the plan for `config`; `memory_per_rank`: what each rank reported, else configured.

    Raises ConfigurationError when neither says how much memory there is, and what `plan_kv_cache`
    raises.
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
