"""The coordinator inside an engine's own process: no actor of its own, and no hop for its clients.

    client of this process ──▶ SharedService ──▶ Coordinator       in the client's thread
    workers ──sockets────────▶ SharedService ──▶ Coordinator       in the service's thread

It may end with its process at any moment. The workers stay, and Ray's key-value store keeps the
state that outlives it. Another process then takes the cluster over, warm. If this process still
lives, the workers no longer obey it; it notices that and tells its clients. The transport of Ray
calls is refused, because only actors can be called.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from actors.assembly import make_coordinator
from actors.connect import this_node
from actors.coordinator_metrics import CoordinatorMetrics
from actors.embedded.record import EmbeddedRecord, load_record, take_record
from actors.embedded.shared_service import SharedService
from actors.endpoints import EndpointTable
from actors.loop import ServiceLoop
from actors.reports import ClusterStatus, NodeAddress, describe_losses
from actors.service import ServiceStatistics, with_faults
from actors.state import RayStateStore
from actors.transport import Endpoint, Peer, PeerTransport
from actors.transport.inprocess import InProcessServer
from actors.transport.protocol import TransportLimits
from actors.workers.supervisor import CoordinatorLink, WorkerSupervisor
from actors.workers.worker_set import DiscoveredCluster, WorkerSet
from kvcache.base.clock import StallAwareClock, SystemClock
from kvcache.base.curve import generate_curve_keys
from kvcache.base.errors import (
    ClusterError,
    ConfigurationError,
    KVCacheError,
    NotRunningError,
    StartupError,
    SupersededError,
)
from kvcache.base.logs import get_logger
from kvcache.base.serving_loop import ServingLoop
from kvcache.config import ClusterConfig
from kvcache.coordinator import Coordinator
from kvcache.coordinator.settings import CoordinatorStatistics, Phase

logger = get_logger(__name__)

CLOSE_TIMEOUT_S = 10.0
READY_POLL_S = 0.002

IN_PROCESS = Endpoint("in process")
"""The endpoint for clients of this process."""


@dataclass(frozen=True)
class _Rule:
    """The parts that exist once workers are being taken over."""

    coordinator: Coordinator
    supervisor: WorkerSupervisor


class EmbeddedCoordinator:
    """One cluster's coordinator in this process. A `Dialing` for the clients of this process.

    Any thread may call it.
    """

    needs_keeping_alive = True

    def __init__(self, record: EmbeddedRecord) -> None:
        """Start the service's thread. Raises ConfigurationError for the transport of Ray calls."""
        self.config = config = record.config
        require_sockets(config)
        self.record = record
        self._node = this_node()
        self._clock = StallAwareClock(SystemClock(), config.transport.heartbeat_s)
        self._store = RayStateStore(config.name)
        self._rule: _Rule | None = None
        self._closed = threading.Event()
        self._metrics = CoordinatorMetrics(config)
        limits, keys = TransportLimits(config.transport.max_message_bytes), generate_curve_keys()
        self._transport = transport = InProcessServer(limits, keys)
        self._endpoints = EndpointTable(transport, config.transport, keys, self._node)
        self._service = SharedService(
            transport,
            SystemClock(),  # shows that this process was stopped
            config.transport.max_message_bytes,
            tick_s=min(config.transport.resend_s, config.transport.heartbeat_s) / 4,
            stall_s=config.transport.heartbeat_s,
            check_takeover=self.look_for_successor,
        )
        self._loop = ServiceLoop(
            "kvcache-coordinator", self._service.turn, transport.wake, on_failure=self._fail
        )
        self._loop.start()
        self._successors = ServingLoop("kvcache-successors", self._watch_for_successors)

    # --- start-up

    def launch(self, worker_set: WorkerSet, timeout_s: float) -> None:
        """Take over new workers; return when all of them obey.

        Raises StartupError, which names the ranks that do not obey, and ClusterError for a socket
        or state store that cannot be used.
        """
        rule = self._begin(self.config, worker_set, {})
        self._await_running(rule, timeout_s, spares_nobody=True)
        rule.supervisor.take_care()
        self._successors.start()

    def take_over(self, discovered: DiscoveredCluster, timeout_s: float) -> None:
        """Take over the workers that were found, replace lost ones, and return when all obey.
        Raises as `launch`, and SupersededError if another process was faster."""
        worker_set = discovered.worker_set
        if worker_set is None:
            causes = "; ".join(f"rank {rank}: {why}" for rank, why in discovered.lost.items())
            raise StartupError(
                f"no worker of {self.config.name} can say what the plan is ({causes or 'none'} "
                "answers): stop the cluster and launch it again"
            )
        # Clients of the previous process do not come back: they died with it, or are refused.
        deadlines = self.config.deadlines.model_copy(update={"reattach_s": 0.0})
        config = self.config.model_copy(update={"deadlines": deadlines})
        rule = self._begin(config, worker_set, discovered.lost)
        rule.supervisor.take_care()
        self._await_running(rule, timeout_s, spares_nobody=False)
        self._successors.start()

    # --- for clients of this process

    def endpoint(self) -> Endpoint:
        """Return the endpoint of this process. Raises the error that ended the coordinator."""
        self._require_alive()
        return IN_PROCESS

    def noted(self) -> Endpoint | None:
        """Return None: an embedded coordinator does not move."""
        return None

    def open(self, endpoint: Endpoint, peer: Peer) -> PeerTransport:
        """Return a client's connection. Raises the error that ended the coordinator."""
        return self._service.connect(peer)

    def lost_workers(self) -> str:
        """Say which ranks are lost and why. Raises the error that ended the coordinator."""
        self._require_alive()
        rule = self._rule
        if rule is None:
            return ""
        ranks = rule.supervisor.describe_ranks()
        lost = describe_losses(ranks, " is")
        problem = self._service.call(rule.coordinator.problem)
        return lost or (problem if "rank" in problem else "")

    # --- inspection

    @property
    def ended(self) -> KVCacheError | None:
        """Why this coordinator stopped serving, None while it serves. A new error object each time,
        because several threads may raise it."""
        ended = self._service.ended
        return None if ended is None else type(ended)(str(ended))

    @property
    def supervisor(self) -> WorkerSupervisor:
        """The supervisor of the workers. Raises NotRunningError before there are any."""
        if self._rule is None:
            raise NotRunningError(f"{self.config.name} has not taken its workers over yet")
        return self._rule.supervisor

    def status(self) -> ClusterStatus:
        """Return the cluster's status."""
        statistics, ranks = self.statistics()[0], self.supervisor.describe_ranks()
        problem = "; ".join(filter(None, (describe_losses(ranks), statistics.problem)))
        is_running = statistics.phase == Phase.RUNNING.value
        state = "ready" if is_running and not problem else "degraded"
        if self.ended is not None:
            state, problem = "failed", str(self.ended)
        supervisor, service = self.supervisor, self._service.statistics()
        own = with_faults(self._loop.statistics(), service)
        loops = (own, *supervisor.loops(), self._successors.statistics())
        return ClusterStatus.of(
            self.config,
            supervisor.worker_set.plan,
            os.getpid(),
            self._node,
            state=state,
            problem=problem,
            epoch=statistics.epoch,
            ranks=ranks,
            memory_services=supervisor.memory_services.statuses(),
            loops=loops,
            is_embedded=True,
        )

    def statistics(self) -> tuple[CoordinatorStatistics, ServiceStatistics]:
        """Return the statistics of the coordinator and of its message loop."""
        rule, service = self._rule, self._service
        statistics = CoordinatorStatistics()
        if rule is not None:
            statistics = service.call(rule.coordinator.statistics)
        return statistics, service.statistics()

    def look_for_successor(self) -> None:
        """Ask Ray's store whether this process still owns the cluster; if not, end the service."""
        rule = self._rule
        if rule is None or self.ended is not None:
            return
        try:
            record, state = load_record(self.config.name), self._store.load()
        except KVCacheError as error:
            logger.warning("cannot read which process has %s: %s", self.config.name, error)
            return
        name = self.config.name
        if record is None or state is None or record.launch_id != self.record.launch_id:
            logger.warning("%s was stopped by another process: this process stops serving", name)
            self._service.end(
                SupersededError(f"cluster {name} was stopped by another process: launch it again")
            )
        elif state.epoch > self._service.call(lambda: rule.coordinator.epoch):
            is_told = record.process not in (None, self.record.process)
            who = record.where() if is_told else "another process"
            logger.warning("%s was taken over by %s in epoch %d", name, who, state.epoch)
            self._service.end(
                SupersededError(
                    f"cluster {name} was taken over by {who} in epoch {state.epoch}: schedule "
                    "there, workers do not obey this process any more"
                )
            )

    def close(self) -> None:
        """Stop serving; the workers stay. Repeatable."""
        self._service.end(NotRunningError(f"cluster {self.config.name} was closed in this process"))
        self._closed.set()
        self._successors.stop()
        if self._rule is not None:
            self._rule.supervisor.stop()
        self._metrics.stop()
        if self._loop.end(CLOSE_TIMEOUT_S):
            self._service.call(self._give_back)
        # This process may disconnect from Ray next. A thread that calls Ray after that starts
        # another cluster, or crashes.
        self._successors.join(CLOSE_TIMEOUT_S)
        if self._rule is not None:
            self._rule.supervisor.join()

    # --- inside

    def _begin(
        self, config: ClusterConfig, worker_set: WorkerSet, lost: Mapping[int, str]
    ) -> _Rule:
        """Make the Coordinator, send the workers its endpoint, and start the supervisor."""
        metrics = self._metrics
        coordinator = make_coordinator(
            config, worker_set.plan, self._clock, self._store, core_factory=metrics.core_factory
        )
        incarnations = worker_set.incarnations(lost)
        self._service.open(metrics.around(coordinator), partial(coordinator.start, incarnations))
        metrics.report(coordinator, self._service.statistics, self._service.call)
        link = CoordinatorLink(
            coordinator, self._service.ask, self._service.send, self._endpoint_for
        )
        supervisor = WorkerSupervisor(
            config, self.record.worker_options, worker_set, link, clock=self._clock, lost=lost
        )
        self._rule = _Rule(coordinator, supervisor)
        return self._rule

    def _await_running(self, rule: _Rule, timeout_s: float, *, spares_nobody: bool) -> None:
        """Wait until the coordinator runs, and record that it is in this process."""
        coordinator, give_up_s = rule.coordinator, self._clock.now() + timeout_s
        while coordinator.phase is not Phase.RUNNING:
            self._require_alive()
            for rank, cause in rule.supervisor.losses.items():
                if spares_nobody:
                    raise StartupError(f"rank {rank} died before it was taken over: {cause}")
            if coordinator.phase is Phase.SUPERSEDED:
                raise SupersededError(
                    f"another process has taken {self.config.name} over at the same time"
                )
            if self._clock.now() > give_up_s:
                missing = ", ".join(map(str, self._service.call(coordinator.missing_ranks)))
                parts = (f"rank {missing} is missing" if missing else "", self.lost_workers())
                raise StartupError(
                    f"not every rank obeyed the coordinator within {timeout_s:.0f} s: "
                    f"{'; '.join(filter(None, parts))}"
                )
            self._closed.wait(READY_POLL_S)
        self.record = take_record(self.record, coordinator.epoch)

    def _watch_for_successors(self) -> None:
        """Check for a successor now and then; clean up when there is one."""
        if self._successors.pause(self.config.transport.heartbeat_s):
            return
        self.look_for_successor()
        if self.ended is not None:
            self.close()

    def _fail(self, failure: BaseException) -> None:
        """Handle the end of the service's thread by errors."""
        self._service.end(ClusterError(f"the coordinator has ended: {failure!r}"))

    def _endpoint_for(self, node: NodeAddress) -> Endpoint:
        endpoint: Endpoint = self._service.ask(partial(self._endpoints.endpoint_for, node))
        return endpoint

    def _give_back(self) -> None:
        if self._rule is not None:
            self._rule.coordinator.close()
        self._transport.close()

    def _require_alive(self) -> None:
        ended = self.ended
        if ended is not None:
            raise ended
        if self._loop.failure is not None:
            raise ClusterError(f"the coordinator has ended: {self._loop.failure!r}")


def require_sockets(config: ClusterConfig) -> None:
    """Raise ConfigurationError for the transport of Ray calls."""
    if config.transport.kind == "ray":
        raise ConfigurationError(
            "transport.kind is ray, but a coordinator embedded in a process cannot be called: "
            "set it to zmq"
        )
