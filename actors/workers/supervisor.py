"""Keeps every rank of a running cluster served: detects deaths, ends hanging workers, replaces
them.

    dead (sentinel) ─────────────────────┐
    silent too long ──▶ ended (SIGKILL) ─┴▶ reported to the Coordinator: a new epoch, which waits
                                              └──▶ Replacement: another process ──▶ continues

Runs in its own threads, never in the coordinator's message loop, because everything here takes
time. After another coordinator has taken over, it does nothing: this one would hear no worker
although all live. It never ends or makes an engine's own actors; the engine hands over new ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from actors.connect import end_actors
from actors.memory_service import MemoryServiceWatch, keeps_memory
from actors.processes import ProcessIdentity, end_process
from actors.reports import NodeAddress, RankStatus, WorkerReport
from actors.state import RayStateStore
from actors.transport import Endpoint
from actors.workers.health import DeathWatch, SilenceWatch
from actors.workers.making import WorkerOptions
from actors.workers.replacement import Replacement, patience_for
from actors.workers.worker_set import WorkerSet, save_roster
from kvcache.base.clock import Clock
from kvcache.base.errors import ClusterError, KVCacheError, RequestError, StartupError
from kvcache.base.logs import get_logger
from kvcache.base.serving_loop import LoopStatistics, ServingLoop
from kvcache.config import ClusterConfig
from kvcache.config.deadlines import ENDING_S
from kvcache.coordinator import Coordinator
from kvcache.coordinator.settings import OBEYED
from kvcache.coordinator.watchdog import (
    PendingWork,
    Watchdog,
    WatchLimits,
    signs_of_life,
    signs_of_progress,
)
from kvcache.protocol.messages import Outgoing

logger = get_logger(__name__)

T = TypeVar("T")

LOOK_S = 0.5
"""How often silence and pending work are checked."""

PROOF_S = ENDING_S / 3
"""How long to wait for Ray to notice an ended process before asking Ray to end it too."""

PROOF_POLL_S = 0.1
RULE_LOOKS = 3
STOP_S = 2.0

TO_BE_HANDED_OVER = "the engine has to make an actor and pass it to KVCacheCluster.replace_worker"


@dataclass(frozen=True)
class CoordinatorLink:
    """How to reach this process's coordinator, which belongs to its loop's thread.

    `call` runs a function there and returns its result; `send` must run there.
    """

    coordinator: Coordinator
    call: Callable[[Callable[[], Any]], Any]
    send: Callable[[Sequence[Outgoing]], None]
    endpoint_for: Callable[[NodeAddress], Endpoint]

    def epoch(self) -> int:
        """Return the coordinator's epoch. Any thread may ask."""
        return self.coordinator.epoch


