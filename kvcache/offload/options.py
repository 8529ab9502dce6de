"""Size and rules of a tier, and rules of the transfers between tiers.

Made from the configuration and the unified plan. Each number is checked here, their combination
when a tier is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvcache.base.arguments import as_int, as_number, as_text, check_fields, check_kind
from kvcache.base.errors import ConfigurationError, shown
from kvcache.config.tenants import TenantsConfig
from kvcache.offload.contents import LabelShape
from kvcache.offload.jobs import Deadlines
from kvcache.tenants import TenantLedger, TierShares

_TIERS = {"file": "disk"}
"""Media with another name in configurations."""


@dataclass(frozen=True)
class TierOptions:
    """One tier: `num_slots` slots of `blocks_per_slot` device blocks each.

    `block_bytes` is a device block's size over all ranks, for statistics. `store_after`: how often
    a key must be seen before it is stored. `labels`: keep the labels of stored blocks, and publish
    events; None: publish nothing. `tenants`: their shares of the slots. Options without slots
    describe a missing tier. Raises ConfigurationError for wrong types
    and invalid numbers.
    """

    medium: str
    num_slots: int
    blocks_per_slot: int = 1
    policy: str = "lru"
    store_after: int = 1
    labels: LabelShape | None = None
    block_bytes: int = 0
    tenants: TenantsConfig | None = None

    def __post_init__(self) -> None:
        check_fields(self, as_text, "medium", "policy")
        check_fields(self, as_int, "blocks_per_slot", "store_after", at_least=1)
        check_fields(self, as_int, "num_slots", "block_bytes")
        check_kind("labels", self.labels, (LabelShape, type(None)), ConfigurationError)
        check_kind("tenants", self.tenants, (TenantsConfig, type(None)), ConfigurationError)

    def tenant_ledger(self) -> TenantLedger | None:
        """Return an empty ledger of the tier's tenants; raises ConfigurationError."""
        if self.tenants is None:
            return None
        tier = _TIERS.get(self.medium, self.medium)
        shares = TierShares.of(self.tenants, tier, self.num_slots, self.blocks_per_slot)
        return TenantLedger(shares, self.num_slots)


@dataclass(frozen=True)
class HierarchyOptions:
    """Rules of the transfers between host memory and disk.

    `disk_write`: spill the next victims of host memory (`on_evict`), or all that is stored there
    (`on_store`). `spare_share` of the host slots are kept clean or free for the next stores. At
    most `max_spilling_blocks` and `max_fetching_blocks` are in transit.

    Raises ConfigurationError for invalid values.
    """

    disk_write: Literal["on_evict", "on_store"] = "on_evict"
    spare_share: float = 1 / 16
    max_spilling_blocks: int = 1024
    max_fetching_blocks: int = 4096
    deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        disk_write: object = self.disk_write
        if not isinstance(disk_write, str) or disk_write not in ("on_evict", "on_store"):
            raise ConfigurationError(
                f"disk_write is {shown(disk_write)}: choose on_evict or on_store"
            )
        check_fields(self, as_number, "spare_share", at_least=0, at_most=1)
        check_fields(self, as_int, "max_spilling_blocks", "max_fetching_blocks", at_least=1)
        check_kind("deadlines", self.deadlines, Deadlines, ConfigurationError)
