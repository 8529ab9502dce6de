"""Inputs of the planner: specs by layer, lengths, overrides, memory.

Refuses invalid numbers and specs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvcache.base.arguments import (
    as_bool,
    as_int,
    as_text,
    as_tuple,
    check_fields,
    check_kind,
    check_methods,
)
from kvcache.base.errors import ConfigurationError, shown
from kvcache.specs import LAYOUTS, KVCacheSpec, Layout

LayerSpecs = Mapping[str, KVCacheSpec]
"""Specs by layer name, for one rank or for the whole model."""

Warn = Callable[[str], None]
"""Takes one warning. The default logs it; a plan collects them instead."""


def log_warning(message: str) -> None:
    logging.getLogger("kvcache.planner").warning(message)


@dataclass(frozen=True)
class PlanOptions:
    """Settings of the model and the scheduler that decide how much memory a request takes.

    `max_model_len`: most tokens of one request, or "auto" for the most that fits, up to
    `max_position_embeddings`, the model's limit. `max_num_batched_tokens`: most tokens of one
    scheduling step. `num_gpu_blocks_override`: number of blocks, instead of as many as fit.
    """

    max_model_len: int | Literal["auto"]
    max_num_batched_tokens: int = 8192
    num_gpu_blocks_override: int | None = None
    disable_hybrid_kv_cache_manager: bool = False
    layout: Layout = "block_first"
    max_position_embeddings: int = 1 << 20

    def __post_init__(self) -> None:
        if not isinstance(self.max_model_len, str) or self.max_model_len != "auto":
            check_fields(self, as_int, "max_model_len", at_least=1)
        check_fields(self, as_int, "max_num_batched_tokens", at_least=1)
        check_fields(self, as_int, "max_position_embeddings", at_least=1)
        if self.num_gpu_blocks_override is not None:
            check_fields(self, as_int, "num_gpu_blocks_override", at_least=1)
        check_fields(self, as_bool, "disable_hybrid_kv_cache_manager")
        if not isinstance(self.layout, str) or self.layout not in LAYOUTS:
            raise ConfigurationError(
                f"layout {shown(self.layout)}: use one of {', '.join(LAYOUTS)}"
            )

    @property
    def longest_model_len(self) -> int:
        """The length to plan for, or the longest to try if it is "auto"."""
        if isinstance(self.max_model_len, int):
            return self.max_model_len
        return self.max_position_embeddings

    def with_max_model_len(self, max_model_len: int) -> PlanOptions:
        """Return a copy for requests of at most `max_model_len` tokens."""
        return replace(self, max_model_len=max_model_len)


@dataclass(frozen=True)
class RankMemory:
    """Bytes that one rank may use for blocks, per tier."""

    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("device_bytes", "host_bytes", "disk_bytes"):
            check_fields(self, as_int, name, at_least=0)


def as_rank_memories(memories: Sequence[int | RankMemory], num_ranks: int) -> list[RankMemory]:
    """Return `memories` with plain numbers read as device bytes.

    Raises ConfigurationError unless there is one for each of `num_ranks`.
    """
    listed = as_tuple("memories", memories, ConfigurationError)
    if len(listed) != num_ranks:
        raise ConfigurationError(
            f"{num_ranks} ranks state specs and {len(listed)} state memory: give one of each "
            "per rank"
        )
    return [m if isinstance(m, RankMemory) else RankMemory(m) for m in listed]


def check_options(options: PlanOptions) -> None:
    """Raise ConfigurationError unless these are valid options."""
    check_kind("options", options, PlanOptions, ConfigurationError)


def check_layer_specs(specs: LayerSpecs, what: str = "specs") -> None:
    """Raise ConfigurationError unless `specs` has a spec for each name of a layer."""
    check_kind(what, specs, Mapping, ConfigurationError)
    for name, spec in specs.items():
        as_text(f"a layer of {what}", name, ConfigurationError)
        check_kind(f"{what}[{name!r}]", spec, KVCacheSpec, ConfigurationError)


def as_rank_specs(specs_by_rank: Sequence[LayerSpecs]) -> tuple[LayerSpecs, ...]:
    """Return the specs of each rank; raises ConfigurationError if they are invalid."""
    listed: tuple[LayerSpecs, ...] = as_tuple("specs_by_rank", specs_by_rank, ConfigurationError)
    for rank, specs in enumerate(listed):
        check_layer_specs(specs, f"specs_by_rank[{rank}]")
    return listed


def check_warn(warn: Warn) -> None:
    """Raise ConfigurationError unless `warn` can be called."""
    check_methods("warn", warn, ("__call__",), ConfigurationError)
