"""Makes the workers of a cluster, for its launch and to replace lost ones.

A replacement has no owner: if the coordinator owned it, it would die with the coordinator. It lives
in the placement group, which ends with the launcher, or with a detached cluster. No worker is
placed outside the group.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.names import RAY_NAMESPACE, worker_name
from kvcache.config import ClusterConfig


@dataclass(frozen=True)
class WorkerOptions:
    """How a cluster makes its workers, besides its configuration.

    `is_foreign`: the workers are an engine's own actors, which only the engine can make.
    `subclass`: of `WorkerActor`; None for that class itself.
    """

    is_foreign: bool = False
    subclass: type[Any] | None = None

    def worker_class(self) -> type[Any]:
        from actors.workers.worker import WorkerActor

        return self.subclass or WorkerActor


def code_options() -> dict[str, Any]:
    """Return actor options that make it use this process's directory of compiled code. By default
    it has the environment in which its Ray was started."""
    directory = os.environ.get("NUMBA_CACHE_DIR")
    if not directory:
        return {}
    return {"runtime_env": {"env_vars": {"NUMBA_CACHE_DIR": os.path.abspath(directory)}}}


def make_worker(
    config: ClusterConfig,
    worker_options: WorkerOptions,
    place: int,
    group: PlacementGroup,
    lifetime: Literal["detached"] | None,
) -> Any:
    """Return a new worker actor at `place`, in its stage's bundle; it may not run yet.

    Raises ValueError when the name is taken.
    """
    from actors.workers.worker import WORKER_CONCURRENCY_GROUPS

    make_remote: Any = ray.remote
    actor = make_remote(concurrency_groups=WORKER_CONCURRENCY_GROUPS)(worker_options.worker_class())
    stage = place // config.parallel.tensor_parallel_size
    return actor.options(
        name=worker_name(config.name, place),
        namespace=RAY_NAMESPACE,
        lifetime=lifetime,
        max_restarts=0,
        max_task_retries=0,
        num_cpus=config.workers.num_cpus_per_rank,
        num_gpus=config.workers.num_gpus_per_rank,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=stage
        ),
        **code_options(),
    ).remote(config, place)


def begin_making_worker(
    config: ClusterConfig, worker_options: WorkerOptions, place: int, group: PlacementGroup
) -> Any:
    """Start a process that may load torch to make a replacement worker. Return the call; its answer
    is the actor. Raises nothing."""
    make_remote: Any = ray.remote
    make = make_remote(num_cpus=0, max_retries=0)(_make_without_owner)
    return make.remote(config, worker_options, place, group)


def _make_without_owner(
    config: ClusterConfig, worker_options: WorkerOptions, place: int, group: PlacementGroup
) -> Any:
    return make_worker(config, worker_options, place, group, "detached")
