"""The configuration of a cluster, and the layer specs that follow from it.

models.py has the sections and the specs that follow, layer_kinds.py the kinds of layers,
sections.py the base of both, problems.py the error texts. loading.py reads files.
"""

from __future__ import annotations

from kvcache.config.deadlines import DeadlinesConfig
from kvcache.config.layer_kinds import (
    ChunkedLocalLayer,
    CrossLayer,
    FullLayer,
    Layer,
    MambaLayer,
    MLALayer,
    SlidingWindowLayer,
    StatelessLayer,
)
from kvcache.config.loading import load_config, parse_config
from kvcache.config.models import ClusterConfig, ModelConfig, TransportConfig, layer_specs

__all__ = [
    "ChunkedLocalLayer",
    "ClusterConfig",
    "CrossLayer",
    "DeadlinesConfig",
    "FullLayer",
    "Layer",
    "MLALayer",
    "MambaLayer",
    "ModelConfig",
    "SlidingWindowLayer",
    "StatelessLayer",
    "TransportConfig",
    "layer_specs",
    "load_config",
    "parse_config",
]
