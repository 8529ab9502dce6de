"""How likely contents of each class come back at each age, and what that makes them worth.

Stands under the hazard policy, which reports uses and ages. Knows classes and counts, no contents.
Ages are counted in blocks used since, never in seconds: the same requests teach the same.

    reuse           index of an age: the best that keeping on from there can bring,
      │    ▄▄                   P(reuse before age h) / blocks × ages it stays until then,
      │  ▂████▃     the highest over all h. Before the hump it grows with age, behind it
      └──────────▶ age          it falls: of the young ones the last is let go first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = "npt.NDArray[np.float64]"

_FIRST_AGE_BLOCKS = 64
"""Ages below are one: about two requests, among which there is nothing to tell apart."""

_STEPS_PER_OCTAVE = 3
"""How finely ages are told apart: humps an octave wide are seen, counts stay large."""

_NUM_OCTAVES = 18

AGE_LIMITS_BLOCKS: Sequence[int] = tuple(
    round(_FIRST_AGE_BLOCKS * 2 ** (step / _STEPS_PER_OCTAVE))
    for step in range(_NUM_OCTAVES * _STEPS_PER_OCTAVE)
)
"""Where one age ends and the next begins; the last one has no end."""

NUM_AGES = len(AGE_LIMITS_BLOCKS) + 1

_WIDTHS_BLOCKS = np.diff(np.array([0, *AGE_LIMITS_BLOCKS, 2 * AGE_LIMITS_BLOCKS[-1]], np.float64))

_EXPECTED_REUSE = 0.02
"""Chance of a reuse at each age before anything is known. The same at every age means a rate that
falls as one over the age: the oldest is worth least, which is LRU."""

_ALL_PRIOR_BLOCKS = 2_000.0
"""How many blocks must have reached an age to count as much as that. Blocks come back with their
request, some 20 at once, so these are about a hundred independent observations."""

_CLASS_PRIOR_BLOCKS = 100.0
"""How many of one class must have reached an age to count as much as all classes together. A few
requests: what classes differ in is large, or else it does not matter."""

_LEAST_LEFT = 1e-200
"""Where nothing of a class is left at an age, so much is taken to be: no ratio is zero by zero."""


class ReuseTable:
    """Counts by class and age, and an index made from them.

    `index[line][age]` is the value of keeping a block, in hits for each block admitted meanwhile;
    `grows[line][age]` says whether it is more at the next age. Both stay until `learn` is called.
    """

    def __init__(self, num_lines: int) -> None:
        """Know nothing of `num_lines` classes: at first all are worth the same at the same age."""
        self._num_reused: FloatArray = np.zeros((num_lines, NUM_AGES))
        self._num_reached: FloatArray = np.zeros((num_lines, NUM_AGES))
        self.index: list[list[float]] = []
        self.grows: list[list[bool]] = []
        self.learn()

    def note_reuse(self, line: int, age: int, num_blocks: int) -> None:
        """Blocks of a class were used again at an age."""
        self._num_reused[line, age] += num_blocks
        self._num_reached[line, age] += num_blocks

    def note_passed(self, line: int, age: int, num_blocks: int) -> None:
        """Blocks of a class passed an age without being used."""
        self._num_reached[line, age] += num_blocks

    def learn(self) -> None:
        """Make the index from what was counted."""
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
    """Return the index for chances of reuse, given that an age is reached, by class and age.

    The Gittins index of a block that is kept until it is used or given up: the highest ratio, over
    all ages to give it up at, of the chance of a hit to the time it stays until then (Gittins,
    "Bandit processes and dynamic allocation indices", 1979).
    """
    # Left at an age, `left`; hits between two ages are what `left` falls by. Times are summed from
    # the last age, where they are small, so that differences keep their digits.
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
