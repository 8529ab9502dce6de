"""One rank of the cluster: real tensors, and a plain class that obeys the coordinator.

    worker.py         KVCacheWorker: messages and ticks in, messages out
    execution.py      what commands change; validation.py refuses a message as a whole
    reports.py        how jobs have ended, and what blocks hold
    kv_cache_pool.py  one allocation, seen as layers and as rows; block_tables.py
    transfers.py      jobs between the tiers of a rank; tiers.py opens them
    copies/           copy engines, and the threads that copy
    files/            blocks on disk
    host_memory/      slots and labels that outlive the process
    content/          what every byte must be, written and compared

This package and `integrations` are the only ones that import torch. Start with worker.py.
"""

from __future__ import annotations

from kvcache.worker.copies.cuda import CudaCopyEngine
from kvcache.worker.copies.engine import CopyEngine, CpuCopyEngine, PendingCopy
from kvcache.worker.copies.measurement import make_copy_engine
from kvcache.worker.host_memory.host_pool import HostPool
from kvcache.worker.kv_cache_pool import KVCachePool, PoolLayout
from kvcache.worker.settings import WorkerSettings
from kvcache.worker.statistics import WorkerStatistics
from kvcache.worker.worker import KVCacheWorker

__all__ = [
    "CopyEngine",
    "CpuCopyEngine",
    "CudaCopyEngine",
    "HostPool",
    "KVCachePool",
    "KVCacheWorker",
    "PendingCopy",
    "PoolLayout",
    "WorkerSettings",
    "WorkerStatistics",
    "make_copy_engine",
]
