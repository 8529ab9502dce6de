"""The KV cache of one layer, and the plan of one rank.

All objects are frozen, hashable and free of torch; dtypes are names. spec.py has the interface of
a kind, attention.py and state.py the kinds, cache_config.py the plan of one rank.
"""

from __future__ import annotations

from kvcache.specs.attention import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from kvcache.specs.cache_config import (
    LAYOUTS,
    NULL_BLOCK_ID,
    SPEC_KINDS,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    Layout,
    can_cache_prefixes,
    require_eagle_support,
    spec_from_dict,
)
from kvcache.specs.spec import Difference, KVCacheSpec, PageTensor, first_difference
from kvcache.specs.state import MAMBA_CACHE_MODES, MambaSpec
from kvcache.specs.units import DTYPE_SIZES_BYTES, ceil_div, dtype_size_bytes, require_count

__all__ = [
    "DTYPE_SIZES_BYTES",
    "LAYOUTS",
    "MAMBA_CACHE_MODES",
    "NULL_BLOCK_ID",
    "SPEC_KINDS",
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "Difference",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVCacheTensor",
    "Layout",
    "MLAAttentionSpec",
    "MambaSpec",
    "PageTensor",
    "SlidingWindowSpec",
    "can_cache_prefixes",
    "ceil_div",
    "dtype_size_bytes",
    "first_difference",
    "require_count",
    "require_eagle_support",
    "spec_from_dict",
]
