"""The settings and factories from which an epoch's tiers are made.

Each epoch makes a new `Offloading` from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcache.coordinator.partial_block_swap import SwapRule
from kvcache.coordinator.tier_hits import TierHitFinder
from kvcache.offload.hierarchy import TierHierarchy


@dataclass(frozen=True)
class OffloadSettings:
    """When tiers are used. `min_load_tokens` is the least worth waiting for; what was loaded stays
    for `hold_s` until its request comes, which waits `wait_s` at most. What tiers hold from before
    the epoch is waited for `adoption_s`. `swap` says what of preempted requests is kept."""

    min_load_tokens: int = 1
    hold_s: float = 5.0
    wait_s: float = 30.0
    adoption_s: float = 30.0
    swap: SwapRule = field(default_factory=SwapRule)


@dataclass(frozen=True)
class OffloadParts:
    """What the tiers of each epoch are made from. `make_tiers` is given who numbers jobs."""

    settings: OffloadSettings
    finder: TierHitFinder
    make_tiers: Callable[[Callable[[], int]], TierHierarchy]
