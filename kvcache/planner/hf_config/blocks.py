"""Parts of layers, read from fields that many architectures share.

Refuses sizes that contradict each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvcache.base.errors import shown
from kvcache.config import (
    ChunkedLocalLayer,
    FullLayer,
    Layer,
    MambaLayer,
    SlidingWindowLayer,
    StatelessLayer,
)
from kvcache.planner.hf_config.fields import MAX_LAYERS, HFFields

CacheMode = Literal["none", "align"]


@dataclass(frozen=True)
class Deployment:
    """The settings of a deployment that change the cache of a layer.

    `state_dtype`: of a state's elements, if the file does not say.
    """

    tensor_parallel_size: int
    mamba_cache_mode: CacheMode
    state_dtype: str


@dataclass(frozen=True)
class Heads:
    """KV heads of a layer, and the elements of one key or value."""

    num_kv_heads: int
    head_size: int


def num_layers(fields: HFFields) -> int:
    """Return how many layers the model has."""
    return fields.count("num_hidden_layers", at_most=MAX_LAYERS)


def read_heads(fields: HFFields, deployment: Deployment, head_size_name: str = "head_dim") -> Heads:
    """Return the heads of grouped-query attention.

    Without `num_key_value_heads` and an architecture's default, every head has its own keys and
    values. Without a head size, heads share `hidden_size` evenly. Raises ConfigurationError if
    heads do not divide.
    """
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count_or_none("num_key_value_heads") or heads
    if heads % kv_heads:
        raise fields.wrong(
            f"num_attention_heads is {heads} and num_key_value_heads {kv_heads}: heads cannot "
            "share keys and values evenly"
        )
    require_divisible(fields, "num_attention_heads", deployment)
    head_size = fields.count_or_none(head_size_name)
    if head_size is None:
        hidden_size = fields.count("hidden_size")
        if hidden_size % heads:
            raise fields.wrong(
                f"{head_size_name} is missing, and hidden_size ({hidden_size}) does not divide by "
                f"num_attention_heads ({heads})"
            )
        head_size = hidden_size // heads
    return Heads(kv_heads, head_size)


def require_divisible(fields: HFFields, name: str, deployment: Deployment) -> None:
    """Raise ConfigurationError unless tensor-parallel ranks can divide the count `name`."""
    count, size = fields.count(name), deployment.tensor_parallel_size
    if count % size:
        raise fields.refused(
            f"{name} is {count}, which {size} tensor-parallel ranks cannot divide evenly: choose a "
            f"tensor-parallel size that divides {count}"
        )


def full(heads: Heads, count: int = 1) -> FullLayer:
    """Return `count` layers of full attention."""
    return FullLayer(num_kv_heads=heads.num_kv_heads, head_size=heads.head_size, count=count)


def typed_layers(fields: HFFields, heads: Heads, types: Sequence[object]) -> list[Layer]:
    """Return a layer for each of `types`, the words of the field `layer_types`.

    Raises ConfigurationError for other words, and for windows or chunks of unknown size.
    """
    kinds: dict[object, Layer] = {"full_attention": full(heads)}
    if "sliding_attention" in types:
        kinds["sliding_attention"] = SlidingWindowLayer(
            num_kv_heads=heads.num_kv_heads,
            head_size=heads.head_size,
            window_tokens=_size_of(fields, "sliding_attention", "sliding_window"),
        )
    if "chunked_attention" in types:
        kinds["chunked_attention"] = ChunkedLocalLayer(
            num_kv_heads=heads.num_kv_heads,
            head_size=heads.head_size,
            chunk_tokens=_size_of(fields, "chunked_attention", "attention_chunk_size"),
        )
    return chosen_layers(fields, "layer_types", types, kinds)


def chosen_layers(
    fields: HFFields, name: str, words: Sequence[object], kinds: Mapping[object, Layer]
) -> list[Layer]:
    """Return the layer for each word of field `name`; raises for unknown words."""
    layers = []
    for index, word in enumerate(words):
        layer = kinds.get(word) if isinstance(word, str) else None
        if layer is None:
            known = ", ".join(sorted(map(str, kinds)))
            raise fields.wrong(
                f"{name}[{index}] is {shown(word)}: its cache is not known (known are {known})"
            )
        layers.append(layer)
    return layers


def _size_of(fields: HFFields, layer_type: str, name: str) -> int:
    if not fields.has(name):
        raise fields.wrong(f"there are layers of {layer_type}, but {name} is missing")
    return fields.count(name)


def mamba_layer(
    fields: HFFields, deployment: Deployment, shapes: Sequence[tuple[int, ...]]
) -> MambaLayer:
    """Return a layer with the states of a convolution and a recurrence, in this order."""
    recurrent = deployment.state_dtype
    if fields.has("mamba_ssm_cache_dtype"):
        recurrent = fields.dtype("mamba_ssm_cache_dtype")
    return MambaLayer(
        state_shapes=tuple(shapes),
        state_dtypes=(deployment.state_dtype, recurrent),
        cache_mode=deployment.mamba_cache_mode,
    )


def stateless() -> StatelessLayer:
    """Return a layer without a cache."""
    return StatelessLayer()


def in_runs(layers: Sequence[Layer]) -> list[Layer]:
    """Return `layers` with equal consecutive entries merged into one with a count."""
    runs: list[Layer] = []
    for layer in layers:
        if runs and runs[-1].model_copy(update={"count": layer.count}) == layer:
            runs[-1] = runs[-1].model_copy(update={"count": runs[-1].count + layer.count})
        else:
            runs.append(layer)
    return runs
