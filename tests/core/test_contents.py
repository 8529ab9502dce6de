"""Contents that are pinned, forgotten, withdrawn with a failed step, or asked for by digest."""

from __future__ import annotations

import random

import pytest

from kvcache.core import CacheHit, NewestState, Reservation
from kvcache.core.flat_core import FlatCore
from kvcache.errors import BlockError, RequestError
from kvcache.hashing import BlockHash
from kvcache.request import Namespace, Request
from tests.audits import Audits
from tests.core.builders import (
    block_lists,
    chunked,
    full,
    make_flat_core,
    make_request,
    mamba,
    run_request,
    window,
)

NAMESPACE = Namespace(0, None, None, None)


def units(*numbers: int) -> list[int]:
    """Tokens of units of four equal ones each."""
    return [number for number in numbers for _ in range(4)]


def request(name: str, *numbers: int) -> Request:
    return make_request(name, units(*numbers))


def probe(core: FlatCore, *numbers: int) -> CacheHit:
    return core.look_up(request("probe", *numbers, 99))


def fill_pool(core: FlatCore, name: str = "filler") -> int:
    """Take every free block, without contents; return how many requests hold them."""
    number = 0
    while core.reserve(request(f"{name} {number}", 7), Reservation(0, 4, 0)) is not None:
        number += 1
    return number


# --- pins --------------------------------------------------------------------------------------


def test_what_is_pinned_outlives_every_eviction() -> None:
    core = make_flat_core(20)
    served = request("a", 1, 2, 3, 4)
    run_request(core, served)
    hit = probe(core, 1, 2)
    core.pin(hit)
    core.free(served)
    fill_pool(core)
    core.check()
    assert probe(core, 1, 2, 3, 4) == hit
    assert core.statistics().num_pinned_blocks == 2
    core.unpin(hit)
    core.check()
    assert core.num_free_blocks() == 2
    fill_pool(core, "second filler")
    assert probe(core, 1, 2).num_tokens == 0


def test_a_pin_is_given_back_once_for_each_time_it_was_made() -> None:
    core = make_flat_core(20, full(), window(9))
    run_request(core, request("a", 1, 2, 3))
    hit = probe(core, 1, 2, 3)
    core.pin(hit)
    core.pin(hit)
    core.free(request("a", 1))
    core.unpin(hit)
    core.check()
    assert core.statistics().num_pinned_blocks == sum(
        len([b for b in ids if b]) for ids in block_lists(hit)
    )
    core.unpin(hit)
    core.check()
    with pytest.raises(BlockError) as error:
        core.unpin(hit)
    assert str(error.value) == (
        "a prefix of 12 tokens is unpinned, but no pin holds blocks [6, 5, 3, 2, 1]: unpin what "
        "was pinned, once"
    )
    core.check()


def test_a_pin_that_loses_its_content_keeps_its_blocks() -> None:
    core = make_flat_core(20)
    served = request("a", 1, 2, 3)
    run_request(core, served)
    hit = probe(core, 1, 2, 3)
    core.pin(hit)
    core.free(served)
    core.evict(block_lists(hit)[0][1:2])
    core.check()
    assert probe(core, 1, 2, 3).num_tokens == 4
    assert core.num_free_blocks() == 16
    core.unpin(hit)
    core.check()
    assert core.num_free_blocks() == 19


# --- evict -------------------------------------------------------------------------------------


def test_blocks_that_are_forgotten_take_what_continues_them_along() -> None:
    core = make_flat_core(40)
    for name, numbers in (("a", (1, 2, 3)), ("b", (1, 2, 4)), ("c", (1, 5))):
        run_request(core, request(name, *numbers))
    second = block_lists(probe(core, 1, 2))[0][1]
    core.evict([second])
    core.check()
    assert [probe(core, *n).num_tokens for n in ((1, 2, 3), (1, 2, 4), (1, 5))] == [4, 4, 8]
    for name in "abc":
        core.free(request(name, 1))
    core.check()
    assert core.num_free_blocks() == 39


def test_of_a_window_only_the_named_blocks_and_their_followers_are_forgotten() -> None:
    core = make_flat_core(40, full(), window(5))
    run_request(core, request("a", 1, 2, 3, 4))
    core.free(request("a", 1))
    of_full, _ = block_lists(probe(core, 1, 2, 3, 4))
    hits = [block_lists(probe(core, *range(1, n + 1)))[1] for n in range(1, 5)]
    of_window = [ids[-1] for ids in hits]
    core.evict([of_window[2]])
    core.check()
    assert [probe(core, *range(1, n + 1)).num_tokens for n in range(1, 5)] == [4, 8, 8, 8]
    core.evict([of_full[1]])
    core.check()
    assert [probe(core, *range(1, n + 1)).num_tokens for n in range(1, 5)] == [4, 4, 4, 4]


