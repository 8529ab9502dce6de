"""EmbeddedCluster: the coordinator in the engine's own process, which may die; the workers stay.

    with EmbeddedCluster.launch("configs/cpu_tp2.yaml") as cluster:     the engine's first process
        with cluster.client() as client: ...                            it is killed

    with EmbeddedCluster.take_over("cpu-tp2") as cluster:               another one goes on, warm
        with cluster.client() as client: ...

A step needs one hop less, and no coordinator process has to be placed. In return, only this process
has clients. Workers are detached and run until they are stopped. After another process has taken
the cluster over, this one no longer ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.clusters.access import ClusterAccess, connect_to_ray
from actors.clusters.launch import Launch, LaunchOptions, OnProgress
from actors.clusters.shutdown import ClusterParts, take_down
from actors.embedded.coordinator import EmbeddedCoordinator, require_sockets
from actors.embedded.record import EmbeddedRecord, claim_launch, leave_record, load_record
from actors.names import placement_group_name
from actors.reports import ClusterStatus
from actors.service import ServiceStatistics
from actors.workers.worker_set import WorkerSet, look_for_workers
from kvcache.base.errors import NotRunningError, SupersededError
from kvcache.config import ClusterConfig, load_config
from kvcache.coordinator.settings import CoordinatorStatistics

if TYPE_CHECKING:
    from kvcache.coordinator.watchdog import PendingWork


class EmbeddedCluster(ClusterAccess):
    """A running cluster, as the process with its coordinator sees it."""

    def __init__(self, coordinator: EmbeddedCoordinator) -> None:
        """Use `launch` or `take_over` instead."""
        self.config = coordinator.config
        self._coordinator = coordinator
        self._is_over = False

    @classmethod
    def launch(
        cls,
        config: ClusterConfig | str | Path,
        *,
        on_progress: OnProgress | None = None,
        worker_actors: Sequence[Any] = (),
        worker_class: type[Any] | None = None,
    ) -> EmbeddedCluster:
        """Start the workers and return when they obey a coordinator in this process.

        Connects to Ray if necessary. The workers outlive this process; your own actors do if you
        made them detached. Arguments and errors as in `KVCacheCluster.launch`; ConfigurationError
        for the transport of Ray calls.
        """
        if not isinstance(config, ClusterConfig):
            config = load_config(config)
        require_sockets(config)
        options = LaunchOptions(
            is_detached=True,
            on_progress=on_progress or (lambda line: None),
            worker_actors=worker_actors,
            worker_class=worker_class,
        )
        connect_to_ray()
        launch = _EmbeddedLaunch(config, options)
        launch.run()
        return cls(launch.coordinators[0])

    @classmethod
    def take_over(cls, name: str) -> EmbeddedCluster:
        """Take the cluster `name` over from the process that had its coordinator, dead or alive,
        and return when the workers obey this one. Blocks that all of them hold stay cached; a lost
        worker is replaced.

        Connects to Ray if necessary.

        Raises:
            NotRunningError: no cluster of that name has an embedded coordinator.
            StartupError: no worker is left, or not all obey in time. They keep running.
            SupersededError: another process has taken it over at the same time.
        """
        connect_to_ray()
        record = load_record(name)
        if record is None:
            raise NotRunningError(
                f"no cluster named {name!r} has its coordinator in a process: launch it, or check "
                "the name"
            )
        coordinator = EmbeddedCoordinator(record)
        try:
            config = coordinator.config
            coordinator.take_over(look_for_workers(config), config.deadlines.startup_s)
        except BaseException:
            coordinator.close()
            raise
        return cls(coordinator)

    @property
    def workers(self) -> tuple[Any, ...]:
        """The worker actors in rank order."""
        return self._coordinator.supervisor.worker_set.actors

    def status(self) -> ClusterStatus:
        """Return the cluster's status."""
        return self._coordinator.status()

    def pending(self) -> tuple[PendingWork, ...]:
        """Return all pending work of the coordinator, with its age."""
        return self._coordinator.supervisor.pending()

    def stop(self) -> None:
        """End the cluster in order; nothing of it remains. Repeatable.

        If another process has taken it over, only this process's part ends.
        """
        if self._end_here():
            take_down(self._parts())

    def leave(self) -> None:
        """End this process's part of the cluster; the workers stay, for `take_over`. Repeatable.

        Scheduled steps are void; cached blocks stay.
        """
        if self._end_here():
            leave_record(self._coordinator.record)

    def _end_here(self) -> bool:
        """End the coordinator; return whether this process still owned the cluster."""
        if self._is_over:
            return False
        self._is_over = True
        self._coordinator.look_for_successor()
        is_superseded = isinstance(self._coordinator.ended, SupersededError)
        self._coordinator.close()
        return not is_superseded

    def _parts(self) -> ClusterParts:
        worker_set = self._coordinator.supervisor.worker_set
        parts = ClusterParts(self.name, self.config.deadlines)
        parts.process_ids = tuple(report.process_id for report in worker_set.reports)
        if self._coordinator.record.has_given_workers:
            parts.foreign_workers = [actor for actor in worker_set.actors if actor is not None]
        else:
            parts.find_workers(self.config.parallel.num_ranks)
            parts.find_placement(placement_group_name(self.name))
        return parts

    def _begin_to_replace(self, rank: int, actor: Any) -> None:
        self._coordinator.supervisor.replace_worker(rank, actor)

    def _dialer(self) -> EmbeddedCoordinator:
        return self._coordinator

    def _service_statistics(self) -> tuple[CoordinatorStatistics, ServiceStatistics]:
        return self._coordinator.statistics()


@dataclass
class _EmbeddedLaunch(Launch):
    """A launch that locks by a record and runs the coordinator in this process."""

    coordinators: list[EmbeddedCoordinator] = field(default_factory=list)
    records: list[EmbeddedRecord] = field(default_factory=list)

    def _create_coordinator(self) -> None:
        """Take the launch lock; no actor is made."""
        self.records.append(claim_launch(self.config, self._worker_options))

    def _connect(self, worker_set: WorkerSet) -> None:
        coordinator = EmbeddedCoordinator(self.records[0])
        try:
            coordinator.launch(worker_set, self._remaining_s())
        except BaseException:
            coordinator.close()
            raise
        self.coordinators.append(coordinator)
