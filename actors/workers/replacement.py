"""Replaces the process of a lost rank: makes, checks, allocates and connects it, in its own thread.

    made ──▶ reports ──fits the plan──▶ allocates ──same fingerprint──▶ connects ──▶ obeys the epoch
      ▲                                                                   │
      └────── a pause that grows ◀── ended, and said why ◀── any failure ─┘    until the deadline

It stands between the worker supervisor, which reports lost ranks, and Ray. The plan never changes:
a process that does not fit it is refused, and the error says why.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group_table

from actors.connect import end_actors, find_actor
from actors.names import worker_name
from actors.reports import WorkerReport
from actors.workers.health import describe_death
from actors.workers.making import begin_making_worker
from kvcache.base.clock import Clock
from kvcache.base.errors import KVCacheError, NotEnoughMemoryError, PlanMismatchError, StartupError
from kvcache.base.logs import get_logger
from kvcache.config import ClusterConfig
from kvcache.planner import Plan
from kvcache.specs import KVCacheSpec

if TYPE_CHECKING:
    from actors.workers.supervisor import WorkerSupervisor

logger = get_logger(__name__)

WAITING_FOR_ROOM = "waiting for room"
STARTING = "starting"
ALLOCATING = "allocating"
CONNECTING = "connecting"
FAILED = "failed"

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0

LOOK_S = 0.5
"""How often to check for room while a process is waited for."""

SERVED_POLL_S = 0.02

STABLE_S = 60.0
"""A process that lives this long did not die of its start-up."""


@dataclass(frozen=True)
class Patience:
    """When a replacement makes its first attempt, and when it gives up."""

    delay_s: float
    give_up_s: float


class Replacement:
    """The replacement of one lost rank.

    `state` describes its progress; `step_since_s` is the time of the last step, by the clock.
    `is_over`: it has worked (`has_worked`), has been given up, or was stopped, at `ended_s`.
    """

    def __init__(
        self, rank: int, site: WorkerSupervisor, clock: Clock, patience: Patience, given: Any = None
    ) -> None:
        """Begin. `given`: the actor that an engine has made for the rank; it is tried once."""
        self.rank = rank
        self.patience = patience
        self.is_over = self.has_worked = False
        self.ended_s = clock.now()
        self.needs_memory = True
        self._site = site
        self._clock = clock
        self._given = given
        self._state = STARTING
        self.step_since_s = clock.now()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"kvcache-replacement-{rank}", daemon=True
        )
        logger.info(
            "rank %d: its replacement begins in %g s, and is tried for %.0f s",
            rank,
            patience.delay_s,
            max(0.0, patience.give_up_s - self.step_since_s),
        )
        self._began_s = self.step_since_s
        self._thread.start()

    @property
    def state(self) -> str:
        """The progress, in words."""
        return self._state

    def stop(self) -> None:
        """Stop trying; end the process of a running attempt."""
        self._is_stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._try_until_served()
        finally:
            self.ended_s = self._clock.now()
            self.is_over = True
            self._site.on_over(self.rank)

    def _try_until_served(self) -> None:
        give_up_s, pause_s = self.patience.give_up_s, FIRST_PAUSE_S
        startup_s = self._site.config.deadlines.startup_s
        self._is_stopping.wait(self.patience.delay_s)
        while not self._is_stopping.is_set():
            limit_s = min(startup_s, max(1.0, give_up_s - self._clock.now()))
            try:
                self._attempt(self._clock.now() + limit_s)
                self.has_worked = True
                return
            except Exception as error:
                cause = explain(error)
            logger.warning("rank %d is not replaced: %s", self.rank, cause)
            if self._given is not None or self._clock.now() + pause_s >= give_up_s:
                self._enter(f"{FAILED}: {cause}")
                logger.error("rank %d is not replaced any more: %s", self.rank, cause)
                return
            self._enter(f"{FAILED}: {cause}: again in {pause_s:g} s")
            self._is_stopping.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _attempt(self, give_up_s: float) -> None:
        """Take one process through all steps. Raises the error that stops it."""
        site, rank = self._site, self.rank
        self.needs_memory = True
        actor = self._given
        if actor is None:
            actor = self._make(give_up_s)
        try:
            call = actor.kvcache_report.remote(site.num_to_allocate())
            report: WorkerReport = self._await(call, "start and report", give_up_s)
            worker_set = site.worker_set
            require_fit(worker_set.plan, rank, report, worker_set.reports[rank].specs)
            self._enter(ALLOCATING)
            call = actor.kvcache_allocate_again.remote(rank, worker_set.plan)
            fingerprint = self._await(call, "allocate its blocks", give_up_s)
            if fingerprint != worker_set.plan.fingerprint:
                raise PlanMismatchError(
                    f"its plan is {fingerprint}, the cluster's {worker_set.plan.fingerprint}: run "
                    "the same release everywhere"
                )
            self.needs_memory = False
            self._enter(CONNECTING)
            site.install(rank, actor, report)
            self._await_served(report.incarnation, give_up_s)
        except BaseException:
            if self._given is None:
                end_actors([actor])
            raise

    def _make(self, give_up_s: float) -> Any:
        """Return a new actor at the rank's place."""
        site = self._site
        worker_set, place = site.worker_set, site.worker_set.reports[self.rank].place
        if site.worker_options.is_foreign or worker_set.placement is None:
            raise StartupError(
                f"rank {self.rank} is an actor of the engine's own: make another one and pass it "
                "to KVCacheCluster.replace_worker"
            )
        if not site.rules():
            self._is_stopping.set()
            raise StartupError("another coordinator has taken over: it replaces lost workers")
        # The actor with this name is dead, or belongs to an abandoned attempt.
        before = find_actor(worker_name(site.config.name, place))
        if before is not None:
            end_actors([before])
        self._enter(STARTING)
        call = begin_making_worker(site.config, site.worker_options, place, worker_set.placement)
        try:
            return self._await(call, "be made", give_up_s)
        except BaseException:
            ray.cancel(call, force=True)
            raise

    def _await(self, call: Any, what: str, give_up_s: float) -> Any:
        """Return the answer to a call. Raises StartupError if it is late, and the call's own
        error."""
        began_s = self._clock.now()
        while True:
            ended, _ = ray.wait([call], timeout=LOOK_S)
            if ended:
                return ray.get(call)
            if self._is_stopping.is_set():
                raise StartupError("the cluster is being stopped")
            if self._state in (STARTING, WAITING_FOR_ROOM):
                has_room = self._has_room()
                self._enter(STARTING if has_room else WAITING_FOR_ROOM)
            if self._clock.now() >= give_up_s:
                raise StartupError(
                    f"its new process did not {what} within {self._clock.now() - began_s:.0f} s"
                    f"{self._describe_room()}"
                )

    def _has_room(self) -> bool:
        """Whether Ray has room for every stage. Raises StartupError if the group was removed."""
        group: PlacementGroup | None = self._site.worker_set.placement
        if group is None:
            return True
        state = placement_group_table(group).get("state", "REMOVED")
        if state == "REMOVED":
            raise StartupError(
                "the placement group of the cluster is gone, and its room with it: stop the "
                "cluster and launch it again"
            )
        return bool(state == "CREATED")

    def _describe_room(self) -> str:
        if self._state != WAITING_FOR_ROOM:
            return ": look at the Ray logs of that worker, or raise deadlines.startup_s"
        from actors.clusters.placement import describe_nodes, stage_resources

        return (
            f": no room for a pipeline stage of {stage_resources(self._site.config)} (nodes have "
            f"{describe_nodes()}): free resources or add a node"
        )

    def _await_served(self, incarnation: str, give_up_s: float) -> None:
        while not self._site.is_served(self.rank, incarnation):
            if self._clock.now() >= give_up_s:
                raise StartupError("its new process did not obey the coordinator in time")
            if self._is_stopping.wait(SERVED_POLL_S):
                raise StartupError("the cluster is being stopped")
        logger.info(
            "rank %d is served again by process %s, %.1f s after its replacement began",
            self.rank,
            incarnation,
            self._clock.now() - self._began_s,
        )
        self._site.on_replaced(self.rank, incarnation)

    def _enter(self, state: str) -> None:
        if state != self._state:
            self._state, self.step_since_s = state, self._clock.now()


