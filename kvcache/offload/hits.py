"""What the tiers below the device hold of a chain of blocks.

The answer of a hierarchy's look-up, on the way to a step's `OffloadHooks`. Data only; true until
the hierarchy's next change.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.core import OffloadAnswer

PlaceArray: TypeAlias = npt.NDArray[np.uint8]
"""A `Place` per key."""


class Place(IntEnum):
    """Where a key is. UNKNOWN: in no tier that knows, but one is still being adopted."""

    NOWHERE = 0
    UNKNOWN = 1
    HOST = 2
    HOST_PENDING = 3
    DISK = 4
    DISK_PENDING = 5


@dataclass(frozen=True, eq=False)
class TierHits:
    """The leading keys that some tier holds or is getting, and what comes behind.

    `places[i]` is where leading key `i` is, shape `(num_keys,)`. `ends_unknown`: behind them comes
    a key that a tier may hold which is still being adopted. `num_asked` keys were asked for.
    """

    places: PlaceArray
    ends_unknown: bool
    num_asked: int

    @property
    def num_keys(self) -> int:
        """Leading keys that some tier holds or is getting."""
        return len(self.places)

    @cached_property
    def num_ready(self) -> int:
        """Leading keys that can be had now: ready in host memory, or to be fetched from disk."""
        return _leading((self.places == Place.HOST) | (self.places == Place.DISK))

    @cached_property
    def num_in_host(self) -> int:
        """Leading keys that are ready in host memory."""
        return _leading(self.places == Place.HOST)

    @property
    def answer(self) -> OffloadAnswer:
        """HIT: all leading keys can be had now. HIT_PENDING: some are pending. RETRY: there are
        none, but a tier is still being adopted. MISS: there are none."""
        if self.num_keys:
            is_whole = self.num_ready == self.num_keys
            return OffloadAnswer.HIT if is_whole else OffloadAnswer.HIT_PENDING
        return OffloadAnswer.RETRY if self.ends_unknown else OffloadAnswer.MISS


def _leading(is_so: npt.NDArray[np.bool_]) -> int:
    """Return how many leading ones are so."""
    return len(is_so) if is_so.all() else int(is_so.argmin())
