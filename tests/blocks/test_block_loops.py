"""Compiled loops over the arrays of a pool, at their edges, and against plain Python."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcache.arrays import index_array
from kvcache.blocks.lineage import enter_runs, way_to
from kvcache.blocks.reference_counts import (
    are_holdable,
    count_unheld,
    give_references,
    take_references,
)


def figures(*values: int) -> np.ndarray:
    """Return an array of figures by block."""
    return np.array(values, dtype=np.int32)


def test_no_block_at_all_is_fine_everywhere() -> None:
    counts, nobody = figures(0, 1), index_array([])
    assert are_holdable(counts, figures(0, 0), nobody)
    assert take_references(counts, nobody).tolist() == []
    assert [ids.tolist() for ids in give_references(counts, figures(0, 0), nobody)] == [[], []]
    assert count_unheld(counts, nobody) == 0
    assert way_to(figures(0, 0), 1, 0).tolist() == []


@pytest.mark.parametrize(
    ("block_ids", "can_hold"),
    [
        *[([1], True), ([2], True), ([2, 1, 2], True), ([0], False), ([3], False)],
        *[([4], False), ([-1], False), ([1, 2, 1 << 40], False)],
    ],
)
def test_held_and_cached_blocks_can_be_held(block_ids: list[int], can_hold: bool) -> None:
    counts, table_numbers = figures(0, 1, 0, 0), figures(0, 0, 7, 0)
    assert are_holdable(counts, table_numbers, index_array(block_ids)) is can_hold


def test_a_block_named_several_times_is_counted_as_often_and_goes_at_the_last_time() -> None:
    counts, table_numbers = figures(0, 0, 1, 0), figures(0, 5, 0, 5)
    assert take_references(counts, index_array([3, 1, 3, 2])).tolist() == [3, 1]
    assert counts.tolist() == [0, 1, 2, 2]
    empty, cached = give_references(counts, table_numbers, index_array([3, 2, 1, 3, 2]))
    assert (empty.tolist(), cached.tolist()) == ([2], [1, 3])
    assert not counts.any()


def test_null_blocks_are_not_counted_as_unheld() -> None:
    assert count_unheld(figures(0, 0, 2, 0), index_array([0, 1, 2, 3, 0])) == 2


@pytest.mark.parametrize("seed", range(10))
def test_runs_are_entered_as_block_after_block_says(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    parents, children = np.zeros(200, np.int32), np.zeros(200, np.int32)
    model_parents, model_children = [0] * 200, [0] * 200
    unused = chance.sample(range(1, 200), 150)
    entered: list[int] = [0]
    while len(unused) > 20:
        runs = [[unused.pop() for _ in range(chance.randint(1, 5))] for _ in range(3)]
        above = [chance.choice(entered) for _ in runs]
        firsts = [[chance.choice([b, b, *entered[1:]]) for b in run] for run in runs]
        for run, first_of, parent in zip(runs, firsts, above, strict=True):
            for block_id, first in zip(run, first_of, strict=True):
                model_parents[block_id] = parent
                model_children[parent] += first == block_id and parent != 0
                parent = first  # noqa: PLW2901
        flat = [[block_id for part in parts for block_id in part] for parts in (runs, firsts)]
        ends = np.cumsum([len(run) for run in runs])
        enter_runs(parents, children, *map(index_array, flat), ends, index_array(above))
        entered += flat[0]
    assert parents.tolist() == model_parents
    assert children.tolist() == model_children


def test_the_way_to_a_block_begins_with_its_first_ancestor() -> None:
    parent_blocks = figures(0, 0, 3, 1, 2)
    assert way_to(parent_blocks, 4, 4).tolist() == [1, 3, 2, 4]
