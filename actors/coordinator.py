"""The coordinator actor: the plain Coordinator behind sockets, in a process that Ray restarts.

`__init__` starts a thread and returns at once, whatever state the cluster is in: an actor whose
`__init__` raises after a crash is dead for good, and one whose `__init__` waits blocks every call.
Everything that decides is in `kvcache.coordinator`; this class carries bytes and asks Ray.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from actors.assembly import make_coordinator
from actors.connect import this_node
from actors.endpoints import EndpointBook
from actors.health import DeathWatch
from actors.loop import ServiceLoop, calm_garbage_collector
from actors.names import RAY_NAMESPACE, coordinator_name, worker_name
from actors.reports import ClusterStatus, NodeAddress, RankStatus, WorkerReport
from actors.service import CoordinatorService, ServiceStatistics
from actors.state import RayStateStore
from actors.transport import Endpoint, ServerTransport
from actors.transport.curve import CurveKeys
from actors.transport.node_server import NodeServer
from actors.transport.ray import RAY_SCHEME, RayServer
from actors.transport.zmq_server import ZmqLimits
from kvcache.clock import SystemClock
from kvcache.config import ClusterConfig
from kvcache.coordinator import Coordinator
from kvcache.coordinator.coordinator import Phase
from kvcache.coordinator.settings import CoordinatorStatistics
from kvcache.errors import StartupError
from kvcache.planner import Plan

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONTROL = "control"
MAIL = "mail"
COLLECT = "collect"

COORDINATOR_CONCURRENCY_GROUPS = {CONTROL: 2, MAIL: 1, COLLECT: 8}
"""Threads for calls: start-up and status; messages and long waits of the fallback transport."""

CALL_TIMEOUT_S = 10.0
READY_POLL_S = 0.002


@dataclass(frozen=True)
class Workforce:
    """The workers of a cluster in rank order: actors, and where each of them runs."""

    plan: Plan
    actors: tuple[Any, ...]
    reports: tuple[WorkerReport, ...]


class CoordinatorActor:
    """One cluster's coordinator. Named, restarted by Ray for ever, its calls never retried."""

    def __init__(self, config: ClusterConfig, keys: CurveKeys) -> None:
        """Start the loop's thread; after a crash also the one that finds the workers again."""
        self._config = config
        self._node = this_node()
        self._clock = SystemClock()
        self._workforce: Workforce | None = None
        self._coordinator: Coordinator | None = None
        self._watch: DeathWatch | None = None
        self._problem = ""
        self._deaths: dict[int, str] = {}
        self._closed = threading.Event()
        self._endpoints: EndpointBook | None = None
        self._transport = transport = self._open_transport(keys)
        self._service = CoordinatorService(
            transport, self._clock, config.transport.max_message_bytes, tick_s(config)
        )
        self._loop = ServiceLoop("kvcache-coordinator", self._service.turn, transport.wake)
        self._loop.start()
        if ray.get_runtime_context().was_current_actor_reconstructed:
            threading.Thread(target=self._recover, name="kvcache-recovery", daemon=True).start()

    # --- start-up

    @ray.method(concurrency_group=CONTROL)
    def begin(
        self,
        plan: Plan,
        workers: Sequence[Any],
        reports: Sequence[WorkerReport],
        timeout_s: float,
    ) -> Endpoint:
        """Take over `workers`, given in rank order, and return when all of them obey.

        Raises StartupError naming the ranks that do not, ClusterError for a socket or state store
        that cannot be used.
        """
        self._begin(Workforce(plan, tuple(workers), tuple(reports)))
        give_up_s = self._clock.now() + timeout_s
        while not self._is_running():
            if self._deaths:
                rank, cause = next(iter(self._deaths.items()))
                raise StartupError(f"rank {rank} died before it was taken over: {cause}")
            if self._clock.now() > give_up_s:
                raise StartupError(
                    f"not every rank obeyed the coordinator within {timeout_s:.0f} s: "
                    f"{self._describe_missing()}"
                )
            self._closed.wait(READY_POLL_S)
        calm_garbage_collector()
        return self._endpoint_for(self._node)

    @ray.method(concurrency_group=CONTROL)
    def endpoint_for(self, node: NodeAddress) -> Endpoint:
        """Return where a process on `node` connects to."""
        return self._endpoint_for(node)

    @ray.method(concurrency_group=CONTROL)
    def connection_settings(self) -> ClusterConfig:
        """Return the configuration, which says how a client has to talk."""
        return self._config

    # --- looking

    @ray.method(concurrency_group=CONTROL)
    def status(self) -> ClusterStatus:
        """Return what the cluster is and how it does."""
        return self._status()

    @ray.method(concurrency_group=CONTROL)
    def statistics(self) -> tuple[CoordinatorStatistics | None, ServiceStatistics]:
        """Return the figures of the coordinator (None before `begin`) and of its message loop."""
        coordinator = self._coordinator
        if coordinator is None:
            return None, self._service.statistics()
        return self._call(coordinator.statistics), self._service.statistics()

    @ray.method(concurrency_group=CONTROL)
    def workers(self) -> tuple[Any, ...]:
        """Return the worker actors in rank order; empty before `begin`."""
        return () if self._workforce is None else self._workforce.actors

    # --- fallback transport

    @ray.method(concurrency_group=MAIL)
    def post(self, identity: bytes, payload: bytes) -> None:
        """Take a message that comes as an actor call."""
        if isinstance(self._transport, RayServer):
            self._transport.post(identity, payload)

    @ray.method(concurrency_group=COLLECT)
    def collect(self, client_id: str, timeout_s: float) -> list[bytes]:
        """Return the messages that wait for a client, waiting for them at most `timeout_s`."""
        if not isinstance(self._transport, RayServer):
            return []
        return self._transport.collect(client_id, min(timeout_s, CALL_TIMEOUT_S))

    # --- the end

    @ray.method(concurrency_group=CONTROL)
    def close(self) -> None:
        """Let sentinels go and close the sockets. Repeatable."""
        self._closed.set()
        if self._watch is not None:
            self._watch.stop()
        if self._loop.stop(CALL_TIMEOUT_S):
            if self._coordinator is not None:
                self._coordinator.close()
            self._transport.close()

    # --- inside

    def _open_transport(self, keys: CurveKeys) -> ServerTransport:
        limits = ZmqLimits(self._config.transport.max_message_bytes)
        if self._config.transport.kind == "ray":
            return RayServer(self._worker_of, limits)
        server = NodeServer(limits, keys)
        self._endpoints = EndpointBook(server, self._config.transport, keys, self._node)
        return server

    def _endpoint_for(self, node: NodeAddress) -> Endpoint:
        book = self._endpoints
        if book is None:
            return Endpoint(RAY_SCHEME + coordinator_name(self._config.name))
        return self._call(lambda: book.endpoint_for(node))

    def _worker_of(self, rank: int) -> Any | None:
        workforce = self._workforce
        if workforce is None or not 0 <= rank < len(workforce.actors):
            return None
        return workforce.actors[rank]

    def _begin(self, workforce: Workforce) -> None:
        """Make the Coordinator, tell the workers where it is, and watch over them."""
        self._workforce = workforce
        coordinator = make_coordinator(
            self._config, workforce.plan, self._clock, RayStateStore(self._config.name)
        )
        incarnations = {rank: r.incarnation for rank, r in enumerate(workforce.reports)}
        self._coordinator = coordinator
        self._call(lambda: self._service.open(coordinator, coordinator.start(incarnations)))
        for actor, report in zip(workforce.actors, workforce.reports, strict=True):
            actor.kvcache_attach.remote(self._endpoint_for(report.node))
        self._watch = DeathWatch(
            dict(enumerate(workforce.actors)), coordinator.epoch, self._on_death
        )

    def _on_death(self, rank: int, cause: str) -> None:
        coordinator, workforce = self._coordinator, self._workforce
        if coordinator is None or workforce is None:
            return
        self._deaths[rank] = cause
        incarnation = workforce.reports[rank].incarnation
        self._call(lambda: self._service.send(coordinator.on_worker_lost(rank, incarnation, cause)))

    def _recover(self) -> None:
        """After a restart: ask the workers for the plan they obey, and take over again, cold."""
        try:
            self._begin(find_workforce(self._config))
        except Exception as error:
            self._problem = f"the restarted coordinator could not take over: {error}"
            logger.exception("recovery failed")

    def _describe_missing(self) -> str:
        """Name the ranks that have not obeyed yet."""
        coordinator = self._coordinator
        if coordinator is None:
            return "there is none"
        missing = ", ".join(map(str, self._call(coordinator.missing_ranks)))
        return "; ".join(filter(None, (f"rank {missing} is missing", coordinator.problem())))

    def _is_running(self) -> bool:
        return self._coordinator is not None and self._coordinator.phase is Phase.RUNNING

    def _call(self, action: Callable[[], T]) -> T:
        return self._loop.call(action, CALL_TIMEOUT_S)

    def _status(self) -> ClusterStatus:
        figures = self._statistics_of_coordinator()
        workforce, plan = self._workforce, None
        if workforce is not None:
            plan = workforce.plan
        problem = self._problem or figures.problem
        state = "ready" if self._is_running() and not problem else "degraded"
        if self._loop.failure is not None:
            state, problem = "failed", f"the coordinator has ended: {self._loop.failure!r}"
        elif self._coordinator is None:
            state = "degraded" if problem else "starting"
        return ClusterStatus(
            name=self._config.name,
            state=state,
            problem=problem,
            model=self._config.model.name,
            epoch=figures.epoch,
            fingerprint="" if plan is None else plan.fingerprint,
            num_blocks=0 if plan is None else plan.num_blocks,
            max_model_len=0 if plan is None else plan.max_model_len,
            transport=self._config.transport.kind,
            coordinator_process_id=os.getpid(),
            coordinator_node=self._node,
            ranks=() if workforce is None else self._rank_statuses(workforce),
            warnings=() if plan is None else plan.warnings,
        )

    def _rank_statuses(self, workforce: Workforce) -> tuple[RankStatus, ...]:
        return tuple(
            RankStatus(
                rank=rank,
                place=report.place,
                node_id=report.node.node_id,
                host=report.node.host,
                process_id=report.process_id,
                gpu_ids=report.gpu_ids,
                problem=self._deaths.get(rank, ""),
            )
            for rank, report in enumerate(workforce.reports)
        )

    def _statistics_of_coordinator(self) -> CoordinatorStatistics:
        coordinator = self._coordinator
        if coordinator is None or not self._loop.is_running:
            return CoordinatorStatistics()
        return self._call(coordinator.statistics)


def find_workforce(config: ClusterConfig) -> Workforce:
    """Return the cluster's workers as their names and their own words have them.

    Raises StartupError when one of them cannot be found or has no plan.
    """
    actors: dict[int, Any] = {}
    reports: dict[int, WorkerReport] = {}
    plan: Plan | None = None
    for place in range(config.parallel.num_ranks):
        name = worker_name(config.name, place)
        try:
            actor = ray.get_actor(name, namespace=RAY_NAMESPACE)
            rank, plan, report = ray.get(actor.kvcache_assignment.remote(), timeout=CALL_TIMEOUT_S)
        except (ValueError, RayError) as error:
            raise StartupError(f"worker {name} does not answer: {error}") from error
        actors[rank], reports[rank] = actor, report
    if plan is None or sorted(actors) != list(range(config.parallel.num_ranks)):
        raise StartupError(f"the workers of {config.name} serve ranks {sorted(actors)}")
    ranks = sorted(actors)
    return Workforce(plan, tuple(actors[r] for r in ranks), tuple(reports[r] for r in ranks))


def tick_s(config: ClusterConfig) -> float:
    """Return how often the clock is looked at: four times in the shortest interval it measures."""
    return min(config.transport.resend_s, config.transport.heartbeat_s) / 4
