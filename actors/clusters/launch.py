"""Starts a cluster completely or not at all.

    coordinator (its name is the launch lock) ─▶ placement group ─▶ workers ─▶ reports
    ─▶ one plan ─▶ every rank allocates ─▶ fingerprints compared ─▶ coordinator takes over ─▶ ready

After an error or an interruption, everything made so far is taken down, and one error says which
rank failed and why. The launch never takes longer than `deadlines.startup_s`, plus at most
`GRACE_S` for the coordinator to name the missing ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from actors.clusters.placement import create_placement
from actors.clusters.shutdown import ClusterParts, take_down
from actors.connect import is_actor_known
from actors.coordinator import COORDINATOR_CONCURRENCY_GROUPS, CoordinatorActor
from actors.embedded.record import refuse_if_embedded
from actors.memory_service import make_memory_services
from actors.names import RAY_NAMESPACE, coordinator_name
from actors.reports import WorkerReport
from actors.workers.health import known_part
from actors.workers.making import WorkerOptions, code_options, make_worker
from actors.workers.worker_set import WorkerSet
from kvcache.base.arguments import as_bool, as_tuple, check_methods
from kvcache.base.curve import generate_curve_keys
from kvcache.base.errors import (
    AlreadyRunningError,
    ConfigurationError,
    KVCacheError,
    NotEnoughMemoryError,
    PlanMismatchError,
    StartupError,
    shown,
)
from kvcache.config import ClusterConfig
from kvcache.planner import Plan, plan_kv_cache, plan_options

OnProgress = Callable[[str], None]
"""Gets a short line for each step of the start-up."""


BEGIN_SHARE = 0.6
"""The coordinator's share of the remaining time: it knows best which rank does not obey."""

GRACE_S = 10.0
"""How late an answer may come on an overloaded machine."""


@dataclass(frozen=True)
class LaunchOptions:
    """How to launch, besides the configuration.

    `worker_actors`: the engine's own actors (see `WorkerMethods`), in order of places. Then no
    worker is started and no placement group made. `worker_class`: a subclass of `WorkerActor`.
    """

    is_detached: bool = False
    on_progress: OnProgress = lambda line: None
    worker_actors: Sequence[Any] = ()
    worker_class: type[Any] | None = None

    def __post_init__(self) -> None:
        """Raise ConfigurationError for invalid options."""
        as_bool("detached", self.is_detached, ConfigurationError)
        check_methods("on_progress", self.on_progress, ("__call__",), ConfigurationError)
        as_tuple("worker_actors", self.worker_actors, ConfigurationError)
        made = self.worker_class
        if made is not None and not (isinstance(made, type) and hasattr(made, "kvcache_report")):
            raise ConfigurationError(
                f"worker_class is {shown(made)}: pass a subclass of WorkerActor"
            )


