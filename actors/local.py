"""A whole cluster in one process and one thread, without Ray and without sockets.

    with LocalCluster(config) as cluster, cluster.client() as client:
        result = client.step(StepRequest(...))
        cluster.workers[0].worker.begin_forward(result.epoch, result.seq, timeout_s=1.0)

The same coordinator, workers, client and messages as on Ray, every message encoded and decoded:
for trying things out, for examples and for tests. Whoever waits gives the others their turns.
"""

from __future__ import annotations

from types import TracebackType

from actors.assembly import make_coordinator
from actors.client import KVCacheClient
from actors.embedding import EmbeddedWorker
from actors.reports import NodeAddress
from actors.service import CoordinatorService
from actors.transport import Endpoint, Peer, PeerTransport
from actors.transport.local import LocalServer
from actors.transport.mailbox import Mailbox
from kvcache.clock import Clock, SystemClock
from kvcache.config import ClusterConfig
from kvcache.coordinator import Coordinator
from kvcache.coordinator.coordinator import Phase
from kvcache.errors import StartupError
from kvcache.planner import Plan, plan_kv_cache, plan_options
from kvcache.state_store import MemoryStateStore, StateStore

LOCAL_ENDPOINT = Endpoint("local")
MAX_STARTUP_ROUNDS = 10_000


class LocalCluster:
    """Coordinator, all workers and any number of clients in this thread."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        clock: Clock | None = None,
        state_store: StateStore | None = None,
    ) -> None:
        """Plan, allocate and start. `config.transport.kind` is not looked at.

        Raises NotEnoughMemoryError or ConfigurationError when the model does not fit, StartupError
        when the workers do not obey.
        """
        self.config = config
        self.needs_keeping_alive = False
        self._clock = SystemClock() if clock is None else clock
        self._server = LocalServer()
        self._clients: list[KVCacheClient] = []
        num_ranks = config.parallel.num_ranks
        self.workers = tuple(
            EmbeddedWorker(config, rank, self._connect_worker, clock=self._clock)
            for rank in range(num_ranks)
        )
        here = NodeAddress("local", "127.0.0.1")
        reports = [worker.report(here, (), num_ranks) for worker in self.workers]
        self.plan: Plan = plan_kv_cache(
            plan_options(config), [r.specs for r in reports], [r.memory for r in reports]
        )
        store = MemoryStateStore() if state_store is None else state_store
        self.coordinator: Coordinator = make_coordinator(config, self.plan, self._clock, store)
        self._service = CoordinatorService(
            self._server, self._clock, config.transport.max_message_bytes, tick_s=0.05
        )
        for rank, worker in enumerate(self.workers):
            worker.allocate(rank, self.plan)
            worker.attach(LOCAL_ENDPOINT)
        self._service.open(self.coordinator, self.coordinator.start())
        self._start()

    def client(self, client_name: str = "client") -> KVCacheClient:
        """Return a new client, attached. It is closed with the cluster."""
        made = KVCacheClient(self, client_name)
        self._clients.append(made)
        return made

    def pump(self) -> bool:
        """Give coordinator and workers a turn each; say whether any of them had work."""
        received = self._server.statistics().received
        self._service.turn()
        is_busy = self._server.statistics().received > received
        for worker in self.workers:
            is_busy = worker.poll() or is_busy
        return is_busy

    def close(self) -> None:
        """Detach all clients and give the memory back. Repeatable."""
        for client in self._clients:
            client.close()
        self.pump()
        self.coordinator.close()
        for worker in self.workers:
            worker.close()
        self._server.close()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- what a client needs to know

    def endpoint(self) -> Endpoint:
        """Return where clients connect to: here."""
        return LOCAL_ENDPOINT

    def open(self, endpoint: Endpoint, peer: Peer) -> PeerTransport:
        """Return a client's end."""
        return self._server.connect(peer, self.pump)

    def lost_workers(self) -> str:
        """Say which ranks do not answer; none can be lost alone."""
        return self.coordinator.problem()

    def _connect_worker(
        self, endpoint: Endpoint, peer: Peer, max_message_bytes: int, mailbox: Mailbox
    ) -> PeerTransport:
        return self._server.connect(peer)

    def _start(self) -> None:
        for _ in range(MAX_STARTUP_ROUNDS):
            if self.coordinator.phase is Phase.RUNNING:
                return
            self.pump()
        raise StartupError(f"the workers did not obey: {self.coordinator.problem()}")
