"""From a configuration's layers to the specs of each rank.

For models that are described rather than loaded. `layer_kinds.py` has the spec of a kind; this
module names layers and assigns them to pipeline stages.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.base.arguments import check_kind
from kvcache.base.errors import ConfigurationError
from kvcache.config.layer_kinds import Layer
from kvcache.config.models import ClusterConfig
from kvcache.specs import KVCacheSpec


def layer_specs(config: ClusterConfig) -> list[dict[str, KVCacheSpec]]:
    """Return the specs by layer name for every global rank, `pipeline_rank * tp + tensor_rank`.

    Layers are named `layers.0`, `layers.1`, ... over the whole model, including layers without a
    cache; cross attention in a layer with another attention is `layers.0.cross`. Pipeline stages
    take consecutive layers; if the division leaves a remainder, earlier stages take one more.
    Raises ConfigurationError for sizes that contradict each other.
    """
    check_kind("config", config, ClusterConfig, ConfigurationError)
    layers = config.model.layers_in_order()
    by_rank: list[dict[str, KVCacheSpec]] = []
    for start, end in _stage_ranges(len(layers), config.parallel.pipeline_parallel_size):
        stage: dict[str, KVCacheSpec] = {}
        for index in range(start, end):
            stage |= _named_specs(config, f"layers.{index}", layers[index])
        by_rank.extend(dict(stage) for _ in range(config.parallel.tensor_parallel_size))
    return by_rank


def _stage_ranges(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    """Return `[start, end)` of each stage."""
    share, remainder = divmod(num_layers, num_stages)
    ranges = []
    start = 0
    for stage in range(num_stages):
        end = start + share + (stage < remainder)
        ranges.append((start, end))
        start = end
    return ranges


def _named_specs(
    config: ClusterConfig, layer_name: str, parts: Sequence[Layer]
) -> dict[str, KVCacheSpec]:
    """Return the specs of one rank for the layer that `parts` make up; empty if it has none."""
    specs = {}
    for part in parts:
        block_size = part.block_size or config.cache.block_size
        spec = part.spec(block_size, config.model.dtype, config.parallel.tensor_parallel_size)
        if spec is not None:
            specs[f"{layer_name}.{part.kind}" if part.is_beside_previous else layer_name] = spec
    return specs
