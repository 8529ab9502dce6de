"""From a configuration and a plan to the plain parts: the coordinator's manager and settings.

The one place that knows which key of the configuration becomes which setting on the coordinator's
side; embedding.py does the same for workers.
"""

from __future__ import annotations

import secrets

from actors.event_publishing import make_event_feed
from actors.tier_parts import offload_parts
from kvcache.base.clock import Clock
from kvcache.base.curve import CurveKeys
from kvcache.config import ClusterConfig
from kvcache.config.sections import Location
from kvcache.coordinator import Coordinator
from kvcache.coordinator.settings import AuditSettings, CoordinatorSettings
from kvcache.coordinator.step_recorder import StepRecorder
from kvcache.core.flat_core import CoreFactory, FlatCore
from kvcache.manager import KVCacheManager
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
from kvcache.specs import require_eagle_support


def coordinator_settings(config: ClusterConfig, plan: Plan) -> CoordinatorSettings:
    """Return the coordinator's settings."""
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


def make_manager(
    config: ClusterConfig, plan: Plan, clock: Clock, model_epoch: int = 0
) -> KVCacheManager:
    """Return an empty manager for the whole model."""
    return manager_config_of(config, plan).make(clock, model_epoch)


def manager_config_of(config: ClusterConfig, plan: Plan) -> ManagerConfig:
    """Return what every manager of the cluster is made from."""
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
    """Return the recorder that the configuration asks for, None for none.

    Managers that are recorded are made with its clock.
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
    """Return a coordinator with a nonce of its own, not started; `keys` are the cluster's, its
    managers' cores come from `core_factory`, `tracer` hears of requests.

    Raises ConfigurationError for a kind of attention that EAGLE cannot be used with, and for events
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
        return Coordinator(
            coordinator_settings(config, plan),
            manager_factory=make_one,
            clock=clock,
            nonce=secrets.token_hex(16),
            state_store=state_store,
            recorder=traced,
            offload=offload,
            events=feed,
        )
    except BaseException:
        if feed is not None:
            feed.close()
        raise
