"""The keeper of a node's memory, and the workers' way to it. Light: it never imports torch."""

from __future__ import annotations

from kvcache.keeper.client import KeeperAddress, KeeperClient
from kvcache.keeper.memory_keeper import KeeperStatistics, MemoryKeeper

__all__ = ["KeeperAddress", "KeeperClient", "KeeperStatistics", "MemoryKeeper"]
