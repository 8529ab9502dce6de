"""The contents of a tier that no lower tier has, and the order in which they are written there.

The hierarchy asks for the next keys when it plans spills. Starts no transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from kvcache.offload.keys import OffloadKey
from kvcache.offload.slots import NO_ADDRESS
from kvcache.offload.tier_manager import TierManager


class SpillQueue:
    """The dirty contents of a tier, and the next ones to write to the lower tier.

    The next victims must be clean in time: a share of all slots, and as many as the last store
    lacked. With write-through, everything stored goes to disk as well.
    """

    def __init__(self, tier: TierManager, spare_share: float) -> None:
        """Keep `spare_share` of the slots of `tier` clean or free."""
        self._slots = tier.slots
        self._eviction = tier.eviction
        self._num_spare_slots = int(spare_share * tier.slots.num_slots)
        self._num_missing_slots = 0
        self._unwritten: dict[OffloadKey, None] = {}
        self._is_idle = True

    def mark_dirty(self, keys: Sequence[OffloadKey]) -> None:
        """Mark ready keys as dirty: no lower tier has them. Skips others."""
        self._slots.mark_dirty(self._slots.ready(keys))

    def mark_clean(self, keys: Sequence[OffloadKey]) -> None:
        """Mark ready keys as clean. Skips others."""
        self._slots.mark_clean(self._slots.ready(keys))

    def owed(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the keys that are dirty and not being spilled, in order. No mutation."""
        slots, addresses = self._slots, self._slots.addresses_of(keys)
        is_owed = slots.is_dirty[addresses] & (slots.num_spills[addresses] == 0)
        is_owed &= addresses != NO_ADDRESS
        return [keys[i] for i in np.flatnonzero(is_owed).tolist()]

    def has_next(self) -> bool:
        """Return whether `next` may have an answer; cheap while it has none."""
        if not self._is_idle:
            self._is_idle = not self._ahead() and not self._unwritten
        return not self._is_idle

    def pause(self) -> None:
        """Record that there is no room to spill to until something changes."""
        self._is_idle = True

    def wake(self) -> None:
        """Record a change: there may be something to spill."""
        self._is_idle = False

    def note_shortage(self, num_refused: int) -> None:
        """Record that a store found no room for this many keys."""
        num_slots = -(-num_refused // self._slots.blocks_per_slot)
        self._num_missing_slots = min(num_slots, self._slots.num_slots)
        self._is_idle = False

    def write_through(self, keys: Iterable[OffloadKey]) -> None:
        """Request that these keys of the tier are soon in the lower one. Keys that leave the tier
        are skipped."""
        self._unwritten.update(dict.fromkeys(keys))

    def next(self, room: int) -> list[OffloadKey]:
        """Return up to `room` dirty keys that are not being spilled: the most urgent ones, in the
        order of their prefixes, so that the lower tier evicts the end of a prefix first."""
        if self._is_idle:
            return []
        wanted = dict.fromkeys(self._ahead()[:room][::-1])
        while self._unwritten and len(wanted) < room:
            waiting = list(islice(self._unwritten, room - len(wanted)))
            wanted.update(dict.fromkeys(self.owed(waiting)))
            for key in waiting:
                del self._unwritten[key]
        self._is_idle = not wanted
        self._num_missing_slots = 0
        return list(wanted)

    def clear(self) -> None:
        """Forget all requests."""
        self._unwritten.clear()
        self._num_missing_slots = 0

    def _ahead(self) -> list[OffloadKey]:
        """Return the dirty keys in the next victims that are not being spilled, in that order."""
        wanted = max(self._num_spare_slots, self._num_missing_slots)
        num_slots = max(0, wanted - len(self._slots.free_slots))
        addresses = self._slots.addresses_in(self._eviction.dirty_ahead(num_slots))
        return self._slots.keys_at(addresses[self._slots.is_dirty[addresses]])
