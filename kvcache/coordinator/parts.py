"""The services of a coordinator: made once, and used by every epoch.

The tiers of an epoch are made from `OffloadParts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcache.base.clock import Clock
from kvcache.coordinator.event_feed import EventFeed
from kvcache.coordinator.settings import OffloadSettings
from kvcache.coordinator.step_recorder import StepRecorder
from kvcache.coordinator.tier_hits import TierHitFinder
from kvcache.manager import KVCacheManager
from kvcache.offload.hierarchy import TierHierarchy
from kvcache.protocol.state_store import StateStore

ManagerFactory = Callable[[int], KVCacheManager]
"""Makes a cold manager for a new epoch; the argument is the model epoch."""


@dataclass(frozen=True)
class OffloadParts:
    """The parts of each epoch's tiers. `make_tiers` gets the source of job numbers."""

    settings: OffloadSettings
    finder: TierHitFinder
    make_tiers: Callable[[Callable[[], int]], TierHierarchy]


@dataclass(frozen=True, eq=False)
class CoordinatorParts:
    """The services that a coordinator uses. `recorder` gets every change of a manager, `events` the
    cache events; `offload` describes the tiers below the device, None without tiers."""

    make_manager: ManagerFactory
    clock: Clock
    state_store: StateStore
    recorder: StepRecorder = field(default_factory=StepRecorder)
    events: EventFeed = field(default_factory=EventFeed)
    offload: OffloadParts | None = None
