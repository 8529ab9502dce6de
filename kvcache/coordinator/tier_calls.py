"""What a manager and its tiers say to each other, as values: for who listens, and writes it down.

A manager calls its tiers within a step or call, the tiers call its `PrefixLoads` outside of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvcache.core import OffloadHit
from kvcache.requests.request import Request


@dataclass(frozen=True)
class LookedUp:
    """The tiers were asked what they have behind a request's hit, and answered."""

    request_id: str
    num_device_tokens: int
    answer: OffloadHit


@dataclass(frozen=True)
class SwappedOut:
    """The tiers were told of a request that is preempted by swap."""

    request_id: str
    num_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True)
class Gone:
    """The tiers were told that a request has gone, and released these loads at that moment."""

    request_id: str
    released_loads: tuple[int, ...] = ()


TierCall: TypeAlias = LookedUp | SwappedOut | Gone


@dataclass(frozen=True, eq=False)
class WantedLoad:
    """What `PrefixLoads.begin` is asked for."""

    request: Request
    num_tokens: int
    num_spare_blocks: int = 0
    has_tail: bool = False
