"""Rows that follow what others have published: whoever publishes, and forks that share his blocks.

The parent's blocks are not cached; somebody else computes the same tokens and caches the first of
them. When the parent caches, it follows the other's blocks, and so does every fork that shares its
own, before what is new is published for all of them.
"""

from __future__ import annotations

import pytest

from kvcache.core import ForkOrigin, NewestState, Reservation
from kvcache.core.flat_core import FlatCore
from kvcache.request import Request
from kvcache.specs import KVCacheSpec
from tests.core.builders import full, make_flat_core, make_request, run_request, window
from tests.core.test_fork_contents import NUM_TOKENS, TOKENS, hits

NUM_BLOCKS = 60
ALL_HITS = [1, 2, 3, 4, 5, 6, 7, 8]


def fork(core: FlatCore, parent: Request, name: str, num_tokens: int = NUM_TOKENS) -> Request:
    """Fork a request behind so many of its tokens."""
    child = make_request(name, TOKENS[:num_tokens])
    core.fork(parent, child, ForkOrigin(num_tokens, NewestState(num_tokens, 0)))
    return child


def family(core: FlatCore, num_shared: int = NUM_TOKENS) -> tuple[Request, Request]:
    """Return a request none of whose blocks is cached, and a fork of it."""
    parent = make_request("parent", TOKENS)
    core.reserve(parent, Reservation(0, NUM_TOKENS, 0))
    return parent, fork(core, parent, "child", num_shared)


def somebody_else(core: FlatCore, num_tokens: int, name: str = "other") -> Request:
    """Let a request with the same tokens, and one more, cache its blocks; it stays."""
    other = make_request(name, [*TOKENS[:num_tokens], 99])
    hit = core.look_up(other)
    end = other.num_tokens
    assert core.reserve(other, Reservation(hit.num_tokens, end, end), hit) is not None
    return other


def leave(core: FlatCore, *requests: Request) -> None:
    """Let them go, one by one; at last nobody holds anything."""
    core.take_commands()
    for request in requests:
        core.free(request)
        core.check()
    assert core.num_free_blocks() == NUM_BLOCKS - 1


def test_a_fork_follows_with_its_parent() -> None:
    core = make_flat_core(NUM_BLOCKS, full())
    parent, child = family(core)
    other = somebody_else(core, 16)
    tables = [core.block_ids(request.request_id)[0] for request in (parent, child)]
    core.commit(parent, NUM_TOKENS)
    core.check()
    assert hits(core) == ALL_HITS
    assert [core.block_ids(r.request_id)[0] for r in (parent, child)] == tables
    core.free(parent)
    core.free(other)
    core.check()
    # The fork has its four blocks of what it follows, and holds all eight cached ones or copies.
    assert hits(core) == ALL_HITS
    assert core.num_free_blocks() <= NUM_BLOCKS - 1 - 8
    core.commit(child, NUM_TOKENS)
    core.check()
    leave(core, child)
    assert hits(core) == ALL_HITS


def test_doubles_of_a_fork_take_the_place_of_what_nobody_else_holds() -> None:
    core = make_flat_core(NUM_BLOCKS, full())
    parent, child = family(core)
    other = somebody_else(core, 16)
    core.commit(parent, NUM_TOKENS)
    # Eight of the parent and the fork together, five of the other: four contents stand twice.
    assert core.statistics().num_cached_blocks == 8
    assert core.num_free_blocks() == NUM_BLOCKS - 1 - 13
    core.free(other)
    assert core.num_free_blocks() == NUM_BLOCKS - 1 - 12
    core.free(parent)  # nobody else holds the tree's: the doubles take their place
    assert core.num_free_blocks() == NUM_BLOCKS - 1 - 8
    leave(core, child)
    assert core.statistics().num_cached_blocks == 8


def test_doubles_of_a_fork_go_back_empty_while_the_other_stays() -> None:
    core = make_flat_core(NUM_BLOCKS, full())
    parent, child = family(core)
    other = somebody_else(core, 16)
    core.commit(parent, NUM_TOKENS)
    core.free(parent)
    assert core.num_free_blocks() == NUM_BLOCKS - 1 - 13
    core.free(child)
    core.check()
    assert core.num_free_blocks() == NUM_BLOCKS - 1 - 5
    assert core.statistics().num_cached_blocks == 8
    leave(core, other)


def test_a_fork_that_has_cached_some_follows_from_there() -> None:
    core = make_flat_core(NUM_BLOCKS, full())
    parent, child = family(core)
    core.commit(child, 8)
    core.check()
    assert hits(core) == [1, 2, 2, 2, 2, 2, 2, 2]
    other = somebody_else(core, 20)
    assert hits(core) == [1, 2, 3, 4, 5, 5, 5, 5]
    core.commit(parent, NUM_TOKENS)
    core.check()
    assert hits(core) == ALL_HITS
    leave(core, parent, child, other)


