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
    that have or had something, where tenants are configured. `num_loads` of tiers and `num_holds`,
    for clients that come back, have blocks, too.
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
    num_loads: int = 0
    num_holds: int = 0

    def users(self) -> str:
        """Say how many blocks are in use, and by whom: what a reset waits for."""
        core = self.core
        users = {
            "running requests": self.num_running_requests,
            "pins": self.num_pins,
            "loads from tiers": self.num_loads,
            "prefixes held for clients that come back": self.num_holds,
            "copies for forks that wait for the next step": core.references.get("fork", 0),
            "transfers": core.num_in_flight_blocks,
        }
        named = [f"{user} ({number:,})" for user, number in users.items() if number]
        num_used = core.num_blocks - core.num_free_blocks
        return f"{num_used:,} blocks are in use by {', '.join(named) or 'no known user'}"
