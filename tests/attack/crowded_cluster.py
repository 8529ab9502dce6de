"""A coordinator and two ranks in threads of this process, and every transport of clients.

The same parts as on Ray, without Ray: over Unix sockets, over ZMQ, with keys, or in the
coordinator's process. This module tells clients where the coordinator listens, as Ray would.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from actors.assembly import make_coordinator
from actors.clusters.placement import wait_until
from actors.coordinator import tick_s
from actors.embedded.shared_service import SharedService
from actors.loop import ServiceLoop
from actors.reports import NodeAddress
from actors.service import CoordinatorService
from actors.transport import Endpoint, Peer, PeerTransport
from actors.transport.inprocess import InProcessServer
from actors.transport.mailbox import Mailbox
from actors.transport.node_server import NodeServer
from actors.transport.protocol import TransportLimits
from actors.transport.unix_channel import UNIX_SCHEME
from actors.transport.unix_peer import UnixPeer
from actors.transport.unix_server import unix_address
from actors.transport.zmq_peer import ZmqPeer
from actors.transport.zmq_server import local_address
from actors.workers.embedding import EmbeddedWorker
from kvcache.base.clock import StallAwareClock, SystemClock
from kvcache.base.curve import generate_curve_keys
from kvcache.base.errors import NotRunningError
from kvcache.config import ClusterConfig, parse_config
from kvcache.coordinator import Phase
from kvcache.planner import plan_kv_cache, plan_options
from kvcache.protocol.messages import ClientAddress
from kvcache.protocol.state_store import MemoryStateStore

KINDS = ("unix", "zmq", "keys", "process")
"""The transports of clients."""

DEADLINE_S = 180.0
"""Bounds hangs only: longer than anything takes on a machine that is busy."""
CALL_S = 120.0
HERE = NodeAddress("here", "127.0.0.1")


def crowd_config(**sections: dict[str, Any]) -> ClusterConfig:
    """Return a small configuration with room for many clients. Timeouts of silent and disconnected
    clients are longer than any test, so that only a client itself can leave."""
    settings: dict[str, Any] = {
        "name": "crowd",
        "model": {
            "name": "small",
            "max_model_len": 512,
            "layers": [{"kind": "full", "count": 2, "num_kv_heads": 1, "head_size": 8}],
        },
        "cache": {"num_blocks": 1024, "memory_per_rank": "4MiB"},
        "parallel": {"tensor_parallel_size": 2},
        "transport": {"resend_s": 0.2, "heartbeat_s": 0.4},
        "deadlines": {"step_s": 601.0, "client_silence_s": 600.0, "reattach_s": 600.0},
        "scheduler": {"max_num_seqs": 256},
    }
    for section, values in sections.items():
        settings[section] = {**settings.get(section, {}), **values}
    return parse_config(settings)


@dataclass(frozen=True)
class Left:
    """The coordinator's clients."""

    num_clients: int
    num_requests: int
    num_used_blocks: int


NOTHING = Left(0, 0, 0)