def test_blocks_that_do_not_exist_are_not_forgotten() -> None:
    core = make_flat_core(20)
    run_request(core, request("a", 1, 2))
    before = core.dump_state()
    with pytest.raises(BlockError) as error:
        core.evict([1, 20, -1])
    assert str(error.value) == "blocks [20, -1] do not exist: ids are below 20"
    assert core.dump_state() == before


# --- failed steps ------------------------------------------------------------------------------


def test_a_failed_step_withdraws_what_it_made_hittable_and_no_more() -> None:
    core = make_flat_core(40)
    core.open_step("engine", 1)
    served = request("a", 1, 2)
    run_request(core, served)
    core.open_step("engine", 2)
    longer = request("b", 1, 2, 3, 4)
    run_request(core, longer)
    core.complete_steps("engine", 1)
    core.fail_steps("engine", 2)
    core.check()
    core.close_step()
    assert probe(core, 1, 2, 3, 4).num_tokens == 8
    assert [len(table) for table in core.block_ids("b")] == [4]
    core.free(served)
    core.free(longer)
    core.check()
    assert core.num_free_blocks() == 39


@pytest.mark.parametrize("specs", [(full(),), (full(), full(8)), (full(8), window(9))])
def test_a_failed_step_cuts_off_the_end_of_what_nobody_holds(specs: tuple[object, ...]) -> None:
    core = make_flat_core(40, *specs)
    served = request("a", 1, 2, 3)
    for step, end in ((1, 8), (2, 12)):
        core.open_step("engine", step)
        assert core.reserve(served, Reservation(end - 4, end, end)) is not None
    core.complete_steps("engine", 1)
    core.free(served)
    core.fail_steps("engine", 2)
    core.check()
    core.close_step()
    assert probe(core, 1, 2, 3).num_tokens == 8
    assert core.num_free_blocks() == 39
    fill_pool(core)
    core.check()
    assert probe(core, 1, 2, 3).num_tokens == 0


def test_what_failed_is_found_where_runs_were_split_evicted_and_joined_meanwhile() -> None:
    core = make_flat_core(12)
    core.open_step("engine", 1)
    first = request("a", 1, 2, 3, 4)
    run_request(core, first)
    core.open_step("engine", 2)
    second = make_request("b", [*units(1, 2), 9])
    run_request(core, second)
    core.free(first)
    for number in range(fill_pool(core)):
        core.free(request(f"filler {number}", 7))
    third = make_request("c", [*units(1, 2, 5), 9])
    run_request(core, third)
    core.free(second)
    core.free(third)
    assert core.statistics().num_cached_blocks == 3
    core.fail_steps("engine", 1)
    core.check()
    assert core.statistics().num_cached_blocks == 0
    assert probe(core, 1, 2, 5).num_tokens == 0
    assert core.num_free_blocks() == 11


def test_whoever_adopted_what_is_withdrawn_keeps_it_without_content() -> None:
    core = make_flat_core(40)
    core.open_step("engine", 1)
    run_request(core, request("a", 1, 2, 3))
    run_request(core, request("b", 1, 2, 3, 4))
    assert core.block_ids("b")[0][:3] == core.block_ids("a")[0]
    before = core.block_ids("b")
    core.fail_steps("engine", 1)
    core.check()
    assert core.block_ids("b") == before
    assert probe(core, 1, 2, 3, 4).num_tokens == 0
    assert core.statistics().num_cached_blocks == 0
    core.free(request("a", 1))
    core.check()
    assert core.num_free_blocks() == 35
    core.free(request("b", 1))
    assert core.num_free_blocks() == 39


