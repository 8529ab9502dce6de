"""Which leading blocks of a row nobody reads any more, by attention kind; for one row or many.

Between a row, which knows how far its request has been computed, and the blocks it gives back.
Refuses to free: it says how many.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvcache.extents.rows import NEVER
from kvcache.managers.chunked_local_attention import chunk_tokens
from kvcache.managers.sliding_window import window_tokens
from kvcache.specs import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec

Int64Array = npt.NDArray[np.int64]


class SkipRule:
    """Nothing is ever skipped: the rule of kinds that read the whole prefix."""

    is_skipping = False

    def __init__(self, spec: KVCacheSpec) -> None:
        """Follow the rule of `spec`."""
        self.block_size = spec.block_size
        self._spec = spec

    def num_skipped(self, num_computed_tokens: int) -> int:
        """Return how many leading blocks nobody reads after so many computed tokens."""
        return self._spec.num_skipped_tokens(num_computed_tokens) // self.block_size

    def skipped_of_rows(self, num_computed_tokens: Int64Array) -> Int64Array:
        """Do `num_skipped` for many rows."""
        return np.zeros(len(num_computed_tokens), dtype=np.int64)

    def next_skip(self, first_kept: int) -> int:
        """Return the computed tokens from which on one block more is skipped."""
        return NEVER

    def next_skip_tokens(self, first_kept: Int64Array) -> Int64Array:
        """Do `next_skip` for many rows."""
        return np.full(len(first_kept), NEVER, dtype=np.int64)


class WindowSkips(SkipRule):
    """Blocks wholly before `computed - window + 1` are skipped."""

    is_skipping = True

    def __init__(self, spec: KVCacheSpec) -> None:
        super().__init__(spec)
        self._window = window_tokens(spec)

    def skipped_of_rows(self, num_computed_tokens: Int64Array) -> Int64Array:
        return np.maximum(num_computed_tokens - (self._window - 1), 0) // self.block_size

    def next_skip(self, first_kept: int) -> int:
        return (first_kept + 1) * self.block_size + (self._window - 1)

    def next_skip_tokens(self, first_kept: Int64Array) -> Int64Array:
        return (first_kept + 1) * self.block_size + (self._window - 1)


class ChunkSkips(SkipRule):
    """Blocks before the chunk that holds the next token are skipped."""

    is_skipping = True

    def __init__(self, spec: KVCacheSpec) -> None:
        super().__init__(spec)
        self._chunk = chunk_tokens(spec)

    def skipped_of_rows(self, num_computed_tokens: Int64Array) -> Int64Array:
        return num_computed_tokens // self._chunk * self._chunk // self.block_size

    def next_skip(self, first_kept: int) -> int:
        return (first_kept * self.block_size // self._chunk + 1) * self._chunk

    def next_skip_tokens(self, first_kept: Int64Array) -> Int64Array:
        return (first_kept * self.block_size // self._chunk + 1) * self._chunk


SKIP_RULES: Mapping[str, type[SkipRule]] = MappingProxyType(
    {SlidingWindowSpec.kind: WindowSkips, ChunkedLocalAttentionSpec.kind: ChunkSkips}
)
"""Skip rule by kind of spec; kinds that are not named skip nothing."""


def skip_rule(spec: KVCacheSpec) -> SkipRule:
    """Return the rule of a spec."""
    return SKIP_RULES.get(spec.kind, SkipRule)(spec)
