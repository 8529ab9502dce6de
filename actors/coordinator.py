"""The coordinator actor: the plain Coordinator behind sockets, in a process that Ray restarts.

`__init__` starts a thread and returns at once, whatever state the cluster is in. An actor whose
`__init__` raises after a crash is dead permanently, and one whose `__init__` waits blocks every
call. `kvcache.coordinator` makes the decisions; this class carries bytes and asks Ray.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import ray

from actors.assembly import make_coordinator
from actors.connect import log_path, this_node
from actors.coordinator_metrics import CoordinatorMetrics
from actors.endpoints import EndpointTable, save_endpoint
from actors.loop import ServiceLoop, calm_garbage_collector, end_this_process
from actors.names import OUR_LOGGERS, coordinator_name
from actors.reports import ClusterStatus, LastWorkers, NodeAddress, describe_losses
from actors.service import CoordinatorService, ServiceStatistics, with_faults
from actors.state import RayStateStore
from actors.transport import Endpoint, ServerTransport
from actors.transport.node_server import NodeServer
from actors.transport.protocol import TransportLimits
from actors.transport.ray import RAY_SCHEME, RayServer
from actors.workers.making import WorkerOptions
from actors.workers.replacement import FIRST_PAUSE_S, LONGEST_PAUSE_S
from actors.workers.supervisor import CoordinatorLink, WorkerSupervisor
from actors.workers.worker_set import WorkerSet, look_for_workers
from kvcache.base.clock import StallAwareClock, SystemClock
from kvcache.base.curve import CurveKeys
from kvcache.base.errors import KVCacheError, NotRunningError, StartupError
from kvcache.base.logs import get_logger, log_to_stderr
from kvcache.config import ClusterConfig
from kvcache.coordinator import Coordinator
from kvcache.coordinator.settings import CoordinatorStatistics, Phase
from kvcache.coordinator.watchdog import PendingWork
from kvcache.metrics.inspection import CacheInspection, inspect_cache
from kvcache.recorder import RecordedBatch, RequestTracer, record_request

logger = get_logger(__name__)

T = TypeVar("T")

MOST_RECORDED = 256
"""How many requests a recording client gets at once."""

CONTROL = "control"
MAIL = "mail"
COLLECT = "collect"

COORDINATOR_CONCURRENCY_GROUPS = {CONTROL: 2, MAIL: 1, COLLECT: 8}
"""Threads for calls: start-up and status, and messages and long waits of the fallback transport."""

LAUNCH_GRACE_S = 20.0
"""Longer than a launch can last beyond `deadlines.startup_s`."""

_REMEDY = "stop the cluster and launch it again"

CALL_TIMEOUT_S = 10.0
READY_POLL_S = 0.002


class CoordinatorActor:
    """The coordinator of one cluster. A named actor that Ray restarts without limit; calls are
    never retried."""

    def __init__(
        self, config: ClusterConfig, keys: CurveKeys, worker_options: WorkerOptions
    ) -> None:
        """Start the loop's thread; after a crash also the thread that finds the workers again.

        `worker_options`: options of the workers that replace lost ones.
        """
        self._config, self._keys = config, keys
        self._worker_options = worker_options
        self._node = this_node()
        self._clock = StallAwareClock(SystemClock(), config.transport.heartbeat_s)
        self._tracer = RequestTracer(self._clock)
        self._coordinator: Coordinator | None = None
        self._supervisor: WorkerSupervisor | None = None
        self._problem = ""
        self._is_hopeless = False
        self._closed = threading.Event()
        self._endpoints: EndpointTable | None = None
        log_to_stderr(OUR_LOGGERS)
        self._metrics = CoordinatorMetrics(config)
        self._transport = transport = self._open_transport(keys)
        self._service = CoordinatorService(
            transport, self._clock, config.transport.max_message_bytes, tick_s(config)
        )
        self._loop = ServiceLoop(
            "kvcache-coordinator",
            self._service.turn,
            transport.wake,
            on_failure=end_this_process,  # Ray restarts it, and it takes over again
        )
        self._loop.start()
        self._launch_s = config.deadlines.startup_s + LAUNCH_GRACE_S
        self._launched_by_s = self._clock.now() + self._launch_s
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._launched_by_s = math.inf
            threading.Thread(target=self._recover, name="kvcache-recovery", daemon=True).start()

    # --- start-up

    @ray.method(concurrency_group=CONTROL)
    def begin(self, worker_set: WorkerSet, timeout_s: float) -> Endpoint:
        """Take over the workers and return when all of them obey.

        Raises StartupError, which names the ranks that do not obey, and ClusterError for a socket
        or state store that cannot be used.
        """
        supervisor = self._begin(worker_set, {})
        give_up_s = self._clock.now() + timeout_s
        while not self._is_running():
            for rank, cause in supervisor.losses.items():
                raise StartupError(f"rank {rank} died before it was taken over: {cause}")
            if self._clock.now() > give_up_s:
                raise StartupError(
                    f"not every rank obeyed the coordinator within {timeout_s:.0f} s: "
                    f"{self._describe_missing()}"
                )
            if self._closed.wait(READY_POLL_S):
                raise StartupError(f"{self._config.name} was stopped")
        supervisor.take_care()
        calm_garbage_collector()
        return self._endpoint_for(self._node)

    @ray.method(concurrency_group=CONTROL)
    def endpoint_for(self, node: NodeAddress) -> Endpoint:
        """Return the endpoint for processes on `node`."""
        return self._endpoint_for(node)

    @ray.method(concurrency_group=CONTROL)
    def connection_settings(self) -> ClusterConfig:
        """Return the configuration, which defines how clients connect."""
        return self._config

    @ray.method(concurrency_group=CONTROL)
    def event_keys(self) -> CurveKeys | None:
        """Return the keys that followers of events need, None if they need none."""
        return self._keys.for_peers() if self._config.events.curve == "always" else None

    # --- inspection

    @ray.method(concurrency_group=CONTROL)
    def status(self) -> ClusterStatus:
        """Return the cluster's status."""
        return self._status()

    @ray.method(concurrency_group=CONTROL)
    def statistics(self) -> tuple[CoordinatorStatistics | None, ServiceStatistics]:
        """Return the statistics of the coordinator (None before `begin`) and of its message
        loop."""
        coordinator = self._coordinator
        if coordinator is None:
            return None, self._service.statistics()
        return self._call(coordinator.statistics), self._service.statistics()

    @ray.method(concurrency_group=CONTROL)
    def workers(self) -> tuple[Any, ...]:
        """Return the worker actors in rank order; empty before `begin`."""
        return self._actors()

    @ray.method(concurrency_group=CONTROL)
    def inspect(self) -> CacheInspection:
        """Return pins and block usage. Raises NotRunningError between two epochs."""
        coordinator, now = self._coordinator, self._clock.now
        if coordinator is None:
            return inspect_cache(None, now(), None)

        def look() -> CacheInspection:
            return inspect_cache(coordinator.manager, now(), self._metrics.ages)

        return self._call(look)

    @ray.method(concurrency_group=CONTROL)
    def pending(self) -> tuple[PendingWork, ...]:
        """Return all pending work, at most a second old."""
        return () if self._supervisor is None else self._supervisor.pending()

    @ray.method(concurrency_group=CONTROL)
    def record_requests(self, listener: str, salt: bytes, is_last: bool) -> RecordedBatch:
        """Return the requests served since `listener` asked last, without tokens; `salt` keys their
        digests. The first call begins the recording, `is_last` ends it.

        Raises AlreadyRunningError while another listener records.
        """
        tracer, block_size = self._tracer, self._config.cache.block_size
        take = partial(tracer.take, listener, MOST_RECORDED)
        seen = self._call(partial(tracer.finish, listener) if is_last else take)
        requests = tuple(record_request(one, block_size, salt) for one in seen.requests)
        return RecordedBatch(requests, seen.num_lost, block_size)

    @ray.method(concurrency_group=CONTROL)
    def replace_worker(self, rank: int, actor: Any) -> None:
        """Begin to replace a rank's worker by an engine's own actor, or, with None, try again.

        Raises NotRunningError before `begin`, RequestError if it cannot be replaced.
        """
        if self._supervisor is None:
            raise NotRunningError(f"{self._config.name} has not taken its workers over yet: wait")
        self._supervisor.replace_worker(rank, actor)

    # --- fallback transport

    @ray.method(concurrency_group=MAIL)
    def post(self, identity: bytes, payload: bytes) -> None:
        """Take a message that arrives as an actor call."""
        if isinstance(self._transport, RayServer):
            self._transport.post(identity, payload)

    @ray.method(concurrency_group=COLLECT)
    def collect(self, client_id: str, timeout_s: float) -> list[bytes]:
        """Return the messages for a client; wait for the first at most `timeout_s`."""
        if not isinstance(self._transport, RayServer):
            return []
        return self._transport.collect(client_id, min(timeout_s, CALL_TIMEOUT_S))

    # --- the end

    @ray.method(concurrency_group=CONTROL)
    def close(self) -> LastWorkers:
        """Stop replacing workers, release sentinels and close the sockets. Return the last workers.
        Repeatable."""
        was_closed = self._closed.is_set()
        self._closed.set()
        supervisor = self._supervisor
        if supervisor is not None:
            supervisor.stop()
        self._metrics.stop()
        if self._loop.end(self._config.deadlines.closing_s):
            if self._coordinator is not None:
                self._coordinator.close()
            self._transport.close()
        reports = () if supervisor is None else supervisor.worker_set.reports
        process_ids = tuple(report.process_id for report in reports)
        actors = self._actors() if self._worker_options.is_foreign else ()
        return LastWorkers(process_ids, actors, was_closed)

    # --- inside

    def _open_transport(self, keys: CurveKeys) -> ServerTransport:
        limits = TransportLimits(self._config.transport.max_message_bytes)
        if self._config.transport.kind == "ray":
            return RayServer(self._worker_of, limits)
        server = NodeServer(limits, keys)
        self._endpoints = EndpointTable(server, self._config.transport, keys, self._node)
        return server

    def _endpoint_for(self, node: NodeAddress) -> Endpoint:
        endpoints = self._endpoints
        if endpoints is None:
            return Endpoint(RAY_SCHEME + coordinator_name(self._config.name))
        return self._call(partial(endpoints.endpoint_for, node))

    def _actors(self) -> tuple[Any, ...]:
        return () if self._supervisor is None else self._supervisor.worker_set.actors

    def _worker_of(self, rank: int) -> Any | None:
        actors = self._actors()
        return actors[rank] if 0 <= rank < len(actors) else None

    def _begin(self, worker_set: WorkerSet, lost: Mapping[int, str]) -> WorkerSupervisor:
        """Make the Coordinator, send the workers its endpoint, and start the supervisor."""
        metrics, store = self._metrics, RayStateStore(self._config.name)
        coordinator = make_coordinator(
            self._config,
            worker_set.plan,
            self._clock,
            store,
            self._keys,
            core_factory=metrics.core_factory,
            tracer=self._tracer,
        )
        incarnations = worker_set.incarnations(lost)
        decider = metrics.around(coordinator)

        def start() -> None:
            self._service.open(decider, coordinator.start(incarnations))

        self._call(start)
        self._coordinator = coordinator
        metrics.report(coordinator, self._service.statistics, self._call)
        link = CoordinatorLink(coordinator, self._call, self._service.send, self._endpoint_for)
        supervisor = WorkerSupervisor(
            self._config, self._worker_options, worker_set, link, clock=self._clock, lost=lost
        )
        self._supervisor = supervisor
        return supervisor

    def _recover(self) -> None:
        """After a restart, ask the workers for their plan, and take over again.

        Until a worker knows the plan, workers that do not answer are looked up again.
        """
        logger.warning(
            "%s: its coordinator was restarted, process %d: looking for its workers",
            self._config.name,
            os.getpid(),
        )
        pause_s = FIRST_PAUSE_S
        give_up_s = self._clock.now() + self._config.deadlines.return_s
        while not self._closed.is_set():
            try:
                discovered = look_for_workers(self._config)
                if discovered.worker_set is not None:
                    supervisor = self._begin(discovered.worker_set, discovered.lost)
                    self._problem = ""
                    if self._closed.is_set():
                        supervisor.stop()
                    else:
                        supervisor.take_care()
                        self._tell_clients(give_up_s)
                    return
                causes = "; ".join(f"rank {r}: {why}" for r, why in sorted(discovered.lost.items()))
                self._problem = f"the restarted coordinator finds no worker: {causes or 'silence'}"
                logger.warning("%s: %s", self._config.name, self._problem)
                self._is_hopeless = discovered.is_hopeless
            except Exception as error:
                self._problem = f"the restarted coordinator could not take over: {error}"
                logger.exception("recovery failed")
            self._is_hopeless |= self._clock.now() + pause_s > give_up_s
            if self._is_hopeless:
                self._problem += f": {_REMEDY}"
                logger.error("%s: %s", self._config.name, self._problem)
                return
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _tell_clients(self, give_up_s: float) -> None:
        """Record the coordinator's endpoint as soon as it can serve steps."""
        while not (self._is_running() or self._closed.wait(READY_POLL_S)):
            if self._clock.now() > give_up_s:
                return  # clients ask, and learn which ranks are missing
        if self._closed.is_set():
            return
        try:
            save_endpoint(self._config.name, self._node.node_id, self._endpoint_for(self._node))
        except KVCacheError as error:  # it has taken over nevertheless, and must not do so again
            logger.warning("the endpoint is not recorded, so clients have to ask for it: %s", error)

    def _describe_missing(self) -> str:
        """Name the ranks that do not obey yet."""
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
        statistics, supervisor = self._statistics_of_coordinator(), self._supervisor
        plan = None if supervisor is None else supervisor.worker_set.plan
        ranks = () if supervisor is None else supervisor.describe_ranks()
        lost = describe_losses(ranks)
        problem = self._problem or "; ".join(filter(None, (lost, statistics.problem)))
        state = "ready" if self._is_running() and not problem else "degraded"
        if self._loop.failure is not None:
            state = "failed"
            problem = f"the coordinator has ended: {self._loop.failure!r}: {_REMEDY}"
        elif self._is_hopeless:
            state = "failed"
        elif self._coordinator is None and self._clock.now() > self._launched_by_s:
            state = "failed"
            problem = f"its launch has not ended within {self._launch_s:g} s: {_REMEDY}"
        elif self._coordinator is None:
            state = "degraded" if problem else "starting"
        own = with_faults(self._loop.statistics(), self._service.statistics())
        loops = (own, *(supervisor.loops() if supervisor else ()))
        return ClusterStatus.of(
            self._config,
            plan,
            os.getpid(),
            self._node,
            state=state,
            problem=problem,
            epoch=statistics.epoch,
            ranks=ranks,
            memory_services=() if supervisor is None else supervisor.memory_services.statuses(),
            loops=loops,
            log_path=log_path(),
        )

    def _statistics_of_coordinator(self) -> CoordinatorStatistics:
        coordinator = self._coordinator
        if coordinator is None or not self._loop.is_running:
            return CoordinatorStatistics()
        return self._call(coordinator.statistics)


def tick_s(config: ClusterConfig) -> float:
    """Return how often to check the clock: four times in the shortest interval it measures."""
    return min(config.transport.resend_s, config.transport.heartbeat_s) / 4
