"""Histograms of latencies and ages, at the cost of a few additions per value.

Single values wait in a list and are counted together, because callers count microseconds. One
user, one thread; never drops a value.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvcache.metrics.metric import HistogramSample, Metric

_MANY = 256
"""Most values that wait."""


class Histogram:
    """Counts of values by upper bound.

    Invariant: `_counts[i]` values were above `bounds[i - 1]` and at most `bounds[i]`; the last
    count is of values above all bounds. `_waiting[i]`, `_weights[i]` times, is not counted yet.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """Start at zero. `bounds` rise."""
        self.bounds = bounds
        self._array = np.array(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._waiting: list[float] = []

    def observe(self, value: float) -> None:
        """Count a value."""
        self._waiting.append(value)
        if len(self._waiting) == _MANY:
            self._count_waiting()

    def observe_many(self, values: npt.NDArray[np.float64], times: int = 1) -> None:
        """Count each value, shape `(n,)`, `weight` times; -1 undoes one count."""
        places = self._array.searchsorted(values)
        added = np.bincount(places, minlength=len(self._counts)).tolist()
        self._counts = [old + times * new for old, new in zip(self._counts, added, strict=True)]
        self._sum += times * float(values.sum())

    def sample(self, metric: Metric, labels: tuple[str, ...] = ()) -> HistogramSample:
        """Return the counts, frozen."""
        self._count_waiting()
        counts = tuple(accumulate(self._counts))
        return HistogramSample(metric, self.bounds, counts, self._sum, labels)

    def _count_waiting(self) -> None:
        if self._waiting:
            values = np.array(self._waiting)
            self._waiting.clear()
            self.observe_many(values)
