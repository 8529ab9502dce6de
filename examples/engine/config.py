"""The settings of an engine, and the cluster configuration derived from them.

Frozen, and checked at construction. The model's sizes are set once, here; the cluster's layers are
derived from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from examples.engine.model_config import DecoderConfig
from kvcache.base.errors import ConfigurationError
from kvcache.config import ClusterConfig, parse_config


@dataclass(frozen=True)
class EngineConfig:
    """The model, cache and ranks of one engine.

    `checkpoint`: a directory with a model in Hugging Face's format; without one, the weights of
    `model` are drawn from `seed`. `adapters` are the low-rank adapters that requests may name as
    `lora_name`. `executor` "local": everything in this process and thread; "ray": a coordinator and
    a worker per rank, as actors. A step computes at most `max_num_batched_tokens`, at most
    `max_chunk_tokens` of one request (0: as many), for at most `max_num_seqs` sequences.
    `is_pipelined`: the next step is requested while the present one computes. `preemption` decides
    about the computed tokens of a preempted request: "recompute" them, or "swap" them to host
    memory, which `sections` must then configure. `max_draft_tokens`: most drafts of a step, for
    models with states. A request that finds no room for `no_room_s`, although nothing else runs,
    ends with an error. `sections` are added to the cluster's configuration, as in a YAML file:
    `{"offload": {"host_memory_per_rank": "8MiB"}}`.
    """

    model: DecoderConfig = field(default_factory=DecoderConfig)
    checkpoint: str | None = None
    seed: int = 0
    adapters: tuple[str, ...] = ()
    name: str = "engine"
    executor: Literal["local", "ray"] = "local"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    block_size: int = 16
    num_blocks: int | None = None
    memory_per_rank: int | str = "64MiB"
    max_num_batched_tokens: int = 512
    max_chunk_tokens: int = 0
    max_num_seqs: int = 32
    is_pipelined: bool = True
    preemption: Literal["recompute", "swap"] = "recompute"
    max_draft_tokens: int = 0
    no_room_s: float = 1.0
    enable_prefix_caching: bool = True
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_chunk_tokens < 0 or self.max_draft_tokens < 0 or self.no_room_s < 0:
            raise ConfigurationError(
                f"max_chunk_tokens is {self.max_chunk_tokens}, max_draft_tokens "
                f"{self.max_draft_tokens}, no_room_s {self.no_room_s}: give 0 or more"
            )
        if self.preemption == "swap" and not self.sections.get("offload"):
            raise ConfigurationError(
                "preemption is 'swap', but nothing is offloaded: give sections an 'offload' with "
                "host_memory_per_rank, or use 'recompute'"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def cluster_config(self) -> ClusterConfig:
        """Return the configuration of the cluster. Raises ConfigurationError."""
        model = replace(self.model, num_state_drafts=self.max_draft_tokens)
        settings: dict[str, dict[str, Any]] = {
            "model": {
                "name": model.name,
                "max_model_len": model.max_model_len,
                "dtype": model.dtype,
                "layers": model.cache_layers(),
            },
            "cache": {
                "block_size": self.block_size,
                "num_blocks": self.num_blocks,
                "memory_per_rank": self.memory_per_rank,
                "enable_prefix_caching": self.enable_prefix_caching,
            },
            "parallel": {
                "tensor_parallel_size": self.tensor_parallel_size,
                "pipeline_parallel_size": self.pipeline_parallel_size,
            },
            "workers": {
                "device": self.device,
                "num_gpus_per_rank": 1.0 if self.device == "cuda" else 0.0,
            },
            "scheduler": {
                "max_num_batched_tokens": max(self.max_num_batched_tokens, self.max_num_seqs),
                "max_num_seqs": self.max_num_seqs,
            },
        }
        for section, values in self.sections.items():
            settings[section] = {**settings.get(section, {}), **values}
        return parse_config({"name": self.name, **settings})
