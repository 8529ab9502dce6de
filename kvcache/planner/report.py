"""The numbers of a plan: blocks, bytes, tokens, concurrency.

Pure data; the commands render it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvcache.base.arguments import as_text, check_kind
from kvcache.base.errors import ConfigurationError
from kvcache.planner.memory import NUM_NULL_BLOCKS, blocks_per_request, longest_model_len
from kvcache.planner.plan import Plan
from kvcache.specs import KVCacheConfig

MAX_MODEL_LEN = 2**31 - 1
"""Longest request that can be reported: positions travel as int32."""


@dataclass(frozen=True)
class GroupReport:
    """One KV cache group over all ranks."""

    group_id: int
    kind: str
    num_layers: int
    block_size_tokens: int
    page_size_bytes: int
    real_page_size_bytes: int
    """Bytes of content in a page; the rest is padding."""
    blocks_per_request: int
    """Most blocks that one request of `max_model_len` tokens holds in this group."""


@dataclass(frozen=True)
class RankReport:
    """One rank's share. `bytes_per_token`: bytes per token of a request of full length here."""

    rank: int
    num_layers: int
    available_bytes: int
    num_blocks: int
    block_bytes: int
    allocated_bytes: int
    unused_bytes: int
    bytes_per_token: float
    padding_waste: float
    """Share, 0 to 1, of evenly used blocks that no layer of this rank fills: padding of pages, and
    pools that a group has no layer for."""
    host_blocks: int
    disk_blocks: int


@dataclass(frozen=True)
class PlanReport:
    """The numbers of a plan. Tokens are of the whole model; bytes are summed over ranks or per
    rank.

    `capacity_tokens`: tokens in a pool full of requests of full length; `bytes_per_token`: bytes of
    each of them on all ranks. `request_bytes`: bytes of one such request; no layer fills
    `request_padding_bytes` of them (padding of pages, and pools that a group has no layer for).
    `largest_model_len`: most tokens of one request that fit into the memory, regardless of the
    configured length and the model's limit. `max_concurrency`, `capacity_tokens` and
    `largest_model_len` are None if they are unbounded (a model without a cache, or with only
    windows and states).
    """

    name: str
    num_ranks: int
    num_blocks: int
    num_usable_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    layout: str
    capacity_tokens: int | None
    bytes_per_token: float
    request_bytes: int
    request_padding_bytes: int
    allocated_bytes: int
    max_concurrency: float | None
    largest_model_len: int | None
    can_prefix_cache: bool
    fingerprint: str
    groups: tuple[GroupReport, ...]
    ranks: tuple[RankReport, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> str:
        """Return the report as JSON, with the fields' names as keys."""
        return json.dumps(asdict(self), indent=2)


def report_plan(plan: Plan, name: str = "kvcache") -> PlanReport:
    check_kind("plan", plan, Plan, ConfigurationError)
    name = as_text("name", name, ConfigurationError)
    groups = _report_groups(plan)
    usable = plan.num_blocks - NUM_NULL_BLOCKS
    allocated = sum(config.total_size_bytes for config in plan.configs)
    per_request = sum(group.blocks_per_request for group in groups)
    tokens = plan.max_model_len * usable / per_request if per_request else math.inf
    is_bounded = math.isfinite(tokens)
    request_bytes = _block_bytes(plan.configs) * per_request
    return PlanReport(
        name=name,
        num_ranks=len(plan.configs),
        num_blocks=plan.num_blocks,
        num_usable_blocks=usable,
        max_model_len=plan.max_model_len,
        max_num_batched_tokens=plan.options.max_num_batched_tokens,
        layout=plan.options.layout,
        capacity_tokens=int(tokens) if is_bounded else None,
        bytes_per_token=request_bytes / plan.max_model_len,
        request_bytes=request_bytes,
        request_padding_bytes=request_bytes - _filled_bytes(plan, groups),
        allocated_bytes=allocated,
        max_concurrency=plan.max_concurrency if math.isfinite(plan.max_concurrency) else None,
        largest_model_len=_largest_model_len(plan),
        can_prefix_cache=plan.can_prefix_cache,
        fingerprint=plan.fingerprint,
        groups=groups,
        ranks=tuple(_report_rank(plan, rank) for rank in range(len(plan.configs))),
        warnings=plan.warnings,
    )


def _report_groups(plan: Plan) -> tuple[GroupReport, ...]:
    return tuple(
        GroupReport(
            group_id=group_id,
            kind=group.kv_cache_spec.kind,
            num_layers=len(group.layer_names),
            block_size_tokens=group.kv_cache_spec.block_size,
            page_size_bytes=group.kv_cache_spec.page_size_bytes,
            real_page_size_bytes=group.kv_cache_spec.real_page_size_bytes,
            blocks_per_request=blocks_per_request(plan.options, [group]),
        )
        for group_id, group in enumerate(plan.model_groups)
    )


def _filled_bytes(plan: Plan, groups: Sequence[GroupReport]) -> int:
    """Return the content bytes of a request of full length, over all ranks."""
    return sum(
        report.blocks_per_request * report.real_page_size_bytes * len(group.layer_names)
        for config in plan.configs
        for report, group in zip(groups, config.kv_cache_groups, strict=True)
    )


def _largest_model_len(plan: Plan) -> int | None:
    """Return the most tokens of a request that fit into the plan's blocks, None if any number."""
    if not plan.model_groups:
        return None
    anything = plan.options.with_max_model_len(MAX_MODEL_LEN)
    largest = longest_model_len(anything, plan.model_groups, plan.num_blocks)
    return largest if largest < MAX_MODEL_LEN else None


def _report_rank(plan: Plan, rank: int) -> RankReport:
    config = plan.configs[rank]
    filled = sum(
        len(group.layer_names) * group.kv_cache_spec.real_page_size_bytes
        for group in config.kv_cache_groups
    )
    per_request = blocks_per_request(plan.options, config.kv_cache_groups)
    taken = len(config.kv_cache_groups) * _block_bytes([config])
    available = plan.memories[rank].device_bytes
    return RankReport(
        rank=rank,
        num_layers=sum(len(group.layer_names) for group in config.kv_cache_groups),
        available_bytes=available,
        num_blocks=config.num_blocks,
        block_bytes=_block_bytes([config]),
        allocated_bytes=config.total_size_bytes,
        unused_bytes=available - config.total_size_bytes,
        bytes_per_token=_block_bytes([config]) * per_request / plan.max_model_len,
        padding_waste=1 - filled / taken if taken else 0.0,
        host_blocks=config.host_blocks,
        disk_blocks=config.disk_blocks,
    )


def _block_bytes(configs: Sequence[KVCacheConfig]) -> int:
    """Return the bytes of one block over all pools of these ranks."""
    return sum(config.block_size_bytes for config in configs)
