"""Random draws of generators: lengths with a long tail, pauses, and popularity.

Every function takes its random source.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log
from random import Random

from kvcache.base.errors import TraceError


@dataclass(frozen=True)
class Length:
    """Tokens, log-normal around a median: half are shorter; with `spread` 1, two thirds are between
    median / e and median * e. Never outside `[least, most]`.

    Raises TraceError for an invalid length.
    """

    median: int
    spread: float
    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.median <= self.most or self.spread < 0:
            raise TraceError(
                f"a length of {self.least} to {self.most} tokens around {self.median}, spread "
                f"{self.spread}: give 1 <= least <= median <= most and a spread of at least 0"
            )

    def draw(self, rng: Random) -> int:
        """Return a number of tokens."""
        drawn = rng.lognormvariate(log(self.median), self.spread)
        return min(self.most, max(self.least, round(drawn)))


class Popularity:
    """A choice among `num_items`; item `i` has weight `1 / (i + 1) ** exponent` (Zipf)."""

    def __init__(self, num_items: int, exponent: float) -> None:
        self._sums = list(accumulate((i + 1) ** -exponent for i in range(num_items)))

    def draw(self, rng: Random) -> int:
        """Return the index of an item."""
        sums = self._sums
        return min(bisect_left(sums, rng.random() * sums[-1]), len(sums) - 1)


def draw_count(rng: Random, mean: float, most: int) -> int:
    """Return 1 or more, geometric with this mean, at most `most`."""
    count = 1
    while count < most and rng.random() > 1 / mean:
        count += 1
    return count


def draw_pause_s(rng: Random, median_s: float, spread: float = 1.0) -> float:
    """Return a pause, log-normal around its median."""
    return median_s * exp(spread * rng.gauss(0.0, 1.0))
