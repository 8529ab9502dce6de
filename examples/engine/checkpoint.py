"""A Llama checkpoint of Hugging Face's format: `config.json` and safetensors files.

Config, names and shapes are those of published models. A rank reads the files lazily, one weight at
a time. Models that the decoder cannot compute are refused: other architectures, biases, scaled
positions, and missing weights or wrong shapes. Needs the extra `safetensors`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from examples.engine.model_config import DecoderConfig
from examples.engine.weights import RandomWeights, WeightSource
from kvcache.base.errors import ConfigurationError

_ENDS: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "to_logits": "lm_head.weight",
    }
)
_LAYER_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "input_norm": "input_layernorm",
        "output_norm": "post_attention_layernorm",
        "q_proj": "self_attn.q_proj",
        "k_proj": "self_attn.k_proj",
        "v_proj": "self_attn.v_proj",
        "o_proj": "self_attn.o_proj",
        "gate_proj": "mlp.gate_proj",
        "up_proj": "mlp.up_proj",
        "down_proj": "mlp.down_proj",
    }
)


def weight_source(checkpoint: str | None, seed: int) -> WeightSource:
    """Return the source of an engine's weights."""
    return RandomWeights(seed) if checkpoint is None else Checkpoint(Path(checkpoint))


def read_config(
    directory: str | Path, *, dtype: str | None = None, max_model_len: int | None = None
) -> DecoderConfig:
    """Return the decoder of a `config.json`, which has the defaults of `dtype` and
    `max_model_len`. Raises ConfigurationError for a model that the decoder cannot compute."""
    path = Path(directory) / "config.json"
    try:
        said: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    if said.get("model_type") != "llama":
        raise ConfigurationError(
            f"{path} is of model_type {said.get('model_type')!r}: the decoder reads 'llama'"
        )
    positions = _positions(path, said)
    for key in ("attention_bias", "mlp_bias"):
        if said.get(key):
            raise ConfigurationError(f"{path} has {key}: the decoder has no biases")
    heads = said["num_attention_heads"]
    return DecoderConfig(
        name=Path(directory).resolve().name,
        layers=("full",) * said["num_hidden_layers"],
        vocab_size=said["vocab_size"],
        hidden_size=said["hidden_size"],
        intermediate_size=said["intermediate_size"],
        num_heads=heads,
        num_kv_heads=said.get("num_key_value_heads") or heads,
        head_size=said.get("head_dim") or said["hidden_size"] // heads,
        rope_theta=float(positions.get("rope_theta", 10_000.0)),
        norm_eps=said.get("rms_norm_eps", 1e-6),
        max_model_len=max_model_len or said["max_position_embeddings"],
        dtype=dtype or said.get("dtype") or said.get("torch_dtype") or "bfloat16",
        is_embedding_tied=bool(said.get("tie_word_embeddings")),
    )


def _positions(path: Path, said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary settings, which newer files have in a separate section."""
    section = said.get("rope_parameters") or said.get("rope_scaling") or {}
    kind = section.get("rope_type") or section.get("type") or "default"
    if kind != "default":
        raise ConfigurationError(
            f"{path} scales positions by {kind!r}: the decoder knows 'default' only"
        )
    return {**said, **section} if "rope_theta" in section else said


class Checkpoint:
    """Weights of a directory, by the decoder's names."""

    def __init__(self, directory: Path) -> None:
        """Find the file of each weight; raises ConfigurationError if there is none."""
        self._directory = directory
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ConfigurationError(f"{directory} has no *.safetensors: name a checkpoint")
        self._file_of: dict[str, Path] = {}
        for file in files:
            with _open(file) as weights:
                self._file_of |= dict.fromkeys(weights.keys(), file)

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See `WeightSource`."""
        published = _published_name(name)
        file = self._file_of.get(published)
        if file is None:
            raise ConfigurationError(f"{self._directory} lacks {published}: name a whole one")
        with _open(file) as weights:
            weight: torch.Tensor = weights.get_tensor(published)
        if weight.shape != shape:
            raise ConfigurationError(
                f"{published} of {file} has shape {tuple(weight.shape)}, config.json means {shape}"
            )
        return weight


def _published_name(name: str) -> str:
    if name in _ENDS:
        return _ENDS[name]
    layer, _, part = name.rpartition(".")
    return f"model.{layer}.{_LAYER_PARTS[part]}.weight"


def _open(file: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ConfigurationError(
            f"{file} needs safetensors, which is not installed: pip install 'kvcache[transformers]'"
        ) from error
    return safe_open(str(file), framework="pt")
