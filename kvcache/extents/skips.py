"""Which leading blocks of a row nobody reads any more, by attention kind.

Between a row, which knows how far its request has been computed, and the blocks it gives back.
Refuses to free: it says how many. For many rows `row_columns.plan_skips` does, by the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvcache.core.kinds.chunked_local_attention import chunk_tokens
from kvcache.core.kinds.sliding_window import window_tokens
from kvcache.extents.row_columns import NEVER
from kvcache.specs import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec


class SkipRule:
    """Nothing is ever skipped: the rule of kinds that read the whole prefix."""

    is_skipping = False
    window = 0
    """Tokens of the window that is read, 0 where there is none."""
    chunk = 0
    """Tokens of a chunk, 0 where there are none."""

    def __init__(self, spec: KVCacheSpec) -> None:
        """Follow the rule of `spec`."""
        self.block_size = spec.block_size
        self._spec = spec

    def num_skipped(self, num_computed_tokens: int) -> int:
        """Return how many leading blocks nobody reads after so many computed tokens."""
        return self._spec.num_skipped_tokens(num_computed_tokens) // self.block_size

    def next_skip(self, first_kept: int) -> int:
        """Return the computed tokens from which on one block more is skipped."""
        return NEVER


class WindowSkips(SkipRule):
    """Blocks wholly before `computed - window + 1` are skipped."""

    is_skipping = True

    def __init__(self, spec: KVCacheSpec) -> None:
        super().__init__(spec)
        self.window = window_tokens(spec)

    def next_skip(self, first_kept: int) -> int:
        return (first_kept + 1) * self.block_size + (self.window - 1)


class ChunkSkips(SkipRule):
    """Blocks before the chunk that holds the next token are skipped."""

    is_skipping = True

    def __init__(self, spec: KVCacheSpec) -> None:
        super().__init__(spec)
        self.chunk = chunk_tokens(spec)

    def next_skip(self, first_kept: int) -> int:
        return (first_kept * self.block_size // self.chunk + 1) * self.chunk


SKIP_RULES: Mapping[str, type[SkipRule]] = MappingProxyType(
    {SlidingWindowSpec.kind: WindowSkips, ChunkedLocalAttentionSpec.kind: ChunkSkips}
)
"""Skip rule by kind of spec; kinds that are not named skip nothing."""


def skip_rule(spec: KVCacheSpec) -> SkipRule:
    """Return the rule of a spec."""
    return SKIP_RULES.get(spec.kind, SkipRule)(spec)
