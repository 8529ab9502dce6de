"""A simulated LRU cache, and how far the hazard policy may depart from it.

The guard plays LRU with names alone. So it knows the hits lost against LRU, and limits future
losses: a hit can be lost only if LRU has a content that the cache has not. It allows only
departures that a small budget and the hits won cover.

    LRU's        a b c d e f g h i      missing: LRU's, not ours            1 (d)
    ours       ? a b c   e f g h i      allowance: budget + hits won - hits lost
"""

from __future__ import annotations

from collections import OrderedDict
from copy import copy
from math import sqrt

_MOST_NAMES = 1 << 16
"""In larger caches, LRU simulates a sample of contents, to limit memory. In smaller ones it
simulates all, so that no lost hit is missed."""

_BUDGET_PER_BLOCK = 0.0008
"""Share of all blocks used that may be lost as hits: less than the promised .001, because LRU's
cache is known only to a block or two."""

_DEVIATIONS = 2.0
"""Standard deviations of the bound on losses, where many hits make the sum normal."""


class Guard:
    """LRU's contents by name, the last used last, and those that are missing in the cache.

    O(1) for each name. Until `settle`, `missing` may have names that LRU has evicted.
    """

    def __init__(self, capacity: int) -> None:
        """Start without contents."""
        self._scale = 1 << max(0, ((capacity - 1) // _MOST_NAMES).bit_length())
        self._stamps: OrderedDict[bytes, int] = OrderedDict()
        self._missing: set[bytes] = set()
        self._most_missing = 0.0
        self._won = 0
        self._lru_hits = 0
        self._hits_at_once = 0
        self._used_blocks = 0
        self._num_requests = 0
        self._squared_hits = 0

    def __contains__(self, name: object) -> bool:
        """Return whether LRU would have a content."""
        return name in self._stamps

    @property
    def won_blocks(self) -> int:
        """Hits so far, minus those that LRU would have had."""
        return self._won * self._scale

    @property
    def num_missing_blocks(self) -> int:
        """Blocks that LRU would have and that were evicted here."""
        return len(self._missing) * self._scale

    @property
    def old_stamp(self) -> int:
        """LRU would have evicted all contents used before this; 0 before the first use."""
        return next(iter(self._stamps.values()), 0)

    def twin(self) -> Guard:
        """Return a copy that follows evictions independently."""
        twin = copy(self)
        twin._missing = self._missing.copy()
        return twin

    def allows(self, name: bytes) -> bool:
        """Return whether a content may be evicted, regardless of LRU."""
        if not self._is_sampled(name) or name not in self._stamps:
            return True
        return (len(self._missing) + 1) * self._scale <= self._most_missing

    def evict(self, name: bytes) -> None:
        """Record that a content is no longer cached."""
        if self._is_sampled(name) and name in self._stamps:
            self._missing.add(name)

    def restore(self, name: bytes) -> None:
        """Record that a content chosen for eviction stays."""
        self._missing.discard(name)

    def use(self, name: bytes, stamp: int, *, is_hit: bool, is_lru_hit: bool) -> None:
        """Record a use of a cached content.

        `is_hit`: it was cached before. `is_lru_hit`: LRU had it when it came into use; otherwise
        LRU had it if it has it now.
        """
        if not self._is_sampled(name):
            return
        stamps, missing = self._stamps, self._missing
        is_known, was_missing = name in stamps, name in missing
        stamps[name] = stamp
        stamps.move_to_end(name)
        missing.discard(name)
        if is_hit:
            is_known = is_lru_hit or is_known
            self._won += not is_known
        else:
            self._won -= was_missing
        self._hits_at_once += is_known * self._scale

    def settle(self, num_blocks: int, cached_blocks: int) -> None:
        """Record that `num_blocks` were used together; limit LRU to `cached_blocks`."""
        room = max(1, cached_blocks // self._scale)
        while len(self._stamps) > room:
            name, _ = self._stamps.popitem(last=False)
            self._missing.discard(name)
        self._used_blocks += num_blocks
        self._num_requests += 1
        self._lru_hits += self._hits_at_once
        self._squared_hits += self._hits_at_once**2
        self._hits_at_once = 0
        self._most_missing = self._limit()

    def _limit(self) -> float:
        """Return how many blocks may be missing.

        At least the allowance: it is then never exceeded, because a lost block is no longer
        missing. More if most missing blocks will probably not be used again. Of `n` missing blocks
        a share `p` comes back, `b` at once, so by Bernstein's inequality the hits lost are hardly
        more than `n p + z sqrt(n p b) + z^2 b / 6`. `p` and `b` are those of LRU's hits, as if one
        more request had been hit as a whole.
        """
        allowance = _BUDGET_PER_BLOCK * self._used_blocks + self.won_blocks
        if allowance <= 0:
            return 0.0
        request_blocks = self._used_blocks / self._num_requests
        hits = self._lru_hits + request_blocks
        at_once = (self._squared_hits + request_blocks**2) / hits
        chance = min(1.0, hits / self._used_blocks)
        sure = allowance - _DEVIATIONS**2 * at_once / 6
        if sure <= 0:
            return allowance
        spread = _DEVIATIONS * sqrt(at_once)
        root = (sqrt(spread**2 + 4 * sure) - spread) / 2
        return max(allowance, root**2 / chance)

    def _is_sampled(self, name: bytes) -> bool:
        return not int.from_bytes(name[:4], "big") & (self._scale - 1)
