"""Copies before a write: neither end is handed out before workers have been told, whoever goes."""

from __future__ import annotations

import pytest

from kvcache.commands import Copy
from kvcache.core import ForkOrigin, NewestState, Reservation
from kvcache.core.flat_core import FlatCore
from kvcache.request import Request
from tests.core.builders import full, make_flat_core, make_request, window

PLANS = pytest.mark.parametrize("specs", [(full(),), (full(), window(9))], ids=["full", "window"])


def forked(core: FlatCore) -> tuple[Request, Request]:
    """Return parent and child, which share a block of which half is filled."""
    parent, child = make_request("parent", range(6)), make_request("child", range(6))
    assert core.reserve(parent, Reservation(0, 6, 6), core.look_up(parent)) is not None
    core.fork(parent, child, ForkOrigin(6, NewestState(6, 0)))
    core.take_commands()
    return parent, child


def fill(core: FlatCore, request: Request) -> None:
    """Fill the block that has been shared."""
    request.append_output_token_ids([9, 9])
    assert core.reserve(request, Reservation(6, 8, 8)) is not None


def take_all_there_is(core: FlatCore, name: str = "taker") -> None:
    end = 4 * (core.num_free_blocks() // len(core.block_ids(name)))
    taker = make_request(name, range(100, 100 + end))
    assert core.reserve(taker, Reservation(0, end, 0)) is not None


@PLANS
def test_a_full_copy_and_what_it_was_copied_from_wait_for_the_workers(
    specs: tuple[object, ...],
) -> None:
    core = make_flat_core(12, *specs)
    parent, child = forked(core)
    fill(core, child)
    fill(core, parent)
    ends = {table[1] for name in ("parent", "child") for table in core.block_ids(name)}
    core.free(child)
    core.free(parent)
    core.check()
    take_all_there_is(core)
    assert not ends & {block for table in core.block_ids("taker") for block in table}
    (copy,) = [each for each in core.take_commands() if isinstance(each, Copy)]
    assert {*copy.sources.tolist(), *copy.destinations.tolist()} == ends
    core.check()
    take_all_there_is(core, "another")
    core.check()


@pytest.mark.parametrize("is_told", [False, True])
def test_a_copy_whose_content_is_withdrawn_still_waits_for_the_workers(is_told: bool) -> None:
    core = make_flat_core(6)
    parent, child = forked(core)
    core.open_step("engine", 1)
    fill(core, child)
    core.free(child)
    core.close_step()
    if is_told:
        core.take_commands()
    core.fail_steps("engine", 1)
    core.check()
    assert core.num_free_blocks() == 5 - 2 - (not is_told)
    core.take_commands()
    core.check()
    assert core.num_free_blocks() == 3
    core.free(parent)
    core.check()
    assert core.num_free_blocks() == 5


def test_a_copy_that_others_have_adopted_is_theirs_afterwards() -> None:
    core = make_flat_core(8)
    parent, child = forked(core)
    fill(core, child)
    reader = make_request("reader", [*range(6), 9, 9, 1])
    hit = core.look_up(reader)
    assert hit.num_tokens == 8
    assert core.reserve(reader, Reservation(8, 9, 9), hit) is not None
    core.free(child)
    core.take_commands()
    core.check()
    shared = core.block_ids("reader")[0][:2]
    core.free(parent)
    take_all_there_is(core)
    assert not set(shared) & set(core.block_ids("taker")[0])
    core.check()


def test_what_was_found_before_the_workers_were_told_can_be_adopted_after() -> None:
    core = make_flat_core(8)
    parent, child = forked(core)
    fill(core, child)
    core.free(child)
    core.free(parent)
    reader = make_request("reader", [*range(4), 1])
    hit = core.look_up(reader)
    assert hit.num_tokens == 4
    core.take_commands()
    assert core.reserve(reader, Reservation(4, 5, 5), hit) is not None
    core.check()
    core.free(reader)
    core.check()
    assert core.num_free_blocks() == 7


def test_what_only_a_copy_held_goes_before_what_it_continues() -> None:
    core = make_flat_core(12)
    parent, child = forked(core)
    for request in (child, parent):
        fill(core, request)
    core.free(child)
    core.free(parent)
    core.take_commands()
    core.check()
    for num_blocks in (1, 2, 3):
        end = 4 * (core.num_free_blocks() - 3 + num_blocks)
        assert core.reserve(
            make_request(f"{num_blocks}", range(50, 50 + end)), Reservation(0, end, 0)
        )
        core.check()
        core.free(make_request(f"{num_blocks}", [0]))
