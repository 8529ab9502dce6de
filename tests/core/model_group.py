"""A model of a KV cache group that searches and counts, while the core computes."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.specs import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from tests.core.builders import chunked, cross, full, mamba, mla, window


@dataclass(frozen=True)
class ModelGroup:
    """Sizes in tokens; `states` is the cache mode of a group that keeps states."""

    block_size: int
    window: int | None = None
    chunk: int | None = None
    states: str | None = None
    num_drafts: int = 0
    is_cross: bool = False
    is_latent: bool = False

    @property
    def is_ordered(self) -> bool:
        return not (self.window or self.chunk or self.states or self.is_cross)

    @property
    def can_be_hit(self) -> bool:
        return not self.is_cross and self.states != "none"

    def column(self, num_tokens: int) -> int:
        """The place of the state after `num_tokens`, -1 for none."""
        if self.states == "none" or not num_tokens:
            return 0 if num_tokens else -1
        index = 0
        while (index + 1) * self.block_size < num_tokens:
            index += 1
        return index

    def num_skipped(self, computed: int) -> int:
        """Leading blocks that are never read after `num_tokens`."""
        if self.window is not None:
            count = 0
            while (count + 1) * self.block_size - 1 < computed - self.window + 1:
                count += 1
            return count
        if self.chunk is not None:
            return computed // self.chunk * self.chunk // self.block_size
        return max(0, self.column(computed)) if self.states == "align" else 0

    def first_needed(self, num_tokens: int) -> int:
        """The first block that a hit of `num_tokens` must have."""
        count = num_tokens // self.block_size
        if self.window is not None:
            blocks = 1
            while blocks * self.block_size < self.window - 1:
                blocks += 1
            return max(0, count - blocks)
        if self.chunk is not None:
            return num_tokens // self.chunk * self.chunk // self.block_size
        return count - 1 if self.states else 0


def group_of(spec: KVCacheSpec) -> ModelGroup:
    """Return the model of a spec."""
    size = spec.block_size
    if isinstance(spec, SlidingWindowSpec):
        return ModelGroup(size, window=spec.sliding_window)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return ModelGroup(size, chunk=spec.attention_chunk_size)
    if isinstance(spec, MambaSpec):
        drafts = spec.num_speculative_blocks
        return ModelGroup(size, states=spec.mamba_cache_mode, num_drafts=drafts)
    is_latent = isinstance(spec, MLAAttentionSpec)
    return ModelGroup(size, is_cross=not spec.can_prefix_cache, is_latent=is_latent)


def spec_of(group: ModelGroup) -> KVCacheSpec:
    """Return a spec of such a group."""
    if group.window is not None:
        return window(group.window, group.block_size)
    if group.chunk is not None:
        return chunked(group.chunk, group.block_size)
    if group.states is not None:
        return mamba(group.states, group.block_size, group.num_drafts)
    if group.is_cross:
        return cross(block_size=group.block_size)
    return mla(group.block_size) if group.is_latent else full(group.block_size)
