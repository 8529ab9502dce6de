"""The managers of the tests: small plans of every attention kind and of hybrids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcache.manager import KVCacheManager
from kvcache.specs import KVCacheConfig, KVCacheGroupSpec
from tests.core.model_group import ModelGroup, spec_of


@dataclass(frozen=True)
class Shape:
    """A model: its KV cache groups."""

    name: str
    groups: tuple[ModelGroup, ...]
    max_model_len: int = 80

    @property
    def keeps_states(self) -> bool:
        return any(group.states for group in self.groups)


FULL = Shape("full", (ModelGroup(4),))
WINDOW = Shape("window", (ModelGroup(4, 10),))
HYBRID = Shape("hybrid", (ModelGroup(4), ModelGroup(4, 9)))
THREE_KINDS = Shape("three kinds", (ModelGroup(4), ModelGroup(4, 6), ModelGroup(4, 17)))
CHUNKED = Shape("chunked", (ModelGroup(4, chunk=8),))
STATES = Shape("states", (ModelGroup(4, states="align", num_drafts=2),))
ONE_STATE = Shape("one state", (ModelGroup(4, states="none", num_drafts=2),))
ENCODER = Shape("encoder", (ModelGroup(4), ModelGroup(4, is_cross=True)))
CHUNKED_HYBRID = Shape(
    "full, window, chunked", (ModelGroup(8), ModelGroup(4, 9), ModelGroup(8, chunk=16))
)
STATES_HYBRID = Shape(
    "full, window, states",
    (ModelGroup(4), ModelGroup(2, 6), ModelGroup(4, states="align", num_drafts=2)),
)
LATENT_STATES = Shape(
    "latent, states", (ModelGroup(2, is_latent=True), ModelGroup(6, states="align"))
)
MORE_SHAPES = (
    CHUNKED,
    STATES,
    ONE_STATE,
    ENCODER,
    CHUNKED_HYBRID,
    STATES_HYBRID,
    LATENT_STATES,
)


def make_config(shape: Shape, num_blocks: int) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks,
        (),
        tuple(
            KVCacheGroupSpec((f"layer.{i}",), spec_of(group))
            for i, group in enumerate(shape.groups)
        ),
    )


def make_manager(shape: Shape = FULL, num_blocks: int = 64, **settings: Any) -> KVCacheManager:
    settings.setdefault("max_num_seqs", 8)
    settings.setdefault("has_workers", True)
    return KVCacheManager(make_config(shape, num_blocks), shape.max_model_len, **settings)
