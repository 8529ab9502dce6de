"""Increments of counters since the last collection.

Prometheus' counters are incremented, while statistics have totals. A total that fell was reset.
"""

from __future__ import annotations

from kvcache.metrics.metric import Sample


class CounterGrowth:
    """Remembers the totals of one process. One user, one thread."""

    def __init__(self) -> None:
        """Start with all totals at 0."""
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}

    def since_last(self, sample: Sample) -> float:
        """Return by how much a counter has grown, at least 0.

        A counter that fell was reset: its whole value is the growth.
        """
        key = (sample.metric.name, sample.labels)
        last = self._last.get(key, 0.0)
        self._last[key] = sample.value
        return sample.value - last if sample.value >= last else sample.value
