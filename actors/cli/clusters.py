"""The cluster that a command is about: found by name, or the only one there is.

Below all commands that ask or change a running cluster. An error names the clusters that do run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from actors.cli.sessions import ray_session
from actors.cluster import KVCacheCluster
from actors.embedded_site import EmbeddedSite, find_cluster
from actors.names import RAY_NAMESPACE, coordinator_name
from actors.reports import ClusterStatus
from actors.state import recorded_clusters
from kvcache.base.errors import NotRunningError


@contextmanager
def open_cluster(name: str | None, *, must_serve: bool = True) -> Iterator[KVCacheCluster]:
    """Yield a running cluster whose coordinator can be asked; connected to Ray meanwhile.

    Raises NotRunningError where no Ray runs, or no such cluster, or where its coordinator is in a
    process of its engine: that alone can ask it. Unless told otherwise, also as `require_plan`.
    """
    with ray_session(may_start=False):
        cluster = named_cluster(name)
        if not isinstance(cluster, KVCacheCluster):
            raise NotRunningError(
                f"the coordinator of {cluster.name} is in a process of its engine, which alone can "
                "ask it: call the same from there, or `kvcache status`"
            )
        if must_serve:
            require_plan(cluster.status())
        yield cluster


def require_plan(status: ClusterStatus) -> ClusterStatus:
    """Return the status of a cluster that can serve; raises NotRunningError for one that has
    failed, or whose coordinator does not know its workers yet."""
    if status.state == "failed":
        raise NotRunningError(f"{status.name} has failed: {status.problem}")
    if not status.ranks:
        problem = f" ({status.problem})" if status.problem else ""
        raise NotRunningError(
            f"the coordinator of {status.name} does not know its workers yet{problem}: wait until "
            "`kvcache status` says ready"
        )
    return status


def named_cluster(name: str | None) -> KVCacheCluster | EmbeddedSite:
    """Return a running cluster, default the only one. In a process that is connected to Ray.

    Raises NotRunningError, naming those that run, unless there is one.
    """
    names = running_clusters()
    if name is None:
        name = only_cluster(names)
    elif name not in names:
        raise NotRunningError(f"no cluster named {name!r} is running: {_instead(names)}")
    return find_cluster(name)


def running_clusters() -> list[str]:
    """Return the names of the clusters that run in this Ray cluster, in order."""
    suffix = coordinator_name("")
    actors: Any = ray.util.list_named_actors(all_namespaces=True)
    named = {
        actor["name"].removesuffix(suffix)
        for actor in actors
        if actor["namespace"] == RAY_NAMESPACE and actor["name"].endswith(suffix)
    }
    return sorted(map(str, named.union(recorded_clusters())))


def only_cluster(names: list[str] | None = None) -> str:
    """Return the name of the one cluster that runs; raises NotRunningError unless there is one."""
    names = running_clusters() if names is None else names
    if len(names) == 1:
        return names[0]
    if not names:
        raise NotRunningError("no cluster is running: start one with `kvcache launch`")
    raise NotRunningError(
        f"{len(names)} clusters are running: choose one with --name: {', '.join(names)}"
    )


def _instead(names: list[str]) -> str:
    if not names:
        return "none is, start one with `kvcache launch`"
    return f"choose one of {', '.join(names)}"
