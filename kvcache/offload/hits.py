"""The places of a chain of blocks in the tiers.

The answer of a hierarchy's look-up. Data only; valid until the hierarchy's next change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.core import OffloadAnswer
from kvcache.offload.keys import OffloadKey
from kvcache.offload.slots import READY, STORING
from kvcache.offload.tier_manager import TierManager

PlaceArray: TypeAlias = npt.NDArray[np.uint8]
"""A `Place` per key."""


class Place(IntEnum):
    """Where a key is. UNKNOWN: not known, because a tier is still being adopted. PEER: in another
    engine's memory; NODE: in that of another node. Hierarchies do not know these two."""

    NOWHERE = 0
    UNKNOWN = 1
    HOST = 2
    HOST_PENDING = 3
    DISK = 4
    DISK_PENDING = 5
    PEER = 6
    NODE = 7


@dataclass(frozen=True, eq=False)
class TierHits:
    """The leading keys that tiers hold or are getting, and what follows them.

    `places[i]` is the place of leading key `i`, shape `(num_keys,)`. `ends_unknown`: the next key
    may be in a tier that is still being adopted. `num_asked` keys were looked up.
    """

    places: PlaceArray
    ends_unknown: bool
    num_asked: int

    @property
    def num_keys(self) -> int:
        """Leading keys that a tier holds or is getting."""
        return len(self.places)

    @cached_property
    def num_ready(self) -> int:
        """Leading keys that are available: ready in host memory, or can be fetched from disk."""
        return _leading((self.places == Place.HOST) | (self.places == Place.DISK))

    @cached_property
    def num_in_host(self) -> int:
        """Leading keys that are ready in host memory."""
        return _leading(self.places == Place.HOST)

    @property
    def answer(self) -> OffloadAnswer:
        """HIT: all leading keys are available. HIT_PENDING: some are pending. RETRY: there are
        none, but a tier is still being adopted. MISS: there are none."""
        if self.num_keys:
            is_whole = self.num_ready == self.num_keys
            return OffloadAnswer.HIT if is_whole else OffloadAnswer.HIT_PENDING
        return OffloadAnswer.RETRY if self.ends_unknown else OffloadAnswer.MISS


def _leading(is_so: npt.NDArray[np.bool_]) -> int:
    """Return how many leading ones are true."""
    return len(is_so) if is_so.all() else int(is_so.argmin())


_FIRST_KEYS = 32
_GROWTH = 4


def locate(keys: Sequence[OffloadKey], host: TierManager, disk: TierManager | None) -> PlaceArray:
    """Return the place of each key, independently of the others."""
    in_host = host.states_of(keys)
    is_adopting = host.is_adopting
    places = np.full(len(keys), Place.NOWHERE, np.uint8)
    if disk is not None:
        is_adopting |= disk.is_adopting
        on_disk = disk.states_of(keys)
        places[on_disk == STORING] = Place.DISK_PENDING
        places[on_disk == READY] = Place.DISK
    if is_adopting:
        places[places == Place.NOWHERE] = Place.UNKNOWN
    places[in_host == STORING] = Place.HOST_PENDING
    places[in_host == READY] = Place.HOST
    return places


def look_up(keys: Sequence[OffloadKey], host: TierManager, disk: TierManager | None) -> TierHits:
    """Return the places of the leading keys."""
    places: list[PlaceArray] = []
    start, size, ends_unknown = 0, _FIRST_KEYS, False
    while start < len(keys):
        found = locate(keys[start : start + size], host, disk)
        ends = np.flatnonzero(found <= Place.UNKNOWN)
        if len(ends):
            end = int(ends[0])
            ends_unknown = bool(found[end] == Place.UNKNOWN)
            places.append(found[:end])
            break
        places.append(found)
        start, size = start + size, _GROWTH * size
    joined = np.concatenate(places) if places else np.empty(0, np.uint8)
    return TierHits(joined, ends_unknown, len(keys))
