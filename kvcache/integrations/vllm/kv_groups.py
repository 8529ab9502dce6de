"""The KV cache groups of a vLLM engine: which blocks of which group a prefix needs.

vLLM gives each group a block table of its own, over one pool of blocks. A group of full attention
needs every block of a prefix. A group with a sliding window needs those that the next token still
reads; vLLM puts the null block in place of the others. The rule itself is that of our own clusters
(`TierHitFinder`). Imports nothing of vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcache.base.errors import ConfigurationError
from kvcache.coordinator.tier_hits import TierHitFinder
from kvcache.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

NULL_BLOCK = 0
"""vLLM's id of the block that stands where a group has none."""

_SERVED = ("FullAttentionSpec", "SlidingWindowSpec")

BlockTables = Sequence[Sequence[int]]
"""The block ids of one request, by group."""


@dataclass(frozen=True)
class NewTable:
    """Blocks that a request has got for a step: its whole table, or what is added to it."""

    request_id: str
    blocks: BlockTables
    is_whole: bool


@dataclass(frozen=True)
class KVGroups:
    """The groups of an engine: `specs` by group id, and the tokens of one of its block hashes."""

    specs: tuple[KVCacheSpec, ...]
    hash_tokens: int

    @property
    def fails_whole_requests(self) -> bool:
        """Whether a request is computed from its start if any block of it could not be loaded.

        A window's blocks do not continue a shorter prefix. With several groups, vLLM does not know
        which group a block is of.
        """
        return len(self.specs) > 1 or not self.specs[0].reads_whole_prefix

    @property
    def hashes_per_block(self) -> tuple[int, ...]:
        """How many block hashes a block of each group has; the last one names it."""
        return tuple(spec.block_size // self.hash_tokens for spec in self.specs)

    @property
    def plan(self) -> KVCacheConfig:
        """The groups as one of our plans, without tensors."""
        groups = tuple(
            KVCacheGroupSpec((f"group {index}",), spec) for index, spec in enumerate(self.specs)
        )
        return KVCacheConfig(0, (), groups)

    def finder(self) -> TierHitFinder:
        """Return the finder of hits in these groups."""
        return TierHitFinder(self.plan, self.hash_tokens)

    def num_blocks_between(self, start: int, end: int) -> int:
        """Return how many blocks behind `start` tokens a prefix of `end` tokens needs."""
        return sum(
            max(0, end // size - max(start, spec.num_skipped_tokens(end)) // size)
            for spec in self.specs
            for size in (spec.block_size,)
        )


def kv_groups(kv_cache_config: Any, hash_tokens: int | None) -> KVGroups:
    """Return the groups in vLLM's configuration.

    `hash_tokens` is vLLM's `prefix_match_unit`; without it, vLLM hashes the largest parts that all
    blocks consist of. Raises ConfigurationError for kinds of groups that are not served.
    """
    found = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    kinds = [type(spec).__name__ for spec in found]
    specs = tuple(spec for spec in map(_spec_of, found) if spec is not None)
    if not found or len(specs) < len(found):
        raise ConfigurationError(
            f"the model has KV cache groups {', '.join(kinds) or 'none'}, the connector serves "
            f"{' and '.join(_SERVED)}: {_remedy(kinds)}"
        )
    sizes = [spec.block_size for spec in specs]
    return KVGroups(specs, hash_tokens if hash_tokens and len(specs) > 1 else math.gcd(*sizes))


def _spec_of(spec: Any) -> KVCacheSpec | None:
    """Return our spec for one of vLLM's, None for a kind that is not served."""
    kind = type(spec).__name__
    if kind not in _SERVED:
        return None
    sizes = int(spec.block_size), int(spec.num_kv_heads), int(spec.head_size)
    if kind == "FullAttentionSpec":
        return FullAttentionSpec(*sizes)
    # What vLLM retains before the window counts as a part of it.
    window = int(spec.sliding_window) + int(spec.extra_retained_tokens)
    return SlidingWindowSpec(*sizes, sliding_window=window)


def _remedy(kinds: Sequence[str]) -> str:
    """Say what to do about kinds that are not served.

    Without vLLM's hybrid manager, windows and chunks are full attention. Nothing helps other kinds:
    a Mamba state is no block of tokens, it is right for one length only, and vLLM moves it.
    """
    remedy = "remove --kv-transfer-config"
    if "ChunkedLocalAttentionSpec" in kinds and {*kinds} <= {*_SERVED, "ChunkedLocalAttentionSpec"}:
        return "add --disable-hybrid-kv-cache-manager, or " + remedy
    return remedy
