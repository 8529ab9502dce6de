"""Whose cache events a command reads: a running cluster's, or those of two addresses.

Below `kvcache watch` and `kvcache events dump`. A cluster's coordinator is asked for its statistics
in a thread of its own: one that is away does not hold up the events. Refuses to start anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from actors.event_endpoints import EventEndpoints
from kvcache.base.errors import ConfigurationError, DeadlineError, NotRunningError
from kvcache.base.serving_loop import ServingLoop
from kvcache.coordinator.settings import CoordinatorStatistics

Look = Callable[[], "CoordinatorStatistics | None"]

_ASK_S = 0.5


@dataclass(frozen=True)
class SourceChoice:
    """What was typed: a cluster's name, or two addresses, or nothing for the only cluster."""

    name: str | None
    endpoint: str | None
    replay_endpoint: str | None


@dataclass(frozen=True)
class EventSource:
    """Where to follow. `look` asks the coordinator for its statistics; None where only addresses
    are known. `host`: where its publisher runs."""

    title: str
    endpoints: EventEndpoints
    look: Look | None = None
    host: str = ""


@contextmanager
def open_source(choice: SourceChoice) -> Iterator[EventSource]:
    """Yield what to follow; connected to Ray meanwhile, if it is a cluster.

    Raises ConfigurationError when the choices contradict each other or the cluster publishes no
    events, NotRunningError if there is none, or none whose coordinator can be asked.
    """
    if choice.endpoint is None and choice.replay_endpoint is None:
        with _cluster(choice.name) as source:
            yield source
    elif choice.endpoint is None or choice.replay_endpoint is None:
        raise ConfigurationError(
            "one address is not enough: give --endpoint for the live stream and --replay-endpoint "
            "for what was missed"
        )
    elif choice.name is not None:
        raise ConfigurationError(
            f"{choice.name} and --endpoint {choice.endpoint}: give a cluster or addresses, not both"
        )
    else:
        yield EventSource(choice.endpoint, EventEndpoints(choice.endpoint, choice.replay_endpoint))


@contextmanager
def _cluster(name: str | None) -> Iterator[EventSource]:
    from actors.cli.clusters import named_cluster, require_plan
    from actors.cli.sessions import ray_session
    from actors.cluster import KVCacheCluster
    from actors.cluster_events import cluster_endpoints, publisher_host

    with ray_session(may_start=False):
        cluster = named_cluster(name)
        if not isinstance(cluster, KVCacheCluster):
            raise NotRunningError(
                f"the coordinator of {cluster.name} is in a process of its engine, which alone "
                "knows its statistics: pass --endpoint and --replay-endpoint"
            )
        require_plan(cluster.status())
        yield EventSource(
            cluster.name,
            cluster_endpoints(cluster),
            cluster.coordinator_statistics,
            publisher_host(cluster),
        )


class StatisticsReader:
    """Asks for a coordinator's statistics again and again, in a thread; the newest are at hand."""

    def __init__(self, look: Look | None) -> None:
        """Ask no coordinator yet; with `look` None, never."""
        self._look = look
        self._loop = ServingLoop("figure-reader", self._turn)
        self.newest: CoordinatorStatistics | None = None
        """The last answer, None before there was one."""
        self.problem = ""
        """Why there was no answer the last time, nothing if there was."""

    def __enter__(self) -> StatisticsReader:
        if self._look is not None:
            self._loop.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.stop()
        self._loop.join()

    def _turn(self) -> None:
        if self._look is not None:
            try:
                self.newest, self.problem = self._look(), ""
            except (DeadlineError, NotRunningError) as error:
                self.problem = str(error)
        self._loop.pause(_ASK_S)