@pytest.mark.parametrize("stays", [True, False])
def test_what_a_fork_cached_is_forgotten_with_what_nobody_holds_before_it(stays: bool) -> None:
    core = make_flat_core(NUM_BLOCKS, full())
    parent, child = family(core)
    other = somebody_else(core, 12)
    core.commit(child, NUM_TOKENS)
    for one in [child, other] if stays else [child, other, parent]:
        core.free(one)
        core.check()
    for num_left in (2, 1, 0):
        end = 4 * (core.num_free_blocks() - num_left)
        taker = make_request("taker", range(100, 100 + end))
        assert core.reserve(taker, Reservation(0, end, 0)) is not None
        core.check()
        core.free(taker)
    leave(core, parent)


def test_forks_of_forks_follow_all_of_them() -> None:
    core = make_flat_core(NUM_BLOCKS, full())
    parent, child = family(core)
    grandchild = fork(core, child, "grandchild")
    other = somebody_else(core, 12)
    core.free(child)
    late = fork(core, grandchild, "late")
    core.commit(parent, 16)
    core.check()
    assert hits(core) == [1, 2, 3, 4, 4, 4, 4, 4]
    core.commit(late, NUM_TOKENS)
    core.check()
    assert hits(core) == ALL_HITS
    leave(core, parent, grandchild, late, other)


@pytest.mark.parametrize("num_shared", [8, 16, 20, 24])
def test_a_fork_that_shares_less_does_not_stand_in_the_way(num_shared: int) -> None:
    """It shares less than the other has published, as much, and more."""
    core = make_flat_core(NUM_BLOCKS, full())
    parent, child = family(core, num_shared)
    other = somebody_else(core, 16)
    core.commit(parent, NUM_TOKENS)
    core.check()
    assert hits(core) == ALL_HITS
    core.commit(child, num_shared)
    core.check()
    leave(core, child, parent, other)
    assert hits(core) == ALL_HITS


@pytest.mark.parametrize("lengths", [(24, 12, 28), (12, 24, 8), (32, 32, 4)])
def test_forks_that_share_more_and_less_are_taken_along_each_as_far_as_it_goes(
    lengths: tuple[int, ...],
) -> None:
    core = make_flat_core(NUM_BLOCKS, full())
    parent = make_request("parent", TOKENS)
    core.reserve(parent, Reservation(0, NUM_TOKENS, 0))
    forks = [fork(core, parent, f"fork-{i}", length) for i, length in enumerate(lengths)]
    core.commit(parent, NUM_TOKENS)
    core.check()
    assert hits(core) == ALL_HITS
    assert core.num_free_blocks() == NUM_BLOCKS - 1 - 8
    for each, length in zip(forks, lengths, strict=True):
        core.commit(each, length)
        core.check()
    assert core.statistics().num_cached_blocks == 8
    leave(core, parent, *forks)


def test_a_stranger_with_the_same_tokens_is_not_taken_along() -> None:
    core = make_flat_core(NUM_BLOCKS, full())
    parent, child = family(core)
    stranger = make_request("stranger", TOKENS)
    core.reserve(stranger, Reservation(0, NUM_TOKENS, 0))
    core.commit(parent, NUM_TOKENS)
    core.check()
    assert hits(core) == ALL_HITS
    core.commit(stranger, NUM_TOKENS)
    core.check()
    leave(core, parent, stranger, child)
    assert hits(core) == ALL_HITS


def test_a_forks_blocks_may_be_the_trees_by_the_time_it_follows() -> None:
    """Those of its parent, which followed, have taken the place of what nobody else held."""
    core = make_flat_core(NUM_BLOCKS, full())
    parent, child = family(core)
    core.free(somebody_else(core, 16))
    core.commit(parent, 16)
    core.check()
    core.commit(child, 16)
    core.check()
    assert hits(core) == [1, 2, 3, 4, 4, 4, 4, 4]
    core.commit(child, NUM_TOKENS)
    core.check()
    assert hits(core) == ALL_HITS
    leave(core, child, parent)


def test_who_follows_only_a_part_of_a_run_ends_in_its_middle() -> None:
    core = make_flat_core(NUM_BLOCKS, full())
    parent, child = family(core, 10)
    other = somebody_else(core, NUM_TOKENS)
    core.commit(child, 10)
    core.check()
    child.append_output_token_ids([50] * 6)
    assert core.reserve(child, Reservation(10, 16, 16)) is not None
    core.check()
    assert hits(core) == ALL_HITS
    branch = make_request("probe", [*TOKENS[:10], *[50] * 6, 99])
    assert core.look_up(branch).num_tokens == 16
    core.commit(parent, NUM_TOKENS)
    core.check()
    leave(core, other, parent, child)


