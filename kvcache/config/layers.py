"""From a configuration's layers to what each rank keeps.

Stands between configuration and planner, for models that are described rather than loaded.
"""

from __future__ import annotations

from kvcache.config.models import ClusterConfig, LayerConfig
from kvcache.specs import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec


def layer_specs(config: ClusterConfig) -> list[dict[str, KVCacheSpec]]:
    """Return layer name to spec for every global rank, `pipeline_rank * tp + tensor_rank`.

    Layers are named `layers.0`, `layers.1`, ... over the whole model. Pipeline stages take runs of
    layers, earlier stages one more where they do not divide evenly. KV heads are divided by the
    tensor-parallel size; with more ranks than heads, each rank keeps one head.
    """
    layers = [layer for layer in config.model.layers for _ in range(layer.count)]
    by_rank: list[dict[str, KVCacheSpec]] = []
    for start, end in _stage_ranges(len(layers), config.parallel.pipeline_parallel_size):
        stage = {f"layers.{i}": _spec(config, layers[i]) for i in range(start, end)}
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


def _spec(config: ClusterConfig, layer: LayerConfig) -> KVCacheSpec:
    """Return the spec of `layer` on one rank."""
    block_size = config.cache.block_size
    num_kv_heads = max(1, layer.num_kv_heads // config.parallel.tensor_parallel_size)
    dtype = config.model.dtype
    if layer.window_tokens is not None:
        return SlidingWindowSpec(
            block_size, num_kv_heads, layer.head_size, dtype, sliding_window=layer.window_tokens
        )
    return FullAttentionSpec(block_size, num_kv_heads, layer.head_size, dtype)
