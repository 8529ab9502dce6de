"""A cluster with an embedded coordinator, as any other process sees it: its status and its end.

There is no actor to ask: the record names the coordinator's process, and the workers report for
themselves. Only the process with the coordinator can serve clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from actors.clusters.access import answer_or_none
from actors.clusters.cluster import KVCacheCluster
from actors.clusters.shutdown import ClusterParts, take_down
from actors.embedded.record import EmbeddedRecord, load_record
from actors.memory_service import ANSWER_S, keeps_memory, look_at_memory_services
from actors.names import RAY_NAMESPACE, coordinator_name, placement_group_name, worker_name
from actors.processes import ProcessIdentity, is_process_alive
from actors.reports import ClusterStatus, MemoryServiceStatus, NodeAddress, RankStatus, WorkerReport
from actors.service import ServiceStatistics
from actors.state import RayStateStore
from kvcache.config import ClusterConfig
from kvcache.coordinator.settings import CoordinatorStatistics
from kvcache.planner import Plan

NO_PROCESS = ProcessIdentity("", "no node", 0, 0)
REMEDY = "take it over with EmbeddedCluster.take_over, or stop it"


@dataclass(frozen=True)
class _Seen:
    """One worker's own report."""

    rank: int
    plan: Plan
    report: WorkerReport
    epoch: int


class EmbeddedSite:
    """A cluster whose coordinator is, or was, in the process of its record."""

    def __init__(self, record: EmbeddedRecord) -> None:
        self._record = record
        self.config: ClusterConfig = record.config
        self.name = self.config.name

    def status(self) -> ClusterStatus:
        """Return the cluster's status, as far as the workers know it."""
        seen = self._ask_workers()
        epochs = [worker.epoch for worker in seen]
        problem = "; ".join(filter(None, (self._missing_process(), self._missing_ranks(seen))))
        reports = {worker.rank: worker.report for worker in seen}
        memory_services: list[MemoryServiceStatus] = []
        if keeps_memory(self.config):
            memory_services = look_at_memory_services(self.name, reports, ANSWER_S)
        process = self._record.process or NO_PROCESS
        return ClusterStatus.of(
            self.config,
            seen[0].plan if seen else None,
            process.process_id,
            NodeAddress(process.node_id, process.host),
            state="degraded" if problem else "ready",
            problem=problem,
            epoch=max(epochs, default=self._record.epoch),
            ranks=[_describe(worker) for worker in sorted(seen, key=lambda worker: worker.rank)],
            memory_services=memory_services,
            is_embedded=True,
        )

    def coordinator_statistics(self) -> CoordinatorStatistics | None:
        """Return None: only the coordinator's process knows its statistics."""
        return None

    def message_statistics(self) -> ServiceStatistics | None:
        """Return None: only the coordinator's process knows them."""
        return None

    def stop(self) -> None:
        """End the workers; nothing of the cluster remains. The process with the coordinator, if it
        lives, gets errors. An engine's own actors are not ended."""
        RayStateStore(self.name).clear()  # first, or lost workers would be replaced meanwhile
        parts = ClusterParts(self.name, self.config.deadlines)
        parts.process_ids = tuple(worker.report.process_id for worker in self._ask_workers())
        parts.find_workers(self.config.parallel.num_ranks)
        parts.find_placement(placement_group_name(self.name))
        take_down(parts)

    def _ask_workers(self) -> list[_Seen]:
        """Return the reports of all workers that can be found and answer."""
        calls: list[tuple[Any, Any]] = []
        for place in range(self.config.parallel.num_ranks):
            actor = find_actor(worker_name(self.name, place))
            if actor is not None:
                calls.append((actor.kvcache_assignment.remote(), actor.kvcache_statistics.remote()))
        answers = [(answer_or_none(first), answer_or_none(second)) for first, second in calls]
        return [
            _Seen(assignment[0], assignment[1], assignment[2], statistics[0].epoch)
            for assignment, statistics in answers
            if assignment is not None and statistics is not None
        ]

    def _missing_process(self) -> str:
        process = self._record.process
        if process is None:
            return f"no process has its coordinator: {REMEDY}"
        if not is_process_alive(process):
            return f"{self._record.where()}, which had its coordinator, is gone: {REMEDY}"
        return ""

    def _missing_ranks(self, seen: list[_Seen]) -> str:
        if self._record.has_given_workers:
            return ""  # an engine's own actors have no names of this package
        present = {worker.rank for worker in seen}
        missing = [r for r in range(self.config.parallel.num_ranks) if r not in present]
        return f"ranks {missing} do not answer" if missing else ""


def find_cluster(name: str) -> KVCacheCluster | EmbeddedSite:
    """Return the running cluster `name`, wherever its coordinator is. The process is connected to
    Ray. Raises NotRunningError if there is none."""
    if find_actor(coordinator_name(name)) is None:
        record = load_record(name)
        if record is not None:
            return EmbeddedSite(record)
    return KVCacheCluster.connect(name)


def find_actor(name: str) -> Any | None:
    """Return an actor of this package by its name, None if there is none."""
    try:
        return ray.get_actor(name, namespace=RAY_NAMESPACE)
    except (ValueError, RayError):
        return None


def _describe(worker: _Seen) -> RankStatus:
    report = worker.report
    return RankStatus(
        rank=worker.rank,
        place=report.place,
        node_id=report.node.node_id,
        host=report.node.host,
        process_id=report.process_id,
        gpu_ids=report.gpu_ids,
        problem="",
    )