class CrowdedCluster:
    """A running cluster, and a `Dialing` for its clients. Use it in a `with` block."""

    needs_keeping_alive = True

    def __init__(self, kind: str = "unix", config: ClusterConfig | None = None) -> None:
        """Start and wait until steps are served. `kind` is one of `KINDS`."""
        self.config = config = crowd_config() if config is None else config
        self._limits = limits = TransportLimits(config.transport.max_message_bytes)
        self._resources = ExitStack()
        self._keys = generate_curve_keys() if kind == "keys" else None
        make_server = InProcessServer if kind == "process" else NodeServer
        self.sockets = make_server(limits, self._keys)
        near = self.sockets.bind(unix_address(), is_guarded=False)
        self._endpoint = Endpoint(near)
        if kind in ("zmq", "keys"):
            bound = self.sockets.bind(local_address(), is_guarded=self._keys is not None)
            peers_keys = None if self._keys is None else self._keys.for_peers()
            self._endpoint = Endpoint(bound, peers_keys)
        self._workers = [
            EmbeddedWorker(config, rank, self._connect_worker, is_threaded=True)
            for rank in range(config.parallel.num_ranks)
        ]
        reports = [w.report(HERE, (), len(self._workers)) for w in self._workers]
        self._plan = plan_kv_cache(
            plan_options(config), [r.specs for r in reports], [r.memory for r in reports]
        )
        self._store = MemoryStateStore()
        self._clock = StallAwareClock(SystemClock(), config.transport.heartbeat_s)
        self.coordinator = self._make_coordinator()
        self._closed = threading.Event()
        self._shared: SharedService | None = None
        if kind == "process":
            self._start_in_process()
        else:
            self._start_behind_sockets()
        self._loop.start()
        for rank, worker in enumerate(self._workers):
            worker.allocate(rank, self._plan)
            worker.attach(Endpoint(near))
            self._start_thread(worker)
        self._await_running()

    # --- a `Dialing`

    def endpoint(self) -> Endpoint:
        """Return where the coordinator listens. Raises NotRunningError after `close`."""
        if self._closed.is_set():
            raise NotRunningError("the crowded cluster is gone")
        return self._endpoint

    def noted(self) -> Endpoint | None:
        """Return False: the coordinator never moves."""
        return None

    def open(self, endpoint: Endpoint, peer: Peer) -> PeerTransport:
        """Return a client's end."""
        if self._shared is not None:
            return self._shared.connect(peer)
        if endpoint.address.startswith(UNIX_SCHEME):
            return UnixPeer(endpoint, peer, self._limits)
        return ZmqPeer(endpoint, peer, self._limits)

    def lost_workers(self) -> str:
        """Return that none is."""
        return ""

    # --- inspection, and faults

    def left(self) -> Left:
        """Return the present clients; checks the state."""
        return self._call(self._look)

    def await_nothing_left(self, timeout_s: float = DEADLINE_S) -> None:
        """Wait until no trace of any client is left; fail if that takes too long."""
        assert wait_until(lambda: self.left() == NOTHING, timeout_s), self.left()

    def hang_up_on(self, client_id: str) -> None:
        """End a client's connection, like a network fault."""

        def hang_up() -> None:
            (connection,) = self.sockets._near._known[ClientAddress(client_id)].values()
            self.sockets._near._cut_off(connection)

        self._call(hang_up)

    def restart_coordinator(self) -> None:
        """Lose the coordinator's state; another one takes the ranks over at the same address.

        Returns when it serves steps.
        """
        self._call(self._restart)
        self._await_running()

    def close(self) -> None:
        """End all threads. Repeatable."""
        self._closed.set()
        for worker in self._workers:
            worker.wake()
        if self._shared is not None:
            self._shared.end(NotRunningError("the crowded cluster was closed"))
        self._resources.close()
        if self._shared is not None:
            self._shared.call(self.coordinator.close)

    def __enter__(self) -> CrowdedCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- inside

    def _make_coordinator(self) -> Any:
        return make_coordinator(self.config, self._plan, self._clock, self._store)

    def _start_behind_sockets(self) -> None:
        config = self.config
        service = CoordinatorService(
            self.sockets, self._clock, config.transport.max_message_bytes, tick_s(config)
        )
        self._sockets_service = service
        service.open(self.coordinator, self.coordinator.start())
        self._loop = ServiceLoop("crowded-coordinator", service.turn, self.sockets.wake)
        self._resources.callback(self.sockets.close)
        self._resources.callback(self._loop.end, CALL_S)

    def _start_in_process(self) -> None:
        config = self.config
        server = self.sockets
        assert isinstance(server, InProcessServer)
        self._shared = service = SharedService(
            server,
            SystemClock(),
            config.transport.max_message_bytes,
            tick_s=tick_s(config),
            stall_s=config.transport.heartbeat_s,
            check_takeover=lambda: None,
        )
        service.open(self.coordinator, self.coordinator.start)
        self._loop = ServiceLoop("crowded-coordinator", service.turn, server.wake)
        self._resources.callback(server.close)
        self._resources.callback(self._loop.end, CALL_S)

    def _start_thread(self, worker: EmbeddedWorker) -> None:
        def work() -> None:
            while not self._closed.is_set():
                worker.poll(0.05)
            worker.close()

        thread = threading.Thread(target=work, name="crowded-worker", daemon=True)
        thread.start()
        self._resources.callback(thread.join, CALL_S)

    def _connect_worker(
        self, endpoint: Endpoint, peer: Peer, max_message_bytes: int, mailbox: Mailbox
    ) -> PeerTransport:
        return UnixPeer(endpoint, peer, self._limits)

    def _await_running(self) -> None:
        assert wait_until(lambda: self.coordinator.phase is Phase.RUNNING, DEADLINE_S)

    def _restart(self) -> None:
        self.coordinator.close()
        self.coordinator = self._make_coordinator()
        for worker in self._workers:
            worker.worker.introduce()
        if self._shared is not None:
            self._shared.open(self.coordinator, self.coordinator.start)
        else:
            self._sockets_service.open(self.coordinator, self.coordinator.start())

    def _look(self) -> Left:
        self.coordinator.check()
        statistics = self.coordinator.statistics()
        manager = statistics.manager
        if manager is None:
            return Left(statistics.num_clients, 0, 0)
        num_requests = manager.num_running_requests + manager.num_preempted_requests
        core = manager.core
        return Left(statistics.num_clients, num_requests, core.num_blocks - core.num_free_blocks)

    def _call(self, action: Any) -> Any:
        if self._shared is not None:
            return self._shared.call(action)
        return self._loop.call(action, CALL_S)
