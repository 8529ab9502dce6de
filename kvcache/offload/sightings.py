"""How often keys have been seen lately: what a tier stores only from the second time on.

Keeps a tier from filling up with blocks that are asked for only once. Bounded: what has not been
seen for longest is forgotten, so a count may be too low, never too high. Refuses to know what a key
stands for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvcache.base.errors import ConfigurationError
from kvcache.offload.keys import OffloadKey


class Sightings:
    """Counts of the `capacity` keys seen last. O(1) per key."""

    def __init__(self, threshold: int, capacity: int) -> None:
        """Know no key. Raises ConfigurationError for a threshold or capacity below 1."""
        if threshold < 1 or capacity < 1:
            raise ConfigurationError(
                f"store threshold {threshold} with room for {capacity} keys: both must be at "
                "least 1"
            )
        self.threshold = threshold
        self._capacity = capacity
        self._counts: OrderedDict[OffloadKey, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def see(self, keys: Sequence[OffloadKey]) -> None:
        """Count one sighting of each of these keys, in chain order: the last is forgotten first."""
        if self.threshold == 1:
            return
        counts = self._counts
        for key in reversed(keys):
            counts[key] = min(counts.pop(key, 0) + 1, self.threshold)
        while len(counts) > self._capacity:
            counts.popitem(last=False)

    def is_frequent(self, key: OffloadKey) -> bool:
        """Say whether a key has been seen as often as is asked for. Changes nothing."""
        return self.threshold == 1 or self._counts.get(key, 0) >= self.threshold

    def clear(self) -> None:
        """Forget all keys."""
        self._counts.clear()