@dataclass
class Launch:
    """One launch, from nothing to a running cluster. Use once: `Launch(config, options).run()`."""

    config: ClusterConfig
    options: LaunchOptions
    parts: ClusterParts = field(init=False)

    def __post_init__(self) -> None:
        self.parts = ClusterParts(self.config.name, self.config.deadlines)
        is_foreign = bool(self.options.worker_actors)
        self._worker_options = WorkerOptions(is_foreign, self.options.worker_class)
        self._give_up_s = time.monotonic() + self.config.deadlines.startup_s

    def run(self) -> ClusterParts:
        """Start the cluster and return its parts.

        Raises AlreadyRunningError, StartupError or NotEnoughMemoryError; nothing keeps running
        then.
        """
        self._say(f"starting the coordinator of {self.config.name}")
        self.parts.coordinator = self._create_coordinator()
        try:
            self._start()
        except BaseException as error:
            take_down(self.parts)
            if self.parts.was_stopped and isinstance(error, Exception):
                raise StartupError(
                    f"{self.config.name} was stopped by another process while it was starting, and "
                    "nothing of it is left: launch it again"
                ) from error
            if isinstance(error, RayError):
                raise StartupError(
                    f"{self.config.name} cannot start: {first_line(error)}"
                ) from error
            raise
        return self.parts

    def _start(self) -> None:
        workers = self._obtain_workers()
        self._say(f"waiting for {len(workers)} worker(s)")
        reports = self._reports(workers)
        self.parts.process_ids = tuple(report.process_id for report in reports)
        order = rank_order(reports, self.config.parallel.tensor_parallel_size)
        ranked = [workers[place] for place in order]
        in_order = tuple(reports[place] for place in order)
        plan = self._plan(in_order)
        self._keep_memory(reports)
        self._say(f"allocating {plan.num_blocks} blocks on every rank")
        self._allocate(ranked, plan)
        self._say("connecting coordinator and workers")
        self._connect(WorkerSet(plan, tuple(ranked), in_order, self.parts.placement))
        self._say("ready")

    def _connect(self, worker_set: WorkerSet) -> None:
        """Make the coordinator take over the workers; return when all of them obey."""
        coordinator: Any = self.parts.coordinator
        # First wait until it exists: its own time limit begins when it takes the call.
        self._await([coordinator.__ray_ready__.remote()], "start", who="the coordinator")
        ready = coordinator.begin.remote(worker_set, BEGIN_SHARE * self._remaining_s())
        # Its answer names the ranks that do not obey, so wait a little longer for it.
        self._await([ready], "connect to the workers", who="the coordinator", grace_s=GRACE_S)

    def _create_coordinator(self) -> Any:
        name = coordinator_name(self.config.name)
        refuse_if_embedded(self.config.name)
        actor = _remote(CoordinatorActor, COORDINATOR_CONCURRENCY_GROUPS)
        try:
            return actor.options(
                name=name,
                namespace=RAY_NAMESPACE,
                lifetime="detached" if self.options.is_detached else None,
                max_restarts=-1,
                max_task_retries=0,
                num_cpus=0,
                **code_options(),
            ).remote(self.config, generate_curve_keys(), self._worker_options)
        except ValueError as error:
            if not is_actor_known(name):
                raise
            raise AlreadyRunningError(
                f"a cluster named {self.config.name!r} is running: connect to it, stop it, or "
                "launch under another name"
            ) from error

    def _obtain_workers(self) -> list[Any]:
        num_ranks = self.config.parallel.num_ranks
        if self.options.worker_actors:
            given = list(self.options.worker_actors)
            if len(given) != num_ranks:
                raise StartupError(
                    f"{len(given)} worker actors were given, the configuration has {num_ranks} "
                    "ranks: pass one actor for each"
                )
            self.parts.foreign_workers = given
            return given
        self._say("reserving room for the workers")
        group = create_placement(self.config, self.options.is_detached, self._remaining_s())
        self.parts.placement, self.parts.num_places = group, num_ranks
        lifetime: Literal["detached"] | None = "detached" if self.options.is_detached else None
        workers = [
            make_worker(self.config, self._worker_options, place, group, lifetime)
            for place in range(num_ranks)
        ]
        self.parts.workers = workers
        return workers

    def _reports(self, workers: Sequence[Any]) -> list[WorkerReport]:
        num_sharing = len(workers)
        if self.config.workers.device == "cuda":
            num_sharing = max(1, round(1 / self.config.workers.num_gpus_per_rank))
        calls = [worker.kvcache_report.remote(num_sharing) for worker in workers]
        return self._await(calls, "start and report")

    def _plan(self, reports: Sequence[WorkerReport]) -> Plan:
        try:
            return plan_kv_cache(
                plan_options(self.config),
                [report.specs for report in reports],
                [report.memory for report in reports],
            )
        except PlanMismatchError as error:
            raise StartupError(f"the ranks do not fit together: {error}") from error

    def _keep_memory(self, reports: Sequence[WorkerReport]) -> None:
        """Make the memory services and keep their handles: Ray ends actors without a handle."""
        lifetime: Literal["detached"] | None = "detached" if self.options.is_detached else None
        self.parts.memory_services = make_memory_services(
            self.config, reports, lifetime, self._remaining_s()
        )

    def _allocate(self, ranked: Sequence[Any], plan: Plan) -> None:
        calls = [worker.kvcache_allocate.remote(rank, plan) for rank, worker in enumerate(ranked)]
        for rank, fingerprint in enumerate(self._await(calls, "allocate its blocks")):
            if fingerprint != plan.fingerprint:
                raise StartupError(
                    f"rank {rank} has plan {fingerprint}, the launcher has {plan.fingerprint}: "
                    "run the same release everywhere"
                )

    def _await(
        self, calls: Sequence[Any], what: str, who: str = "", grace_s: float = 0.0
    ) -> list[Any]:
        """Return the answers of `calls`, one per rank (or of `who`); raise for the first bad
        one."""
        waiting = {call: who or f"rank {rank}" for rank, call in enumerate(calls)}
        while waiting:
            limit_s = self._remaining_s() + grace_s
            ended, _ = ray.wait(list(waiting), num_returns=1, timeout=limit_s)
            if not ended:
                raise StartupError(
                    f"{', '.join(waiting.values())} did not {what} within "
                    f"{self.config.deadlines.startup_s:g} s: look at the Ray logs of that worker, "
                    "or raise deadlines.startup_s"
                )
            for call in ended:
                process = waiting.pop(call)
                try:
                    ray.get(call, timeout=0)
                except GetTimeoutError:
                    waiting[call] = process
                except RayError as error:
                    raise startup_error(process, what, error) from error
        return list(ray.get(list(calls)))

    def _remaining_s(self) -> float:
        return max(0.0, self._give_up_s - time.monotonic())

    def _say(self, line: str) -> None:
        self.options.on_progress(line)


