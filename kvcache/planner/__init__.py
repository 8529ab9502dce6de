"""Planning: from the specs of every layer and the memory of every rank to one plan for all.

Pure functions. grouping.py and pages.py choose the layers that share a block table, memory.py
computes how many blocks fit, unify.py places their bytes and makes ranks agree. plan.py runs all
of them, also from a configuration, and identifies the result. report.py has the numbers of a plan.
hf_config/ reads the config.json of a published model.
"""

from __future__ import annotations

from kvcache.planner.grouping import (
    create_kv_cache_group_specs,
    get_kv_cache_groups,
    get_uniform_page_size,
    is_kv_cache_page_size_uniform,
    is_kv_cache_type_attention_free,
    is_kv_cache_type_uniform,
    layer_order,
    merge_rank_specs,
    project_groups,
    unify_hybrid_kv_cache_specs,
)
from kvcache.planner.hf_config import HFChoices, cluster_from_hf_config, model_from_hf_config
from kvcache.planner.memory import (
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    get_max_concurrency_for_kv_cache_config,
    get_num_blocks,
    max_memory_usage_bytes,
)
from kvcache.planner.options import LayerSpecs, PlanOptions, RankMemory
from kvcache.planner.pages import unify_page_sizes
from kvcache.planner.plan import (
    Plan,
    RankCoordinates,
    get_kv_cache_config,
    get_kv_cache_configs,
    layout_fingerprint,
    plan_cluster,
    plan_fingerprint,
    plan_kv_cache,
    plan_options,
    rank_coordinates,
    rank_layout_fingerprint,
    rank_memory,
)
from kvcache.planner.report import GroupReport, PlanReport, RankReport, report_plan
from kvcache.planner.unify import unify_kv_cache_configs

__all__ = [
    "GroupReport",
    "HFChoices",
    "LayerSpecs",
    "Plan",
    "PlanOptions",
    "PlanReport",
    "RankCoordinates",
    "RankMemory",
    "RankReport",
    "check_enough_kv_cache_memory",
    "cluster_from_hf_config",
    "create_kv_cache_group_specs",
    "estimate_max_model_len",
    "get_kv_cache_config",
    "get_kv_cache_configs",
    "get_kv_cache_groups",
    "get_max_concurrency_for_kv_cache_config",
    "get_num_blocks",
    "get_uniform_page_size",
    "is_kv_cache_page_size_uniform",
    "is_kv_cache_type_attention_free",
    "is_kv_cache_type_uniform",
    "layer_order",
    "layout_fingerprint",
    "max_memory_usage_bytes",
    "merge_rank_specs",
    "model_from_hf_config",
    "plan_cluster",
    "plan_fingerprint",
    "plan_kv_cache",
    "plan_options",
    "project_groups",
    "rank_coordinates",
    "rank_layout_fingerprint",
    "rank_memory",
    "report_plan",
    "unify_hybrid_kv_cache_specs",
    "unify_kv_cache_configs",
    "unify_page_sizes",
]
