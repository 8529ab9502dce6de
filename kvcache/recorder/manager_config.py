"""The settings of a manager as plain values, from which an equal manager can be made.

The first record of every segment has them, and a coordinator makes its own managers from them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from pydantic import ValidationError

from kvcache.base.clock import Clock
from kvcache.base.errors import ConfigurationError, MalformedMessageError
from kvcache.config.tenants import TenantsConfig
from kvcache.core import EventSink
from kvcache.core.flat_core import CoreFactory, FlatCore
from kvcache.manager import KVCacheManager
from kvcache.requests.hashing import DEFAULT_HASH_SEED
from kvcache.specs import KVCacheConfig


@dataclass(frozen=True)
class ManagerConfig:
    """The settings of a coordinator's manager except its epoch; `KVCacheManager` explains each.

    `kv_cache_config` is the plan with the groups of the whole model.
    """

    kv_cache_config: KVCacheConfig
    max_model_len: int
    enable_caching: bool = True
    caching_hash_algo: str = "sha256"
    use_eagle: bool = False
    log_stats: bool = False
    enable_kv_cache_events: bool = False
    watermark: float = 0.0
    eviction_policy: str = "lru"
    max_num_seqs: int = 256
    max_pin_share: float = 0.5
    hash_seed: str = DEFAULT_HASH_SEED
    merge_duplicates: bool = False
    tenants: TenantsConfig | None = None

    def make(
        self,
        clock: Clock,
        model_epoch: int = 0,
        event_sink: EventSink | None = None,
        *,
        publish_all_groups: bool = False,
        core_factory: CoreFactory = FlatCore,
    ) -> KVCacheManager:
        """Return a manager with an empty cache, which keeps commands for workers.

        `event_sink` receives its cache events. `core_factory` makes its core.

        Raises:
            ConfigurationError: a value is invalid.
        """
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        return KVCacheManager(
            **settings,
            clock=clock,
            has_workers=True,
            model_epoch=model_epoch,
            event_sink=event_sink,
            publish_all_groups=publish_all_groups,
            core_factory=core_factory,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a record."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tenants = None if self.tenants is None else self.tenants.model_dump(mode="json")
        return {**values, "kv_cache_config": self.kv_cache_config.to_dict(), "tenants": tenants}

    @classmethod
    def from_dict(cls, data: object) -> ManagerConfig:
        """Return the settings that `to_dict` wrote; raises MalformedMessageError."""
        known = {field.name: field for field in fields(cls)}
        if isinstance(data, dict):
            data = {"tenants": None, **data}  # recordings older than tenants
            data.pop("core", None)  # recordings with a choice of cores
        if not isinstance(data, dict) or set(data) != set(known):
            names = sorted(map(str, data)) if isinstance(data, dict) else type(data).__name__
            raise MalformedMessageError(f"no settings of a manager: {names}")
        plain = _PLAIN_TYPES
        for name, value in data.items():
            if name not in _MADE_OF_PARTS and type(value) is not plain[known[name].type]:
                raise MalformedMessageError(f"{name} of a manager is {value!r}")
        try:
            config = KVCacheConfig.from_dict(data["kv_cache_config"])
            tenants = data["tenants"]
            if tenants is not None:
                tenants = TenantsConfig.model_validate(tenants)
        except (ConfigurationError, ValidationError) as error:
            raise MalformedMessageError(f"no plan or tenants of a manager: {error}") from error
        return cls(**{**data, "kv_cache_config": config, "tenants": tenants})


_MADE_OF_PARTS = frozenset({"kv_cache_config", "tenants"})
_PLAIN_TYPES: dict[Any, type[Any]] = {"int": int, "bool": bool, "str": str, "float": float}
"""The type by a field's annotation."""
