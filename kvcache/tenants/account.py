"""The counts of one tenant in one tier.

Only the ledger changes an account. Knows no block ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.policies import EvictionPolicy
from kvcache.tenants.shares import TenantShare


@dataclass(frozen=True)
class TenantStatistics:
    """Statistics of one tenant in one tier. Counters since the tenant was last added.

    Of its `num_held_blocks`, `num_cached_blocks` are not in use and can be evicted. Its requests
    queried `num_asked_tokens` tokens and hit `num_hit_tokens`. On the device these are all tokens
    of its look-ups, and loaded blocks are hit there (with `log_stats`); in a tier below, the tokens
    of admitted requests that no tier above had, and those loaded from this tier. It lost
    `num_evicted_blocks`; `num_evicted_for_blocks` were evicted for its requests. It was refused
    room `num_refusals` times; `last_refusal` has the numbers and the remedy of the last one.
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

    Invariants: `num_blocks` are all blocks that it has; `num_unheld` of them are in its eviction
    policy, `policy`. `num_ties` counts references to the account, which is remembered until it has
    none. `hopeless_blocks` is its last refused amount if that can never fit, otherwise 0.
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
        """Blocks that others must leave to it: the unused part of its guarantee."""
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
        """Whether any counter of the tenant is above 0."""
        return bool(self.num_asked_tokens or self.num_evicted_for or self.num_refusals)

    def refuse(self, reason: str) -> None:
        """Record that a request found no room, and why."""
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