class WorkerSupervisor:
    """The workers of one coordinator. Thread-safe."""

    def __init__(
        self,
        config: ClusterConfig,
        worker_options: WorkerOptions,
        worker_set: WorkerSet,
        link: CoordinatorLink,
        *,
        clock: Clock,
        lost: Mapping[int, str],
    ) -> None:
        """Record the rank of each worker, connect and watch them all.

        `lost`: ranks that are known to have no process, and why. No worker is replaced before
        `take_care`. Raises ClusterError if Ray's store cannot be written.
        """
        self.config = config
        self.worker_options = worker_options
        self._worker_set = worker_set
        self._link = link
        self._clock = clock
        self._lock = threading.RLock()
        self._losses = dict(lost)
        self._noting = threading.Lock()
        self._dead: dict[str, str] = {}
        self._ending: dict[str, str] = {}
        self._replacements: dict[int, Replacement] = {}
        self._has_care = False
        self._closed = threading.Event()
        self._silence = SilenceWatch(LOOK_S)
        self._watchdog = Watchdog(_limits(config))
        self._pending: tuple[PendingWork, ...] = ()
        save_roster(config.name, worker_set)
        self._watch = DeathWatch(link.epoch, self._on_death)
        for rank in worker_set.incarnations(lost):
            self._connect(rank)
        self.memory_services = MemoryServiceWatch(
            config, lambda: self._worker_set, self.rules, clock
        )
        """Watches the host memory of the nodes."""
        self._loop = ServingLoop("kvcache-worker-supervisor", self._turn)
        self._loop.start()

    # --- for the coordinator's process

    @property
    def worker_set(self) -> WorkerSet:
        return self._worker_set

    @property
    def losses(self) -> Mapping[int, str]:
        """The ranks without an obeying process, and how they were lost."""
        with self._lock:
            return dict(self._losses)

    def take_care(self) -> None:
        """Replace lost workers from now on, including those lost before."""
        self._has_care = True
        for rank in sorted(self.losses):
            self._replace(rank)

    def replace_worker(self, rank: int, actor: Any) -> None:
        """Begin to replace a rank's worker by an engine's own actor, or with None try again.

        Raises RequestError for an unknown rank, or if it cannot be replaced this way.
        """
        num_ranks = self.config.parallel.num_ranks
        if not 0 <= rank < num_ranks:
            raise RequestError(f"rank {rank} does not exist: the ranks are 0 to {num_ranks - 1}")
        if self.worker_options.is_foreign != (actor is not None):
            whose = "the engine's own" if self.worker_options.is_foreign else "made by the cluster"
            remedy = "pass another one" if self.worker_options.is_foreign else "pass none"
            raise RequestError(f"the workers of {self.config.name} are {whose}: {remedy}")
        with self._lock:
            under_way = self._replacements.get(rank)
            if under_way is not None and not under_way.is_over:
                raise RequestError(f"rank {rank} is being replaced already: {under_way.state}")
            if rank not in self._losses and actor is None:
                raise RequestError(f"rank {rank} is not lost: nothing has to be replaced")
            self._replacements.pop(rank, None)
            incarnation = self._worker_set.reports[rank].incarnation
        if rank not in self._losses:
            self._on_death(rank, incarnation, "the engine has replaced it")
        self._replace(rank, actor)

    def describe_ranks(self) -> tuple[RankStatus, ...]:
        with self._lock:
            return tuple(
                RankStatus(
                    rank=rank,
                    place=report.place,
                    node_id=report.node.node_id,
                    host=report.node.host,
                    process_id=report.process_id,
                    gpu_ids=report.gpu_ids,
                    problem=self._losses.get(rank, ""),
                    replacement=self._describe_replacement(rank),
                )
                for rank, report in enumerate(self._worker_set.reports)
            )

    def pending(self) -> tuple[PendingWork, ...]:
        """Return all pending work as of the last check."""
        now_s = self._clock.now()
        with self._lock:
            replacements = [
                PendingWork(
                    "replacement",
                    f"rank {rank}: {one.state}",
                    now_s - one.step_since_s,
                    self.config.deadlines.startup_s,
                )
                for rank, one in self._replacements.items()
                if rank in self._losses and not one.has_worked
            ]
            return (*self._pending, *replacements)

    def loops(self) -> tuple[LoopStatistics, ...]:
        """Return the statistics of the supervising threads."""
        loops = [self._loop, self._watch.loop]
        if keeps_memory(self.config):
            loops.append(self.memory_services.loop)
        return tuple(loop.statistics() for loop in loops)

    def stop(self) -> None:
        """Stop watching and replacing. Repeatable."""
        self._closed.set()
        self._loop.stop()
        self._watch.stop()
        self.memory_services.stop()
        with self._lock:
            replacements = list(self._replacements.values())
        for one in replacements:
            one.stop()
        give_up_s = self._clock.now() + STOP_S
        for one in replacements:
            one.join(max(0.0, give_up_s - self._clock.now()))

    def join(self) -> None:
        """After `stop`, wait at most `STOP_S` until none of its threads uses Ray any more."""
        give_up_s = self._clock.now() + STOP_S
        for loop in (self._watch.loop, self.memory_services.loop, self._loop):
            loop.join(max(0.0, give_up_s - self._clock.now()))

    # --- for replacements

    def num_to_allocate(self) -> int:
        """Return the number of ranks whose process has not allocated yet."""
        with self._lock:
            waiting = [r for r in self._replacements.values() if r.needs_memory and not r.is_over]
            return max(1, len(waiting))

    def rules(self) -> bool:
        """Say whether this coordinator may still replace workers. May ask Ray."""
        return not self._closed.is_set() and self._rules()

    def install(self, rank: int, actor: Any, report: WorkerReport) -> None:
        """Make `actor` serve the rank. Raises ClusterError, also if the cluster has ended."""
        if self._closed.is_set() or not self._rules():
            raise ClusterError("another coordinator has taken over: it replaces lost workers")
        with self._lock:
            self._worker_set = self._worker_set.with_worker(rank, actor, report)
        with self._noting:
            save_roster(self.config.name, self._worker_set)
        self._connect(rank)

    def is_served(self, rank: int, incarnation: str) -> bool:
        """Say whether the process obeys the present epoch; raises StartupError if it has died."""
        with self._lock:
            if incarnation in self._dead:
                raise StartupError(f"its new process died: {self._dead[incarnation]}")
        coordinator = self._link.coordinator

        def is_obeying() -> bool:
            serving, _ = signs_of_life(coordinator).get(rank, ("", 0.0))
            return serving == incarnation and rank not in coordinator.missing_ranks()

        return bool(self._link.call(is_obeying))

    def on_replaced(self, rank: int, incarnation: str) -> None:
        """Called when the process obeys."""
        with self._lock:
            if incarnation not in self._dead:
                self._losses.pop(rank, None)

    def on_over(self, rank: int) -> None:
        """Called when a replacement has ended, successfully or not. If its process has died since,
        replace it again."""
        with self._lock:
            has_worked = self._replacements[rank].has_worked
        if has_worked and rank in self.losses and not self.worker_options.is_foreign:
            self._replace(rank)

    # --- inside

    def _connect(self, rank: int) -> None:
        """Send a rank's process the coordinator's endpoint, and watch it."""
        actor, report = self._worker_set.actors[rank], self._worker_set.reports[rank]
        self._watch.watch(rank, report.incarnation, actor)
        actor.kvcache_attach.remote(self._link.endpoint_for(report.node))

    def _on_death(self, rank: int, incarnation: str, cause: str) -> None:
        """A process is known to be dead: tell the coordinator, and replace it."""
        with self._lock:
            if incarnation and self._dead.setdefault(incarnation, cause) is not cause:
                return  # known already
            if self._closed.is_set() or self._worker_set.reports[rank].incarnation != incarnation:
                return
            self._losses[rank] = self._ending.pop(incarnation, cause)
            reason = self._losses[rank]
        link = self._link

        def tell() -> None:
            link.send(link.coordinator.on_worker_lost(rank, incarnation, reason))

        try:
            link.call(tell)
        except KVCacheError as error:
            logger.error(
                "the loss of rank %d cannot be reported to the coordinator: %s", rank, error
            )
        if self._has_care and incarnation:
            self._replace(rank)

    def _replace(self, rank: int, given: Any = None) -> None:
        """Begin to replace a rank, unless a replacement runs, is forbidden, or is the engine's
        task."""
        is_ours = not self.worker_options.is_foreign and self.config.deadlines.replacement_s > 0
        if not (is_ours or given is not None) or not self._rules():
            return
        with self._lock:
            before = self._replacements.get(rank)
            if self._closed.is_set() or (before is not None and not before.is_over):
                return
            patience = patience_for(self.config, before, self._clock.now())
            self._replacements[rank] = Replacement(rank, self, self._clock, patience, given)

    def _describe_replacement(self, rank: int) -> str:
        if rank not in self._losses:
            return ""
        replacement = self._replacements.get(rank)
        if replacement is not None and not replacement.has_worked:
            return replacement.state
        if self.worker_options.is_foreign:
            return TO_BE_HANDED_OVER
        return "" if self.config.deadlines.replacement_s else "none, deadlines.replacement_s is 0"

    def _rules(self) -> bool:
        """Whether the cluster still exists and no other coordinator has taken a higher epoch. True
        if that cannot be read."""
        coordinator, store = self._link.coordinator, RayStateStore(self.config.name)
        for _ in range(RULE_LOOKS):
            if coordinator.phase not in OBEYED:
                return False
            try:
                state = store.load()
            except KVCacheError as error:
                logger.warning(
                    "cannot read which coordinator rules %s: %s", self.config.name, error
                )
                return True
            if state is None:
                return False  # its state was removed: the cluster is being stopped
            if state.epoch <= coordinator.epoch:
                return True
            # It may be taking an epoch at this moment; the epoch is saved before it counts.
            self._closed.wait(PROOF_POLL_S)
        return False

    def _turn(self) -> None:
        if self._loop.pause(LOOK_S):
            return
        self._watch.loop.ensure_running()
        self.memory_services.loop.ensure_running()
        now_s = self._clock.now()
        try:
            heard, self._pending = self._link.call(partial(self._look, now_s))
            self._end_silent(heard, self._silence.look(heard, now_s))
        except KVCacheError as error:
            logger.warning("the coordinator could not be checked: %s", error)

    def _look(self, now_s: float) -> tuple[dict[int, tuple[str, float]], tuple[PendingWork, ...]]:
        """Return when each process was last heard, and the pending work. In the loop's thread."""
        coordinator = self._link.coordinator
        return signs_of_progress(coordinator), self._watchdog.look(coordinator, now_s)

    def _end_silent(
        self, heard: Mapping[int, tuple[str, float]], silent: Mapping[int, float]
    ) -> None:
        """End the processes that have been silent for too long."""
        limit_s = self.config.deadlines.worker_kill_s
        if not limit_s or self.worker_options.is_foreign or not self._has_care:
            return
        for rank, silent_s in silent.items():
            if silent_s <= limit_s:
                continue
            actor, report = self._worker_set.actors[rank], self._worker_set.reports[rank]
            is_known = report.incarnation in self._ending or report.incarnation in self._dead
            if is_known or report.incarnation != heard[rank][0]:
                continue
            if not self._rules():
                return
            self._ending[report.incarnation] = f"silent for {silent_s:.0f} s, so it was ended"
            threading.Thread(
                target=self._end, args=(rank, actor, report), name="kvcache-ending", daemon=True
            ).start()

    def _end(self, rank: int, actor: Any, report: WorkerReport) -> None:
        """End a hanging process; after an error it is tried again."""
        with self._loop.faults.contained(f"the ending of rank {rank}"):
            self._end_and_prove(rank, actor, report)
        if report.incarnation not in self._dead:
            self._ending.pop(report.incarnation, None)

    def _end_and_prove(self, rank: int, actor: Any, report: WorkerReport) -> None:
        """End a process; if Ray does not notice, make Ray end it."""
        node = report.node
        logger.warning("rank %d hangs: its process %d is ended", rank, report.process_id)
        failure = end_process(
            ProcessIdentity(node.node_id, node.host, report.process_id, report.started_ticks)
        )
        if failure or not self._is_proven_dead(report.incarnation):
            logger.warning("rank %d is ended by Ray: %s", rank, failure or "it lives on")
            end_actors([actor])
            self._is_proven_dead(report.incarnation)

    def _is_proven_dead(self, incarnation: str) -> bool:
        """Wait a while for Ray to say that a process is dead."""
        give_up_s = self._clock.now() + PROOF_S
        while incarnation not in self._dead and self._clock.now() < give_up_s:
            if self._closed.wait(PROOF_POLL_S):
                return True
        return incarnation in self._dead


def _limits(config: ClusterConfig) -> WatchLimits:
    deadlines = config.deadlines
    return WatchLimits(
        rank_s=deadlines.worker_silence_s,
        client_s=deadlines.reattach_s,
        step_s=deadlines.step_s,
        forward_s=deadlines.forward_s,
    )