def test_a_fork_offers_what_stood_beside_units_that_it_followed() -> None:
    core = make_flat_core(NUM_BLOCKS, full(), window(9))
    parent, child = family(core)
    other = somebody_else(core, 16)
    core.evict(core.block_ids("other")[1][:4])
    assert hits(core) == [0] * 8
    parent.append_output_token_ids([1])
    end = NUM_TOKENS + 1  # its window has passed the blocks of what it follows
    assert core.reserve(parent, Reservation(NUM_TOKENS, end, end)) is not None
    core.check()
    assert hits(core) == [0, 0, 0, 0, 0, 0, 0, 8]
    core.commit(child, 3)  # not even one block: nothing is offered yet
    core.commit(child, 12)
    core.check()
    assert hits(core)[:3] == [1, 2, 3]
    core.commit(child, NUM_TOKENS)
    core.check()
    assert hits(core) == ALL_HITS
    leave(core, parent, child, other)


@pytest.mark.parametrize("specs", [(full(),), (full(), window(9))], ids=["full", "window"])
@pytest.mark.parametrize("stays", [True, False])
def test_who_followed_in_a_step_that_failed_follows_again(
    specs: tuple[KVCacheSpec, ...], stays: bool
) -> None:
    core = make_flat_core(NUM_BLOCKS, *specs)
    parent, child = family(core)
    other = somebody_else(core, 16)
    if not stays:
        core.free(other)
    core.open_step("engine", 1)
    core.commit(parent, NUM_TOKENS)
    core.close_step()
    core.check()
    core.fail_steps("engine", 1)
    core.check()
    assert hits(core) == [1, 2, 3, 4, 4, 4, 4, 4]
    core.open_step("engine", 2)
    core.commit(child, NUM_TOKENS)
    core.commit(parent, NUM_TOKENS)
    core.close_step()
    core.complete_steps("engine", 2)
    core.check()
    assert hits(core) == ALL_HITS
    leave(core, parent, child, *([other] if stays else []))


def test_what_two_clients_compute_may_be_followed_before_it_is_there() -> None:
    """Parent and fork follow blocks whose step is not complete; when it fails, theirs are used."""
    core = make_flat_core(NUM_BLOCKS, full())
    parent, child = family(core)
    core.open_step("another", 1)
    other = somebody_else(core, 16)
    core.close_step()
    core.open_step("engine", 1)
    core.commit(parent, NUM_TOKENS)
    core.close_step()
    core.check()
    core.complete_steps("engine", 1)
    core.check()
    core.fail_steps("another", 1)
    core.check()
    core.free(other)
    core.open_step("engine", 2)
    core.commit(child, NUM_TOKENS)
    core.commit(parent, NUM_TOKENS)
    core.close_step()
    core.complete_steps("engine", 2)
    core.check()
    assert hits(core) == ALL_HITS
    leave(core, parent, child)


def test_who_lost_contents_caches_none_when_its_step_fails_and_runs_again() -> None:
    core = make_flat_core(NUM_BLOCKS, full())
    parent = make_request("parent", TOKENS)
    core.reserve(parent, Reservation(0, 8, 8))
    core.open_step("engine", 1)
    core.reserve(parent, Reservation(8, 24, 24))
    core.close_step()
    core.evict([core.block_ids("parent")[0][3]])
    core.fail_steps("engine", 1)
    core.check()
    core.reserve(parent, Reservation(8, 24, 24))
    core.check()
    assert hits(core) == [1, 2, 2, 2, 2, 2, 2, 2]
    assert core.statistics().num_cached_blocks == 2
    leave(core, parent)


@pytest.mark.parametrize("ends", [[12], [8, 12], [4, 8, 12]])
def test_nothing_takes_the_place_of_what_waits_before_what_it_continues(ends: list[int]) -> None:
    """The parent shares its first two blocks with a fork, which may still cache them; the third is
    its own. Were it alone in the tree's place, it would be told of before its parents."""
    core = make_flat_core(NUM_BLOCKS, full())
    parent = make_request("parent", TOKENS)
    core.reserve(parent, Reservation(0, 8, 0))
    child = fork(core, parent, "child", 8)
    core.reserve(parent, Reservation(8, 12, 0))
    core.open_step("another", 1)
    other = somebody_else(core, 12)
    core.close_step()
    for end in ends:
        core.commit(parent, end)
        core.check()
    assert core.statistics().num_sealed_blocks == 0
    core.commit(child, 8)  # now these are doubles, too
    core.check()
    core.complete_steps("another", 1)
    core.check()
    assert core.statistics().num_sealed_blocks == 3
    assert hits(core) == [1, 2, 3, 3, 3, 3, 3, 3]
    leave(core, parent, child, other)