def _remote(actor_class: type[Any], concurrency_groups: dict[str, int]) -> Any:
    make_remote: Any = ray.remote
    return make_remote(concurrency_groups=concurrency_groups)(actor_class)


def rank_order(reports: Sequence[WorkerReport], stage_width: int) -> list[int]:
    """Return the place of each rank. Within a stage, ranks are ordered by node and GPU, not by
    Ray's placement order."""
    order: list[int] = []
    for start in range(0, len(reports), stage_width):
        stage = list(range(start, min(start + stage_width, len(reports))))
        order.extend(sorted(stage, key=lambda p: (reports[p].node.node_id, _gpus(reports[p]), p)))
    return order


def _gpus(report: WorkerReport) -> tuple[tuple[int, str], ...]:
    """Return the GPU ids in a form that sorts as numbers."""
    return tuple((int(gpu) if gpu.isdigit() else -1, gpu) for gpu in report.gpu_ids)


def startup_error(process: str, what: str, error: RayError) -> KVCacheError:
    """Return a kvcache error for a Ray error of `process`, which did not do `what`."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(cause, NotEnoughMemoryError):
        return NotEnoughMemoryError(f"{process}: {cause}")
    if isinstance(cause, KVCacheError):
        return StartupError(f"{process} could not {what}: {cause}")
    verb = "died before it could" if isinstance(error, ActorDiedError) else "could not"
    return StartupError(f"{process} {verb} {what}: {first_line(cause or error)}")


def first_line(error: BaseException) -> str:
    """Return the most telling line of an error: Ray wraps causes in tracebacks and advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if len(lines) == 1:
        return (
            f"{type(error).__name__}: {lines[0]}" if not isinstance(error, RayError) else lines[0]
        )
    # Ray's text about a dead actor has lines such as `ip: 192.0.2.2`.
    named = [line for line in lines if ": " in line and line.split(": ")[0].isidentifier()]
    raised = [line for line in named if line[0].isupper()]
    exits = [line for line in lines if "exit" in line.lower() or "killed" in line.lower()]
    return known_part((raised[-1:] or exits[:1] or lines[:1])[0])