def patience_for(config: ClusterConfig, before: Replacement | None, now_s: float) -> Patience:
    """Return the patience of a rank's next replacement; `before` is the previous one, if any.

    Processes that die as soon as they serve are made more and more slowly, and finally not at all.
    """
    if before is None or now_s - before.ended_s >= STABLE_S:
        return Patience(0.0, now_s + config.deadlines.replacement_s)
    delay_s = max(FIRST_PAUSE_S, min(2 * before.patience.delay_s, LONGEST_PAUSE_S))
    return Patience(delay_s, before.patience.give_up_s)


def require_fit(
    plan: Plan, rank: int, report: WorkerReport, specs: Mapping[str, KVCacheSpec]
) -> None:
    """Raise unless a process can serve `rank` of `plan`: PlanMismatchError if its layers differ
    from `specs`, NotEnoughMemoryError if the plan needs more memory than it has."""
    for name in sorted({*report.specs, *specs}):
        mine, wanted = report.specs.get(name), specs.get(name)
        if mine != wanted:
            raise PlanMismatchError(
                f"its layer {name} keeps {mine}, the plan was made for {wanted}: run the same "
                "model on every rank, or stop the cluster and launch it again"
            )
    needed = plan.configs[rank].total_size_bytes
    available = report.free_bytes or report.memory.device_bytes
    if needed > available:
        raise NotEnoughMemoryError(
            f"the plan needs {needed} bytes on rank {rank}, {available} are available on "
            f"{report.node.host}: free memory there, or stop the cluster and launch it again, "
            "which makes a new plan"
        )


def explain(error: BaseException) -> str:
    """Return one line that says why a process could not replace a worker."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, KVCacheError):
        return str(cause)
    if isinstance(cause, ActorDiedError):
        return f"its new process died: {describe_death(cause)}"
    if isinstance(cause, GetTimeoutError):
        return "no answer came in time"
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0][:300] if lines else 'no reason given'}"
