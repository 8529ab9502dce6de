"""The waits of a coordinator, their ages, and those that last too long.

Reads the coordinator's state at every look, in its thread, and changes nothing. Most tables have no
times, so the watchdog remembers when it first saw each wait; ages are accurate to the time between
two looks. A wait that becomes too long is logged once. Takes no action.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvcache.base.logs import get_logger
from kvcache.coordinator.coordinator import Coordinator
from kvcache.coordinator.epoch_state import EpochState
from kvcache.coordinator.job_table import Job
from kvcache.coordinator.settings import Phase

logger = get_logger(__name__)


@dataclass(frozen=True)
class WatchLimits:
    """How long a wait may last, in seconds, before it is stuck: for a rank's message or audit, the
    clients of the previous epoch, a step that could be executed, the end of a forward. Transfers
    have the deadlines of the tiers."""

    rank_s: float
    client_s: float
    step_s: float
    forward_s: float


@dataclass(frozen=True)
class PendingWork:
    """A wait. `kind` is one word, `what` describes it, `age_s` is its age; it is stuck when that is
    more than `limit_s`."""

    kind: str
    what: str
    age_s: float
    limit_s: float

    @property
    def is_stuck(self) -> bool:
        """Whether it has lasted longer than it should."""
        return self.age_s > self.limit_s


class Watchdog:
    """Watches one coordinator."""

    def __init__(self, limits: WatchLimits) -> None:
        self._limits = limits
        self._seen_s: dict[tuple[str, str], float] = {}
        self._stuck: set[tuple[str, str]] = set()

    def look(self, coordinator: Coordinator, now_s: float) -> tuple[PendingWork, ...]:
        """Return all present waits, the oldest first. `now_s` is by the clock of the
        coordinator."""
        pending = []
        stuck: set[tuple[str, str]] = set()
        seen_s: dict[tuple[str, str], float] = {}
        for kind, what, limit_s, known_s in self._waits(coordinator):
            since_s = known_s
            if since_s is None:
                since_s = seen_s[kind, what] = self._seen_s.get((kind, what), now_s)
            work = PendingWork(kind, what, max(0.0, now_s - since_s), limit_s)
            pending.append(work)
            if work.is_stuck:
                stuck.add((kind, what))
                if (kind, what) not in self._stuck:
                    logger.warning(
                        "epoch %d waits too long, %.1f s: %s", coordinator.epoch, work.age_s, what
                    )
        self._seen_s, self._stuck = seen_s, stuck
        return tuple(sorted(pending, key=lambda work: -work.age_s))

    def _waits(self, coordinator: Coordinator) -> Iterator[tuple[str, str, float, float | None]]:
        """Yield kind, text, limit, and the start if a table has it."""
        limits, epoch = self._limits, coordinator.epoch
        if coordinator.phase is Phase.FENCING:
            served = signs_of_life(coordinator)
            for rank in coordinator.missing_ranks():
                why = "has not granted" if rank in served else "has no process to grant"
                yield "grant", f"rank {rank} {why} epoch {epoch}", limits.rank_s, None
        if coordinator.phase is Phase.RUNNING:
            for rank, (_, heard_s) in signs_of_life(coordinator).items():
                yield "silence", f"rank {rank} has not been heard from", limits.rank_s, heard_s
        collection, epoch_state = coordinator._collection, coordinator._epoch_state
        if collection is not None:
            for rank in collection.missing():
                what = f"rank {rank} has not sent its labels in epoch {epoch}"
                yield "labels", what, limits.rank_s, collection._ranks[rank].since_s
        if epoch_state is not None:
            yield from self._waits_of(epoch_state, coordinator)

    def _waits_of(
        self, epoch_state: EpochState, coordinator: Coordinator
    ) -> Iterator[tuple[str, str, float, float | None]]:
        limits = self._limits
        if epoch_state.reattachment.is_waiting:
            for client in epoch_state.reattachment.missing():
                yield "client", f"client {client} has not come back", limits.client_s, None
        for job_id, job in coordinator._jobs._open.items():
            ranks = set(range(coordinator.settings.num_ranks)) - job.reported
            kind, subject, limit_s = self._describe_job(job_id, job, epoch_state)
            yield kind, f"{subject} (job {job_id}) has not ended on {_ranks(ranks)}", limit_s, None
        window = epoch_state.window
        if len(window):
            seq = window.applied_by_all + 1
            behind = {
                r for r in range(coordinator.settings.num_ranks) if window.applied_by(r) < seq
            }
            what = f"message {coordinator.epoch}:{seq} is not applied by {_ranks(behind)}"
            yield "message", what, limits.rank_s, None
        for ledger in coordinator._clients.leaving():
            what = f"client {ledger.client_id} is not fenced on every rank"
            yield "fence", what, limits.rank_s, None
        for ledger in coordinator._clients.attached():
            if ledger.lost_s is not None:
                what = f"client {ledger.client_id} has lost its connection"
                yield "client", what, coordinator.settings.client_return_s, ledger.lost_s
            receiver = ledger.receiver
            if receiver.ready_step is not None:
                what = f"step {receiver.next_step} of {ledger.client_id} has not been executed"
                yield "step", what, limits.step_s, None
            elif receiver._buffered:
                what = (
                    f"step {receiver.next_step} of {ledger.client_id} has not arrived, "
                    "but later ones have"
                )
                yield "step", what, limits.step_s, None

    def _describe_job(
        self, job_id: int, job: Job, epoch_state: EpochState
    ) -> tuple[str, str, float]:
        """Return the kind of an open job, its description and its limit."""
        offloading = epoch_state._offloading
        transfer = None if offloading is None else offloading.open_transfer(job_id)
        if transfer is not None:
            kind, limit_s = transfer
            return kind.value, f"the {kind.value} of tiers", limit_s
        if job.client_id:
            what = f"the forward of step {job.step} of {job.client_id}"
            return "forward", what, self._limits.forward_s
        return "audit", "the audit", self._limits.rank_s


def signs_of_life(coordinator: Coordinator) -> dict[int, tuple[str, float]]:
    """Return, by rank, its process and when its last message came, by the coordinator's clock.
    Omits ranks without a process."""
    members = coordinator._members._members
    return {
        rank: (member.incarnation, member.heard_s)
        for rank, member in members.items()
        if member.incarnation is not None
    }


def signs_of_progress(coordinator: Coordinator) -> dict[int, tuple[str, float]]:
    """Return values that change as long as a rank makes progress: by rank, its process, and when
    its last message came or, while it has commands to apply, the last applied number."""
    signs = signs_of_life(coordinator)
    window = None if coordinator._epoch_state is None else coordinator._epoch_state.window
    if window is not None:
        for rank, (incarnation, _) in signs.items():
            applied = window.applied_by(rank)
            if applied + 1 < window.next_seq:
                signs[rank] = (incarnation, -1.0 - applied)
    return signs


def _ranks(ranks: set[int]) -> str:
    return f"rank {', '.join(map(str, sorted(ranks)))}"