@pytest.mark.parametrize(
    "specs",
    [
        (full(),),
        (full(), full(8)),
        (full(8), window(9)),
        (full(), window(6), window(17)),
        (window(9),),
        (chunked(8),),
        (full(), chunked(8)),
        (full(), mamba()),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_books_add_up_whatever_fails(specs: tuple[object, ...], seed: int) -> None:
    print(f"seed {seed}")
    choose = random.Random(seed)
    core = make_flat_core(60, *specs, merge_duplicates=True)
    audits = Audits(seed, core.check)
    served: list[Request] = []
    failed = 0
    for step in range(60):
        core.open_step(choose.choice("ab"), step)
        for number in range(choose.randrange(3)):
            tokens = [choose.randrange(2) for _ in range(choose.randrange(1, 6)) for _ in range(4)]
            skips = choose.random() < 0.4
            one = make_request(f"r{step}.{number}", [*tokens, 9], skip_reading_prefix_cache=skips)
            if run_request(core, one) is not None:
                served.append(one)
        while served and choose.random() < 0.5:
            core.free(served.pop(choose.randrange(len(served))))
        client, first = choose.choice("ab"), step - choose.randrange(4)
        if choose.random() < 0.5:
            core.complete_steps(client, first)
        else:
            failed += 1
            core.fail_steps(client, first)
        audits.perhaps()
    assert failed
    for client in "ab":
        core.fail_steps(client, 0)
    for one in served:
        core.free(one)
    core.check()
    assert core.num_free_blocks() == 59


# --- by digest ---------------------------------------------------------------------------------


def test_a_digest_leads_to_the_block_that_holds_it() -> None:
    core = make_flat_core(40, full(), window(9, 8))
    served = request("a", 1, 2, 3, 4)
    run_request(core, served)
    of_full, of_window = core.block_ids("a")
    digests = served.block_hashes
    found = [core.find_block(digest, NAMESPACE, 0) for digest in digests]
    assert found == of_full
    found = [core.find_block(digest, NAMESPACE, 1) for digest in digests]
    assert found == [None, of_window[0], None, of_window[1]]
    core.evict([of_full[2]])
    assert core.find_block(digests[2], NAMESPACE, 0) is None
    assert core.find_block(digests[1], NAMESPACE, 0) == of_full[1]


def test_a_digest_is_found_in_its_namespace_and_when_it_is_sealed() -> None:
    core = make_flat_core(40)
    core.open_step("engine", 1)
    salted = make_request("a", units(1, 2), cache_salt="s")
    run_request(core, salted)
    digest = salted.block_hashes[1]
    assert core.find_block(digest, salted.namespace, 0) is None
    core.complete_steps("engine", 1)
    assert core.find_block(digest, salted.namespace, 0) == core.block_ids("a")[0][1]
    assert core.find_block(digest, NAMESPACE, 0) is None
    assert core.find_block(BlockHash(digest[1:]), salted.namespace, 0) is None
    assert core.find_block(BlockHash(bytes(32)), salted.namespace, 0) is None


def test_a_group_that_does_not_exist_holds_nothing() -> None:
    core = make_flat_core(40)
    with pytest.raises(BlockError) as error:
        core.find_block(BlockHash(bytes(32)), NAMESPACE, 1)
    assert str(error.value) == "KV cache group 1 does not exist: the plan has 1"


def test_a_digest_across_two_others_is_not_found() -> None:
    core = make_flat_core(40)
    served = request("a", 1, 2)
    run_request(core, served)
    packed = b"".join(served.block_hashes)
    for at in range(1, 32):
        assert core.find_block(BlockHash(packed[at : at + 32]), NAMESPACE, 0) is None


def test_tokens_to_come_are_not_cached_where_no_block_ends_before_them() -> None:
    core = make_flat_core(40, full(8), full(12))
    served = make_request("a", range(3))
    assert core.reserve(served, Reservation(0, 5, 5)) is not None
    core.check()
    served.append_output_token_ids(list(range(3, 30)))
    assert core.reserve(served, Reservation(5, 30, 30)) is not None
    core.check()
    core.free(served)
    assert core.look_up(make_request("b", range(30))).num_tokens == 24


def test_a_state_is_found_though_its_forward_ended_with_caching_delayed() -> None:
    core = make_flat_core(40, full(), mamba())
    served = make_request("a", range(9))
    for computed, end, cached in ((0, 6, 6), (6, 7, 7), (7, 8, 0)):
        newest = NewestState(computed, 0) if computed else None
        reservation = Reservation(computed, end, cached, num_own_tokens=end, newest_state=newest)
        assert core.reserve(served, reservation) is not None
    core.commit(served, 8)
    core.check()
    assert core.look_up(make_request("b", range(9))).num_tokens == 8


def test_a_hit_of_another_plan_is_not_adopted() -> None:
    core = make_flat_core(40)
    run_request(core, request("a", 1, 2, 3))
    before = core.dump_state()
    with pytest.raises(RequestError) as error:
        core.reserve(request("b", 1, 2, 3), Reservation(8, 9, 9), CacheHit((), 8))
    assert str(error.value) == (
        "request b: its 8 computed tokens are not cached in these blocks any more: look it up again"
    )
    assert core.dump_state() == before


def test_a_failed_step_takes_back_a_unit_in_which_no_block_ends() -> None:
    core = make_flat_core(40, full(8), window(9))
    one = make_request("a", range(8))
    for step, (start, end) in enumerate([(0, 8), (8, 12)], 1):
        if step == 2:
            one.append_output_token_ids([20, 21, 22, 23])
        core.open_step("engine", step)
        assert core.reserve(one, Reservation(start, end, end)) is not None
        core.close_step()
    core.complete_steps("engine", 1)
    core.fail_steps("engine", 2)
    core.check()
    one.truncate_tokens(8)
    one.append_output_token_ids(list(range(30, 38)))
    core.open_step("engine", 3)
    assert core.reserve(one, Reservation(8, 16, 16)) is not None
    core.close_step()
    core.complete_steps("engine", 3)
    core.check()
    computed = [*range(8), *range(30, 38)]
    never = [*range(8), 20, 21, 22, 23, *computed[12:]]
    assert core.look_up(make_request("b", [*computed, 1])).num_tokens == 16
    assert core.look_up(make_request("c", [*never, 1])).num_tokens == 8
