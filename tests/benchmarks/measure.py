"""Timing two things beside each other, on a machine that is never quiet.

Only ratios count: the sides alternate within one run, each repetition gives one ratio-worthy pair,
and the medians and their spread are printed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Figure:
    """What one side measured over several repetitions: seconds, or what `unit` says."""

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
    """One line of the table. `peer` is None where the peer was not there.

    `bar` is what the reference core must reach now, `goal` what the fast core is built for; both
    are ratios unless they name a unit, and empty where there is none.
    """

    workload: str
    what: str
    ours: Figure
    peer: Figure | None
    peer_name: str
    goal: str
    bar: str = ""
    note: str = ""
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None else self.peer.median / self.ours.median

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"ratio": self.ratio}


def alternate(
    sides: Iterable[Callable[[], float]],
    repetitions: int,
    on_repetition: Callable[[], None] = lambda: None,
) -> list[Figure]:
    """Call each side in turn, `repetitions` times over; each call returns its own seconds."""
    sides = list(sides)
    samples: list[list[float]] = [[] for _ in sides]
    for _ in range(repetitions):
        for side, taken in zip(sides, samples, strict=True):
            taken.append(side())
        on_repetition()
    return [Figure(tuple(taken)) for taken in samples]
