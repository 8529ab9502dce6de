"""What a manager is made of, put together in one place.

Settings are checked here, once. The parts know each other only as far as they are handed over
below; the manager is their common face.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcache.arguments import (
    MAX_INT32,
    as_bool,
    as_int,
    as_number,
    as_text,
    check_fields,
    check_kind,
    check_methods,
)
from kvcache.clock import Clock
from kvcache.config.tenants import TenantsConfig
from kvcache.core import EventSink, NullEventSink, NullOffloadHooks, OffloadHooks
from kvcache.errors import ConfigurationError, shown
from kvcache.hashing import get_hash_fn, get_request_block_hasher
from kvcache.manager.admission import Admission, AdmissionLimits
from kvcache.manager.cache_control import CacheControl
from kvcache.manager.cache_view import CacheView
from kvcache.manager.core_settings import CoreFactory, CoreSettings
from kvcache.manager.events_buffer import EventBuffer
from kvcache.manager.holds import PrefixHolds
from kvcache.manager.loads import PrefixLoads
from kvcache.manager.model_limits import ModelLimits
from kvcache.manager.request_table import RequestTable
from kvcache.manager.step_execution import StepExecutor
from kvcache.manager.step_ledger import StepLedger
from kvcache.manager.step_plan import StepPlanner
from kvcache.manager.tiers import GuardedHooks, TierLink
from kvcache.specs import KVCacheConfig
from kvcache.tenants import TenantLedger, TierShares
from kvcache.tenants.shares import DEVICE_TIER

MAX_UNFINISHED_STEPS = 256
"""Steps of one client that may be neither complete nor failed at the same time."""


_FLAGS = (
    "enable_caching",
    "use_eagle",
    "log_stats",
    "enable_kv_cache_events",
    "zero_new_blocks",
    "has_workers",
    "merge_duplicates",
    "publish_all_groups",
)
_HOOKS = ("look_up", "on_eviction_candidates", "on_sealed", "on_request_finished")


@dataclass(frozen=True)
class ManagerSettings:
    """The settings of a manager; `KVCacheManager` says what each means.

    Raises:
        ConfigurationError: a value cannot be meant; names it, and what could be.
    """

    kv_cache_config: KVCacheConfig
    max_model_len: int
    enable_caching: bool
    caching_hash_algo: str
    use_eagle: bool
    log_stats: bool
    enable_kv_cache_events: bool
    watermark: float
    eviction_policy: str
    max_num_seqs: int
    max_pin_share: float
    hash_seed: str
    zero_new_blocks: bool
    has_workers: bool
    model_epoch: int
    merge_duplicates: bool = False
    publish_all_groups: bool = False
    tenants: TenantsConfig | None = None

    def __post_init__(self) -> None:
        check_kind("kv_cache_config", self.kv_cache_config, KVCacheConfig, ConfigurationError)
        check_fields(self, as_int, "max_model_len", "max_num_seqs", at_least=1, at_most=MAX_INT32)
        check_fields(self, as_int, "model_epoch")
        check_fields(self, as_bool, *_FLAGS)
        check_fields(self, as_text, "caching_hash_algo", "eviction_policy")
        check_fields(self, as_text, "hash_seed", may_be_empty=True)
        check_fields(self, as_number, "watermark", "max_pin_share", at_least=0, at_most=1)
        if self.watermark == 1:
            raise ConfigurationError(
                f"watermark is {self.watermark}: pass a share from 0.0 to below 1.0"
            )
        if self.tenants is not None:
            check_kind("tenants", self.tenants, TenantsConfig, ConfigurationError)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens per block of each KV cache group."""
        groups = self.kv_cache_config.kv_cache_groups
        return tuple(group.kv_cache_spec.block_size for group in groups)

    @property
    def hash_block_size(self) -> int:
        """Tokens per digest: what divides every group's block size."""
        return math.gcd(*self.block_sizes) or 1

    def tenant_ledger(self) -> TenantLedger | None:
        """Return empty books of the tenants of the pool; raises ConfigurationError."""
        if self.tenants is None:
            return None
        num_blocks = self.kv_cache_config.num_blocks
        shares = TierShares.of(self.tenants, DEVICE_TIER, max(0, num_blocks - 1))
        return TenantLedger(shares, num_blocks)


