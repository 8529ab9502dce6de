"""Declarations of metrics (name, kind, help, labels) and their values.

Data only. Refuses names that break Prometheus' conventions, so that an invalid declaration cannot
be imported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvcache.base.errors import ConfigurationError

_NAME = re.compile(r"kvcache(_[a-z][a-z0-9]*)+")
_LABEL = re.compile(r"[a-z][a-z_]*")
_UNITS = ("_seconds", "_bytes", "_ratio", "_tokens", "_blocks")


class Kind(Enum):
    """How the values of a metric are read."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """One declaration. Counters end with `_total`, histograms with their unit.

    Raises ConfigurationError for a name, or labels, that break the conventions.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        is_total = self.name.endswith("_total")
        if not _NAME.fullmatch(self.name) or is_total != (self.kind is Kind.COUNTER):
            raise ConfigurationError(
                f"{self.name!r} is not a name of a {self.kind.value}: begin it with kvcache_, and "
                "end it with _total if, and only if, it is a counter"
            )
        if self.kind is Kind.HISTOGRAM and not self.name.endswith(_UNITS):
            raise ConfigurationError(f"histogram {self.name!r} has no unit: end it with one")
        if not all(_LABEL.fullmatch(label) for label in self.labels) or "le" in self.labels:
            raise ConfigurationError(f"{self.name!r} cannot have labels {self.labels}: rename them")


@dataclass(frozen=True)
class Sample:
    """One value of a counter or gauge; `labels` are the values of the metric's labels, in order."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class HistogramSample:
    """One histogram: `counts[i]` values were at most `bounds[i]`; `counts[-1]` has all values.
    Cumulative, as in Prometheus; `sum` is of all values."""

    metric: Metric
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    labels: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """The number of values."""
        return self.counts[-1]


AnySample = Sample | HistogramSample


class CounterGrowth:
    """Remembers the totals of one process. One user, one thread."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}

    def since_last(self, sample: Sample) -> float:
        """Return by how much a counter has grown, at least 0.

        A counter that fell was reset: its whole value is the growth.
        """
        key = (sample.metric.name, sample.labels)
        last = self._last.get(key, 0.0)
        self._last[key] = sample.value
        return sample.value - last if sample.value >= last else sample.value


_MANY = 256
"""Most values that wait."""


class Histogram:
    """Counts of latencies or ages by upper bound, at the cost of a few additions per value.

    Single values wait in a list and are counted together, because callers count microseconds. One
    user, one thread; never drops a value.

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
