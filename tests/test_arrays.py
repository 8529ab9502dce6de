"""Checks of many ids at once, against the same check of each."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.base.arrays import are_below, are_distinct, are_ids, int32_array

EDGES = (-(2**31), -5, -1, 0, 1, 4, 5, 6, 2**31 - 1)


@pytest.mark.seeds(20)
def test_many_are_asked_as_each_is(seed: int) -> None:
    random = np.random.default_rng(seed)
    seen = set()
    for _ in range(300):
        plain = random.integers(0, 7, random.integers(0, 6)).tolist()
        if random.random() < 0.3:
            plain.insert(int(random.integers(len(plain) + 1)), int(random.choice(EDGES)))
        if random.random() < 0.3:
            plain.sort()
        values, end = int32_array(plain), int(random.integers(0, 8))
        answers = are_below(values, end), are_ids(values, end), are_distinct(values)
        assert answers == (
            all(0 <= value < end for value in plain),
            all(1 <= value < end for value in plain),
            len(set(plain)) == len(plain),
        )
        seen.add(answers)
    assert len(seen) == 6  # every id is below the end


def test_the_largest_end_is_one() -> None:
    largest = int32_array([2**31 - 1])
    assert are_below(largest, 2**31)
    assert not are_below(largest, 2**31 - 1)
    assert not are_below(int32_array([-1]), 2**31)