class ManagerParts:
    """One of each, wired."""

    def __init__(
        self,
        settings: ManagerSettings,
        clock: Clock,
        hooks: OffloadHooks,
        event_sink: EventSink | None,
        core_factory: CoreFactory,
    ) -> None:
        """Make the parts of a manager with an empty cache; raises `ConfigurationError`."""
        check_methods("clock", clock, ("now",), ConfigurationError)
        check_methods("offload_hooks", hooks, _HOOKS, ConfigurationError)
        hooks = hooks if type(hooks) is NullOffloadHooks else GuardedHooks(hooks)
        if event_sink is not None:
            check_methods("event_sink", event_sink, ("emit",), ConfigurationError)
        if not callable(core_factory):
            raise ConfigurationError(
                f"core_factory has to be a function that makes a core, not {shown(core_factory)}"
            )
        config = settings.kv_cache_config
        max_model_len = settings.max_model_len
        self.limits = limits = ModelLimits.of(config, max_model_len)
        self.hasher = get_request_block_hasher(
            settings.hash_block_size, get_hash_fn(settings.caching_hash_algo), settings.hash_seed
        )
        self.events = EventBuffer(event_sink, keeps_events=settings.enable_kv_cache_events)
        is_heard = settings.enable_kv_cache_events or event_sink is not None
        self.table = RequestTable(settings.max_num_seqs, settings.hash_block_size)
        heard: EventSink = self.events if is_heard else NullEventSink()
        self.tenants = settings.tenant_ledger()
        core_settings = self._core_settings(settings, self.table.slot_by_request, heard, hooks)
        self.core = core_factory(core_settings)
        self.ledger = StepLedger()
        self.admission = Admission(
            self.table,
            AdmissionLimits(max_model_len, int(settings.watermark * config.num_blocks)),
            limits,
            log_stats=settings.log_stats,
            tenants=self.tenants,
        )
        max_pinned_blocks = int(settings.max_pin_share * max(0, config.num_blocks - 1))
        self.control = CacheControl(
            self.core,
            self.table,
            self.admission,
            clock,
            max_pinned_blocks=max_pinned_blocks,
            model_epoch=settings.model_epoch,
            has_workers=settings.has_workers,
            tenants=self.tenants,
        )
        self.tiers = self._tier_link(settings, hooks)
        self.holds = PrefixHolds(self.core, self.control, self.hasher)
        self.view = CacheView(self.core, self.table, self.control)
        self.planner = StepPlanner(self.table, limits, MAX_UNFINISHED_STEPS, self.hasher)
        self.executor = StepExecutor(self.table, self.core, self.admission, self.tiers, limits)

    def _core_settings(
        self,
        settings: ManagerSettings,
        slot_by_request: dict[str, int],
        events: EventSink,
        hooks: OffloadHooks,
    ) -> CoreSettings:
        return CoreSettings(
            settings.kv_cache_config,
            self.hasher.none_hash,
            self.hasher.hash_fn,
            slot_by_request,
            settings.enable_caching,
            settings.use_eagle,
            settings.eviction_policy,
            events,
            hooks,
            settings.zero_new_blocks,
            settings.has_workers,
            settings.merge_duplicates,
            settings.publish_all_groups,
            tenants=self.tenants,
        )

    def _tier_link(self, settings: ManagerSettings, hooks: OffloadHooks) -> TierLink:
        block_sizes = settings.block_sizes
        loads = PrefixLoads(
            self.core,
            self.control,
            self.hasher,
            self.ledger,
            self.table,
            block_sizes=block_sizes,
            num_dropped_tokens=math.lcm(*block_sizes) if settings.use_eagle else 0,
        )
        return TierLink(
            hooks,
            loads,
            self.events,
            block_sizes=block_sizes,
            none_hash=self.hasher.none_hash,
        )
