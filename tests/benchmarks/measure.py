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
    """Seconds of one side over several repetitions."""

    samples_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.samples_s) < 4:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_s, n=4)
        return (high - low) / 2 / self.median_s


@dataclass(frozen=True)
class Row:
    """One line of the table. `peer` is None where the peer was not there."""

    workload: str
    what: str
    ours: Figure
    peer: Figure | None
    peer_name: str
    goal: str
    note: str = ""
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None else self.peer.median_s / self.ours.median_s

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


def milliseconds(figure: Figure | None) -> str:
    """Write a figure for the table: median and spread."""
    if figure is None:
        return "-"
    value = figure.median_s * 1e3
    digits = 3 if value < 1 else 2 if value < 100 else 0
    return f"{value:.{digits}f} ms ±{figure.spread:.0%}"
