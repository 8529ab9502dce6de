"""KVCacheCluster: launch a cluster, or connect to a running one; use, inspect and stop it.

    with KVCacheCluster.launch("configs/cpu_tp2.yaml") as cluster:
        with cluster.client() as client:
            result = client.step(StepRequest(...))

Engines and the command line use this class. embedded/cluster.py is its counterpart for a
coordinator in the engine's own process. launch.py and shutdown.py do the work. Two clusters cannot
share a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from actors.clusters.access import ClusterAccess, ask, connect_to_ray
from actors.clusters.launch import Launch, LaunchOptions, OnProgress
from actors.clusters.shutdown import ClusterParts, take_down
from actors.connect import connect_peer, find_actor, require_ray, this_node
from actors.embedded.record import load_record
from actors.endpoints import load_endpoint
from actors.names import coordinator_name, placement_group_name
from actors.reports import ClusterStatus, describe_losses
from actors.service import ServiceStatistics
from actors.transport import Endpoint, Peer, PeerTransport
from actors.transport.mailbox import Mailbox
from kvcache.base.curve import CurveKeys
from kvcache.base.errors import ClusterError, ConfigurationError, DeadlineError, NotRunningError
from kvcache.config import ClusterConfig, load_config
from kvcache.coordinator.settings import CoordinatorStatistics
from kvcache.coordinator.watchdog import PendingWork
from kvcache.metrics.inspection import CacheInspection
from kvcache.recorder import RecordedBatch

DIAL_TIMEOUT_S = 5.0


class KVCacheCluster(ClusterAccess):
    """A running cluster, as its launcher or another process of the Ray cluster sees it."""

    def __init__(self, config: ClusterConfig, parts: ClusterParts, *, is_own: bool) -> None:
        """Use `launch` or `connect` instead."""
        self.config = config
        self.is_own = is_own
        self._parts = parts
        self._is_stopped = False

    @classmethod
    def launch(
        cls,
        config: ClusterConfig | str | Path,
        *,
        detached: bool = False,
        on_progress: OnProgress | None = None,
        worker_actors: Sequence[Any] = (),
        worker_class: type[Any] | None = None,
    ) -> KVCacheCluster:
        """Start a cluster and return when every rank obeys its coordinator.

        Connects to Ray if necessary. `detached`: the cluster outlives this driver. `on_progress`
        gets a line for each step of the launch. `worker_actors`: your own actors as workers (see
        `WorkerMethods`). `worker_class`: a subclass of `WorkerActor` to use.

        Raises:
            ConfigurationError: the file is invalid, or asks for several replicas.
            AlreadyRunningError: a cluster of that name runs.
            StartupError, NotEnoughMemoryError: names the rank and the cause; nothing remains.
        """
        if not isinstance(config, ClusterConfig):
            config = load_config(config)
        require_one_replica(config)
        options = LaunchOptions(
            is_detached=detached,
            on_progress=on_progress or (lambda line: None),
            worker_actors=worker_actors,
            worker_class=worker_class,
        )
        connect_to_ray()
        return cls(config, Launch(config, options).run(), is_own=True)

    @classmethod
    def connect(cls, name: str) -> KVCacheCluster:
        """Return the running cluster `name`; a `with` block over it does not end it.

        Raises NotRunningError if there is none, or if its coordinator is embedded in a process.
        """
        connect_to_ray()
        coordinator = find_actor(coordinator_name(name))
        if coordinator is None:
            record = load_record(name)
            if record is not None:
                raise NotRunningError(
                    f"the coordinator of cluster {name!r} is in {record.where()}, which alone has "
                    "clients: EmbeddedCluster.take_over moves it here"
                )
            raise NotRunningError(
                f"no cluster named {name!r} is running: launch it, or check the name"
            )
        config = ask(coordinator.connection_settings.remote(), f"the coordinator of {name}")
        parts = ClusterParts(name, config.deadlines, coordinator)
        parts.find_workers(config.parallel.num_ranks)
        status: ClusterStatus = ask(coordinator.status.remote(), f"the coordinator of {name}")
        parts.process_ids = tuple(rank.process_id for rank in status.ranks)
        parts.find_placement(placement_group_name(name))
        return cls(config, parts, is_own=False)

    @property
    def workers(self) -> tuple[Any, ...]:
        """The worker actors in rank order."""
        return tuple(ask(self._coordinator.workers.remote(), "the coordinator"))

    def status(self) -> ClusterStatus:
        """Return the cluster's status. Raises NotRunningError, DeadlineError."""
        status: ClusterStatus = ask(self._coordinator.status.remote(), "the coordinator")
        return status

    def pending(self) -> tuple[PendingWork, ...]:
        """Return all pending work of the coordinator, with its age. Raises as `status` does."""
        pending = ask(self._coordinator.pending.remote(), "the coordinator")
        return tuple(pending)

    def record_requests(
        self, listener: str, salt: bytes, *, is_last: bool = False
    ) -> RecordedBatch:
        """Return the requests served since `listener`, a unique name, asked last: digests of their
        blocks, keyed with `salt`, no tokens. Ask again at least every few seconds.

        Raises AlreadyRunningError while another listener records, and as `status` does.
        """
        asked = self._coordinator.record_requests.remote(listener, salt, is_last)
        batch: RecordedBatch = ask(asked, "the coordinator")
        return batch

    def inspect(self) -> CacheInspection:
        """Return the state of the cache: pins and block usage. Reads all tables. Raises
        NotRunningError, DeadlineError."""
        found: CacheInspection = ask(self._coordinator.inspect.remote(), "the coordinator")
        return found

    def event_keys(self) -> CurveKeys | None:
        """Return the keys that followers of events need, None if they need none."""
        keys: CurveKeys | None = ask(self._coordinator.event_keys.remote(), "the coordinator")
        return keys

    def stop(self) -> None:
        """End the cluster in order; nothing of it remains. Repeatable."""
        if not self._is_stopped:
            require_ray()
            self._is_stopped = True
            take_down(self._parts)

    @property
    def _coordinator(self) -> Any:
        """The coordinator's actor. Raises NotRunningError after `ray.shutdown`."""
        require_ray()
        return self._parts.coordinator

    def _begin_to_replace(self, rank: int, actor: Any) -> None:
        ask(self._coordinator.replace_worker.remote(rank, actor), "the coordinator")

    def _dialer(self) -> Dialer:
        return Dialer(self._coordinator, self.config)

    def _service_statistics(self) -> tuple[CoordinatorStatistics | None, ServiceStatistics]:
        answer: tuple[CoordinatorStatistics | None, ServiceStatistics] = ask(
            self._coordinator.statistics.remote(), "the coordinator"
        )
        return answer


