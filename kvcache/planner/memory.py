"""How many blocks fit, and how many a request of full length needs.

Second half of planning. Counts the null block, and whole pages including padding. Refuses plans in
which a request of `max_model_len` tokens could never run, and says which length could.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvcache.base.arguments import as_int, check_kind
from kvcache.base.errors import ConfigurationError, NotEnoughMemoryError
from kvcache.planner.grouping import get_kv_cache_groups, get_uniform_page_size
from kvcache.planner.options import LayerSpecs, PlanOptions, check_options
from kvcache.specs import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, ceil_div, require_count
from kvcache.specs.spec import as_specs

NUM_NULL_BLOCKS = 1
"""Blocks that no request can have: the null block."""


@dataclass(frozen=True)
class RankCapacity:
    """Blocks that fit on one rank. A rank without layers takes no bytes and any number of
    blocks."""

    rank: int
    block_bytes: int
    available_bytes: int
    num_blocks: int

    @property
    def is_limit(self) -> bool:
        """Whether this rank bounds the number of blocks."""
        return self.block_bytes > 0


def get_num_blocks(
    options: PlanOptions, num_layers: int, available_memory: int, page_size: int
) -> int:
    """Return the blocks that fit into `available_memory` bytes over `num_layers` pools.

    Never below 0. `num_gpu_blocks_override` takes precedence. Raises ConfigurationError unless
    there is at least one layer and one byte a page.
    """
    check_options(options)
    num_layers = require_count("num_layers", num_layers)
    page_size = require_count("page_size", page_size)
    available_memory = _as_memory(available_memory, at_least=-(2**63))
    if options.num_gpu_blocks_override is not None:
        return options.num_gpu_blocks_override
    return max(available_memory // page_size // num_layers, 0)


def max_memory_usage_bytes(options: PlanOptions, specs: Iterable[KVCacheSpec]) -> int:
    """Return the most bytes that one request takes over all `specs`."""
    check_options(options)
    return sum(_max_bytes(options, spec) for spec in as_specs(specs))


def num_pools(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the number of pools of a rank with these groups: the layers of its largest group."""
    return max((len(group.layer_names) for group in groups), default=0)


