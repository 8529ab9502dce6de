"""The configuration of a cluster, and the layer specs that follow from it.

models.py has the sections and the specs that follow, layer_kinds.py the kinds of layers,
sections.py the base of both, problems.py the error texts. loading.py reads files.
"""

from __future__ import annotations

from kvcache.config.deadlines import DeadlinesConfig
from kvcache.config.events import EventsConfig
from kvcache.config.layer_kinds import (
    ChunkedLocalLayer,
    CrossLayer,
    FullLayer,
    Layer,
    LayerConfig,
    MambaLayer,
    MLALayer,
    SlidingWindowLayer,
    StatelessLayer,
)
from kvcache.config.loading import load_config, parse_config
from kvcache.config.models import (
    AuditConfig,
    CacheConfig,
    ClusterConfig,
    ContentCheckConfig,
    ModelConfig,
    ParallelConfig,
    RecorderConfig,
    SchedulerConfig,
    TransportConfig,
    WorkersConfig,
    layer_specs,
)
from kvcache.config.offload import DiskConfig, OffloadConfig
from kvcache.config.sections import parse_bytes

__all__ = [
    "AuditConfig",
    "CacheConfig",
    "ChunkedLocalLayer",
    "ClusterConfig",
    "ContentCheckConfig",
    "CrossLayer",
    "DeadlinesConfig",
    "DiskConfig",
    "EventsConfig",
    "FullLayer",
    "Layer",
    "LayerConfig",
    "MLALayer",
    "MambaLayer",
    "ModelConfig",
    "OffloadConfig",
    "ParallelConfig",
    "RecorderConfig",
    "SchedulerConfig",
    "SlidingWindowLayer",
    "StatelessLayer",
    "TransportConfig",
    "WorkersConfig",
    "layer_specs",
    "load_config",
    "parse_bytes",
    "parse_config",
]
