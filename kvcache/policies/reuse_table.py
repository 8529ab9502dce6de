"""How likely contents of each class are reused at each age, and their value.

Part of the hazard policy, which reports uses and ages. Knows classes and counts, no contents. Ages
are counted in blocks used since, not in seconds, so that the same requests teach the same.

    reuse           index of an age: the best that keeping on from there can bring,
      │    ▄▄                   P(reuse before age h) / blocks × ages it stays until then,
      │  ▂████▃     the highest over all h. Before the hump it grows with age, behind it
      └──────────▶ age          it falls: of the young contents the last is evicted first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = "npt.NDArray[np.float64]"

_FIRST_AGE_BLOCKS = 64
"""Younger ages are one class: about two requests, which cannot be told apart."""

_STEPS_PER_OCTAVE = 3
"""Steps of age per octave: fine enough for humps an octave wide, coarse enough for large counts."""

_NUM_OCTAVES = 18

AGE_LIMITS_BLOCKS: Sequence[int] = tuple(
    round(_FIRST_AGE_BLOCKS * 2 ** (step / _STEPS_PER_OCTAVE))
    for step in range(_NUM_OCTAVES * _STEPS_PER_OCTAVE)
)
"""The limits between ages; the last age has no end."""

NUM_AGES = len(AGE_LIMITS_BLOCKS) + 1

_WIDTHS_BLOCKS = np.diff(np.array([0, *AGE_LIMITS_BLOCKS, 2 * AGE_LIMITS_BLOCKS[-1]], np.float64))

_EXPECTED_REUSE = 0.02
"""Prior chance of a reuse at each age. The same at every age means a rate that falls as one over
the age: the oldest is worth least, as under LRU."""

_ALL_PRIOR_BLOCKS = 2_000.0
"""Weight of that prior in blocks that reached an age. Blocks are reused with their request, some 20
at once, so this is about a hundred independent observations."""

_CLASS_PRIOR_BLOCKS = 100.0
"""Weight of all classes in the estimate of one class, in blocks: a few requests. Either classes
differ much, or the difference does not matter."""

_LEAST_LEFT = 1e-200
"""Least number of contents assumed at an age, so that no ratio is zero by zero."""


class ReuseTable:
    """Counts by class and age, and an index made from them.

    `index[line][age]` is the value of keeping a block, in hits for each block admitted meanwhile;
    `grows[line][age]` says whether it is higher at the next age. Only `learn` changes them.
    """

    def __init__(self, num_lines: int) -> None:
        """Start without counts for `num_lines` classes: at the same age all have the same value."""
        self._num_reused: FloatArray = np.zeros((num_lines, NUM_AGES))
        self._num_reached: FloatArray = np.zeros((num_lines, NUM_AGES))
        self.index: list[list[float]] = []
        self.grows: list[list[bool]] = []
        self.learn()

    def note_reuse(self, line: int, age: int, num_blocks: int) -> None:
        """Count blocks of a class that were reused at an age."""
        self._num_reused[line, age] += num_blocks
        self._num_reached[line, age] += num_blocks

    def note_passed(self, line: int, age: int, num_blocks: int) -> None:
        """Count blocks of a class that passed an age unused."""
        self._num_reached[line, age] += num_blocks

    def learn(self) -> None:
        """Compute the index from the counts."""
        reused, reached = self._num_reused, self._num_reached
        of_all = (reused.sum(0) + _ALL_PRIOR_BLOCKS * _EXPECTED_REUSE) / (
            reached.sum(0) + _ALL_PRIOR_BLOCKS
        )
        chances = (reused + _CLASS_PRIOR_BLOCKS * of_all) / (reached + _CLASS_PRIOR_BLOCKS)
        index = reuse_index(chances)
        grows = np.zeros(index.shape, np.bool_)
        grows[:, :-1] = index[:, 1:] > index[:, :-1]
        self.index, self.grows = index.tolist(), grows.tolist()


def reuse_index(chances: FloatArray) -> FloatArray:
    """Return the index from the chances of reuse, given that an age is reached, by class and age.

    The Gittins index of a block that is kept until it is used or given up: over all ages to give it
    up at, the highest ratio of the chance of a hit to the time it stays until then (Gittins,
    "Bandit processes and dynamic allocation indices", 1979).
    """
    # `left`: share that reaches an age; its decrease between two ages is hits. Times are summed
    # from the last age, where they are small, so that differences keep their digits.
    num_ages = chances.shape[1]
    left = np.maximum(np.cumprod(1 - chances, axis=1), _LEAST_LEFT)
    left = np.concatenate((np.ones((len(left), 1)), left), axis=1)
    stays = left[:, :-1] * _WIDTHS_BLOCKS[:num_ages] * (1 - chances / 2)
    from_here = np.cumsum(stays[:, ::-1], axis=1)[:, ::-1]
    from_here = np.concatenate((from_here, np.zeros((len(left), 1))), axis=1)
    hits = left[:, :-1, None] - left[:, None, 1:]
    times = from_here[:, :-1, None] - from_here[:, None, 1:]
    is_ahead = np.triu(np.ones((num_ages, num_ages), np.bool_))
    best: FloatArray = np.where(is_ahead, hits / np.where(is_ahead, times, 1.0), 0.0).max(axis=2)
    return best
