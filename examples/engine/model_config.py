"""The shape of a decoder, and its layers' entries in the cache configuration.

The decoder reads shapes here, and the cluster's configuration is made from `cache_layers`. Four
small models are predefined: random weights, but with the parts of the models they are named after.
Sizes that contradict each other are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from kvcache.base.errors import ConfigurationError

LayerKind = Literal["full", "window", "latent", "state"]


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder of `layers`, from first to last.

    `full` and `window` layers keep a key and a value per token for `num_kv_heads` heads of
    `head_size`; a `window` layer's token reads itself and the `window_tokens - 1` before it, and
    rotates its heads by `window_rope_theta`. A `latent` layer keeps `latent_size` elements, from
    which all heads compute keys and values, and `rope_size` elements with the position. A `state`
    layer keeps the last `conv_size - 1` inputs of its convolution and `state_size` elements for
    each of `num_channels` channels. `dtype` is that of weights, activations and cache.
    """

    name: str = "llama"
    layers: tuple[LayerKind, ...] = ("full", "full")
    vocab_size: int = 256
    hidden_size: int = 32
    intermediate_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 8
    rope_theta: float = 10_000.0
    window_rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    max_model_len: int = 256
    dtype: str = "float64"
    window_tokens: int = 0
    latent_size: int = 0
    rope_size: int = 0
    num_channels: int = 0
    state_size: int = 0
    conv_size: int = 4
    num_state_drafts: int = 0
    has_head_norm: bool = False
    is_embedding_scaled: bool = False
    is_embedding_tied: bool = False

    def __post_init__(self) -> None:
        needed = {
            "window": ("window_tokens",),
            "latent": ("latent_size", "rope_size"),
            "state": ("num_channels", "state_size"),
        }
        for kind, names in needed.items():
            for name in names:
                if kind in self.layers and getattr(self, name) < 1:
                    raise ConfigurationError(
                        f"model {self.name} has {kind} layers and {name} {getattr(self, name)}: "
                        "set it to 1 or more"
                    )
        if not self.layers or self.num_heads % self.num_kv_heads or self.head_size % 2:
            raise ConfigurationError(
                f"model {self.name} has {len(self.layers)} layers, {self.num_heads} heads on "
                f"{self.num_kv_heads} KV heads of {self.head_size}: give it a layer, heads that "
                "KV heads divide, and an even head size"
            )

    @property
    def keeps_states(self) -> bool:
        """Whether some layer keeps a state instead of tokens."""
        return "state" in self.layers

    def cache_layers(self) -> list[dict[str, Any]]:
        """Return the `model.layers` section of a cluster's configuration."""
        heads = {"num_kv_heads": self.num_kv_heads, "head_size": self.head_size}
        entries: dict[str, dict[str, Any]] = {
            "full": {"kind": "full", **heads},
            "window": {"kind": "sliding_window", **heads, "window_tokens": self.window_tokens},
            "latent": {"kind": "mla", "head_size": self.latent_size + self.rope_size},
            "state": {
                "kind": "mamba",
                "state_shapes": [
                    [self.num_channels, self.conv_size - 1],
                    [self.num_channels, self.state_size],
                ],
                "cache_mode": "align",
                "num_speculative_blocks": self.num_state_drafts,
            },
        }
        return [entries[kind] for kind in self.layers]

    def stage_layers(self, stage: int, num_stages: int) -> range:
        """Return the layers of a pipeline stage: runs of equal length, earlier ones one longer.

        The cluster divides layers by the same rule.
        """
        share, remainder = divmod(len(self.layers), num_stages)
        start = stage * share + min(stage, remainder)
        return range(start, start + share + (stage < remainder))


def llama(**changes: Any) -> DecoderConfig:
    """Grouped-query attention with rotary positions, SwiGLU, RMS norms."""
    return replace(DecoderConfig(), **changes)


def gemma_hybrid(**changes: Any) -> DecoderConfig:
    """As Gemma 3: windows with occasional full layers, norms of heads, a scaled embedding."""
    config = DecoderConfig(
        name="gemma-hybrid",
        layers=("window", "window", "full", "window"),
        window_tokens=24,
        rope_theta=1_000_000.0,
        has_head_norm=True,
        is_embedding_scaled=True,
    )
    return replace(config, **changes)


def latent(**changes: Any) -> DecoderConfig:
    """Multi-head latent attention: a token keeps one short vector for all heads."""
    config = DecoderConfig(name="latent", layers=("latent", "latent"), latent_size=12, rope_size=4)
    return replace(config, **changes)


def mamba_hybrid(**changes: Any) -> DecoderConfig:
    """Selective state spaces with an attention layer between them."""
    config = DecoderConfig(
        name="mamba-hybrid",
        layers=("state", "full", "state"),
        num_channels=32,
        state_size=5,
    )
    return replace(config, **changes)


MODELS: Mapping[str, Callable[..., DecoderConfig]] = MappingProxyType(
    {
        "llama": llama,
        "gemma-hybrid": gemma_hybrid,
        "latent": latent,
        "mamba-hybrid": mamba_hybrid,
    }
)
"""The small models by name."""
