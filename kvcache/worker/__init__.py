"""One rank of the cluster: real tensors, and a plain class that obeys the coordinator.

The only part of the package that imports torch. Start with worker.py.
"""

from __future__ import annotations

from kvcache.worker.copy_engine import CopyEngine, CpuCopyEngine, PendingCopy
from kvcache.worker.cuda_engine import CudaCopyEngine
from kvcache.worker.engine_choice import make_copy_engine
from kvcache.worker.host_pool import HostPool
from kvcache.worker.layout import PoolLayout
from kvcache.worker.settings import WorkerSettings, WorkerStatistics
from kvcache.worker.tensors import KVCachePool
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
