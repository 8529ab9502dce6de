"""What a manager says about itself at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.core import CoreStatistics
from kvcache.tenants import TenantStatistics


@dataclass(frozen=True)
class ManagerStatistics:
    """Figures at one moment; counters since the manager was made.

    `num_blocks_refusing_reset` are the blocks that were in use when a reset was refused last. Of
    `num_asked_tokens` of requests that were let in `num_hit_tokens` were cached; requests that come
    back after a preemption do not count, and nothing does without `log_stats`. `tenants` are those
    that have or had something, where tenants are configured.
    """

    core: CoreStatistics
    num_running_requests: int
    num_preempted_requests: int
    num_free_slots: int
    num_pins: int
    num_clients: int
    num_unfinished_steps: int
    num_steps: int
    num_failed_step_reports: int
    num_preemptions: int
    num_blocks_refusing_reset: int
    model_epoch: int
    is_draining: bool
    num_asked_tokens: int = 0
    num_hit_tokens: int = 0
    tenants: tuple[TenantStatistics, ...] = ()
