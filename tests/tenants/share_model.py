"""A slow model of the rule of shares, block by block, for comparison in walks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvcache.manager import KVCacheManager


@dataclass(frozen=True)
class Holding:
    """The blocks of a tenant, and how many of them are unused."""

    guaranteed: int
    limit: int
    weight: float
    blocks: int
    unheld: int

    @property
    def in_use(self) -> int:
        return self.blocks - self.unheld


Holdings = Mapping[str, Holding]


def holdings_of(manager: KVCacheManager) -> dict[str, Holding]:
    """Return the present counts of every tenant, by name."""
    return {
        each.name: Holding(
            each.guaranteed_blocks,
            each.limit_blocks,
            each.weight,
            each.num_held_blocks,
            each.num_cached_blocks,
        )
        for each in manager.statistics().tenants
    }


def has_room(holdings: Holdings, name: str, num_blocks: int, pool_blocks: int) -> bool:
    """Return whether a tenant may use `num_blocks` more.

    It must stay within its limit, and leave the others' guarantees free.
    """
    mine = holdings[name]
    if mine.in_use + num_blocks > mine.limit:
        return False
    kept = sum(max(h.in_use, h.guaranteed) for other, h in holdings.items() if other != name)
    own = max(mine.in_use + num_blocks, mine.guaranteed)
    return kept + own <= pool_blocks


def after_taking(
    holdings: Holdings, name: str, num_blocks: int, num_fresh: int
) -> dict[str, Holding]:
    """Return the counts after a tenant has taken blocks; `num_fresh` of them had no owner."""
    left = dict(holdings)
    mine = left[name]
    over = max(0, mine.blocks + num_blocks - mine.limit)
    left[name] = replace(mine, blocks=mine.blocks - over, unheld=mine.unheld - over)
    for _ in range(num_blocks - num_fresh - over):
        giver = _next_giver(left, name, num_blocks)
        has = left[giver]
        left[giver] = replace(has, blocks=has.blocks - 1, unheld=has.unheld - 1)
    mine = left[name]
    left[name] = replace(mine, blocks=mine.blocks + num_blocks)
    return left


def _next_giver(left: Holdings, taker: str, num_blocks: int) -> str:
    """Return the tenant that loses a block: most over its share, with the taker's new blocks.

    The taker may lose its own; others only blocks above their guarantees.
    """
    levels = {}
    for name, has in left.items():
        excess = has.blocks - has.guaranteed + (num_blocks if name == taker else 0)
        if has.unheld and (name == taker or excess > 0):
            levels[name] = excess / has.weight
    highest = max(levels.values())
    return next(name for name in left if levels.get(name) == highest)
