"""A decoder's weights: drawn from a seed or read from a checkpoint, and one rank's part of them.

    RandomWeights ─┐
                   ├─ WeightSource ──▶ rank_weights ──▶ name -> tensor of this rank
    Checkpoint ────┘

A weight's name seeds it, so that each rank draws only its own, and shared ones are equal.
Heads, channels and feed-forward columns are divided over tensor-parallel ranks, layers over stages;
the embedding, the norms and the parts common to all heads are on every rank. Sizes that cannot be
divided are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from examples.engine.model_config import DecoderConfig
from kvcache.base.errors import ConfigurationError
from kvcache.worker.kv_cache_pool import TORCH_DTYPES


@dataclass(frozen=True)
class RankPlace:
    """The position of a rank: `rank = stage * tensor_size + tensor_rank`."""

    tensor_rank: int = 0
    tensor_size: int = 1
    stage: int = 0
    num_stages: int = 1

    @classmethod
    def of(cls, rank: int, tensor_size: int, num_stages: int) -> RankPlace:
        """Return the place of a global rank."""
        return cls(rank % tensor_size, tensor_size, rank // tensor_size, num_stages)

    @property
    def is_first_stage(self) -> bool:
        """Whether tokens enter here."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether logits come out here."""
        return self.stage == self.num_stages - 1


class WeightSource(Protocol):
    """Where whole weights come from, by name."""

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the weight, on the CPU. Raises ConfigurationError when it has another shape."""


class RandomWeights:
    """Weights drawn from a seed, scaled so that hidden states keep their size."""

    def __init__(self, seed: int) -> None:
        """Draw from `seed`."""
        self._seed = seed

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        random = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        drawn = torch.randn(*shape, generator=random, dtype=torch.float64)
        if name.endswith("norm"):
            return 1 + drawn / 8
        return drawn if len(shape) == 1 else drawn / shape[-1] ** 0.5


@dataclass(frozen=True)
class _Part:
    """One weight: its whole shape, and how it is divided: into `num_units` along `axis`."""

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    num_units: int = 1


def rank_weights(
    config: DecoderConfig,
    source: WeightSource,
    place: RankPlace,
    adapters: tuple[str, ...] = (),
    device: str = "cpu",
) -> dict[str, torch.Tensor]:
    """Return a rank's weights in the model's dtype; raises ConfigurationError for sizes that
    tensor-parallel ranks cannot divide. `adapters` are always random, `RandomWeights(0)`."""
    dtype = TORCH_DTYPES[config.dtype]
    weights = {}
    parts = [*_ends(config, place)]
    for layer in config.stage_layers(place.stage, place.num_stages):
        parts += _layer_parts(config, layer)
    for part in parts:
        whole = source.get(part.name, part.shape)
        weights[part.name] = _divide(part, whole, place).to(device, dtype).contiguous()
    for adapter in adapters:
        for layer in config.stage_layers(place.stage, place.num_stages):
            name, size = f"adapters.{adapter}.{layer}", config.hidden_size
            for part in (_Part(f"{name}.a", (4, size)), _Part(f"{name}.b", (size, 4))):
                whole = RandomWeights(0).get(part.name, part.shape)
                weights[part.name] = whole.to(device, dtype)
    return weights


def _divide(part: _Part, whole: torch.Tensor, place: RankPlace) -> torch.Tensor:
    """Return a rank's share of a weight; several ranks keep the same unit where units are few."""
    if part.axis is None or place.tensor_size == 1:
        return whole
    size, units = place.tensor_size, part.num_units
    if units % size and size % units:
        raise ConfigurationError(
            f"{part.name} has {units} units for {size} tensor-parallel ranks: one must divide the "
            "other"
        )
    share = max(1, units // size)
    first = place.tensor_rank * units // size
    width = part.shape[part.axis] // units
    return whole.narrow(part.axis, first * width, share * width)


def _ends(config: DecoderConfig, place: RankPlace) -> Iterator[_Part]:
    table = (config.vocab_size, config.hidden_size)
    if place.is_first_stage or (place.is_last_stage and config.is_embedding_tied):
        yield _Part("embedding", table)
    if place.is_last_stage:
        yield _Part("final_norm", (config.hidden_size,))
        if not config.is_embedding_tied:
            yield _Part("to_logits", table)


def _layer_parts(config: DecoderConfig, layer: int) -> Iterator[_Part]:
    name, hidden, inner = f"layers.{layer}", config.hidden_size, config.intermediate_size
    yield _Part(f"{name}.input_norm", (hidden,))
    yield _Part(f"{name}.output_norm", (hidden,))
    yield _Part(f"{name}.gate_proj", (inner, hidden), 0, inner)
    yield _Part(f"{name}.up_proj", (inner, hidden), 0, inner)
    yield _Part(f"{name}.down_proj", (hidden, inner), 1, inner)
    match config.layers[layer]:
        case "latent":
            yield from _latent_parts(config, name)
        case "state":
            yield from _state_parts(config, name)
        case _:
            yield from _attention_parts(config, name)


def _attention_parts(config: DecoderConfig, name: str) -> Iterator[_Part]:
    hidden, size = config.hidden_size, config.head_size
    heads, kv_heads = config.num_heads, config.num_kv_heads
    yield _Part(f"{name}.q_proj", (heads * size, hidden), 0, heads)
    yield _Part(f"{name}.k_proj", (kv_heads * size, hidden), 0, kv_heads)
    yield _Part(f"{name}.v_proj", (kv_heads * size, hidden), 0, kv_heads)
    yield _Part(f"{name}.o_proj", (hidden, heads * size), 1, heads)
    if config.has_head_norm:
        yield _Part(f"{name}.q_norm", (size,))
        yield _Part(f"{name}.k_norm", (size,))


def _latent_parts(config: DecoderConfig, name: str) -> Iterator[_Part]:
    hidden, size, heads = config.hidden_size, config.head_size, config.num_heads
    latent, rope = config.latent_size, config.rope_size
    yield _Part(f"{name}.q_proj", (heads * (size + rope), hidden), 0, heads)
    yield _Part(f"{name}.kv_down", (latent + rope, hidden))
    yield _Part(f"{name}.latent_norm", (latent,))
    yield _Part(f"{name}.k_up", (heads * size, latent), 0, heads)
    yield _Part(f"{name}.v_up", (heads * size, latent), 0, heads)
    yield _Part(f"{name}.o_proj", (hidden, heads * size), 1, heads)


def _state_parts(config: DecoderConfig, name: str) -> Iterator[_Part]:
    hidden, channels, size = config.hidden_size, config.num_channels, config.state_size
    for part in ("in_proj", "gate_in_proj", "step_proj"):
        yield _Part(f"{name}.{part}", (channels, hidden), 0, channels)
    for part in ("write_proj", "read_proj"):
        yield _Part(f"{name}.{part}", (size, hidden))
    for part in ("step_bias", "skip"):
        yield _Part(f"{name}.{part}", (channels,), 0, channels)
    yield _Part(f"{name}.convolution", (channels, config.conv_size), 0, channels)
    yield _Part(f"{name}.log_decay", (channels, size), 0, channels)
    yield _Part(f"{name}.o_proj", (hidden, channels), 1, channels)
