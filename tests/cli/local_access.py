"""A cluster in this process, for commands that expect one on Ray."""

from __future__ import annotations

import os

from actors import KVCacheCluster, LocalCluster
from actors.clusters.access import ClusterStatistics
from actors.reports import ClusterStatus, NodeAddress, RankStatus
from actors.service import ServiceStatistics
from kvcache.coordinator.settings import CoordinatorStatistics
from kvcache.coordinator.watchdog import PendingWork, Watchdog, WatchLimits
from kvcache.metrics.inspection import CacheInspection, inspect_cache
from kvcache.protocol.labels import LabelSet

HERE = NodeAddress("local", "127.0.0.1")


class LocalAccess(KVCacheCluster):
    """Asks the parts of a `LocalCluster` where a cluster on Ray asks its actors."""

    def __init__(self, local: LocalCluster) -> None:
        self.config = local.config
        self.is_own = False
        self.local = local
        self.problem = ""
        self.now_s = 0.0
        self.watchdog = Watchdog(WatchLimits(5.0, 5.0, 5.0, 5.0))

    def status(self) -> ClusterStatus:
        ranks = [
            RankStatus(rank, rank, HERE.node_id, HERE.host, os.getpid(), (), "")
            for rank in range(len(self.local.workers))
        ]
        return ClusterStatus.of(
            self.config,
            self.local.plan,
            os.getpid(),
            HERE,
            state="failed" if self.problem else "ready",
            problem=self.problem,
            epoch=self.local.coordinator.epoch,
            ranks=ranks,
        )

    def pending(self) -> tuple[PendingWork, ...]:
        return self.watchdog.look(self.local.coordinator, self.now_s)

    def statistics(self) -> ClusterStatistics:
        workers = self.local.workers
        return ClusterStatistics(
            *self._service_statistics(),
            tuple(each.worker.statistics() for each in workers),
            tuple(each.statistics() for each in workers),
        )

    def collect_labels(self, rank: int) -> LabelSet:
        return self.local.workers[rank].worker.collect_labels()

    def inspect(self) -> CacheInspection:
        return inspect_cache(self.local.coordinator.manager, self.local._clock.now(), None)

    def event_keys(self) -> None:
        return None

    def _dialer(self) -> LocalCluster:
        return self.local

    def _service_statistics(self) -> tuple[CoordinatorStatistics, ServiceStatistics]:
        self.local.pump()
        return self.local.coordinator.statistics(), self.local._service.statistics()
