"""The managers that the tests drive: small plans of full and sliding-window attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcache.manager import KVCacheManager
from kvcache.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from tests.manager.slow_model import Group


@dataclass(frozen=True)
class Shape:
    """A model: the windows of its KV cache groups (None is full attention) and its block size."""

    name: str
    windows: tuple[int | None, ...]
    block_size: int = 4
    max_model_len: int = 80

    @property
    def groups(self) -> list[Group]:
        return [Group(self.block_size, window) for window in self.windows]


FULL = Shape("full", (None,))
WINDOW = Shape("window", (10,))
HYBRID = Shape("hybrid", (None, 9))
THREE_KINDS = Shape("three kinds", (None, 6, 17))


def make_config(shape: Shape, num_blocks: int) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks,
        (),
        tuple(
            KVCacheGroupSpec((f"layer.{i}",), _spec(shape.block_size, window))
            for i, window in enumerate(shape.windows)
        ),
    )


def make_manager(shape: Shape = FULL, num_blocks: int = 64, **settings: Any) -> KVCacheManager:
    settings.setdefault("max_num_seqs", 8)
    settings.setdefault("has_workers", True)
    return KVCacheManager(make_config(shape, num_blocks), shape.max_model_len, **settings)


def _spec(block_size: int, window: int | None) -> KVCacheSpec:
    if window is None:
        return FullAttentionSpec(block_size, num_kv_heads=1, head_size=8)
    return SlidingWindowSpec(block_size, num_kv_heads=1, head_size=8, sliding_window=window)
