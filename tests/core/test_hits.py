"""What hits in the flat core: the last token, hybrids, EAGLE, namespaces, delays."""

from __future__ import annotations

from kvcache.arrays import EMPTY_INT32
from kvcache.core import CacheHit, Reservation
from tests.core.builders import (
    block_lists,
    full,
    make_flat_core,
    make_request,
    run_request,
    window,
)


def test_the_last_token_is_always_computed() -> None:
    core = make_flat_core(10)
    run_request(core, make_request("a", range(8)))
    assert core.look_up(make_request("b", range(8))).num_tokens == 4
    assert core.look_up(make_request("c", range(9))).num_tokens == 8


def test_a_hybrid_hit_holds_in_every_group() -> None:
    core = make_flat_core(30, full(), window(5))
    first = make_request("a", range(17))
    run_request(core, first)
    full_ids, window_ids = core.block_ids("a")
    assert block_lists(core.look_up(make_request("b", range(17)))) == [
        full_ids[:4],
        [0, 0, 0, window_ids[3]],
    ]
    core.evict([window_ids[3]])
    assert block_lists(core.look_up(make_request("b", range(17)))) == [
        full_ids[:3],
        [0, 0, window_ids[2]],
    ]
    core.evict([full_ids[1]])
    assert core.look_up(make_request("b", range(17))).num_tokens == 4


def test_hits_of_groups_with_unequal_blocks_are_multiples_of_both() -> None:
    core = make_flat_core(40, full(4), window(5, 6))
    assert core.hash_block_size == 2
    run_request(core, make_request("a", range(30), 2))
    hit = core.look_up(make_request("b", range(30), 2))
    assert hit.num_tokens == 24
    assert [len(ids) for ids in hit.block_ids] == [6, 4]
    assert core.look_up(make_request("c", range(24), 2)).num_tokens == 12


def test_a_hybrid_hit_with_eagle_is_aligned_again_after_the_drop() -> None:
    core = make_flat_core(40, full(4), full(6), use_eagle=True)
    run_request(core, make_request("a", range(30), 2))
    assert core.look_up(make_request("b", range(30), 2)).num_tokens == 12


def test_a_namespace_never_hits_what_another_one_cached() -> None:
    core = make_flat_core(20)
    run_request(core, make_request("a", range(9)))
    for options in ({"tenant": "t"}, {"model_epoch": 1}, {"cache_salt": "s"}):
        assert core.look_up(make_request("b", range(9), **options)).num_tokens == 0
    assert core.look_up(make_request("b", range(9))).num_tokens == 8


def test_a_request_that_skips_reading_misses_and_keeps_what_it_computes() -> None:
    core = make_flat_core(20)
    run_request(core, make_request("a", range(9)))
    skipping = make_request("b", range(9), skip_reading_prefix_cache=True)
    assert core.look_up(skipping).num_tokens == 0
    run_request(core, skipping)
    core.check()
    assert core.statistics().num_cached_blocks == 2
    assert core.num_free_blocks() == 13


def test_without_caching_nothing_hits_and_nothing_is_cached() -> None:
    core = make_flat_core(20, enable_caching=False)
    request = make_request("a", range(9))
    run_request(core, request)
    core.free(request)
    assert core.look_up(make_request("b", range(9))) == CacheHit((EMPTY_INT32,), 0)
    assert core.statistics().num_cached_blocks == 0
    assert core.take_commands() == []
    core.check()


def test_delayed_caching_hits_only_after_the_commit() -> None:
    core = make_flat_core(20)
    request = make_request("a", range(9))
    core.reserve(request, Reservation(0, 9, 0))
    assert core.look_up(make_request("b", range(9))).num_tokens == 0
    core.commit(request, 9)
    assert core.look_up(make_request("b", range(9))).num_tokens == 8
