"""The settings of a manager, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcache.base.arguments import (
    MAX_INT32,
    as_bool,
    as_int,
    as_number,
    as_text,
    check_fields,
    check_kind,
)
from kvcache.base.errors import ConfigurationError
from kvcache.config.tenants import TenantsConfig
from kvcache.core import CoreSettings
from kvcache.requests.hashing import RequestBlockHasher
from kvcache.specs import KVCacheConfig
from kvcache.tenants import TenantLedger, TierShares
from kvcache.tenants.shares import DEVICE_TIER

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


@dataclass(frozen=True)
class ManagerSettings:
    """The settings of a manager; `KVCacheManager` explains each.

    Raises:
        ConfigurationError: a value is invalid; the message names it and the valid ones.
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

    def core_settings(self, hasher: RequestBlockHasher) -> CoreSettings:
        """Return the settings of the manager's core, which makes digests as `hasher` does."""
        return CoreSettings(
            self.kv_cache_config,
            hasher.none_hash,
            hasher.hash_fn,
            self.enable_caching,
            self.use_eagle,
            self.eviction_policy,
            zero_new_blocks=self.zero_new_blocks,
            has_workers=self.has_workers,
            merge_duplicates=self.merge_duplicates,
            publish_all_groups=self.publish_all_groups,
        )

    @property
    def num_watermark_blocks(self) -> int:
        """How many blocks must stay free when a request joins running ones."""
        return int(self.watermark * self.kv_cache_config.num_blocks)

    @property
    def max_pinned_blocks(self) -> int:
        """How many blocks pins may hold."""
        return int(self.max_pin_share * max(0, self.kv_cache_config.num_blocks - 1))

    @property
    def hash_block_size(self) -> int:
        """Tokens per digest: the greatest common divisor of all groups' block sizes."""
        return math.gcd(*self.block_sizes) or 1

    def tenant_ledger(self) -> TenantLedger | None:
        """Return an empty ledger of the pool's tenants; raises ConfigurationError."""
        if self.tenants is None:
            return None
        num_blocks = self.kv_cache_config.num_blocks
        shares = TierShares.of(self.tenants, DEVICE_TIER, max(0, num_blocks - 1))
        return TenantLedger(shares, num_blocks)
