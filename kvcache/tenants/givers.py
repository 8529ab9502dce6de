"""How many blocks each tenant loses: one at a time, from the tenant that is most over its share.

Part of the tenants' policy. A tenant's level is what it has above its guarantee, divided by its
weight. Blocks are not taken one by one: the fall of all levels is computed, and only the remainder
from rounding is simulated. Chooses no blocks.

    level    ▓                   5 blocks go: 4 of a, 1 of b; c is lower and loses none
      5      ▓
             ▓  ▓
      ───────▓──▓──────  ◀ the level to which all fall
             ▓  ▓  ▓
             a  b  c
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from math import floor, inf
from typing import NamedTuple

FEW = 8
"""Up to this many blocks, a simulation is faster than the computation."""


class Giver(NamedTuple):
    """A tenant that can lose at most `cap` blocks, and has `excess` above its guarantee."""

    number: int
    excess: int
    weight: float
    cap: int

    @property
    def level(self) -> float:
        """Its blocks above the guarantee, divided by its weight."""
        return self.excess / self.weight


def counts_to_give(givers: Sequence[Giver], num_blocks: int) -> list[int]:
    """Return how many blocks each loses so that `num_blocks` go, or all they can lose.

    As if they went one by one, each from the highest level; among equals from the lowest number.
    O(givers * log givers), and another step for each giver if weights differ.
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
    """Return the level to which all fall when `num_blocks` go, with fractions of blocks.

    Minus infinity if they cannot lose as many.
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
    """Return whether no tenant of this level loses a block if these givers may. May return
    False for such a tenant."""
    return num_blocks > FEW and bool(givers) and level < water_line(givers, num_blocks)
