"""Blocks that requests give up because others have their contents."""

from __future__ import annotations

import random

import pytest

from kvcache.core import ForkOrigin, NewestState, Reservation, TableChange
from kvcache.core.flat_core import FlatCore
from kvcache.request import Request
from kvcache.specs import KVCacheSpec
from tests.audits import Audits
from tests.core.builders import chunked, full, make_flat_core, make_request, mamba, window

PLANS: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (full(),),
    "two full": (full(), full(8)),
    "full, window": (full(), window(9)),
    "full, long window": (full(), window(20, 8)),
    "window": (window(40),),
    "full, chunked": (full(), chunked(24)),
    "full, states": (full(), mamba()),
}


def request(name: str, *numbers: int) -> Request:
    tokens = [number for number in numbers for _ in range(4)]
    return make_request(name, tokens, skip_reading_prefix_cache=True)


def compute(core: FlatCore, one: Request) -> None:
    """Compute all of a request anew."""
    end = one.num_tokens
    assert core.reserve(one, Reservation(0, end, end)) is not None


def in_step(core: FlatCore, step: int, *requests: Request) -> None:
    core.open_step("engine", step)
    for one in requests:
        compute(core, one)
    core.close_step()


def columns_of(core: FlatCore) -> dict[tuple[str, int, int], int]:
    """Take the changes of tables: the block of each owner, group and column."""
    return {
        (owner, change.group, change.first_index + i): b
        for owner, change in core.take_merges()
        for i, b in enumerate(change.block_ids.tolist())
    }


def test_tables_change_to_the_blocks_that_were_first() -> None:
    core = make_flat_core(40, merge_duplicates=True)
    in_step(core, 1, request("a", 1, 2, 3), request("b", 1, 2, 3, 4))
    core.complete_steps("engine", 1)
    core.check()
    (first,) = core.block_ids("a")
    assert columns_of(core) == {("b", 0, i): b for i, b in enumerate(first)}
    assert core.take_merges() == []
    assert core.block_ids("b")[0][:3] == first
    assert (core.statistics().num_merged_blocks, core.num_free_blocks()) == (3, 35)


def test_successive_columns_are_one_change() -> None:
    core = make_flat_core(40, merge_duplicates=True)
    in_step(core, 1, request("a", 1, 2, 3), request("b", 1, 5), request("c", 1, 2, 3))
    core.complete_steps("engine", 1)
    changes: list[tuple[str, TableChange]] = core.take_merges()
    assert [(name, c.first_index, len(c.block_ids)) for name, c in changes] == [
        ("b", 0, 1),
        ("c", 0, 3),
    ]


def test_a_step_that_failed_merges_nothing() -> None:
    core = make_flat_core(40, merge_duplicates=True)
    in_step(core, 1, request("a", 1, 2))
    in_step(core, 2, request("b", 1, 2))
    core.fail_steps("engine", 2)
    core.complete_steps("engine", 2)
    core.check()
    assert core.take_merges() == []
    assert len({*core.block_ids("a")[0], *core.block_ids("b")[0]}) == 4


def test_what_a_later_step_computed_is_kept_until_that_is_complete() -> None:
    core = make_flat_core(40, merge_duplicates=True)
    two = request("b", 1, 2)
    in_step(core, 1, request("a", 1, 2, 3, 4), two)
    two.append_output_token_ids([3] * 4)
    in_step(core, 2, two)
    two.append_output_token_ids([4] * 4)
    in_step(core, 3, two)
    core.complete_steps("engine", 1)
    assert columns_of(core).keys() == {("b", 0, 0), ("b", 0, 1)}
    core.check()
    core.fail_steps("engine", 3)
    core.complete_steps("engine", 2)
    assert columns_of(core).keys() == {("b", 0, 2)}
    core.check()


def test_what_was_computed_outside_any_step_stays() -> None:
    core = make_flat_core(40, merge_duplicates=True)
    for name in "ab":
        compute(core, request(name, 1, 2))
    in_step(core, 1, request("c", 5))
    core.complete_steps("engine", 1)
    core.check()
    assert core.statistics().num_merged_blocks == 0


def test_a_duplicate_that_a_fork_shares_is_given_up_by_one_of_the_two() -> None:
    core = make_flat_core(40, full(), window(9), merge_duplicates=True)
    parent, child = request("b", 1, 2, 3), request("c", 1, 2, 3)
    in_step(core, 1, request("a", 1, 2, 3), parent)
    core.fork(parent, child, ForkOrigin(12, NewestState(12, 0)))
    before = core.block_ids("c")
    core.complete_steps("engine", 1)
    core.check()
    assert core.block_ids("b") == core.block_ids("a")
    assert core.block_ids("c") == before
    assert core.statistics().num_merged_blocks == 0
    for one in (parent, child, request("a", 1)):
        core.free(one)
        core.check()
    assert core.num_free_blocks() == 39


def test_of_a_request_that_has_gone_nothing_is_merged() -> None:
    core = make_flat_core(40, merge_duplicates=True)
    gone = request("b", 1, 2)
    in_step(core, 1, request("a", 1, 2), gone)
    core.free(gone)
    in_step(core, 2, request("b", 3))
    core.complete_steps("engine", 1)
    core.check()
    assert core.take_merges() == []


def test_a_state_stays_where_its_request_looks_for_it() -> None:
    core = make_flat_core(40, full(), mamba(), merge_duplicates=True)
    in_step(core, 1, request("a", 1, 2), request("b", 1, 2))
    states = core.block_ids("b")[1]
    core.complete_steps("engine", 1)
    core.check()
    assert {group for _, group, _ in columns_of(core)} == {0}
    assert core.block_ids("b")[1] == states


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("seed", range(2))
def test_tables_follow_what_is_merged_while_everybody_runs(name: str, seed: int) -> None:
    choose = random.Random(seed)
    core = make_flat_core(400, *PLANS[name], merge_duplicates=True)
    audits = Audits(seed, core.check)
    table: dict[tuple[str, int, int], int] = {}
    for step in range(30):
        numbers = [choose.randrange(1, 3) for _ in range(choose.randrange(1, 5))]
        in_step(core, step, request(f"r{step}", *numbers))
        core.complete_steps("engine", step - choose.randrange(4))
        audits.perhaps()
        table.update(columns_of(core))
    core.check()
    for (owner, group, column), block_id in table.items():
        assert core.block_ids(owner)[group][column] == block_id
    assert table and core.statistics().num_merged_blocks > 0


def test_a_step_that_had_no_room_for_a_request_merges_nothing_of_another() -> None:
    core = make_flat_core(8, merge_duplicates=True)
    in_step(core, 1, request("a", 1, 2))
    core.open_step("other", 1)
    large = request("large", 1, 2, 3, 4, 5, 6)
    assert core.reserve(large, Reservation(0, 24, 24)) is None
    core.close_step()
    in_step(core, 2, request("b", 1, 2))
    core.complete_steps("engine", 1)
    core.complete_steps("other", 1)
    assert core.take_merges() == []
    core.check()
