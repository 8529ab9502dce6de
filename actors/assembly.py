"""Builds a coordinator from a configuration and a plan: settings, manager, tiers and events.

This is the only place that maps keys of the configuration to settings of the coordinator's side.
workers/embedding.py does the same for workers.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import astuple

from kvcache.base.clock import Clock
from kvcache.base.curve import CurveKeys
from kvcache.base.errors import ConfigurationError
from kvcache.config import ClusterConfig
from kvcache.config.sections import Location
from kvcache.coordinator import Coordinator
from kvcache.coordinator.event_feed import EventFeed, LinkedEventFeed
from kvcache.coordinator.parts import CoordinatorParts, OffloadParts
from kvcache.coordinator.settings import (
    AuditSettings,
    CoordinatorSettings,
    OffloadSettings,
    SwapRule,
    SwapWhen,
)
from kvcache.coordinator.step_recorder import StepRecorder
from kvcache.coordinator.tier_hits import TierHitFinder
from kvcache.core.flat_core import CoreFactory, FlatCore
from kvcache.events.process_link import ProcessLink
from kvcache.events.publisher import PublisherSettings
from kvcache.events.publisher_process import SocketSettings
from kvcache.events.translation import group_kinds, usable_group
from kvcache.manager import KVCacheManager
from kvcache.offload.contents import LabelShape
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.offload.jobs import Deadlines
from kvcache.offload.options import HierarchyOptions, TierOptions
from kvcache.offload.registry import make_tier
from kvcache.offload.specs import FILE_MEDIUM, HOST_MEDIUM
from kvcache.planner import Plan, rank_layout_fingerprint
from kvcache.protocol.state_store import StateStore
from kvcache.recorder import (
    FileStepRecorder,
    ManagerConfig,
    RecorderLimits,
    RecordingOrigin,
    RequestTracer,
    TracedRecorder,
)
from kvcache.recorder.segments import SegmentLimits
from kvcache.requests.hashing import get_hash_fn
from kvcache.specs import require_eagle_support

OPEN_SHARE = 0.25
"""The publisher's share of `deadlines.startup_s`. It starts first; the rest is for finding the
workers."""


def coordinator_settings(config: ClusterConfig, plan: Plan) -> CoordinatorSettings:
    return CoordinatorSettings(
        num_ranks=config.parallel.num_ranks,
        fingerprint=plan.fingerprint,
        is_content_checking=config.content_check.enabled,
        max_unacknowledged=config.transport.window,
        max_client_steps=config.transport.window,
        max_clients=config.transport.max_clients,
        resend_s=config.transport.resend_s,
        heartbeat_s=config.transport.heartbeat_s,
        worker_silence_s=config.deadlines.worker_silence_s,
        client_silence_s=config.deadlines.client_silence_s,
        reattach_s=config.deadlines.reattach_s,
        labels_s=config.deadlines.labels_s,
        audit=AuditSettings(config.audit.mode, config.audit.interval_s),
        layout_fingerprints=tuple(
            rank_layout_fingerprint(config, plan, rank) for rank in range(config.parallel.num_ranks)
        ),
    )


def manager_config_of(config: ClusterConfig, plan: Plan) -> ManagerConfig:
    """Return the settings of every manager of the cluster."""
    cache = config.cache
    return ManagerConfig(
        plan.model_config,
        plan.max_model_len,
        enable_caching=cache.enable_prefix_caching and plan.can_prefix_cache,
        caching_hash_algo=cache.hash_algorithm,
        log_stats=cache.log_stats,
        watermark=cache.watermark,
        eviction_policy=cache.eviction_policy,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_pin_share=cache.max_pin_share,
        hash_seed=cache.hash_seed,
        merge_duplicates=cache.merge_duplicates,
        tenants=config.tenants,
        use_eagle=cache.use_eagle,
    )


def make_recorder(config: ClusterConfig, plan: Plan, clock: Clock) -> FileStepRecorder | None:
    """Return the recorder that the configuration asks for, or None.

    Recorded managers use its clock.
    """
    recorder = config.recorder
    if recorder.directory is None:
        return None
    directory = Location.of(recorder.directory).path / config.name
    limits = SegmentLimits(directory, recorder.segment_bytes, recorder.max_bytes)
    origin = RecordingOrigin(
        recording_id=secrets.token_hex(8),
        fingerprint=plan.fingerprint,
        configuration=config.model_dump_json(),
        manager_config=manager_config_of(config, plan),
        has_tiers=config.offload.host_memory_per_rank is not None,
    )
    return FileStepRecorder(RecorderLimits(limits, recorder.flush_s, recorder.sync), origin, clock)


def make_coordinator(
    config: ClusterConfig,
    plan: Plan,
    clock: Clock,
    state_store: StateStore,
    keys: CurveKeys | None = None,
    *,
    core_factory: CoreFactory = FlatCore,
    tracer: RequestTracer | None = None,
) -> Coordinator:
    """Return a coordinator with its own nonce, not started. `keys` are the cluster's,
    `core_factory` makes its managers' cores, `tracer` records requests.

    Raises ConfigurationError for a kind of attention that EAGLE does not support, and for events
    that cannot be published.
    """
    if config.cache.use_eagle:
        require_eagle_support(g.kv_cache_spec for g in plan.model_config.kv_cache_groups)
    recorder = make_recorder(config, plan, clock)
    manager_clock = clock if recorder is None else recorder.clock
    traced: StepRecorder = recorder or StepRecorder()
    if tracer is not None:
        traced = TracedRecorder(traced, tracer)
    offload = offload_parts(config, plan)
    feed = make_event_feed(config, plan, clock, keys)
    manager_config = manager_config_of(config, plan)

    def make_one(model_epoch: int) -> KVCacheManager:
        tells_all = config.events.publish_groups == "all"
        return manager_config.make(
            manager_clock,
            model_epoch,
            feed,
            publish_all_groups=tells_all,
            core_factory=core_factory,
        )

    try:
        parts = CoordinatorParts(make_one, clock, state_store, traced, feed or EventFeed(), offload)
        return Coordinator(coordinator_settings(config, plan), parts, secrets.token_hex(16))
    except BaseException:
        if feed is not None:
            feed.close()
        raise


def make_event_feed(
    config: ClusterConfig, plan: Plan, clock: Clock, keys: CurveKeys | None
) -> LinkedEventFeed | None:
    """Return the feed of a publisher that has bound its sockets; None if events are off.

    `keys` are the cluster's, for followers that must authenticate.

    Raises ConfigurationError if the sockets cannot be bound or required keys are missing;
    ClusterError if the publisher does not start.
    """
    events = config.events
    if not events.enabled:
        return None
    settings = PublisherSettings.of(events, f"kv@{config.name}@{config.model.name}")
    curve_keys = None
    if events.curve == "always":
        if keys is None:
            raise ConfigurationError(
                "events.curve is always, but a cluster inside one process has no keys: set it to "
                "never"
            )
        curve_keys = astuple(keys)
    groups = [group.kv_cache_spec for group in plan.model_config.kv_cache_groups]
    kinds = group_kinds(plan.model_config.kv_cache_groups)
    link = ProcessLink(
        settings,
        kinds,
        SocketSettings(events.endpoint, events.replay_endpoint, curve_keys=curve_keys),
        clock,
        max_waiting_bytes=events.queue_bytes,
    )
    link.open(OPEN_SHARE * config.deadlines.startup_s)
    return LinkedEventFeed(link, block_size=groups[usable_group(kinds) or 0].block_size)


def offload_parts(config: ClusterConfig, plan: Plan) -> OffloadParts | None:
    """Return the parts that tiers are built from, or None without tiers.

    Raises ConfigurationError for memory too small for a block, an unknown policy, or a kind of
    attention that tiers do not support.
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
    # The disk may be shared with others.
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
            disk_write=offload.disk.write, spare_share=offload.spare_share, deadlines=deadlines
        )

    def make_tiers(new_job_id: Callable[[], int]) -> TierHierarchy:
        below = None if disk is None else make_tier(disk)
        return TierHierarchy(make_tier(host), below, new_job_id, options)

    make_tiers(lambda: 0)  # fail now for an unknown policy, not in the first epoch
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
