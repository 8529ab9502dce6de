"""Phases, settings and statistics of a coordinator: frozen records.

Every queue has its limit here, every wait its time in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from kvcache.base.errors import ConfigurationError
from kvcache.coordinator.step_recorder import RecorderStatistics
from kvcache.manager.statistics import ManagerStatistics
from kvcache.offload.statistics import HierarchyStatistics
from kvcache.specs import require_count

AUDIT_MODES = ("off", "sample", "on")


class Phase(Enum):
    """What a coordinator is doing."""

    NEW = "new"
    FENCING = "fencing"
    COLLECTING = "collecting"
    RUNNING = "running"
    SUPERSEDED = "superseded"
    CLOSED = "closed"


OBEYED = (Phase.FENCING, Phase.COLLECTING, Phase.RUNNING)
"""The phases in which the coordinator accepts messages of workers."""


@dataclass(frozen=True)
class AuditSettings:
    """`sample`: some blocks every `interval_s`. `on`: all blocks and all state with every message.

    Raises ConfigurationError for an unknown mode or an invalid interval.
    """

    mode: str = "off"
    interval_s: float = 1.0

    def __post_init__(self) -> None:
        if self.mode not in AUDIT_MODES:
            raise ConfigurationError(
                f"audit mode {self.mode!r} is not known: choose {', '.join(AUDIT_MODES)}"
            )
        if not self.interval_s > 0:
            raise ConfigurationError(f"audit interval_s is {self.interval_s!r}: set it above 0")


@dataclass
class AuditCounts:
    """Results of audits: finished ones, wrong blocks, and the last finding."""

    num_audits: int = 0
    num_wrong_blocks: int = 0
    last_finding: str = ""


@dataclass(frozen=True)
class CoordinatorSettings:
    """The plan's identity, limits and times.

    `max_unacknowledged`: command messages that some rank has not applied; beyond it clients wait.
    `max_client_steps`: steps of one client that it has not acknowledged; beyond it they wait. A
    rank that is silent for `worker_silence_s` makes steps fail with an error that names it; a
    client that is silent for `client_silence_s` is given up. `resend_s`: how long a message stays
    unanswered before it is repeated; `heartbeat_s`: how long a rank is silent before it is asked.
    After a warm start steps wait at most `reattach_s` for the clients of the previous epoch; a
    client whose connection has ended has as long to return (see `client_return_s`). If a rank sends
    no new labels for `labels_s`, the epoch begins cold. `layout_fingerprints`, by rank, must match
    those of labels; empty ones are not compared.
    """

    num_ranks: int
    fingerprint: str
    is_content_checking: bool = False
    max_unacknowledged: int = 64
    max_client_steps: int = 64
    max_clients: int = 64
    resend_s: float = 0.5
    heartbeat_s: float = 1.0
    worker_silence_s: float = 10.0
    client_silence_s: float = 60.0
    reattach_s: float = 5.0
    labels_s: float = 60.0
    layout_fingerprints: tuple[str, ...] = ()
    audit: AuditSettings = AuditSettings()

    def __post_init__(self) -> None:
        for name in ("num_ranks", "max_unacknowledged", "max_client_steps", "max_clients"):
            require_count(name, getattr(self, name))
        for name in ("resend_s", "heartbeat_s", "worker_silence_s", "client_silence_s", "labels_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}: set it above 0")
        if not self.reattach_s >= 0:
            raise ConfigurationError(f"reattach_s is {self.reattach_s!r}: set it to 0 or above")
        if not self.fingerprint:
            raise ConfigurationError("fingerprint is empty: pass that of the plan of all ranks")

    @property
    def client_return_s(self) -> float:
        """How long a client may be silent after its connection has ended before it is given up.

        At least two heartbeats, because a client that has connected again sends one.
        """
        return min(self.client_silence_s, max(self.reattach_s, 2 * self.heartbeat_s))


class SwapWhen(Enum):
    """Whether a preempted request is swapped. `AUTO`: if that is cheaper."""

    NEVER = "never"
    AUTO = "auto"
    ALWAYS = "always"


@dataclass(frozen=True)
class SwapRule:
    """Decides whether to swap a request that asks for it.

    Recomputing costs `lost tokens / prefill_tokens_per_s` seconds of every rank. Swapping moves
    each block down and up again: `2 * blocks * block_bytes / transfer_bytes_per_s`, during
    forwards, on all ranks at once; `block_bytes` is the size of a block on the largest rank. The
    cheaper one is done. Swapped blocks are kept for `hold_s`.
    """

    when: SwapWhen = SwapWhen.AUTO
    prefill_tokens_per_s: float = 10_000.0
    transfer_bytes_per_s: float = 10e9
    block_bytes: int = 0
    hold_s: float = 600.0

    def is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """Return whether to move `num_blocks` instead of computing `num_tokens`."""
        if self.when is not SwapWhen.AUTO:
            return self.when is SwapWhen.ALWAYS
        move_s = 2 * num_blocks * self.block_bytes / self.transfer_bytes_per_s
        return move_s < num_tokens / self.prefill_tokens_per_s


@dataclass(frozen=True)
class OffloadSettings:
    """When tiers are used. `min_load_tokens` is the least worth waiting for; loaded blocks stay for
    `hold_s` until their request comes, which waits at most `wait_s`. The adoption of tier contents
    from before the epoch may take `adoption_s`. `swap` decides about preempted requests."""

    min_load_tokens: int = 1
    hold_s: float = 5.0
    wait_s: float = 30.0
    adoption_s: float = 30.0
    swap: SwapRule = field(default_factory=SwapRule)


@dataclass(frozen=True)
class OffloadStatistics:
    """Statistics of the tiers and of the requests that wait for them.

    `num_loaded_tokens` were loaded instead of computed, `num_fetched_tokens` of them from files.
    `num_adopted_blocks` were there when the epoch began.

    `num_swapped_out` preempted requests had unhashed blocks stored; `num_swapped_in` of them
    continued from those; `num_swap_saved_tokens` were not computed again because of that, in
    addition to hits.
    """

    tiers: HierarchyStatistics
    num_waiting_requests: int = 0
    num_loaded_tokens: int = 0
    num_fetched_tokens: int = 0
    num_loads_given_up: int = 0
    num_failed_jobs: int = 0
    last_failure: str = ""
    num_adopted_blocks: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_swap_saved_tokens: int = 0


@dataclass
class EpochCounts:
    """Counts of steps, messages and forwards in one epoch; counted by its epoch state."""

    num_steps: int = 0
    num_refused_steps: int = 0
    num_no_room: int = 0
    num_failed_forwards: int = 0
    num_dropped: int = 0
    last_dropped: str = ""
    audits: AuditCounts = field(default_factory=AuditCounts)


@dataclass(frozen=True)
class CoordinatorStatistics:
    """Statistics at one moment; the counters are since the coordinator was made.

    `num_no_room` counts the requests that `StepResult.no_room` named; one that is sent again counts
    in each step.

    `num_dropped` messages were foreign, stale or impossible, `last_dropped` says why the last one
    was; `num_unattached` came from clients that must attach first. `num_kept_blocks` were cached
    when the epoch began, and `cold_reason` says why none was; `waiting_for_clients` are awaited
    before the first step of a warm epoch. `num_audits` have compared labels with the coordinator's
    state, and found `num_wrong_blocks`; `last_finding` describes the last ones.
    """

    phase: str = "new"
    epoch: int = 0
    problem: str = ""
    num_epochs_run: int = 0
    num_clients: int = 0
    num_steps: int = 0
    num_refused_steps: int = 0
    num_no_room: int = 0
    num_failed_forwards: int = 0
    num_open_jobs: int = 0
    last_seq: int = 0
    applied_seq: int = 0
    num_unacknowledged: int = 0
    num_resent: int = 0
    num_unattached: int = 0
    num_dropped: int = 0
    last_dropped: str = ""
    num_kept_blocks: int = 0
    cold_reason: str = ""
    waiting_for_clients: tuple[str, ...] = ()
    num_audits: int = 0
    num_wrong_blocks: int = 0
    last_finding: str = ""
    manager: ManagerStatistics | None = None
    offload: OffloadStatistics | None = None
    events: dict[str, Any] | None = None
    recorder: RecorderStatistics | None = None

    def plus(self, *, epochs_run: int = 0, unattached: int = 0) -> CoordinatorStatistics:
        """Return these statistics with counters increased."""
        return replace(
            self,
            num_epochs_run=self.num_epochs_run + epochs_run,
            num_unattached=self.num_unattached + unattached,
        )

    def plus_dropped(self, reason: str) -> CoordinatorStatistics:
        """Return these statistics with one more message dropped."""
        return replace(self, num_dropped=self.num_dropped + 1, last_dropped=reason)

    def with_epoch(self, counts: EpochCounts, num_resent: int) -> CoordinatorStatistics:
        """Return these statistics with those of one epoch added."""
        return replace(
            self,
            num_steps=self.num_steps + counts.num_steps,
            num_refused_steps=self.num_refused_steps + counts.num_refused_steps,
            num_no_room=self.num_no_room + counts.num_no_room,
            num_failed_forwards=self.num_failed_forwards + counts.num_failed_forwards,
            num_resent=self.num_resent + num_resent,
            num_dropped=self.num_dropped + counts.num_dropped,
            last_dropped=counts.last_dropped or self.last_dropped,
            num_audits=self.num_audits + counts.audits.num_audits,
            num_wrong_blocks=self.num_wrong_blocks + counts.audits.num_wrong_blocks,
            last_finding=counts.audits.last_finding or self.last_finding,
        )
