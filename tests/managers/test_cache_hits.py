"""What hits: full attention, sliding windows, EAGLE, hybrids, namespaces."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from kvcache.arrays import EMPTY_INT32
from kvcache.blocks.pool import BlockPool
from kvcache.blocks.run import CachedRun
from kvcache.core import CacheHit, Reservation
from kvcache.errors import ConfigurationError
from kvcache.hashing import BlockHash
from kvcache.managers.base import MatchLimits
from kvcache.managers.coordinators import (
    HybridKVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
    get_kv_cache_coordinator,
)
from kvcache.managers.registry import get_manager_for_kv_cache_spec
from kvcache.request_content import DEFAULT_NAMESPACE
from kvcache.specs import KVCacheSpec, SlidingWindowSpec
from tests.managers.core_builders import (
    NONE_HASH,
    block_lists,
    full,
    make_core,
    make_request,
    plan,
    run_request,
    window,
)


def hits_of(
    spec: KVCacheSpec, cached: list[int], length: int, use_eagle: bool = False
) -> list[int]:
    """Return 1 for hit blocks and 0 for null ones, when blocks `cached` of six are cached."""
    hashes = [BlockHash(bytes([i])) for i in range(6)]
    pool = BlockPool(10, ordered_groups=frozenset())
    for i in range(6):
        (block_id,) = pool.get_new_blocks(1)
        if i in cached:
            pool.cache_full_blocks(
                CachedRun(
                    table=pool.contents.table(DEFAULT_NAMESPACE, 0),
                    block_ids=[block_id],
                    digests=[hashes[i]],
                    parent=hashes[i - 1],
                    token_ids=np.arange(4, dtype=np.int32),
                    block_size=4,
                    extra_keys=(),
                    request_id="r",
                    first_index=i,
                )
            )
    manager = get_manager_for_kv_cache_spec(spec)
    (ids,) = manager.find_longest_cache_hit(hashes, length, [0], pool, spec, use_eagle)
    assert [b for b in ids if b] == [i + 1 for i, b in enumerate(ids) if b]
    return [int(b > 0) for b in ids]


@pytest.mark.parametrize(
    ("cached", "length", "expected"),
    [
        ([0, 1, 2], 24, [1, 1, 1]),
        ([0, 1, 3], 24, [1, 1]),
        ([1, 2], 24, []),
        ([0, 1, 2], 11, [1, 1]),
        ([0, 1, 2], 3, []),
    ],
)
def test_full_attention_hits_from_the_left_until_the_first_miss(
    cached: list[int], length: int, expected: list[int]
) -> None:
    assert hits_of(full(), cached, length) == expected


@pytest.mark.parametrize(
    ("tokens", "cached", "expected"),
    [
        (5, [0, 1, 2, 3], [0, 0, 0, 1]),
        (6, [0, 1, 2, 3], [0, 0, 1, 1]),
        (9, [0, 1, 2, 3], [0, 0, 1, 1]),
        (9, [1, 2, 4], [0, 1, 1]),
        (9, [0, 2, 4], [1]),
        (9, [2, 4], []),
        (1, [4], [0, 0, 0, 0, 1]),
        (100, [0, 1, 3, 4], [1, 1]),
    ],
)
def test_a_window_hits_on_the_rightmost_run_that_covers_it_or_the_leading_run(
    tokens: int, cached: list[int], expected: list[int]
) -> None:
    assert hits_of(window(tokens), cached, 24) == expected


def test_a_window_search_on_a_cold_cache_probes_once_per_window() -> None:
    probes = []

    def find(digest: BlockHash) -> int | None:
        probes.append(digest)
        return None

    spec = window(16 * 4 + 1)
    hashes = [BlockHash(bytes(32))] * 1600
    manager = get_manager_for_kv_cache_spec(spec)
    assert manager.longest_match(find, hashes, spec, MatchLimits(1600)) == []
    assert len(probes) == 100


@pytest.mark.parametrize(
    ("spec", "cached", "expected"),
    [
        (full(), [0, 1, 2], [1, 1]),
        (full(), [0], []),
        (window(9), [1, 2, 3], [0, 1, 1]),
        (window(9), [2, 3], []),
        (window(9), [0, 1], [1]),
    ],
)
def test_eagle_drops_the_last_matched_block(
    spec: KVCacheSpec, cached: list[int], expected: list[int]
) -> None:
    assert hits_of(spec, cached, 24, use_eagle=True) == expected


def test_the_last_token_is_always_computed() -> None:
    core = make_core(10)
    run_request(core, make_request("a", range(8)))
    assert core.look_up(make_request("b", range(8))).num_tokens == 4
    assert core.look_up(make_request("c", range(9))).num_tokens == 8


def test_a_hybrid_hit_holds_in_every_group() -> None:
    core = make_core(30, full(), window(5))
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
    core = make_core(40, full(4), window(5, 6))
    assert core.hash_block_size == 2
    run_request(core, make_request("a", range(30), 2))
    hit = core.look_up(make_request("b", range(30), 2))
    assert hit.num_tokens == 24
    assert [len(ids) for ids in hit.block_ids] == [6, 4]
    assert core.look_up(make_request("c", range(24), 2)).num_tokens == 12


def test_a_hybrid_hit_with_eagle_is_aligned_again_after_the_drop() -> None:
    core = make_core(40, full(4), full(6), use_eagle=True)
    run_request(core, make_request("a", range(30), 2))
    assert core.look_up(make_request("b", range(30), 2)).num_tokens == 12


def test_a_namespace_never_hits_what_another_one_cached() -> None:
    core = make_core(20)
    run_request(core, make_request("a", range(9)))
    for options in ({"tenant": "t"}, {"model_epoch": 1}, {"cache_salt": "s"}):
        assert core.look_up(make_request("b", range(9), **options)).num_tokens == 0
    assert core.look_up(make_request("b", range(9))).num_tokens == 8


def test_a_request_that_skips_reading_misses_and_is_cached_all_the_same() -> None:
    core = make_core(20)
    run_request(core, make_request("a", range(9)))
    skipping = make_request("b", range(9), skip_reading_prefix_cache=True)
    assert core.look_up(skipping).num_tokens == 0
    run_request(core, skipping)
    core.check()
    assert core.statistics().num_cached_blocks == 4


def test_without_caching_nothing_hits_and_nothing_is_cached() -> None:
    core = make_core(20, enable_caching=False)
    request = make_request("a", range(9))
    run_request(core, request)
    core.free(request)
    assert core.look_up(make_request("b", range(9))) == CacheHit((EMPTY_INT32,), 0)
    assert core.statistics().num_cached_blocks == 0
    assert core.take_commands() == []
    core.check()


class UncachableSpec(SlidingWindowSpec):
    @property
    def can_prefix_cache(self) -> bool:
        return False


def test_a_group_that_cannot_hit_turns_caching_off_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = plan(10, full(), UncachableSpec(4, 1, 8, sliding_window=5))
    with caplog.at_level(logging.WARNING):
        coordinator = get_kv_cache_coordinator(config, BlockPool(10))
    assert isinstance(coordinator, KVCacheCoordinatorNoPrefixCache)
    assert caplog.messages == [
        "prefix caching is off: KV cache groups of kind sliding_window cannot start from cached "
        "blocks"
    ]


def test_the_coordinator_follows_from_the_groups() -> None:
    pool = BlockPool(10)
    assert isinstance(get_kv_cache_coordinator(plan(10, full()), pool), UnitaryKVCacheCoordinator)
    assert isinstance(
        get_kv_cache_coordinator(plan(10, full(), full()), pool), HybridKVCacheCoordinator
    )
    assert isinstance(get_kv_cache_coordinator(plan(10), pool), KVCacheCoordinatorNoPrefixCache)


class OddSpec(SlidingWindowSpec):
    kind = "odd"


def test_a_kind_without_a_manager_is_an_error_that_names_the_kinds() -> None:
    with pytest.raises(ConfigurationError) as error:
        make_core(10, OddSpec(4, 1, 8, sliding_window=5))
    assert str(error.value) == (
        "no manager serves KV cache specs of kind 'odd': use one of chunked_local, cross, full, "
        "mamba, mla, sliding_window, or register a manager for it"
    )


def test_delayed_caching_hits_only_after_the_commit() -> None:
    core = make_core(20)
    request = make_request("a", range(9))
    core.reserve(request, Reservation(0, 9, 0))
    assert core.look_up(make_request("b", range(9))).num_tokens == 0
    core.commit(request, 9)
    assert core.look_up(make_request("b", range(9))).num_tokens == 8
    assert core.pool.contents.parents[1] == NONE_HASH
