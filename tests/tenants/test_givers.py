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


def test_who_is_most_over_his_share_gives_until_all_are_level() -> None:
    givers = [Giver(1, 10, 1.0, 10), Giver(2, 6, 1.0, 6), Giver(3, 2, 1.0, 2)]
    assert counts_to_give(givers, 4) == [4, 0, 0]
    assert counts_to_give(givers, 6) == [5, 1, 0]
    assert counts_to_give(givers, 100) == [10, 6, 2]


def test_a_tenant_of_twice_the_weight_keeps_twice_as_much() -> None:
    assert counts_to_give([Giver(1, 30, 1.0, 30), Giver(2, 30, 2.0, 30)], 30) == [20, 10]


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
