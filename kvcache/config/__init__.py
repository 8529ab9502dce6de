"""The configuration of a cluster: models.py says what can be set, loading.py reads files."""

from __future__ import annotations

from kvcache.config.layers import layer_specs
from kvcache.config.loading import load_config, parse_config
from kvcache.config.models import (
    CacheConfig,
    ClusterConfig,
    ContentCheckConfig,
    DeadlinesConfig,
    LayerConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    TransportConfig,
    WorkersConfig,
    parse_bytes,
)

__all__ = [
    "CacheConfig",
    "ClusterConfig",
    "ContentCheckConfig",
    "DeadlinesConfig",
    "LayerConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "TransportConfig",
    "WorkersConfig",
    "layer_specs",
    "load_config",
    "parse_bytes",
    "parse_config",
]
