"""Where keys are, over all tiers below the device.

Called by the hierarchy, many times per step, for long prompts that are often not there at all, so
keys are looked up some at a time. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcache.offload.hits import Place, PlaceArray, TierHits
from kvcache.offload.keys import OffloadKey
from kvcache.offload.slot_table import READY, STORING
from kvcache.offload.tier_manager import TierManager

_FIRST_KEYS = 32
_GROWTH = 4


def locate(keys: Sequence[OffloadKey], host: TierManager, disk: TierManager | None) -> PlaceArray:
    """Return where each of the keys is, whatever comes before it."""
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
    """Return what the tiers hold of the leading keys."""
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