def require_one_replica(config: ClusterConfig) -> None:
    """Raise ConfigurationError for a configuration of several replicas."""
    size = config.parallel.data_parallel_size
    if size > 1:
        raise ConfigurationError(
            f"parallel.data_parallel_size is {size}, and this launches one cluster: use "
            "KVCacheReplicas.launch, or `kvcache launch`, which launch all of them"
        )


class Dialer:
    """Connects clients to the coordinator of one cluster, also after it has moved."""

    needs_keeping_alive = True

    def __init__(self, coordinator: Any, config: ClusterConfig) -> None:
        """`coordinator` is the actor; `config` is the cluster's."""
        self._coordinator = coordinator
        self.config = config

    def endpoint(self) -> Endpoint:
        """Ask the coordinator for its endpoint for this process.

        Raises NotRunningError if the cluster has ended, DeadlineError if the coordinator does not
        answer now.
        """
        ask = self._coordinator.endpoint_for
        endpoint: Endpoint = self._answer("where it listens", ask, this_node())
        return endpoint

    def noted(self) -> Endpoint | None:
        """Return the coordinator's recorded endpoint for this process."""
        try:
            return load_endpoint(self.config.name, this_node().node_id)
        except ClusterError:
            return None  # `endpoint` can ask the coordinator later

    def open(self, endpoint: Endpoint, peer: Peer) -> PeerTransport:
        """Return a new connection for `peer`."""
        return connect_peer(
            endpoint, peer, self.config.transport.max_message_bytes, Mailbox(capacity=1)
        )

    def lost_workers(self) -> str:
        """Say which ranks are lost and why, empty if none is. Raises as `endpoint` does."""
        require_ray()
        status: ClusterStatus = self._answer("how it does", self._coordinator.status)
        lost = describe_losses(status.ranks, " is")
        return lost or (status.problem if "rank" in status.problem else "")

    def _answer(self, question: str, ask: Any, *arguments: Any) -> Any:
        """Return the coordinator's answer; `ask` is the actor's method."""
        try:
            return ray.get(ask.remote(*arguments), timeout=DIAL_TIMEOUT_S)
        except ActorDiedError as error:
            raise NotRunningError(f"cluster {self.config.name} is gone: launch it again") from error
        except RayError as error:
            raise DeadlineError(
                f"the coordinator of {self.config.name} cannot be asked {question}: {error}"
            ) from error
