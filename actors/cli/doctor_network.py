"""What a cluster meets outside its own processes: Ray, ports, and how much a process may open.

`doctor_checks.py` looks at this node. Looks without starting anything: a running Ray cluster is
joined and left, a port is bound and given back.
"""

from __future__ import annotations

import re
import resource
import socket
from dataclasses import dataclass, replace
from typing import Any

from actors.cli.doctor_checks import Problem
from kvcache.base.errors import KVCacheError, NotRunningError
from kvcache.config import ClusterConfig
from kvcache.config.events import shifted

MIN_OPEN_FILES = 4096
"""Ray's own advice begins there: sockets to every worker are files."""

_TCP = re.compile(r"tcp://(?P<host>.+):(?P<port>[0-9]+)")


@dataclass(frozen=True)
class RayStatistics:
    """The Ray cluster of this machine, as a command would find it. `problem` says why there is
    none that can be used, `remedy` what helps, `is_wanted` that a launch cannot do without it;
    `clusters` are ours that run there."""

    version: str
    is_running: bool = False
    num_nodes: int = 0
    clusters: tuple[str, ...] = ()
    problem: str = ""
    is_wanted: bool = True
    remedy: str = (
        "run the same versions of Python and Ray everywhere, or `ray stop` and start again"
    )


def look_at_ray() -> RayStatistics:
    """Join the Ray cluster that runs here, if there is one, look, and leave it. Never raises."""
    try:
        import ray

        from actors.cli.clusters import running_clusters
        from actors.cli.ray_access import find_refusal
        from actors.cli.sessions import ray_session
    except ImportError as error:
        return RayStatistics("not installed", problem=f"Ray cannot be imported: {error}")
    refusal = None if ray.is_initialized() else find_refusal()
    if refusal is not None:
        own = "" if refusal.is_named else "; `kvcache launch` leaves it alone and starts its own"
        found = RayStatistics(ray.__version__, problem=refusal.what, remedy=refusal.remedy + own)
        return replace(found, is_wanted=refusal.is_named)
    try:
        with ray_session(may_start=False):
            list_nodes: Any = ray.nodes
            num_nodes = sum(bool(node["Alive"]) for node in list_nodes())
            return RayStatistics(ray.__version__, True, num_nodes, tuple(running_clusters()))
    except NotRunningError:
        return RayStatistics(ray.__version__)
    except (KVCacheError, RuntimeError, OSError, ValueError) as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        return RayStatistics(ray.__version__, problem=first[0])


def ray_problems(found: RayStatistics) -> list[Problem]:
    """Return what is wrong with Ray: that none runs is none, `kvcache launch` starts one."""
    if found.problem:
        what = f"the Ray cluster that should run here cannot be joined: {found.problem}"
        return [Problem(what, found.remedy, prevents_launch=found.is_wanted)]
    return []


def open_files_limit() -> int | None:
    """Return how many files a process may open, None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def limit_problems(limit: int | None) -> list[Problem]:
    """Return what is wrong with the limit of open files."""
    if limit is None or limit >= MIN_OPEN_FILES:
        return []
    return [
        Problem(
            f"a process may open {limit:,} files, less than {MIN_OPEN_FILES:,}: every connection "
            "is one",
            "raise it (ulimit -n 65536)",
            prevents_launch=False,
        )
    ]


def port_problems(config: ClusterConfig) -> list[Problem]:
    """Return which ports that events are published at cannot be bound on this node."""
    if not config.events.enabled:
        return []
    problems = []
    for replica in range(config.parallel.data_parallel_size):
        for key in ("endpoint", "replay_endpoint"):
            place = shifted(getattr(config.events, key), replica)
            why_not = _why_not_bound(place)
            if why_not:
                problems.append(
                    Problem(
                        f"events.{key} {place} cannot be bound: {why_not}",
                        "end what is there (a cluster of yours? `kvcache stop`), or choose another "
                        "port; 0 lets the system choose",
                    )
                )
    return problems


def _why_not_bound(place: str) -> str:
    """Say why a TCP address cannot be bound, empty if it can, or is none."""
    match = _TCP.fullmatch(place)
    if match is None or match["port"] == "0":
        return ""
    host = match["host"].strip("[]")
    host = "" if host == "*" else host
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(match["port"])))
    except OSError as error:
        return error.strerror or str(error)
    return ""
