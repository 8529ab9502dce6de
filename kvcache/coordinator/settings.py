"""What a coordinator is made from, and what it says about itself: frozen records.

Stands before coordinator.py. Every queue has its limit here, every wait its time in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcache.errors import ConfigurationError
from kvcache.manager.statistics import ManagerStatistics
from kvcache.specs import require_count


@dataclass(frozen=True)
class CoordinatorSettings:
    """The plan's identity, limits and times.

    `max_unacknowledged`: command messages that some rank has not applied; beyond it clients wait.
    `max_client_steps`: steps of one client that it has not acknowledged; beyond it they wait.
    A rank that is silent for `worker_silence_s` makes steps fail with an error that names it; a
    client that is silent for `client_silence_s` is given up. `resend_s`: how long a message goes
    unanswered before it is repeated; `heartbeat_s`: how long a rank is silent before it is asked.
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

    def __post_init__(self) -> None:
        for name in ("num_ranks", "max_unacknowledged", "max_client_steps", "max_clients"):
            require_count(name, getattr(self, name))
        for name in ("resend_s", "heartbeat_s", "worker_silence_s", "client_silence_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}: set it above 0")
        if not self.fingerprint:
            raise ConfigurationError("fingerprint is empty: pass that of the plan of all ranks")


@dataclass
class ReignCounts:
    """What became of steps, messages and forwards in one epoch; counted on by its reign."""

    num_steps: int = 0
    num_refused_steps: int = 0
    num_failed_forwards: int = 0
    num_dropped: int = 0
    last_dropped: str = ""


@dataclass(frozen=True)
class CoordinatorStatistics:
    """Figures at one moment; the counters are since the coordinator was made.

    `num_dropped` messages were foreign, stale or impossible, `last_dropped` says why the last one
    was; `num_unattached` were sent back to clients that must attach first.
    """

    phase: str = "new"
    epoch: int = 0
    problem: str = ""
    num_epochs_run: int = 0
    num_clients: int = 0
    num_steps: int = 0
    num_refused_steps: int = 0
    num_failed_forwards: int = 0
    num_open_jobs: int = 0
    last_seq: int = 0
    applied_seq: int = 0
    num_unacknowledged: int = 0
    num_resent: int = 0
    num_unattached: int = 0
    num_dropped: int = 0
    last_dropped: str = ""
    manager: ManagerStatistics | None = None

    def plus(self, *, epochs_run: int = 0, unattached: int = 0) -> CoordinatorStatistics:
        """Return these figures with counters moved on."""
        return replace(
            self,
            num_epochs_run=self.num_epochs_run + epochs_run,
            num_unattached=self.num_unattached + unattached,
        )

    def plus_dropped(self, reason: str) -> CoordinatorStatistics:
        """Return these figures with one more message dropped."""
        return replace(self, num_dropped=self.num_dropped + 1, last_dropped=reason)

    def with_reign(self, counts: ReignCounts, num_resent: int) -> CoordinatorStatistics:
        """Return these figures with those of one epoch added."""
        return replace(
            self,
            num_steps=self.num_steps + counts.num_steps,
            num_refused_steps=self.num_refused_steps + counts.num_refused_steps,
            num_failed_forwards=self.num_failed_forwards + counts.num_failed_forwards,
            num_resent=self.num_resent + num_resent,
            num_dropped=self.num_dropped + counts.num_dropped,
            last_dropped=counts.last_dropped or self.last_dropped,
        )
