"""What one layer's KV cache looks like, and the plan that is made from many of them.

Everything is frozen, hashable and free of torch; dtypes are names. spec.py says what a kind
answers, attention.py has the kinds, cache_config.py the plan of one rank.
"""

from __future__ import annotations

from kvcache.specs.attention import AttentionSpec, FullAttentionSpec, SlidingWindowSpec
from kvcache.specs.cache_config import (
    LAYOUTS,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    Layout,
)
from kvcache.specs.plain import SPEC_KINDS, spec_from_dict
from kvcache.specs.spec import Difference, KVCacheSpec, first_difference
from kvcache.specs.units import DTYPE_SIZES_BYTES, ceil_div, dtype_size_bytes, require_count

__all__ = [
    "DTYPE_SIZES_BYTES",
    "LAYOUTS",
    "SPEC_KINDS",
    "AttentionSpec",
    "Difference",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVCacheTensor",
    "Layout",
    "SlidingWindowSpec",
    "ceil_div",
    "dtype_size_bytes",
    "first_difference",
    "require_count",
    "spec_from_dict",
]
