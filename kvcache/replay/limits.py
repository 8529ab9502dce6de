"""What limits replayed steps and waits: numbers of the engine, and properties of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from kvcache.base.errors import RequestError
from kvcache.simulate.workload import WorkloadRequest
from kvcache.specs import KVCacheGroupSpec


@dataclass(frozen=True)
class ModelTraits:
    """Properties of a model.

    `boundary_tokens`: a state can be hit only where a chunk ended, and together with blocks of all
    other groups only at multiples of this; None if it does not matter. `keeps_states`: rows of a
    failed step cannot be rolled back, and are computed again. `max_encoder_tokens`: of one request,
    0 without an encoder.
    """

    boundary_tokens: int | None = None
    keeps_states: bool = False
    max_encoder_tokens: int = 0

    @classmethod
    def of(cls, groups: Sequence[KVCacheGroupSpec]) -> ModelTraits:
        """Return the properties of a model with these groups."""
        specs = [group.kv_cache_spec for group in groups]
        keeps_states = any(spec.num_state_blocks is not None for spec in specs)
        has_hits = all(spec.can_prefix_cache for spec in specs)
        encoder_tokens = [s.encoder_token_limit for s in specs if s.keeps_encoder_tokens]
        return cls(
            lcm(*(spec.block_size for spec in specs)) if keeps_states and has_hits else None,
            keeps_states,
            min(encoder_tokens, default=0),
        )


PLAIN_MODEL = ModelTraits()
"""A model that keeps only tokens."""


@dataclass(frozen=True)
class EngineLimits:
    """Limits of steps and waits.

    `pipeline_depth`: most steps whose forwards still run when the next one is sent. `stall_s`: how
    long nothing may advance before the replay gives up. `skips_too_long`: requests longer than
    `max_model_len` are left out and counted. `model`: the demands of its attention kinds on steps.

    Raises RequestError for an invalid number.
    """

    max_model_len: int
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 128
    pipeline_depth: int = 1
    stall_s: float = 60.0
    skips_too_long: bool = False
    statistics_interval_s: float = 0.25
    model: ModelTraits = PLAIN_MODEL

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "pipeline_depth"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} is {getattr(self, name)}: give at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise RequestError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs "
                f"({self.max_num_seqs}): raise it, or running requests would get no token"
            )


def require_model_len(workload_name: str, request: WorkloadRequest, max_model_len: int) -> None:
    """Raise RequestError unless a request may be as long as `max_model_len`."""
    if request.num_tokens > max_model_len:
        raise RequestError(
            f"request {request.request_id} of {workload_name} has {request.num_prompt_tokens} "
            f"prompt and {request.num_output_tokens} output tokens, {request.num_tokens} in all, "
            f"but max_model_len is {max_model_len}: raise it, or leave such requests "
            "out (`kvcache replay --skip-too-long`)"
        )
