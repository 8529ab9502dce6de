"""How many blocks each tenant loses: computed at once, and simulated block by block."""

from __future__ import annotations

import random

import pytest

from kvcache.tenants.policy import Giver, counts_to_give


def one_by_one(givers: list[Giver], num_blocks: int) -> list[int]:
    counts = [0] * len(givers)
    for _ in range(num_blocks):
        able = [i for i, giver in enumerate(givers) if counts[i] < giver.cap]
        if not able:
            break
        place = max(
            able,
            key=lambda i: (
                (givers[i].excess - counts[i]) / givers[i].weight,
                -givers[i].number,
            ),
        )
        counts[place] += 1
    return counts


@pytest.mark.seeds(200)
def test_counts_are_those_of_one_block_after_the_other(seed: int) -> None:
    rng = random.Random(seed)
    givers = []
    for number in range(1, rng.randint(2, 8)):
        excess = rng.randint(0, 60)
        weight = rng.choice([1.0, 1.0, 0.5, 3.0, 0.1, 7.3])
        cap = rng.randint(0, excess + (10 if number == 1 else 0))
        givers.append(Giver(number, excess, weight, cap))
    for num_blocks in (0, 1, rng.randint(0, 100), rng.randint(0, 300)):
        assert counts_to_give(givers, num_blocks) == one_by_one(givers, num_blocks)
