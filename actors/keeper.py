"""The actor that keeps a node's host memory while its workers come and go.

One for each node of a cluster that offloads, made at launch before any memory is; workers of the
node find it by an address that follows from the names of cluster and node. It lives as long as the
cluster, and its process holds descriptors only. Refuses to know what is in the memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.names import RAY_NAMESPACE, keeper_address, keeper_name, keeper_prefix
from actors.reports import WorkerReport
from kvcache.config import ClusterConfig
from kvcache.errors import StartupError
from kvcache.keeper.memory_keeper import KeeperStatistics, MemoryKeeper


class KeeperActor:
    """Serves one `MemoryKeeper` until it is ended."""

    def __init__(self, address: str, max_segments: int, max_bytes: int) -> None:
        self._keeper = MemoryKeeper(address, max_segments=max_segments, max_bytes=max_bytes)
        self._keeper.serve()

    def statistics(self) -> KeeperStatistics:
        """Return what is kept."""
        return self._keeper.statistics()


def make_keepers(
    config: ClusterConfig,
    reports: Sequence[WorkerReport],
    lifetime: Literal["detached"] | None,
    timeout_s: float,
) -> list[Any]:
    """Make a keeper on each node that has workers, if the configuration wants any; return them.

    Raises StartupError for one that does not answer within `timeout_s`.
    """
    offload = config.offload
    if offload.host_memory_per_rank is None or not offload.keeps_memory:
        return []
    make_remote: Any = ray.remote
    keepers = []
    for node_id in sorted({report.node.node_id for report in reports}):
        num_ranks = sum(report.node.node_id == node_id for report in reports)
        # A rank's memory is let go before it is made anew, but rows and heads come on top.
        most_bytes = 2 * num_ranks * offload.host_memory_per_rank + (64 << 20)
        actor = make_remote(KeeperActor).options(
            name=keeper_name(config.name, node_id),
            namespace=RAY_NAMESPACE,
            lifetime=lifetime,
            max_restarts=0,
            max_task_retries=0,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        address = keeper_address(config.name, node_id)
        keepers.append(actor.remote(address, 2 * num_ranks, most_bytes))
    waiting = [keeper.__ray_ready__.remote() for keeper in keepers]
    ended, late = ray.wait(waiting, num_returns=len(waiting), timeout=timeout_s)
    if late:
        end_keepers(keepers)
        raise StartupError(
            f"{len(late)} of {len(waiting)} memory keepers did not start within {timeout_s:.0f} s: "
            "look at the Ray logs of the nodes, or set offload.keeps_memory to false"
        )
    try:
        ray.get(ended)
    except RayError as error:
        end_keepers(keepers)
        raise StartupError(f"a memory keeper cannot start: {error}") from error
    return keepers


def find_keepers(cluster: str) -> list[Any]:
    """Return the keepers of a cluster, wherever they run."""
    found = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == RAY_NAMESPACE and actor["name"].startswith(keeper_prefix(cluster)):
            with contextlib.suppress(ValueError):
                found.append(ray.get_actor(actor["name"], namespace=RAY_NAMESPACE))
    return found


def end_keepers(keepers: Sequence[Any]) -> None:
    """End these; the memory goes with the last worker that has it."""
    for keeper in keepers:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(keeper, no_restart=True)


def await_no_keepers(cluster: str, give_up_s: float) -> None:
    """Wait until no keeper of the cluster is known any more, or it is `give_up_s` (monotonic)."""
    while find_keepers(cluster) and time.monotonic() < give_up_s:
        time.sleep(0.02)
