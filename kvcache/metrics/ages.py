"""How long cached contents had been out of use when they were hit, and when they were evicted.

The signal of a cache that is too small: if contents are evicted at an age at which others are still
hit, more blocks would give more hits. The core counts ages in its kernels; the coordinator's
message loop sets the time. Does not influence eviction.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvcache.core import CoreSettings
from kvcache.core.columns import AT_EVICTION, AT_HIT, BlockAges
from kvcache.core.flat_core import CoreFactory, FlatCore
from kvcache.metrics.metric import HistogramSample, Metric


class AgeMeter:
    """Ages in seconds at hit and at eviction, each counted once for every block.

    A hit of contents that are in use has no age.
    """

    def __init__(
        self, bounds_s: tuple[float, ...], now: Callable[[], float] = time.monotonic
    ) -> None:
        """Start at zero. `now`: not a manager's clock, whose readings may be recorded."""
        self._bounds_s = bounds_s
        self._ages = BlockAges(bounds_s)
        self._now = now

    def tick(self) -> None:
        """Read the clock: later changes have this time."""
        self._ages.set_time(self._now())

    def at_hit(self, metric: Metric, labels: tuple[str, ...] = ()) -> HistogramSample:
        """Return the ages of contents when they were hit."""
        return self._sample(AT_HIT, metric, labels)

    def at_eviction(self, metric: Metric, labels: tuple[str, ...] = ()) -> HistogramSample:
        """Return the ages of contents when they were evicted."""
        return self._sample(AT_EVICTION, metric, labels)

    def idle_s(self, num_blocks: int) -> npt.NDArray[np.float32]:
        """Return the seconds that each block, by id, has been out of use; -1 for blocks in use and
        for empty ones. Shape `(num_blocks,)`."""
        since = self._ages.idle_since
        if len(since) != num_blocks:
            return np.full(num_blocks, -1.0, np.float32)
        idle = np.where(since >= 0, self._now() - since, -1.0)
        return idle.astype(np.float32)

    def watching(self) -> CoreFactory:
        """Return a factory of cores that count ages here."""

        def make_watched(settings: CoreSettings) -> FlatCore:
            self.tick()
            return FlatCore(replace(settings, ages=self._ages))

        return make_watched

    def _sample(self, line: int, metric: Metric, labels: tuple[str, ...]) -> HistogramSample:
        *counts, total = self._ages.table[line].tolist()
        counts = tuple(accumulate(map(int, counts)))
        return HistogramSample(metric, self._bounds_s, counts, total, labels)
