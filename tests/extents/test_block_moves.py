"""What becomes of many blocks at once, beside the same said block by block."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.arrays import EMPTY_INT32, index_array, int32_array
from kvcache.extents import block_moves
from kvcache.extents.block_store import NO_CONTENT, SEALED

NUM_BLOCKS = 12
LIFE = 1 << 32
WAITING = 2
NO_SINGLES = np.zeros(0, dtype=np.bool_)


def seals_of(*contents: tuple[int, int]) -> np.ndarray:
    seals = np.zeros(NUM_BLOCKS, dtype=np.int16)
    for block_id, seal in contents:
        seals[block_id] = seal
    return seals


@pytest.mark.parametrize("has_single", [False, True])
def test_lives_end_once_for_each_block_and_leave_nothing(has_single: bool) -> None:
    handles, seals = np.arange(NUM_BLOCKS, dtype=np.int64), seals_of((3, SEALED), (5, WAITING))
    single = np.ones(NUM_BLOCKS if has_single else 0, dtype=np.bool_)
    assert block_moves.end_lives(index_array([5, 3]), handles, seals, single, False)
    assert handles[[3, 4, 5]].tolist() == [LIFE + 3, 4, LIFE + 5]
    assert not seals.any()
    if has_single:
        assert np.flatnonzero(~single).tolist() == [3, 5]


def test_no_life_ends_where_one_of_the_blocks_waits_and_must_not() -> None:
    handles, seals = np.arange(NUM_BLOCKS, dtype=np.int64), seals_of((3, SEALED), (5, WAITING))
    assert not block_moves.end_lives(index_array([3, 5]), handles, seals, NO_SINGLES, True)
    assert handles.tolist() == list(range(NUM_BLOCKS))
    assert seals[[3, 5]].tolist() == [SEALED, WAITING]
    assert block_moves.end_lives(index_array([3]), handles, seals, NO_SINGLES, True)


@pytest.mark.parametrize(
    ("adopted", "num_null", "taken", "num_bare", "referenced"),
    [
        ([], 0, [], 0, []),
        ([4, 9], 0, [], 0, []),
        ([], 2, [6], 0, [6]),
        ([4, 9], 0, [6, 1, 8], 2, [8]),
        ([4], 3, [6, 1], 2, []),
    ],
)
def test_a_new_row_has_what_it_adopts_then_what_it_takes(
    adopted: list[int], num_null: int, taken: list[int], num_bare: int, referenced: list[int]
) -> None:
    table = np.zeros(len(adopted) + num_null + len(taken), dtype=np.int32)
    columns = np.full(len(table) + 1, -1, dtype=np.int32)
    references = np.zeros(NUM_BLOCKS, dtype=np.int32)
    block_moves.seat(
        int32_array(adopted) if adopted else EMPTY_INT32,
        num_null,
        int32_array(taken),
        num_bare,
        references,
        columns,
        table,
    )
    assert table.tolist() == adopted + [0] * num_null + taken
    assert columns.tolist() == [*table.tolist(), -1]
    assert np.flatnonzero(references).tolist() == referenced


def test_what_is_given_back_is_fresh_or_cached_once_its_last_reference_goes() -> None:
    references = np.zeros(NUM_BLOCKS, dtype=np.int32)
    references[[2, 3, 4, 5, 6]] = [1, 2, 1, 2, 1]
    seals, single = seals_of((4, SEALED), (6, SEALED)), np.zeros(NUM_BLOCKS, dtype=np.bool_)
    single[4] = True
    fresh = np.full(NUM_BLOCKS, -1, dtype=np.int32)
    ids = int32_array([3, 0, 2, 4, 5, 6, 3])
    cached = index_array([-1, -1])
    counts = block_moves.give_back(ids, references, seals, single, fresh, 1, cached)
    assert references[[0, 2, 3, 4, 5, 6]].tolist() == [0, 0, 0, 0, 1, 0]
    assert counts == (3, 1)
    assert fresh[:4].tolist() == [-1, 3, 2, -1]  # 2 came free first: on top
    assert cached.tolist() == [4, -1]  # 6 has a content and is not single: a run's


def test_nothing_given_back_changes_nothing() -> None:
    references, fresh = np.zeros(NUM_BLOCKS, np.int32), np.zeros(NUM_BLOCKS, np.int32)
    counts = block_moves.give_back(
        EMPTY_INT32, references, seals_of((1, NO_CONTENT)), NO_SINGLES, fresh, 5, index_array([])
    )
    assert counts == (5, 0)


def test_a_touched_block_has_a_reference_more_and_those_that_had_none_are_named() -> None:
    references, seals = np.zeros(NUM_BLOCKS, np.int32), seals_of((4, SEALED), (6, WAITING))
    references[5] = 2
    unheld = index_array([-1, -1, -1, -1])
    assert block_moves.touch(int32_array([6, 0, 5, 4]), references, seals, unheld) == 2
    assert references.tolist() == [0, 0, 0, 0, 1, 3, 1, 0, 0, 0, 0, 0]
    assert unheld.tolist() == [6, 4, -1, -1]


def test_no_block_is_touched_where_one_of_them_is_fresh() -> None:
    references, seals = np.zeros(NUM_BLOCKS, np.int32), seals_of((4, SEALED))
    assert block_moves.touch(int32_array([4, 3]), references, seals, index_array([0, 0])) == -1
    assert not references.any()


def test_null_blocks_are_not_among_those_that_nobody_holds() -> None:
    references = np.zeros(NUM_BLOCKS, np.int32)
    references[[4, 7]] = 1, 3
    assert block_moves.num_unheld(int32_array([0, 4, 5, 0, 7, 6]), references) == 2