def block_bytes_of(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the bytes of one block over all pools of a rank; 0 for a rank without layers."""
    pools = num_pools(groups)
    return pools * get_uniform_page_size(g.kv_cache_spec for g in groups) if pools else 0


def blocks_per_request(options: PlanOptions, groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the most blocks that one request holds at a time, summed over groups."""
    return sum(
        ceil_div(_max_bytes(options, group.kv_cache_spec), group.kv_cache_spec.page_size_bytes)
        for group in groups
    )


def get_max_concurrency_for_kv_cache_config(options: PlanOptions, config: KVCacheConfig) -> float:
    """Return how many requests of full length fit at the same time; infinite without a cache."""
    check_options(options)
    check_kind("config", config, KVCacheConfig, ConfigurationError)
    if not config.kv_cache_groups:
        return math.inf
    page = get_uniform_page_size(group.kv_cache_spec for group in config.kv_cache_groups)
    needed = max_memory_usage_bytes(options, (g.kv_cache_spec for g in config.kv_cache_groups))
    # Layers per group multiply both a request's need and a block's size, and cancel out.
    return config.num_blocks / ceil_div(needed, page)


def rank_capacity(
    options: PlanOptions, rank: int, groups: Sequence[KVCacheGroupSpec], available_bytes: int
) -> RankCapacity:
    """Return how many blocks of its projected `groups` fit on `rank`.

    Raises NotEnoughMemoryError if `num_gpu_blocks_override` is more than fits.
    """
    block_bytes = block_bytes_of(groups)
    if not block_bytes:
        return RankCapacity(rank, 0, available_bytes, NUM_NULL_BLOCKS)
    pools = num_pools(groups)
    num_blocks = get_num_blocks(options, pools, available_bytes, block_bytes // pools)
    if num_blocks * block_bytes > available_bytes:
        raise NotEnoughMemoryError(
            f"rank {rank}: {num_blocks} blocks (num_gpu_blocks_override, cache.num_blocks) need "
            f"{num_blocks * block_bytes} bytes, {available_bytes} are available: override with "
            f"at most {available_bytes // block_bytes} blocks, or give the rank more memory"
        )
    return RankCapacity(rank, block_bytes, available_bytes, num_blocks)


def tightest(capacities: Sequence[RankCapacity]) -> RankCapacity | None:
    """Return the rank with the fewest blocks (the lowest such), None if no rank is bounded."""
    limits = [capacity for capacity in capacities if capacity.is_limit]
    return min(limits, key=lambda c: (c.num_blocks, c.rank), default=None)


def longest_model_len(
    options: PlanOptions, groups: Sequence[KVCacheGroupSpec], num_blocks: int
) -> int:
    """Return the most tokens, up to `options.longest_model_len`, that run in `num_blocks`.

    0 if not even one token does. Bisects, because a longer request never needs fewer blocks.
    """

    def fits(num_tokens: int) -> bool:
        needed = blocks_per_request(options.with_max_model_len(num_tokens), groups)
        return needed + NUM_NULL_BLOCKS <= num_blocks

    return _largest(fits, options.longest_model_len)


def require_capacity(
    options: PlanOptions, groups: Sequence[KVCacheGroupSpec], capacities: Sequence[RankCapacity]
) -> None:
    """Raise NotEnoughMemoryError unless one request of full length fits together with the null
    block."""
    least = tightest(capacities)
    if least is None:
        return
    needed = blocks_per_request(options, groups) + NUM_NULL_BLOCKS
    if needed <= least.num_blocks:
        return
    longest = longest_model_len(options, groups, least.num_blocks)
    if longest:
        remedy = f"lower max_model_len to at most {longest} tokens, or "
    else:
        remedy = "not even one token fits; "
    if options.num_gpu_blocks_override is None:
        remedy += f"give rank {least.rank} more memory"
    else:
        override = options.num_gpu_blocks_override
        remedy += f"raise num_gpu_blocks_override (cache.num_blocks) above {override}"
    raise NotEnoughMemoryError(
        f"rank {least.rank}: a request of {options.longest_model_len} tokens needs "
        f"{needed * least.block_bytes} bytes ({needed} blocks of {least.block_bytes} bytes, the "
        f"null block included), available are {least.available_bytes} bytes "
        f"({least.num_blocks} blocks): {remedy}"
    )


def check_enough_kv_cache_memory(
    options: PlanOptions, specs: LayerSpecs, available_memory: int
) -> None:
    """Raise NotEnoughMemoryError unless a request of full length fits into one rank's memory.

    The error says how much is needed, how much there is, and the length that would fit.
    """
    available = _as_memory(available_memory)
    groups = _groups_of(options, specs)
    require_capacity(options, groups, [rank_capacity(options, 0, groups, available)])


def estimate_max_model_len(options: PlanOptions, specs: LayerSpecs, available_memory: int) -> int:
    """Return the most tokens of a request that fits into one rank's memory; 0 if none does.

    At most `options.max_model_len`, or `max_position_embeddings` if that is "auto".
    """
    available = _as_memory(available_memory)
    groups = _groups_of(options, specs)
    capacity = rank_capacity(options, 0, groups, available)
    if not capacity.is_limit:
        return options.longest_model_len
    return longest_model_len(options, groups, capacity.num_blocks)


def _as_memory(available_memory: int, at_least: int = 0) -> int:
    return as_int("available_memory", available_memory, at_least, error=ConfigurationError)


def _groups_of(options: PlanOptions, specs: LayerSpecs) -> tuple[KVCacheGroupSpec, ...]:
    check_options(options)
    return get_kv_cache_groups(
        specs, disable_hybrid_kv_cache_manager=options.disable_hybrid_kv_cache_manager
    )


def _max_bytes(options: PlanOptions, spec: KVCacheSpec) -> int:
    return spec.max_memory_usage_bytes(options.longest_model_len, options.max_num_batched_tokens)


def _largest(is_possible: Callable[[int], bool], limit: int) -> int:
    """Return the largest possible value of 0..limit; assumes that 0 is possible."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if is_possible(middle):
            low = middle
        else:
            high = middle - 1
    return low
