"""Statistics of tiers. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache.tenants import TenantStatistics


@dataclass(frozen=True)
class TierStatistics:
    """Statistics of one tier. Blocks are device blocks; counters are since the start.

    `num_pending` are being stored, `num_held` are ready and read by a load or a spill. Slots in
    quarantine hold dropped content that a job still uses. `num_hits` and `num_misses` count keys
    that `lookup` was asked for; `num_skipped` were not stored because they had not been seen often
    enough, `num_refused` because there was no room. `num_copies` slots hold what another node
    keeps. `tenants` count slots.
    """

    medium: str
    num_slots: int
    blocks_per_slot: int
    num_free_slots: int
    num_ready: int
    num_pending: int
    num_held: int
    num_dirty: int
    num_quarantined_slots: int
    num_hits: int = 0
    num_misses: int = 0
    num_stored: int = 0
    num_failed_stores: int = 0
    num_loaded: int = 0
    num_evicted: int = 0
    num_forgotten: int = 0
    num_skipped: int = 0
    num_refused: int = 0
    num_copies: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    tenants: tuple[TenantStatistics, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Hits over look-ups, 0 to 1; 0.0 without any."""
        return self.num_hits / max(1, self.num_hits + self.num_misses)


@dataclass(frozen=True)
class HierarchyStatistics:
    """Statistics of all tiers below the device. `open_jobs` by kind; `num_overdue` of them are
    late.

    Since the start, `num_failed_jobs` have failed, wholly or in part, and `num_expired_jobs` were
    late. The disk rested `num_disk_rests` times; `disk_problem` says why it rests now, if it does.
    """

    host: TierStatistics
    disk: TierStatistics | None
    open_jobs: dict[str, int] = field(default_factory=dict)
    num_overdue: int = 0
    num_failed_jobs: int = 0
    num_expired_jobs: int = 0
    num_disk_rests: int = 0
    disk_problem: str = ""

    @property
    def by_name(self) -> dict[str, TierStatistics]:
        """Each tier there is, `host` first, then `disk`."""
        return {"host": self.host} | ({} if self.disk is None else {"disk": self.disk})

    @property
    def num_ready(self) -> int:
        """Blocks that are ready in some tier; a block in two tiers counts twice."""
        return sum(tier.num_ready for tier in self.by_name.values())
