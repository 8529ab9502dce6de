"""The clock of a recorded manager: what time it was told is part of what happened to it.

Pins run out by the clock. The recorder hands its manager a clock that remembers every reading; the
replay hands one that says the same again. Refuses to invent a reading.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvcache.base.clock import Clock


class RememberingClock:
    """A clock that remembers what it said until it is asked. Bounded by who asks: each record."""

    def __init__(self, clock: Clock) -> None:
        """Say what `clock` says."""
        self._clock = clock
        self._readings: list[float] = []

    def now(self) -> float:
        """Return the time in seconds, and remember it."""
        now_s = self._clock.now()
        self._readings.append(now_s)
        return now_s

    def take(self) -> list[float]:
        """Return what was said since the last time."""
        readings, self._readings = self._readings, []
        return readings


class RepeatingClock:
    """A clock that says what another one said. `num_invented` counts readings beyond those."""

    def __init__(self) -> None:
        """Know no reading yet."""
        self._readings: deque[float] = deque()
        self._last_s = 0.0
        self.num_invented = 0

    def now(self) -> float:
        """Return the next reading; without one the last again, which is counted."""
        if self._readings:
            self._last_s = self._readings.popleft()
        else:
            self.num_invented += 1
        return self._last_s

    def expect(self, readings: Sequence[float]) -> None:
        """Say these next, whatever is left of those before."""
        self._readings = deque(readings)
        self.num_invented = 0

    @property
    def num_left(self) -> int:
        """Readings that were not asked for."""
        return len(self._readings)
