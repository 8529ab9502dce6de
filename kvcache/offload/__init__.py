"""Blocks below the device: host memory and files, as the coordinator sees them.

Keys name blocks, tiers know which of them they hold, the hierarchy plans what moves. Bytes are
moved by workers.
"""

from __future__ import annotations

from kvcache.core import OffloadAnswer
from kvcache.offload.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvcache.offload.events import OffloadingEvent
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.offload.keys import (
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from kvcache.offload.manager import (
    HandlerRoute,
    OffloadingHandler,
    OffloadingManager,
    OffloadingSpec,
    PrepareStoreOutput,
    ReqContext,
    TransferResult,
    TransferSpec,
)
from kvcache.offload.options import HierarchyOptions, TierOptions
from kvcache.offload.registry import make_tier
from kvcache.offload.specs import BlockIDsLoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec

__all__ = [
    "BlockIDsLoadStoreSpec",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "GPULoadStoreSpec",
    "HandlerRoute",
    "HierarchyOptions",
    "LoadStoreSpec",
    "OffloadAnswer",
    "OffloadKey",
    "OffloadingEvent",
    "OffloadingHandler",
    "OffloadingManager",
    "OffloadingSpec",
    "PrepareStoreOutput",
    "ReqContext",
    "TierHierarchy",
    "TierOptions",
    "TransferResult",
    "TransferSpec",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "make_offload_key",
    "make_tier",
]
