"""What each attention layer of a stock model keeps, read off its configuration.

First thing a store does. Asks `transformers` itself which layers forget (its own dynamic cache is
made from the same configuration), so that masks and blocks agree. Refuses layers that keep anything
but one key and one value per token and head: states, shared or compressed caches, encoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvcache.base.errors import ConfigurationError
from kvcache.specs import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec


@dataclass(frozen=True)
class ModelLayers:
    """The layers of a model in order: names `layers.0`, `layers.1`, ...; a spec for each.

    `windows[i]`: tokens that layer i sees, its own included; None: all. A layer that attends in
    chunks of `n` tokens counts as one with a window of `n`, which covers its chunk.
    `max_position_embeddings`: what the model was trained for.
    """

    specs: Mapping[str, KVCacheSpec]
    windows: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device
    max_position_embeddings: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers, in the model's order."""
        return tuple(self.specs)

    @classmethod
    def of(cls, model: PreTrainedModel, block_size: int) -> ModelLayers:
        """Read `model`'s configuration.

        Raises:
            ConfigurationError: a layer keeps what blocks of keys and values cannot hold; names it.
        """
        config = model.config.get_text_config(decoder=True)
        if model.config.is_encoder_decoder:
            raise ConfigurationError(
                f"{type(model).__name__} has an encoder: use a model that only decodes"
            )
        windows = tuple(
            _window(type(model).__name__, index, layer)
            for index, layer in enumerate(DynamicCache(config=config).layers)
        )
        num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        dtype = str(model.dtype).removeprefix("torch.")
        full = FullAttentionSpec(
            block_size=block_size, num_kv_heads=num_heads, head_size=head_size, dtype=dtype
        )
        specs: dict[str, KVCacheSpec] = {
            f"layers.{index}": full
            if window is None
            else SlidingWindowSpec(
                block_size=block_size,
                num_kv_heads=num_heads,
                head_size=head_size,
                dtype=dtype,
                sliding_window=window,
            )
            for index, window in enumerate(windows)
        }
        longest = getattr(config, "max_position_embeddings", None) or _LONGEST
        return cls(specs, windows, model.dtype, model.device, longest)


_LONGEST = 1 << 17
"""Tokens of a model that says no limit of its own."""


def _window(model_name: str, index: int, layer: Any) -> int | None:
    """Return what a layer of `transformers`' own cache remembers; None: everything."""
    if type(layer) is DynamicSlidingWindowLayer:
        return int(layer.sliding_window)
    if type(layer) is DynamicLayer:
        return None
    raise ConfigurationError(
        f"layer {index} of {model_name} keeps a {type(layer).__name__}, not one key and value per "
        "token: use a model whose layers are full, sliding or chunked attention"
    )
