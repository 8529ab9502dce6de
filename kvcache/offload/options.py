"""How large a tier is, by which rules it works, and how content moves between tiers.

From configuration and the unified plan to whoever makes tiers. Data only; whether a tier's sizes
can be meant is checked where it is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvcache.config.tenants import TenantsConfig
from kvcache.errors import ConfigurationError
from kvcache.offload.contents import LabelShape
from kvcache.offload.jobs import Deadlines
from kvcache.tenants import TenantLedger, TierShares

_TIERS = {"file": "disk"}
"""Media that configurations call otherwise."""


@dataclass(frozen=True)
class TierOptions:
    """One tier: `num_slots` slots of `blocks_per_slot` device blocks each.

    `block_bytes` is a device block's size over all ranks, for statistics. `store_after`: a key is
    stored once it has been seen so many times. `labels`: keep the labels of what is stored, and
    tell events; None: tell nothing. `tenants`: what each may take of the slots.
    """

    medium: str
    num_slots: int
    blocks_per_slot: int = 1
    policy: str = "lru"
    store_after: int = 1
    labels: LabelShape | None = None
    block_bytes: int = 0
    tenants: TenantsConfig | None = None

    def tenant_ledger(self) -> TenantLedger | None:
        """Return empty books of the tenants of the tier; raises ConfigurationError."""
        if self.tenants is None:
            return None
        tier = _TIERS.get(self.medium, self.medium)
        shares = TierShares.of(self.tenants, tier, self.num_slots, self.blocks_per_slot)
        return TenantLedger(shares, self.num_slots)


@dataclass(frozen=True)
class HierarchyOptions:
    """How content moves between host memory and disk.

    `disk_write`: spill what is about to leave host memory (`on_evict`), or all that is stored
    there (`on_store`). `spare_share` of the host slots are kept clean or free for the next stores.
    At most `max_spilling_blocks` and `max_fetching_blocks` are under way.

    Raises ConfigurationError for what cannot be meant.
    """

    disk_write: Literal["on_evict", "on_store"] = "on_evict"
    spare_share: float = 1 / 16
    max_spilling_blocks: int = 1024
    max_fetching_blocks: int = 4096
    deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        if self.disk_write not in ("on_evict", "on_store"):
            raise ConfigurationError(
                f"disk_write is {self.disk_write!r}: choose on_evict or on_store"
            )
        if not 0 <= self.spare_share <= 1:
            raise ConfigurationError(f"spare_share is {self.spare_share}: give 0.0 to 1.0")
        if self.max_spilling_blocks < 1 or self.max_fetching_blocks < 1:
            raise ConfigurationError(
                f"at most {self.max_spilling_blocks} blocks spilled and "
                f"{self.max_fetching_blocks} fetched at once: both must be at least 1"
            )
