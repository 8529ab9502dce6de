"""The per-token parts of layers: norms, rotary positions, projections, feed-forward.

Shared by the decoder on blocks and by the dense reference. Nothing here depends on other tokens,
blocks or ranks. Head counts come from the weights, so a rank's part needs no other code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from examples.engine.model_config import DecoderConfig, LayerKind

Weights = Mapping[str, torch.Tensor]
"""A rank's weights by name; matrices are `(outputs, inputs)`."""


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale the last dimension to length one, then by `weight`."""
    return functional.rms_norm(hidden, weight.shape, weight, eps)


def split_heads(heads: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Return `heads` with `axis` divided into heads of `size`."""
    axis = axis % heads.ndim
    return heads.reshape(*heads.shape[:axis], -1, size, *heads.shape[axis + 1 :])


def rotary(heads: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Turn `heads`, `(n, heads, size)`, by `positions`, `(n,)`, times `frequencies`, `(size/2,)`.

    Element `i` is paired with element `i + size / 2`, as Llama's checkpoints expect.
    """
    angles = positions.to(frequencies.dtype)[:, None] * frequencies
    cosine = angles.cos()[:, None, :].to(heads.dtype)
    sine = angles.sin()[:, None, :].to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def rope_frequencies(theta: float, size: int, device: torch.device) -> torch.Tensor:
    """Return `theta ** (-2 i / size)` for each pair of elements."""
    exponents = torch.arange(0, size, 2, dtype=torch.float64, device=device) / size
    return theta**-exponents


def feed_forward(weights: Weights, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    """SwiGLU; a rank's part of the sum."""
    name = f"layers.{layer}"
    gate = functional.silu(hidden @ weights[f"{name}.gate_proj"].T)
    return (gate * (hidden @ weights[f"{name}.up_proj"].T)) @ weights[f"{name}.down_proj"].T


def adapt(weights: Weights, adapter: str, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    """Return the contribution of a low-rank adapter to its tokens' hidden states."""
    name = f"adapters.{adapter}.{layer}"
    return (hidden @ weights[f"{name}.a"].T) @ weights[f"{name}.b"].T


@dataclass(frozen=True)
class TokenHeads:
    """Query `(n, heads, size)`, key and value `(n, kv heads, size)` of each token."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class LatentHeads:
    """Per token: queries `(n, heads, size)` without and `(n, heads, rope)` with position, and the
    cached vector, `(n, latent + rope)`."""

    plain_query: torch.Tensor
    rope_query: torch.Tensor
    kept: torch.Tensor


@dataclass(frozen=True)
class StateInputs:
    """Per token: input and gate of the recurrence, `(n, channels)`; the step size
    `(n, channels)`; input and output projection of the state, `(n, state)` each."""

    entering: torch.Tensor
    gate: torch.Tensor
    step: torch.Tensor
    write: torch.Tensor
    read: torch.Tensor


class Projections:
    """Projects hidden states to the inputs of a layer's attention or recurrence."""

    def __init__(self, config: DecoderConfig, weights: Weights, device: torch.device) -> None:
        """Use a rank's `weights`."""
        self._config = config
        self._weights = weights
        self._frequencies: dict[LayerKind, torch.Tensor] = {
            "full": rope_frequencies(config.rope_theta, config.head_size, device),
            "window": rope_frequencies(config.window_rope_theta, config.head_size, device),
        }
        if config.rope_size:
            self._frequencies["latent"] = rope_frequencies(
                config.rope_theta, config.rope_size, device
            )

    def token_heads(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> TokenHeads:
        """Return the heads of a `full` or `window` layer."""
        config, name = self._config, f"layers.{layer}"
        query, key, value = (
            split_heads(hidden @ self._weights[f"{name}.{part}"].T, -1, config.head_size)
            for part in ("q_proj", "k_proj", "v_proj")
        )
        if config.has_head_norm:
            query = rms_norm(query, self._weights[f"{name}.q_norm"], config.norm_eps)
            key = rms_norm(key, self._weights[f"{name}.k_norm"], config.norm_eps)
        frequencies = self._frequencies[config.layers[layer]]
        return TokenHeads(
            rotary(query, positions, frequencies), rotary(key, positions, frequencies), value
        )

    def latent_heads(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> LatentHeads:
        """Return the heads of a `latent` layer."""
        config, weights, name = self._config, self._weights, f"layers.{layer}"
        width = config.head_size + config.rope_size
        query = split_heads(hidden @ weights[f"{name}.q_proj"].T, -1, width)
        plain, turned = query[..., : config.head_size], query[..., config.head_size :]
        compressed = hidden @ weights[f"{name}.kv_down"].T
        latent, key = compressed[:, : config.latent_size], compressed[:, config.latent_size :]
        latent = rms_norm(latent, weights[f"{name}.latent_norm"], config.norm_eps)
        frequencies = self._frequencies["latent"]
        turned_key = rotary(key[:, None, :], positions, frequencies)[:, 0]
        return LatentHeads(
            plain, rotary(turned, positions, frequencies), torch.cat((latent, turned_key), dim=-1)
        )

    def state_inputs(self, layer: int, hidden: torch.Tensor) -> StateInputs:
        """Return the inputs of a `state` layer."""
        weights, name = self._weights, f"layers.{layer}"
        step = hidden @ weights[f"{name}.step_proj"].T + weights[f"{name}.step_bias"]
        return StateInputs(
            entering=hidden @ weights[f"{name}.in_proj"].T,
            gate=functional.silu(hidden @ weights[f"{name}.gate_in_proj"].T),
            step=functional.softplus(step),
            write=hidden @ weights[f"{name}.write_proj"].T,
            read=hidden @ weights[f"{name}.read_proj"].T,
        )
