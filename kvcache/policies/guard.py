"""What LRU would have had here, and how far the hazard policy may depart from it.

Watches the hazard policy's entries. A cache of names is played by LRU, so that what was lost
against it is known, and what may still be lost is bounded: a hit is lost only where LRU has a
content and the cache has not. Refuses departures that a small budget and the hits won do not cover.

    LRU's        a b c d e f g h i      missing: LRU's, not ours            1 (d)
    ours       ? a b c   e f g h i      allowance: budget + hits won - hits lost
"""

from __future__ import annotations

from collections import OrderedDict
from copy import copy
from math import sqrt

_MOST_NAMES = 1 << 16
"""In a larger cache a sample of LRU's contents is known, so that memory is bounded. Otherwise all
are, so that no lost hit is missed."""

_BUDGET_PER_BLOCK = 0.0008
"""Of all blocks used, how many hits may be lost: less than the .001 that is promised, because LRU's
cache is known to a block or two."""

_DEVIATIONS = 2.0
"""How unlikely it has to be that more is lost: as two standard deviations, where many hits make
the sum normal."""


class Guard:
    """LRU's contents by name, the last used last, and which of them are missing.

    O(1) for each name. `missing` may contain names until `settle` that LRU has let go.
    """

    def __init__(self, capacity: int) -> None:
        """Begin with nothing used."""
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
        """Say whether LRU would have a content."""
        return name in self._stamps

    @property
    def won_blocks(self) -> int:
        """Hits so far, less those that LRU would have had."""
        return self._won * self._scale

    @property
    def num_missing_blocks(self) -> int:
        """Blocks that LRU would have and that were evicted here."""
        return len(self._missing) * self._scale

    @property
    def old_stamp(self) -> int:
        """What was used before this LRU would have let go; 0 before anything was used."""
        return next(iter(self._stamps.values()), 0)

    def twin(self) -> Guard:
        """Return one that evictions change alone."""
        twin = copy(self)
        twin._missing = self._missing.copy()
        return twin

    def allows(self, name: bytes) -> bool:
        """Say whether a content may be evicted, whatever LRU would do."""
        if not self._is_sampled(name) or name not in self._stamps:
            return True
        return (len(self._missing) + 1) * self._scale <= self._most_missing

    def evict(self, name: bytes) -> None:
        """A content is no longer cached."""
        if self._is_sampled(name) and name in self._stamps:
            self._missing.add(name)

    def restore(self, name: bytes) -> None:
        """A content that was to be evicted stays."""
        self._missing.discard(name)

    def use(self, name: bytes, stamp: int, *, is_hit: bool, is_lru_hit: bool) -> None:
        """A content was used and is cached.

        `is_hit`: it was cached before. `is_lru_hit`: LRU had it when it came into use; otherwise it
        had it if it has it now.
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
        """So many blocks were used together, and so many are cached: LRU's have to be no more."""
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

        As many as the allowance: then it is never exceeded, since what is lost is missing no more.
        Or more, if it is safe to say that most of them will not be wanted: of `n` missing blocks a
        share `p` comes back, `b` at once, so the hits lost are hardly more than
        `n p + z sqrt(n p b) + z^2 b / 6` (Bernstein's inequality). Share and number are those of
        LRU's hits, as if one request more had been hit as a whole.
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
