"""Who gives up how many blocks: one after the other, always from the tenant that is most over its
share.

Under the policy of tenants. A tenant's level is what it has above its guarantee, by its weight.
That many blocks are not taken one by one: how far all levels fall is computed, and only what is
left by rounding is played. Refuses to choose blocks.

    level    ▓                   5 blocks go: 4 of a, 1 of b; c is lower and gives none
      5      ▓
             ▓  ▓
      ───────▓──▓──────  ◀ where levels fall to
             ▓  ▓  ▓
             a  b  c
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from math import floor, inf
from typing import NamedTuple

FEW = 8
"""So many blocks are sooner played than computed."""


class Giver(NamedTuple):
    """A tenant that can give at most `cap` blocks, and has `excess` above its guarantee."""

    number: int
    excess: int
    weight: float
    cap: int

    @property
    def level(self) -> float:
        """How far above its guarantee it is, by its weight."""
        return self.excess / self.weight


def counts_to_give(givers: Sequence[Giver], num_blocks: int) -> list[int]:
    """Return how many blocks each gives so that `num_blocks` go, or all they can.

    As if they went one by one, each from the highest level; of equal ones from the lowest number.
    O(givers * log givers), and a step more for each by which weights differ.
    """
    if sum([giver.cap for giver in givers]) <= num_blocks:
        return [giver.cap for giver in givers]
    if len(givers) == 1:
        return [num_blocks]
    counts = [0] * len(givers)
    if num_blocks > FEW:
        line = water_line(givers, num_blocks) + 1 / min([giver.weight for giver in givers])
        counts = [
            min(each.cap, max(0, floor(each.excess - line * each.weight) - 1)) for each in givers
        ]
    heap = [
        (-(giver.excess - count) / giver.weight, giver.number, place)
        for place, (giver, count) in enumerate(zip(givers, counts, strict=True))
        if count < giver.cap
    ]
    heapify(heap)
    for _ in range(num_blocks - sum(counts)):
        _, number, place = heap[0]
        giver = givers[place]
        counts[place] += 1
        if counts[place] < giver.cap:
            level = (giver.excess - counts[place]) / giver.weight
            heapreplace(heap, (-level, number, place))
        else:
            heappop(heap)
    return counts


def water_line(givers: Sequence[Giver], num_blocks: int) -> float:
    """Return the level to which all fall when `num_blocks` blocks go, parts of blocks allowed.

    Minus infinity if they cannot give as many.
    """
    edges = []
    for giver in givers:
        if giver.cap:
            edges.append((giver.excess / giver.weight, giver.weight))
            edges.append(((giver.excess - giver.cap) / giver.weight, -giver.weight))
    edges.sort(reverse=True)
    gone = slope = 0.0
    above = inf
    for level, change in edges:
        if slope > 0:
            if gone + slope * (above - level) >= num_blocks:
                return above - (num_blocks - gone) / slope
            gone += slope * (above - level)
        above = level
        slope += change
    return -inf


def is_below(level: float, givers: Sequence[Giver], num_blocks: int) -> bool:
    """Say whether no tenant of this level gives anything if these givers may. False may be
    untrue."""
    return num_blocks > FEW and bool(givers) and level < water_line(givers, num_blocks)
