"""Properties of a replayed model: the demands of its attention kinds on steps.

Derived from the KV cache groups of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

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
