"""From a configuration and a plan to the tiers below the device, on the coordinator's side.

`assembly.py` knows all other keys. Refuses models whose blocks cannot be found by
their content.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvcache.base.errors import ConfigurationError
from kvcache.config import ClusterConfig
from kvcache.coordinator.offload_parts import OffloadParts, OffloadSettings
from kvcache.coordinator.partial_block_swap import SwapRule, SwapWhen
from kvcache.coordinator.tier_hits import TierHitFinder
from kvcache.offload.contents import LabelShape
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.offload.jobs import Deadlines
from kvcache.offload.options import HierarchyOptions, TierOptions
from kvcache.offload.registry import make_tier
from kvcache.offload.specs import FILE_MEDIUM, HOST_MEDIUM
from kvcache.planner import Plan
from kvcache.requests.hashing import get_hash_fn


def offload_parts(config: ClusterConfig, plan: Plan) -> OffloadParts | None:
    """Return what tiers are made from; None where the configuration has none.

    Raises ConfigurationError for memory too small for a block, an unknown policy, or a kind of
    attention that tiers cannot serve.
    """
    offload, model = config.offload, plan.model_config
    if offload.host_memory_per_rank is None:
        return None
    block_sizes = [group.kv_cache_spec.block_size for group in model.kv_cache_groups]
    finder = TierHitFinder(model, math.gcd(*block_sizes), use_eagle=config.cache.use_eagle)
    if model.host_blocks < offload.blocks_per_slot:
        raise ConfigurationError(
            f"offload.host_memory_per_rank is {offload.host_memory_per_rank} bytes, which is "
            f"{model.host_blocks} blocks of the largest rank: set it to "
            f"{offload.blocks_per_slot} blocks at least"
        )
    labels = None
    if config.events.enabled:
        digest_bytes = get_hash_fn(config.cache.hash_algorithm).digest_bytes
        labels = LabelShape(digest_bytes, max(block_sizes))
    block_bytes = sum(rank.block_size_bytes for rank in plan.configs)
    host = TierOptions(
        HOST_MEDIUM,
        model.host_blocks // offload.blocks_per_slot,
        offload.blocks_per_slot,
        offload.policy,
        offload.store_after,
        labels,
        block_bytes,
        config.tenants,
    )
    # Files may be on a disk that others use.
    deadlines = Deadlines(offload.job_s, offload.job_s, 4 * offload.job_s, 4 * offload.job_s)
    disk, options = None, HierarchyOptions(deadlines=deadlines)
    if offload.disk is not None:
        if not model.disk_blocks:
            raise ConfigurationError(
                f"offload.disk.capacity_per_rank is {offload.disk.capacity_per_rank} bytes, less "
                "than a block of the largest rank: raise it, or remove disk"
            )
        disk = TierOptions(
            FILE_MEDIUM,
            model.disk_blocks,
            policy=offload.disk.policy,
            labels=labels,
            block_bytes=block_bytes,
            tenants=config.tenants,
        )
        options = HierarchyOptions(
            disk_write=offload.disk.write,
            spare_share=offload.spare_share,
            deadlines=deadlines,
        )

    def make_tiers(new_job_id: Callable[[], int]) -> TierHierarchy:
        below = None if disk is None else make_tier(disk)
        return TierHierarchy(make_tier(host), below, new_job_id, options)

    make_tiers(lambda: 0)  # an unknown policy is an error now, not in the first epoch
    swap = SwapRule(
        SwapWhen(offload.swap),
        offload.prefill_tokens_per_s,
        offload.swap_bandwidth_per_rank,
        max(rank.block_size_bytes for rank in plan.configs),
    )
    settings = OffloadSettings(
        offload.min_load_tokens, offload.hold_s, offload.wait_s, adoption_s=offload.job_s, swap=swap
    )
    return OffloadParts(settings, finder, make_tiers)
