"""What every handle of a running cluster offers, wherever its coordinator is.

Clients, inspection of ranks, and the `with` block. cluster.py reaches a coordinator that is an
actor, embedded/cluster.py one in this process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from actors.clusters.launch import GRACE_S, first_line
from actors.clusters.placement import wait_until
from actors.connection import Dialing
from actors.reports import ClusterStatus, ProcessStatistics
from actors.service import ServiceStatistics
from actors.workers.replacement import FAILED
from kvcache.base.arguments import as_int
from kvcache.base.errors import (
    DeadlineError,
    KVCacheError,
    NotRunningError,
    RequestError,
    StartupError,
    WorkerLostError,
)
from kvcache.config import ClusterConfig
from kvcache.coordinator.settings import CoordinatorStatistics

if TYPE_CHECKING:
    from actors.async_client import AsyncKVCacheClient
    from actors.client import KVCacheClient
    from kvcache.coordinator.watchdog import PendingWork
    from kvcache.protocol.labels import LabelSet
    from kvcache.worker.statistics import WorkerStatistics

CALL_TIMEOUT_S = 15.0
"""Longer than the coordinator itself waits for its message loop."""

C = TypeVar("C", bound="ClusterAccess")


@dataclass(frozen=True)
class ClusterStatistics:
    """Statistics of all processes at about the same moment.

    `workers[rank]` and `hosts[rank]` are None for a rank that does not answer.
    """

    coordinator: CoordinatorStatistics | None
    service: ServiceStatistics
    workers: tuple[WorkerStatistics | None, ...]
    hosts: tuple[ProcessStatistics | None, ...]


class ClusterAccess(ABC):
    """A running cluster, as its launcher or another process sees it.

    As a context manager it ends the cluster if this process has launched it (`is_own`).
    """

    config: ClusterConfig
    is_own: bool = True

    @property
    def name(self) -> str:
        """The name under which the cluster is found."""
        return self.config.name

    @property
    @abstractmethod
    def workers(self) -> tuple[Any, ...]:
        """The worker actors in rank order."""

    @abstractmethod
    def status(self) -> ClusterStatus:
        """Return the cluster's status. Raises NotRunningError, DeadlineError."""

    @abstractmethod
    def pending(self) -> tuple[PendingWork, ...]:
        """Return all pending work of the coordinator, with its age. Raises as `status` does."""

    @abstractmethod
    def stop(self) -> None:
        """End the cluster in order; nothing of it remains. Repeatable."""

    def client(self, client_name: str = "client") -> KVCacheClient:
        """Return a new synchronous client, attached. See `KVCacheClient` for what it raises."""
        from actors.client import KVCacheClient

        return KVCacheClient(self._dialer(), client_name)

    async def async_client(self, client_name: str = "client") -> AsyncKVCacheClient:
        """Return a new client for asyncio, attached."""
        from actors.async_client import AsyncKVCacheClient

        return await AsyncKVCacheClient.connect(self._dialer(), client_name)

    def statistics(self) -> ClusterStatistics:
        """Return the statistics of all processes. Raises NotRunningError, DeadlineError."""
        calls = [
            None if worker is None else worker.kvcache_statistics.remote()
            for worker in self.workers
        ]
        coordinator, service = self._service_statistics()
        answers = [answer_or_none(call) for call in calls]
        return ClusterStatistics(
            coordinator,
            service,
            tuple(None if answer is None else answer[0] for answer in answers),
            tuple(None if answer is None else answer[1] for answer in answers),
        )

    def coordinator_statistics(self) -> CoordinatorStatistics | None:
        """Return the statistics of the coordinator alone. Raises as `statistics` does."""
        return self._service_statistics()[0]

    def message_statistics(self) -> ServiceStatistics | None:
        """Return the statistics of the coordinator's message loop alone. Raises as `statistics`."""
        return self._service_statistics()[1]

    def collect_labels(self, rank: int) -> LabelSet:
        """Return a rank's labels of all its blocks. Raises RequestError for an unknown rank."""
        labels: LabelSet = ask(self._worker(rank).kvcache_labels.remote(), f"rank {rank}")
        return labels

    def read_block(self, rank: int, layer_name: str, block_id: int) -> bytes:
        """Return the bytes of one layer's page of one block. For tests and inspection.

        Raises RequestError if the rank, its layer or the block does not exist.
        """
        call = self._worker(rank).kvcache_read.remote(layer_name, block_id)
        page: bytes = ask(call, f"rank {rank}")
        return page

    def replace_worker(self, rank: int, actor: Any = None, timeout_s: float | None = None) -> None:
        """Make `actor` serve a rank of a cluster whose workers are the engine's own; return when it
        obeys. The old process may be lost, hang, or be needed elsewhere. Its part of every cached
        block is lost.

        Make `actor` like those of the launch, without a plan. Without `actor`, a cluster that makes
        its own workers tries again to replace a rank that it had given up. `timeout_s` defaults to
        one attempt, `deadlines.startup_s`, plus `GRACE_S` for the report of its failure.

        Raises:
            RequestError: no such rank, or it cannot be replaced this way; nothing has changed.
            StartupError: the actor cannot serve the rank, and why. It is not ended.
            DeadlineError: not within `timeout_s`; it may still succeed.
        """
        self._begin_to_replace(self._checked_rank(rank), actor)
        attempt_s = self.config.deadlines.startup_s + GRACE_S
        limit_s = attempt_s if timeout_s is None else timeout_s

        def is_over() -> bool:
            status = self.status().ranks[rank]
            return not status.problem or status.replacement.startswith(FAILED)

        is_in_time = wait_until(is_over, limit_s)
        status = self.status().ranks[rank]
        if status.problem and status.replacement.startswith(FAILED):
            raise StartupError(f"rank {rank} is not replaced: {status.replacement}")
        if not is_in_time:
            raise DeadlineError(f"rank {rank} is {status.describe()} after {limit_s:g} s")

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_own:
            self.stop()

    def _checked_rank(self, rank: int) -> int:
        return as_int("rank", rank, 0, self.config.parallel.num_ranks - 1, RequestError)

    def _worker(self, rank: int) -> Any:
        """Return the actor of a rank. Raises RequestError for an unknown rank, NotRunningError
        while the coordinator does not know it."""
        place, workers = self._checked_rank(rank), self.workers
        if place >= len(workers):
            raise NotRunningError(f"{self.name} does not know its workers now: look at its status")
        return workers[place]

    @abstractmethod
    def _begin_to_replace(self, rank: int, actor: Any) -> None:
        """Begin the replacement; see `replace_worker`."""

    @abstractmethod
    def _dialer(self) -> Dialing:
        """Return the dialer of clients."""

    @abstractmethod
    def _service_statistics(self) -> tuple[CoordinatorStatistics | None, ServiceStatistics]:
        """Return the statistics of the coordinator and of its message loop."""