def test_a_pin_whose_content_was_withdrawn_is_published_around() -> None:
    core = make_flat_core(NUM_BLOCKS, full())
    parent = make_request("parent", TOKENS)
    core.open_step("engine", 1)
    core.reserve(parent, Reservation(0, NUM_TOKENS, NUM_TOKENS))
    found = core.look_up(make_request("probe", [*TOKENS[:20], 99]))
    assert found.num_tokens == 20
    core.pin(found)
    core.close_step()
    core.fail_steps("engine", 1)
    core.check()
    assert hits(core) == [0] * 8
    core.commit(parent, NUM_TOKENS)
    core.check()
    core.unpin(found)
    core.check()
    core.commit(parent, NUM_TOKENS)
    core.check()
    assert hits(core) == ALL_HITS
    leave(core, parent)


@pytest.mark.parametrize("how", ["commit", "reserve"])
@pytest.mark.parametrize("column", [0, 2, 4])
def test_a_fork_does_not_publish_what_was_to_be_found_no_more(how: str, column: int) -> None:
    """It shares four of the blocks that its parent has cached, and has cached none itself."""
    core = make_flat_core(NUM_BLOCKS, full())
    parent, child = family(core, 16)
    core.commit(parent, NUM_TOKENS)
    core.evict([core.block_ids("parent")[0][column]])
    left = [min(blocks, column) for blocks in ALL_HITS]
    assert hits(core) == left
    core.check()
    if how == "commit":
        core.commit(child, 16)
    else:
        child.append_output_token_ids([2] * 4)
        assert core.reserve(child, Reservation(16, 20, 20)) is not None
    core.commit(parent, NUM_TOKENS)
    core.check()
    assert hits(core) == left
    # A fork that shares none of it goes on.
    branch = make_request("probe", [*TOKENS[:16], *[2] * 4, 99])
    goes_on = column == 4 and how == "reserve"
    assert core.look_up(branch).num_tokens == (20 if goes_on else min(16, 4 * column))
    leave(core, parent, child)


def test_a_policy_with_a_memory_knows_what_a_fork_offers() -> None:
    core = make_flat_core(NUM_BLOCKS, full(), window(9), eviction_policy="hazard")
    parent, child = family(core)
    other = somebody_else(core, 16)
    core.evict(core.block_ids("other")[1][:4])
    parent.append_output_token_ids([1])
    end = NUM_TOKENS + 1
    core.reserve(parent, Reservation(NUM_TOKENS, end, end))
    core.commit(child, NUM_TOKENS)
    core.check()
    leave(core, parent, child, other)
    assert hits(core) == ALL_HITS


@pytest.mark.parametrize("specs", [(full(),), (window(8),), (full(), window(8))])
def test_a_fork_does_not_cache_what_was_evicted_of_any_kind(specs: tuple[KVCacheSpec, ...]) -> None:
    core = make_flat_core(NUM_BLOCKS, *specs)
    parent, child = family(core)
    core.commit(parent, NUM_TOKENS)
    last = core.block_ids(parent.request_id)[-1][-1]
    core.evict([last])
    core.commit(child, NUM_TOKENS)
    hit = core.look_up(make_request("probe", [*TOKENS, 99]))
    assert last not in hit.block_ids[-1].tolist()
    leave(core, parent, child)


ANSWER_UNITS = 6


def answer_again(core: FlatCore, first_step: int = 1) -> Request:
    """Let a request decode what another one, which has gone, has cached; a unit in each step."""
    tokens = [number for number in range(1, 3 + ANSWER_UNITS) for _ in range(4)]
    first = make_request("first", tokens)
    core.open_step("engine", 0)
    run_request(core, first)
    core.close_step()
    core.complete_steps("engine", 0)
    core.free(first)
    again = make_request("again", tokens[:9])
    core.open_step("engine", first_step)
    run_request(core, again)
    core.close_step()
    for unit in range(2, 2 + ANSWER_UNITS):
        again.append_output_token_ids(tokens[again.num_tokens : 4 * unit + 4])
        end = again.num_tokens
        core.open_step("engine", first_step + unit)
        assert core.reserve(again, Reservation(4 * unit, end, end)) is not None
        core.close_step()
        core.check()
    return again


def test_of_two_that_follow_one_answer_neither_takes_the_place_of_what_the_other_holds() -> None:
    core = make_flat_core(NUM_BLOCKS)
    again = answer_again(core)
    hit = core.look_up(make_request("other", [*again.all_token_ids.tolist(), 7]))
    other = make_request("other", [*again.all_token_ids.tolist(), 7])
    run_request(core, other)
    before = core.num_free_blocks()
    core.complete_steps("engine", 100)
    core.check()
    assert core.num_free_blocks() == before
    assert core.block_ids("other")[0][:8] == hit.block_ids[0].tolist()
    leave(core, other, again)
