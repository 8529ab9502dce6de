"""One tenant in one tier: what it has, and what happened to it.

Under the ledger, which alone changes it. Refuses to know blocks: it counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.policies import EvictionPolicy
from kvcache.tenants.shares import TenantShare


@dataclass(frozen=True)
class TenantStatistics:
    """Statistics of one tenant in one tier. Counters since the tenant was last added.

    Of its `num_held_blocks`, `num_cached_blocks` are not in use and can be evicted. Of
    `num_asked_tokens` of its requests `num_hit_tokens` were cached: on the device all tokens of its
    look-ups, and what was loaded is hit there (with `log_stats`); in a tier below those tokens of
    admitted requests that no tier above had, and what was loaded from there. `num_evicted_blocks`
    of it went, `num_evicted_for_blocks` went for what it asked. It was refused `num_refusals`
    times; `last_refusal` says the numbers and the remedy.
    """

    name: str
    tier: str
    guaranteed_blocks: int
    limit_blocks: int
    weight: float
    num_held_blocks: int
    num_cached_blocks: int
    num_pinned_blocks: int
    num_asked_tokens: int
    num_hit_tokens: int
    num_evicted_blocks: int
    num_evicted_for_blocks: int
    num_refusals: int
    last_refusal: str


class TenantAccount:
    """Counts of one tenant.

    Invariants: `num_blocks` are all blocks that it has, `num_unheld` those of them that an eviction
    policy has; `policy` orders these. `num_ties` counts who else knows the account, which is
    remembered until nobody does. `hopeless_blocks`: how many it was refused last, if so many will
    never fit, otherwise 0.
    """

    __slots__ = (
        "hopeless_blocks",
        "last_refusal",
        "name",
        "num_asked_tokens",
        "num_blocks",
        "num_evicted",
        "num_evicted_for",
        "num_hit_tokens",
        "num_pinned",
        "num_refusals",
        "num_ties",
        "num_unheld",
        "number",
        "policy",
        "share",
    )

    def __init__(self, name: str, number: int, share: TenantShare) -> None:
        """Have nothing."""
        self.name = name
        self.number = number
        self.share = share
        self.policy: EvictionPolicy | None = None
        self.num_blocks = 0
        self.num_unheld = 0
        self.num_pinned = 0
        self.num_ties = 0
        self.num_asked_tokens = 0
        self.num_hit_tokens = 0
        self.num_evicted = 0
        self.num_evicted_for = 0
        self.num_refusals = 0
        self.last_refusal = ""
        self.hopeless_blocks = 0

    @property
    def num_in_use(self) -> int:
        """Blocks that requests, pins or copies of the tenant hold."""
        return self.num_blocks - self.num_unheld

    @property
    def num_reserved(self) -> int:
        """Blocks that others must leave to it: what it is guaranteed and does not use."""
        return max(0, self.share.guaranteed_blocks - self.num_blocks + self.num_unheld)

    @property
    def level(self) -> float:
        """How far the tenant is above its guarantee, by its weight."""
        return (self.num_blocks - self.share.guaranteed_blocks) / self.share.weight

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left of the tenant but its counters."""
        return not (self.num_blocks or self.num_ties or self.num_pinned)

    @property
    def has_statistics(self) -> bool:
        """Whether anything ever happened to the tenant that was counted."""
        return bool(self.num_asked_tokens or self.num_evicted_for or self.num_refusals)

    def refuse(self, reason: str) -> None:
        """Note that a request found no room, and why."""
        self.num_refusals += 1
        self.last_refusal = reason

    def statistics(self, tier: str, shown_name: str) -> TenantStatistics:
        """Return frozen statistics."""
        return TenantStatistics(
            shown_name,
            tier,
            self.share.guaranteed_blocks,
            self.share.limit_blocks,
            self.share.weight,
            self.num_blocks,
            self.num_unheld,
            self.num_pinned,
            self.num_asked_tokens,
            self.num_hit_tokens,
            self.num_evicted,
            self.num_evicted_for,
            self.num_refusals,
            self.last_refusal,
        )
