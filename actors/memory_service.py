"""The actor that keeps a node's host memory while its workers come and go.

A cluster that offloads has one per node, made at launch before any memory. Workers compute its
address from the names of cluster and node. It lives as long as the cluster. Its process holds
descriptors only and never reads the memory.

    worker ──put──▶ memory service (dies, Ray restarts it, empty) ◀──asks──┐
       ▲                                                     MemoryServiceWatch, every second
       └──────────────────── put your memory again ────────────────────────┘
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.connect import actor_names, end_actors, find_actor
from actors.names import (
    OUR_LOGGERS,
    RAY_NAMESPACE,
    memory_service_address,
    memory_service_name,
    memory_service_prefix,
)
from actors.processes import ProcessIdentity, end_process, started_ticks
from actors.reports import MemoryServiceReport, MemoryServiceStatus, NodeAddress, WorkerReport
from actors.workers.making import code_options
from kvcache.base.clock import Clock
from kvcache.base.errors import KVCacheError, StartupError
from kvcache.base.logs import get_logger, log_to_stderr
from kvcache.base.serving_loop import ServingLoop
from kvcache.config import ClusterConfig
from kvcache.memory_service.client import segment_name
from kvcache.memory_service.service import HostMemoryService

if TYPE_CHECKING:
    from actors.workers.worker_set import WorkerSet

logger = get_logger(__name__)

LOOK_S = 1.0
"""How long the watch waits between two checks."""

ANSWER_S = 2.0
"""How long memory services may take to report."""

PUT_S = 10.0
"""How long a worker may take to put its memory again."""


class MemoryServiceActor:
    """Serves one `HostMemoryService` until it is ended. If its process dies, Ray restarts it,
    empty, and the workers put their memory again."""

    def __init__(self, address: str, max_segments: int, max_bytes: int) -> None:
        """Serve at `address`. At launch, raises AlreadyRunningError if another memory service
        serves there. After a restart it tries again with each `report`, because an actor whose
        `__init__` raises is dead permanently."""
        log_to_stderr(OUR_LOGGERS)
        self._make = partial(
            HostMemoryService, address, max_segments=max_segments, max_bytes=max_bytes
        )
        self._service: HostMemoryService | None = None
        self._problem = ""
        is_made_again = ray.get_runtime_context().was_current_actor_reconstructed
        try:
            self._serve()
        except KVCacheError as error:
            if not is_made_again:
                raise
            self._problem = str(error)

    def report(self) -> MemoryServiceReport:
        """Return the kept memory; start to serve if it does not serve yet."""
        try:
            if self._service is None:
                self._serve()
        except KVCacheError as error:
            self._problem = str(error)
        service = self._service
        if service is not None:
            service.ensure_serving()
        statistics = None if service is None else service.statistics()
        process_id = os.getpid()
        return MemoryServiceReport(process_id, started_ticks(process_id), statistics, self._problem)

    def _serve(self) -> None:
        service = self._make()
        service.serve()
        self._service, self._problem = service, ""


def make_memory_services(
    config: ClusterConfig,
    reports: Sequence[WorkerReport],
    lifetime: Literal["detached"] | None,
    timeout_s: float,
) -> list[Any]:
    """Make and return a memory service on each node with workers, if the configuration wants them.

    Raises StartupError if one does not answer within `timeout_s`.
    """
    host_bytes = config.offload.host_memory_per_rank
    if host_bytes is None or not keeps_memory(config):
        return []
    make_remote: Any = ray.remote
    memory_services = []
    for node_id in sorted({report.node.node_id for report in reports}):
        num_ranks = sum(report.node.node_id == node_id for report in reports)
        # A rank's memory is released before its replacement is allocated; rows and headers are
        # extra.
        most_bytes = 2 * num_ranks * host_bytes + (64 << 20)
        actor = make_remote(MemoryServiceActor).options(
            name=memory_service_name(config.name, node_id),
            namespace=RAY_NAMESPACE,
            lifetime=lifetime,
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            **code_options(),
        )
        address = memory_service_address(config.name, node_id)
        memory_services.append(actor.remote(address, 2 * num_ranks, most_bytes))
    waiting = [service.__ray_ready__.remote() for service in memory_services]
    ended, late = ray.wait(waiting, num_returns=len(waiting), timeout=timeout_s)
    if late:
        end_actors(memory_services)
        raise StartupError(
            f"{len(late)} of {len(waiting)} memory services did not start within {timeout_s:.0f} "
            "s: look at the Ray logs of the nodes, or set offload.keeps_memory to false"
        )
    try:
        ray.get(ended)
    except RayError as error:
        end_actors(memory_services)
        raise StartupError(f"a memory service cannot start: {error}") from error
    return memory_services


def find_memory_services(cluster: str) -> list[Any]:
    """Return the memory services of a cluster on all nodes."""
    prefix = memory_service_prefix(cluster)
    found = [find_actor(name) for name in actor_names() if name.startswith(prefix)]
    return [actor for actor in found if actor is not None]


def await_no_memory_services(cluster: str, give_up_s: float) -> None:
    """Wait until no memory service of the cluster is registered, or until `give_up_s`
    (monotonic)."""
    while find_memory_services(cluster) and time.monotonic() < give_up_s:
        time.sleep(0.02)


class MemoryServiceWatch:
    """Ensures that the host memory of every rank is kept, from its own thread.

    Asks the memory services what they keep, and makes workers put missing memory again. Ends a
    hanging memory service, so that Ray makes another. Does nothing for a coordinator after another
    one has taken over.
    """

    def __init__(
        self,
        config: ClusterConfig,
        worker_set: Callable[[], WorkerSet],
        rules: Callable[[], bool],
        clock: Clock,
    ) -> None:
        """Start to watch, if the configuration wants memory kept. `worker_set` returns the present
        workers, `rules` whether this coordinator may still act."""
        self._config = config
        self._worker_set = worker_set
        self._rules = rules
        self._clock = clock
        self._nodes: dict[str, _WatchedNode] = {}
        self._handles: dict[str, Any] = {}
        self._told: tuple[MemoryServiceStatus, ...] = ()
        self.loop = ServingLoop("kvcache-memory-service-watch", self._turn)
        if keeps_memory(config):
            self.loop.start()

    def statuses(self) -> tuple[MemoryServiceStatus, ...]:
        """Return the status of the memory services at the last check."""
        return self._told

    def stop(self) -> None:
        """Stop watching. Repeatable."""
        self.loop.stop()

    def _turn(self) -> None:
        worker_set = self._worker_set()
        reports = dict(enumerate(worker_set.reports))
        seen = look_at_memory_services(self._config.name, reports, ANSWER_S, self._handles)
        now_s = self._clock.now()
        for status in seen:
            node = self._nodes.setdefault(status.node_id, _WatchedNode(now_s))
            node.note(status, now_s)
        self._nodes = {one.node_id: self._nodes[one.node_id] for one in seen}
        missing = [rank for one in seen if not one.problem for rank in one.missing_ranks]
        if not self.loop.is_stopping and (missing or any(one.problem for one in seen)):
            self._act(worker_set, missing, now_s)
        self._told = tuple(self._nodes[one.node_id].describe(one, now_s) for one in seen)
        self.loop.pause(LOOK_S)

    def _act(self, worker_set: WorkerSet, missing: Sequence[int], now_s: float) -> None:
        if not self._rules():
            return
        calls = {}
        for rank in missing:
            actor = worker_set.actors[rank]
            if actor is not None:
                calls[actor.kvcache_keep_memory.remote()] = rank
        for call, rank in calls.items():
            reason = _reason_of(call)
            logger.warning(
                "host memory of rank %d, missing in its memory service, %s",
                rank,
                f"is not kept: {reason}" if reason else "is kept again",
            )
            node = self._nodes[worker_set.reports[rank].node.node_id]
            node.reasons[rank] = reason
        limit_s = self._config.deadlines.worker_kill_s
        for node in self._nodes.values():
            if limit_s and node.process is not None and node.hangs_s(now_s) > limit_s:
                logger.error("the memory service of %s hangs: it is ended", node.process.host)
                end_process(node.process)
                node.process = None


@dataclass
class _WatchedNode:
    """The watch's state of one node's memory service. `process`: the one that answered last."""

    answered_s: float
    process: ProcessIdentity | None = None
    num_restarts: int = 0
    is_silent: bool = False
    reasons: dict[int, str] = field(default_factory=dict)

    def note(self, status: MemoryServiceStatus, now_s: float) -> None:
        """Record the result of a check."""
        self.is_silent = status.is_silent
        if status.problem:
            return
        self.answered_s = now_s
        process = ProcessIdentity(
            status.node_id, status.host, status.process_id, status.started_ticks
        )
        if self.process not in (None, process):
            self.num_restarts += 1
            logger.warning(
                "the memory service of %s was made again: process %d",
                status.host,
                status.process_id,
            )
        self.process = process

    def hangs_s(self, now_s: float) -> float:
        """Return for how long the memory service has not answered although its process exists."""
        return now_s - self.answered_s if self.is_silent else 0.0

    def describe(self, status: MemoryServiceStatus, now_s: float) -> MemoryServiceStatus:
        """Add to a status what only several checks can tell."""
        return replace(
            status,
            silent_s=now_s - self.answered_s if status.problem else 0.0,
            num_restarts=self.num_restarts,
            reasons=tuple(self.reasons.get(rank, "") for rank in status.missing_ranks),
        )


def keeps_memory(config: ClusterConfig) -> bool:
    """Say whether a cluster of this configuration has memory services."""
    return config.offload.host_memory_per_rank is not None and config.offload.keeps_memory


def look_at_memory_services(
    cluster: str,
    reports: Mapping[int, WorkerReport],
    timeout_s: float,
    handles: dict[str, Any] | None = None,
) -> list[MemoryServiceStatus]:
    """Ask the memory services of all nodes with ranks, within `timeout_s` in total.

    `reports` are the workers', by rank. `handles` caches the memory services found, by node.
    """
    handles = {} if handles is None else handles
    ranks: dict[NodeAddress, list[int]] = {}
    for rank, report in sorted(reports.items()):
        if report.node.node_id:
            ranks.setdefault(report.node, []).append(rank)
    calls: dict[NodeAddress, Any] = {}
    problems: dict[NodeAddress, str] = {}
    for node in ranks:
        try:
            if node.node_id not in handles:
                name = memory_service_name(cluster, node.node_id)
                handles[node.node_id] = ray.get_actor(name, namespace=RAY_NAMESPACE)
            calls[node] = handles[node.node_id].report.remote()
        except (ValueError, RayError) as error:
            handles.pop(node.node_id, None)
            problems[node] = f"there is none: {first_words(error)}"
    if calls:
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s)
    statuses = []
    for node in sorted(ranks, key=lambda node: node.node_id):
        call, problem = calls.get(node), problems.get(node, "")
        status = _status_of(cluster, node, ranks[node], call, problem)
        if status.problem:
            handles.pop(node.node_id, None)  # look it up again next time: it may be another actor
        statuses.append(status)
    return statuses


def _status_of(
    cluster: str, node: NodeAddress, ranks: Sequence[int], call: Any, problem: str
) -> MemoryServiceStatus:
    """Return the answer of a finished call; a call that still runs has timed out."""
    away = MemoryServiceStatus(node.node_id, node.host, missing_ranks=tuple(ranks), problem=problem)
    if call is None:
        return away
    try:
        report: MemoryServiceReport = ray.get(call, timeout=0)
    except GetTimeoutError:
        return replace(away, problem="it does not answer", is_silent=True)
    except RayError as error:
        return replace(away, problem=first_words(error))
    if report.statistics is None:
        return replace(away, process_id=report.process_id, problem=report.problem)
    kept = [r for r in ranks if segment_name(cluster, r) in report.statistics.names]
    return replace(
        away,
        process_id=report.process_id,
        started_ticks=report.started_ticks,
        kept_ranks=tuple(kept),
        missing_ranks=tuple(rank for rank in ranks if rank not in kept),
        statistics=report.statistics,
    )


def _reason_of(call: Any) -> str:
    """Wait for a worker's answer, and return why its memory is not kept; empty if it is kept."""
    try:
        return str(ray.get(call, timeout=PUT_S))
    except RayError as error:
        return first_words(error)


def first_words(error: Exception) -> str:
    """Return the first words of a Ray error, on one line."""
    if isinstance(error, GetTimeoutError):
        return "no answer came in time"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:200]
