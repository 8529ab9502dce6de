"""Which host content is written to disk next.

The hierarchy plans the spill. Two reasons: slots that will be evicted next have to be
clean by then (a share of all slots, and as many as the last store found missing); or everything
that is stored is to be on disk as well. Refuses to know whether the disk has room.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from kvcache.offload.keys import OffloadKey
from kvcache.offload.tier_manager import TierManager


class SpillChoice:
    """What is to be spilled of one host tier, and whether it is worth asking again."""

    def __init__(self, host: TierManager, spare_share: float) -> None:
        """Keep `spare_share` of the slots of `host` clean or free."""
        self._host = host
        self._num_spare_slots = int(spare_share * host.options.num_slots)
        self._num_missing_slots = 0
        self._unwritten: dict[OffloadKey, None] = {}
        self._is_idle = True

    def has_next(self) -> bool:
        """Say whether `next` may have an answer; cheap to ask again as long as it has none."""
        if not self._is_idle:
            ahead = self._host.dirty_ahead(self._num_wanted_slots())
            self._is_idle = not ahead and not self._unwritten
        return not self._is_idle

    def pause(self) -> None:
        """There is no room for what is to be spilled, until something changes."""
        self._is_idle = True

    def wake(self) -> None:
        """Something has changed: there may be something to spill."""
        self._is_idle = False

    def note_shortage(self, num_refused: int) -> None:
        """A store found no room for so many keys."""
        blocks_per_slot = self._host.options.blocks_per_slot
        num_slots = -(-num_refused // blocks_per_slot)
        self._num_missing_slots = min(num_slots, self._host.options.num_slots)
        self._is_idle = False

    def write_through(self, keys: Iterable[OffloadKey]) -> None:
        """These keys are to be on disk soon. They are in the host tier, so they are bounded by it,
        and what has left it is passed over."""
        self._unwritten.update(dict.fromkeys(keys))

    def next(self, room: int) -> list[OffloadKey]:
        """Return up to `room` dirty keys that are not being spilled, the most urgent ones first."""
        if self._is_idle:
            return []
        host = self._host
        wanted = dict.fromkeys(host.dirty_ahead(self._num_wanted_slots())[:room])
        while self._unwritten and len(wanted) < room:
            waiting = list(islice(self._unwritten, room - len(wanted)))
            wanted.update(dict.fromkeys(host.owed(waiting)))
            for key in waiting:
                del self._unwritten[key]
        self._is_idle = not wanted
        self._num_missing_slots = 0
        return list(wanted)

    def _num_wanted_slots(self) -> int:
        wanted = max(self._num_spare_slots, self._num_missing_slots)
        return max(0, wanted - self._host.num_free_slots)

    def clear(self) -> None:
        """Forget what was to be spilled."""
        self._unwritten.clear()
        self._num_missing_slots = 0
