"""A view of a running coordinator's cache, for commands: pins, and the users of each block.

Made on request, never in a step. Changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import Int32Array
from kvcache.base.errors import NotRunningError
from kvcache.manager import KVCacheManager
from kvcache.metrics.ages import AgeMeter


@dataclass(frozen=True)
class PinStatus:
    """A pin, which ends in `remaining_s`."""

    pin_id: int
    num_tokens: int
    num_blocks: int
    remaining_s: float


@dataclass(frozen=True, eq=False)
class CacheInspection:
    """`reference_counts[b]` requests and pins use block `b`; it has been out of use for `idle_s[b]`
    seconds; -1: in use, empty, or unknown (metrics are off). Shapes `(num_blocks,)`."""

    model_epoch: int
    is_draining: bool
    pins: tuple[PinStatus, ...]
    reference_counts: Int32Array
    idle_s: npt.NDArray[np.float32]


def inspect_cache(
    manager: KVCacheManager | None, now_s: float, ages: AgeMeter | None
) -> CacheInspection:
    """Return a view of a coordinator's cache; `now_s` by the manager's clock.

    Raises NotRunningError if there is no manager because an epoch is beginning.
    """
    if manager is None:
        raise NotRunningError("the coordinator has no cache at the moment: wait until it is ready")
    pins = tuple(
        PinStatus(pin.pin_id, pin.num_tokens, pin.num_blocks, max(0.0, pin.expires_at_s - now_s))
        for pin, _ in manager.control.pinned.values()
        if pin.expires_at_s > now_s
    )
    counts = manager.control.users_of_blocks()
    idle_s = np.full(len(counts), -1, np.float32) if ages is None else ages.idle_s(len(counts))
    return CacheInspection(manager.model_epoch, manager.is_draining, pins, counts, idle_s)
