"""Blocks below the device: host memory and files, as the coordinator sees them.

Keys name blocks, tiers know which of them they hold, the hierarchy plans what moves. Bytes are
moved by workers.
"""

from __future__ import annotations

from kvcache.core import OffloadAnswer
from kvcache.offload.canonical import (
    ByteRows,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from kvcache.offload.contents import LabelShape
from kvcache.offload.events import OffloadingEvent, cache_events
from kvcache.offload.hierarchy import Discards, Place, TierHierarchy
from kvcache.offload.jobs import Deadlines, JobKind, TransferJob
from kvcache.offload.keys import (
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    label_keys,
    make_offload_key,
    make_offload_keys,
    namespaced_digest,
    pack_keys,
    unpack_keys,
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
from kvcache.offload.registry import TIERS, TierFactory, make_tier
from kvcache.offload.specs import (
    BlockIDsLoadStoreSpec,
    FileLoadStoreSpec,
    GPULoadStoreSpec,
    HostLoadStoreSpec,
    LoadStoreSpec,
)
from kvcache.offload.statistics import HierarchyStatistics, TierStatistics
from kvcache.offload.tier_manager import TierManager

__all__ = [
    "TIERS",
    "BlockIDsLoadStoreSpec",
    "ByteRows",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "Deadlines",
    "Discards",
    "FileLoadStoreSpec",
    "GPULoadStoreSpec",
    "HandlerRoute",
    "HierarchyOptions",
    "HierarchyStatistics",
    "HostLoadStoreSpec",
    "JobKind",
    "LabelShape",
    "LoadStoreSpec",
    "OffloadAnswer",
    "OffloadKey",
    "OffloadingEvent",
    "OffloadingHandler",
    "OffloadingManager",
    "OffloadingSpec",
    "Place",
    "PrepareStoreOutput",
    "ReqContext",
    "TierFactory",
    "TierHierarchy",
    "TierManager",
    "TierOptions",
    "TierStatistics",
    "TransferJob",
    "TransferResult",
    "TransferSpec",
    "cache_events",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "label_keys",
    "make_offload_key",
    "make_offload_keys",
    "make_tier",
    "namespaced_digest",
    "pack_keys",
    "unpack_keys",
]
