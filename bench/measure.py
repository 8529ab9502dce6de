"""Timing the sides of a comparison on a noisy machine.

Only ratios count: the sides alternate within one run, and the medians and their spread are printed.
Each side times itself; `stopwatch.py` says by which clock those of the manager do.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from random import Random

from bench.cores import PEER


@dataclass(frozen=True)
class Figure:
    """One side's measurements over several repetitions: seconds, or in `unit`."""

    samples: tuple[float, ...]
    unit: str = "s"

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.samples) < 4:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / 2 / self.median

    def __str__(self) -> str:
        """Write the figure for the table: median and spread."""
        if self.unit != "s":
            return f"{self.median:.3g} {self.unit}"
        value = self.median * 1e3
        digits = 3 if value < 1 else 2 if value < 100 else 0
        return f"{value:.{digits}f} ms ±{self.spread:.0%}"


@dataclass(frozen=True)
class Row:
    """One line of the table: what each side measured, by its name.

    A side that was not there is missing. `goal` is a ratio to the peer unless it says otherwise,
    and empty if there is none.
    """

    workload: str
    what: str
    figures: Mapping[str, Figure]
    peer_name: str
    goal: str
    note: str = ""

    def ratio(self, side: str) -> float | None:
        """Return how many times less than the peer `side` took, if both were there."""
        if side not in self.figures or PEER not in self.figures:
            return None
        return self.figures[PEER].median / self.figures[side].median

    def to_json(self) -> dict[str, object]:
        cores = [side for side in self.figures if side != PEER]
        return asdict(self) | {"ratios": {core: self.ratio(core) for core in cores}}


def alternate(
    sides: Mapping[str, Callable[[], float]],
    repetitions: int,
    on_repetition: Callable[[], None] = lambda: None,
    unit: str = "s",
) -> dict[str, Figure]:
    """Call each side in turn, `repetitions` times over; each call returns its own seconds.

    Each repetition has an order of its own, always the same: the side after the peer finds the
    processor's caches full of the peer's data, and that must not always be the same side.
    """
    samples: dict[str, list[float]] = {name: [] for name in sides}
    orders = Random(repetitions)
    for _ in range(repetitions):
        for name in orders.sample(list(sides), len(sides)):
            samples[name].append(sides[name]())
        on_repetition()
    return {name: Figure(tuple(taken), unit) for name, taken in samples.items()}
