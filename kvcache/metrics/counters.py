"""From counts since some start to what has come since the last look.

Counters of Prometheus are added to, while statistics say how much there is. Between the two;
refuses to go backwards: a count that fell was reset.
"""

from __future__ import annotations

from kvcache.metrics.metric import Sample


class CounterGrowth:
    """Remembers the counts of one process. One owner, one thread."""

    def __init__(self) -> None:
        """Every count was 0."""
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}

    def since_last(self, sample: Sample) -> float:
        """Return by how much a counter has grown, at least 0.

        Of one that fell, a new one began: all of it is growth.
        """
        key = (sample.metric.name, sample.labels)
        last = self._last.get(key, 0.0)
        self._last[key] = sample.value
        return sample.value - last if sample.value >= last else sample.value
