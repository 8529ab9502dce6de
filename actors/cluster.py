"""KVCacheCluster: bring a cluster up, find a running one, talk to it, look at it, stop it.

    with KVCacheCluster.launch("configs/cpu_tp2.yaml") as cluster:
        with cluster.client() as client:
            result = client.step(StepRequest(...))

The only entrance for engines and for the command line. What happens inside is in launch.py and
shutdown.py; refuses to share a name between two clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from actors.dialing import Dialer
from actors.launch import Launch, LaunchOptions, OnProgress, first_line
from actors.names import RAY_NAMESPACE, coordinator_name, placement_group_name
from actors.reports import ClusterStatus, HostStatistics
from actors.service import ServiceStatistics
from actors.shutdown import ClusterParts, take_down
from kvcache.config import ClusterConfig, load_config
from kvcache.coordinator.settings import CoordinatorStatistics
from kvcache.errors import DeadlineError, NotRunningError, WorkerLostError

if TYPE_CHECKING:
    from actors.async_client import AsyncKVCacheClient
    from actors.client import KVCacheClient
    from kvcache.labels import LabelSet
    from kvcache.worker.settings import WorkerStatistics

CALL_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class ClusterStatistics:
    """Figures of all parties at about the same moment.

    `workers[rank]` and `hosts[rank]` are None for a rank that does not answer.
    """

    coordinator: CoordinatorStatistics | None
    service: ServiceStatistics
    workers: tuple[WorkerStatistics | None, ...]
    hosts: tuple[HostStatistics | None, ...]


class KVCacheCluster:
    """A running cluster, as its launcher or anybody else in the Ray cluster sees it."""

    def __init__(self, config: ClusterConfig, parts: ClusterParts) -> None:
        """Use `launch` or `connect` instead."""
        self.config = config
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
        """Bring a cluster up and return when every rank obeys its coordinator.

        Connects to Ray first if this process is not. `detached`: the cluster outlives this driver.
        `on_progress` is told what is being done. `worker_actors`: actors of yours that are the
        workers (see `WorkerMethods`). `worker_class`: a subclass of `WorkerActor` to use.

        Raises:
            ConfigurationError: the file cannot be meant.
            AlreadyRunningError: a cluster of that name runs.
            StartupError, NotEnoughMemoryError: names the rank and the cause; nothing is left.
        """
        if not isinstance(config, ClusterConfig):
            config = load_config(config)
        _connect_to_ray()
        options = LaunchOptions(
            is_detached=detached,
            on_progress=on_progress or (lambda line: None),
            worker_actors=tuple(worker_actors),
            worker_class=worker_class,
        )
        return cls(config, Launch(config, options).run())

    @classmethod
    def connect(cls, name: str) -> KVCacheCluster:
        """Return the running cluster `name`. Raises NotRunningError if there is none."""
        _connect_to_ray()
        try:
            coordinator = ray.get_actor(coordinator_name(name), namespace=RAY_NAMESPACE)
        except ValueError as error:
            raise NotRunningError(
                f"no cluster named {name!r} is running: launch it, or check the name"
            ) from error
        config = _ask(coordinator.connection_settings.remote(), f"the coordinator of {name}")
        parts = ClusterParts(name, config.deadlines.shutdown_s, coordinator)
        parts.find_workers(config.parallel.num_ranks)
        status: ClusterStatus = _ask(coordinator.status.remote(), f"the coordinator of {name}")
        parts.process_ids = tuple(rank.process_id for rank in status.ranks)
        parts.find_placement(placement_group_name(name))
        return cls(config, parts)

    @property
    def name(self) -> str:
        """The name under which the cluster is found."""
        return self.config.name

    @property
    def workers(self) -> tuple[Any, ...]:
        """The worker actors in rank order."""
        coordinator = self._parts.coordinator
        return tuple(_ask(coordinator.workers.remote(), "the coordinator"))

    def client(self, client_name: str = "client") -> KVCacheClient:
        """Return a new synchronous client, attached. See `KVCacheClient` for what it raises."""
        from actors.client import KVCacheClient

        return KVCacheClient(self._dialer(), client_name)

    async def async_client(self, client_name: str = "client") -> AsyncKVCacheClient:
        """Return a new client for asyncio, attached."""
        from actors.async_client import AsyncKVCacheClient

        return await AsyncKVCacheClient.connect(self._dialer(), client_name)

    def status(self) -> ClusterStatus:
        """Return what the cluster is and how it does. Raises NotRunningError, DeadlineError."""
        status: ClusterStatus = _ask(self._parts.coordinator.status.remote(), "the coordinator")
        return status

    def statistics(self) -> ClusterStatistics:
        """Return the figures of all parties. Raises NotRunningError, DeadlineError."""
        calls = [worker.kvcache_statistics.remote() for worker in self.workers]
        coordinator, service = _ask(self._parts.coordinator.statistics.remote(), "the coordinator")
        answers = [_answer_or_none(call) for call in calls]
        return ClusterStatistics(
            coordinator,
            service,
            tuple(None if answer is None else answer[0] for answer in answers),
            tuple(None if answer is None else answer[1] for answer in answers),
        )

    def collect_labels(self, rank: int) -> LabelSet:
        """Return what a rank knows of each of its blocks."""
        labels: LabelSet = _ask(self.workers[rank].kvcache_labels.remote(), f"rank {rank}")
        return labels

    def read_block(self, rank: int, layer_name: str, block_id: int) -> bytes:
        """Return the bytes of one layer's page of one block. For tests and inspection."""
        call = self.workers[rank].kvcache_read.remote(layer_name, block_id)
        page: bytes = _ask(call, f"rank {rank}")
        return page

    def stop(self) -> None:
        """End the cluster in order; nothing of it is left when this returns. Repeatable."""
        if not self._is_stopped:
            self._is_stopped = True
            take_down(self._parts)

    def __enter__(self) -> KVCacheCluster:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _dialer(self) -> Dialer:
        return Dialer(self._parts.coordinator, self.config)


def _connect_to_ray() -> None:
    """Connect this process to Ray: the cluster it was started in, or a new one on this machine."""
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)


def _ask(call: Any, who: str) -> Any:
    """Return the answer to a call of an actor; Ray's errors become ours."""
    try:
        return ray.get(call, timeout=CALL_TIMEOUT_S)
    except GetTimeoutError as error:
        raise DeadlineError(f"{who} gave no answer within {CALL_TIMEOUT_S:g} s") from error
    except ActorUnavailableError as error:
        raise DeadlineError(f"{who} cannot be reached now: {first_line(error)}") from error
    except RayActorError as error:
        kind = WorkerLostError if who.startswith("rank ") else NotRunningError
        raise kind(f"{who} is gone: {first_line(error)}") from error


def _answer_or_none(call: Any) -> Any:
    """Return the answer to a call, None if it fails in any way that Ray knows."""
    try:
        return ray.get(call, timeout=CALL_TIMEOUT_S)
    except RayError:
        return None