def connect_to_ray() -> None:
    """Connect this process to Ray: to the cluster it was started in, or to a new local one."""
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)


def ask(call: Any, who: str) -> Any:
    """Return the answer to an actor's call. Raises its kvcache errors as they are, and Ray's errors
    as kvcache errors."""
    try:
        return ray.get(call, timeout=CALL_TIMEOUT_S)
    except RayTaskError as error:
        if isinstance(error.cause, KVCacheError):
            raise error.cause from error
        raise
    except GetTimeoutError as error:
        raise DeadlineError(
            f"{who} gave no answer within {CALL_TIMEOUT_S:g} s: it hangs, or has too much to do: "
            "ask again, or end the cluster with `kvcache stop`"
        ) from error
    except ActorUnavailableError as error:
        raise DeadlineError(f"{who} cannot be reached now: {first_line(error)}") from error
    except RayActorError as error:
        kind = WorkerLostError if who.startswith("rank ") else NotRunningError
        raise kind(f"{who} is gone: {first_line(error)}") from error


def answer_or_none(call: Any) -> Any:
    """Return the answer to a call, None if there is none or it fails with an error of Ray."""
    if call is None:
        return None
    try:
        return ray.get(call, timeout=CALL_TIMEOUT_S)
    except RayError:
        return None
