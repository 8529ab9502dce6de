"""A whole cluster in one process and one thread, without Ray and without sockets.

    with LocalCluster(config) as cluster, cluster.client() as client:
        result = client.step(StepRequest(...))
        cluster.workers[0].worker.begin_forward(result.epoch, result.seq, timeout_s=1.0)

The same coordinator, workers, client and messages as on Ray; every message is encoded and decoded.
For experiments, examples and tests. A part that waits gives the others their turns.
"""

from __future__ import annotations

from actors.assembly import make_coordinator
from actors.client import KVCacheClient
from actors.reports import NodeAddress
from actors.service import CoordinatorService
from actors.transport import Endpoint, Peer, PeerTransport
from actors.transport.local import LocalServer
from actors.transport.mailbox import Mailbox
from actors.workers.embedding import EmbeddedWorker
from kvcache.base.clock import Clock, StallAwareClock, SystemClock
from kvcache.base.errors import StartupError
from kvcache.config import ClusterConfig
from kvcache.coordinator import Coordinator
from kvcache.coordinator.settings import Phase
from kvcache.planner import Plan, plan_kv_cache, plan_options
from kvcache.protocol.state_store import MemoryStateStore, StateStore

LOCAL_ENDPOINT = Endpoint("local")
MIN_STARTUP_ROUNDS = 10_000

_HERE = NodeAddress("local", "127.0.0.1")


class LocalCluster:
    """Coordinator, all workers and any number of clients in this thread."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        clock: Clock | None = None,
        state_store: StateStore | None = None,
    ) -> None:
        """Plan, allocate and start. Ignores `config.transport.kind`.

        Raises NotEnoughMemoryError or ConfigurationError if the model does not fit, StartupError if
        the workers do not obey.
        """
        # Nothing outlives this process, so no memory service is needed.
        offload = config.offload.model_copy(update={"keeps_memory": False})
        self.config = config = config.model_copy(update={"offload": offload})
        self.needs_keeping_alive = False
        waking = StallAwareClock(SystemClock(), config.transport.heartbeat_s)
        self._clock: Clock = waking if clock is None else clock
        self._server = LocalServer()
        self._clients: list[KVCacheClient] = []
        num_ranks = config.parallel.num_ranks
        self.workers = [self._make_worker(rank) for rank in range(num_ranks)]
        reports = [worker.report(_HERE, (), num_ranks) for worker in self.workers]
        self.plan: Plan = plan_kv_cache(
            plan_options(config), [r.specs for r in reports], [r.memory for r in reports]
        )
        self._store = MemoryStateStore() if state_store is None else state_store
        self.coordinator: Coordinator = make_coordinator(
            config, self.plan, self._clock, self._store
        )
        self._service = CoordinatorService(
            self._server, self._clock, config.transport.max_message_bytes, tick_s=0.05
        )
        for rank, worker in enumerate(self.workers):
            worker.allocate(rank, self.plan)
            worker.attach(LOCAL_ENDPOINT)
        self._service.open(self.coordinator, self.coordinator.start())
        self._start()

    def client(self, client_name: str = "client") -> KVCacheClient:
        """Return a new, attached client. It is closed with the cluster."""
        made = KVCacheClient(self, client_name)
        self._clients.append(made)
        return made

    def restart_coordinator(self) -> None:
        """Drop the coordinator without warning, and start another one over the live workers.

        The ranks keep their blocks; clients attach again. Returns when it runs.
        """
        self.coordinator.close()  # frees sockets and files, as the end of its process would
        self.coordinator = make_coordinator(self.config, self.plan, self._clock, self._store)
        for worker in self.workers:
            worker.worker.introduce()
        self._service.open(self.coordinator, self.coordinator.start())
        self._start()

    def restart_worker(self, rank: int) -> None:
        """Drop a rank's worker with its memory, and start another one with the same plan.

        It starts without files if its directory cannot be used, as a replacement on Ray does.
        Clients attach again. Returns when the new worker obeys.
        """
        lost, self.workers[rank] = self.workers[rank], self._make_worker(rank)
        lost.close()
        self.workers[rank].must_have_files = False
        self.workers[rank].report(_HERE, (), len(self.workers))
        self.workers[rank].allocate(rank, self.plan)
        self.workers[rank].attach(LOCAL_ENDPOINT)
        self._service.send(
            self.coordinator.on_worker_lost(rank, lost.incarnation, "it was restarted")
        )
        self._start()

    def pump(self) -> bool:
        """Give coordinator and workers one turn each; say whether any of them had work."""
        received = self._server.statistics().received
        self._service.turn()
        is_busy = self._server.statistics().received > received
        for worker in self.workers:
            is_busy = worker.poll() or is_busy
        return is_busy

    def close(self) -> None:
        """Detach all clients and free the memory. Repeatable."""
        for client in self._clients:
            client.close()
        self.pump()
        self.coordinator.close()
        for worker in self.workers:
            worker.close()
        self._server.close()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- for clients

    def endpoint(self) -> Endpoint:
        """Return the endpoint of this process."""
        return LOCAL_ENDPOINT

    def noted(self) -> Endpoint | None:
        """Return None: this coordinator does not move."""
        return None

    def open(self, endpoint: Endpoint, peer: Peer) -> PeerTransport:
        """Return a client's connection."""
        return self._server.connect(peer, self.pump)

    def lost_workers(self) -> str:
        """Name ranks that do not answer; here no rank can be lost alone."""
        return self.coordinator.problem()

    def _make_worker(self, rank: int) -> EmbeddedWorker:
        return EmbeddedWorker(self.config, rank, self._connect_worker, clock=self._clock)

    def _connect_worker(
        self, endpoint: Endpoint, peer: Peer, max_message_bytes: int, mailbox: Mailbox
    ) -> PeerTransport:
        return self._server.connect(peer)

    def _start(self) -> None:
        clock = SystemClock()  # not the cluster's: copies that a rank waits for take real time
        deadline_s = clock.now() + self.config.deadlines.startup_s
        num_rounds = 0
        while self.coordinator.phase is not Phase.RUNNING:
            if num_rounds >= MIN_STARTUP_ROUNDS and clock.now() >= deadline_s:
                phase, problem = self.coordinator.phase.value, self.coordinator.problem()
                raise StartupError(
                    f"the workers did not obey within deadlines.startup_s, "
                    f"{self.config.deadlines.startup_s} s (the coordinator is {phase}): {problem}"
                )
            self.pump()
            num_rounds += 1
