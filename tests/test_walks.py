"""The loop under the random walks."""

from __future__ import annotations

import random

import pytest

from tests.walks import NUM_SHOWN, random_walk


def test_operations_are_drawn_by_weight_and_compared_after_each() -> None:
    done: list[str] = []

    def often() -> None:
        done.append("often")

    def seldom() -> None:
        done.append("seldom")

    def never() -> None:
        raise AssertionError

    lengths: list[int] = []
    operations = {often: 3, seldom: 1, never: 0}
    random_walk("", random.Random(1), operations, 400, lambda: lengths.append(len(done)))
    assert lengths == list(range(1, 401))
    assert 250 < done.count("often") < 350


def test_a_walk_that_fails_prints_its_title_its_step_and_its_last_operations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = iter(range(20))

    def operate() -> None:
        next(steps)

    with pytest.raises(StopIteration):
        random_walk("seed 7", random.Random(7), {operate: 1}, 100, lambda: None)
    last = ", ".join(["operate"] * NUM_SHOWN)
    assert capsys.readouterr().out == f"walk seed 7 failed in step 21 of 100, after: {last}\n"
