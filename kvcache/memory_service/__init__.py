"""The service that keeps a node's host memory, and its client in workers. Never imports torch."""

from __future__ import annotations

from kvcache.memory_service.client import MemoryServiceAddress, MemoryServiceClient
from kvcache.memory_service.service import HostMemoryService, MemoryServiceStatistics

__all__ = [
    "HostMemoryService",
    "MemoryServiceAddress",
    "MemoryServiceClient",
    "MemoryServiceStatistics",
]
