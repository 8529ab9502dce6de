"""Managers by kind: hits, tables, and the registry."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvcache import KVCacheManager, Request
from kvcache.base.errors import BlockError, ConfigurationError, OutOfBlocksError, RequestError
from kvcache.core import NewestState, Reservation
from kvcache.core.block_pool import BlockPool
from kvcache.specs import AttentionSpec, KVCacheSpec, SlidingWindowSpec
from kvcache.tables.single_type_managers import (
    MANAGERS,
    ChunkedLocalAttentionManager,
    CrossAttentionManager,
    FullAttentionManager,
    MambaManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
    get_manager_for_kv_cache_spec,
)
from tests.core.builders import chunked, cross, full, make_request, mamba, mla, plan, window
from tests.tables.builders import Tables


def hits_of(spec: KVCacheSpec, cached: list[int], length: int) -> list[int]:
    """Return 1 for hit blocks and 0 for null ones, when blocks `cached` of six are cached."""
    pool, request = BlockPool(10, ordered_groups=()), make_request("r", range(24))
    blocks = [b if i in cached else 0 for i, b in enumerate(pool.get_new_blocks(6))]
    pool.cache_full_blocks(request, blocks, 0, 6, 4)
    manager = get_manager_for_kv_cache_spec(spec)
    (ids,) = manager.find_longest_cache_hit(request.block_hashes, length, [0], pool, spec)
    assert [b for b in ids if b] == [i + 1 for i, b in enumerate(ids) if b]
    return [int(b > 0) for b in ids]


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


@pytest.mark.parametrize(
    ("cached", "length", "expected"),
    [
        ([2], 15, [0, 0, 1]),
        ([2], 16, [0, 0, 0, 0]),
        ([], 16, [0, 0, 0, 0]),
        ([], 15, [0, 0]),
        ([], 7, []),
        ([0, 1, 2, 3], 15, [0, 0, 1]),
        ([0, 1], 7, [1]),
        ([3], 15, [0, 0]),
        ([4], 23, [0, 0, 0, 0, 1]),
    ],
)
def test_chunks_before_the_last_count_as_computed(
    cached: list[int], length: int, expected: list[int]
) -> None:
    assert hits_of(chunked(8), cached, length) == expected


def test_a_digest_hits_where_every_group_has_it() -> None:
    pool, request = BlockPool(10), make_request("r", range(12))
    one, two = pool.get_new_blocks(3), pool.get_new_blocks(2)
    pool.cache_full_blocks(request, one, 0, 3, 4, 0)
    pool.cache_full_blocks(request, two, 0, 2, 4, 1)
    found = FullAttentionManager.find_longest_cache_hit(
        request.block_hashes, 12, [0, 1], pool, full()
    )
    assert found == (one[:2], two)


# --- tables --------------------------------------------------------------------------------------


def test_a_table_grows_is_cached_and_goes_tail_first() -> None:
    pool, request = BlockPool(9), make_request("a", range(9))
    manager = FullAttentionManager(full(), pool, 0)
    assert manager.get_num_blocks_to_allocate("a", Reservation(0, 9, 0)) == 3
    assert manager.allocate_new_blocks("a", Reservation(0, 9, 0)) == [1, 2, 3]
    manager.cache_blocks(request, 9)
    assert manager.num_cached_blocks("a") == 2
    assert manager.get_num_common_prefix_blocks("a", 1) == 3
    assert manager.get_num_common_prefix_blocks("a", 2) == 0
    manager.free("a")
    assert manager.table("a") == ()
    assert pool.get_all_free_blocks()[-2:] == [2, 1]
    manager.free("a")
    assert pool.get_num_free_blocks() == 8


def test_a_hit_is_adopted_by_a_request_without_blocks_alone() -> None:
    pool, request = BlockPool(9), make_request("a", range(9))
    manager = FullAttentionManager(full(), pool, 0)
    manager.allocate_new_blocks("a", Reservation(0, 9, 0))
    manager.cache_blocks(request, 9)
    manager.free("a")
    assert manager.get_num_blocks_to_allocate("b", Reservation(8, 9, 0), [1, 2]) == 3
    manager.save_new_computed_blocks("b", [1, 2], 8)
    assert manager.get_num_blocks_to_allocate("b", Reservation(8, 9, 0)) == 1
    with pytest.raises(RequestError, match="request b holds 2 blocks of group 0 already"):
        manager.save_new_computed_blocks("b", [1])
    with pytest.raises(BlockError, match=r"blocks \[3\] are free and hold nothing"):
        manager.save_new_computed_blocks("c", [3])
    assert [pool.block(b).ref_cnt for b in (1, 2, 3)] == [1, 1, 0]


def test_what_cannot_be_cached_is_refused() -> None:
    pool, request = BlockPool(9), make_request("a", range(5))
    manager = FullAttentionManager(full(), pool, 0)
    with pytest.raises(RequestError, match="has 0 blocks in group 0, 1 cannot be cached"):
        manager.cache_blocks(request, 4)
    manager.allocate_new_blocks("a", Reservation(0, 9, 0))
    with pytest.raises(RequestError, match="has 5 tokens, blocks up to token 8 cannot be full"):
        manager.cache_blocks(request, 8)
    assert pool.num_cached_blocks == 0


def test_a_window_frees_blocks_that_are_read_no_more() -> None:
    pool = BlockPool(9)
    manager = SlidingWindowManager(window(5), pool, 0)
    manager.allocate_new_blocks("a", Reservation(0, 16, 0))
    manager.remove_skipped_blocks("a", 12)
    assert manager.table("a") == [0, 0, 3, 4]
    assert pool.get_all_free_blocks() == [2, 1, 5, 6, 7, 8]
    manager.remove_skipped_blocks("a", 12)
    assert manager.get_num_blocks_to_allocate("b", Reservation(12, 16, 0)) == 2


def test_too_few_blocks_change_nothing() -> None:
    pool = BlockPool(3)
    manager = MambaManager(mamba(num_drafts=2), pool, 0)
    with pytest.raises(OutOfBlocksError):
        manager.allocate_new_blocks("a", Reservation(0, 10, 0))
    assert manager.table("a") == ()


def forward(tables: Tables, start: int, own: int, drafts: int = 0, last: int = 0) -> bool:
    """Schedule the tokens `[start, own)` and some drafts, after a forward that ended at `last`."""
    newest = NewestState(last, start - last) if last else None
    wanted = Reservation(start, own + drafts, own, 0, own, newest)
    return tables.reserve(make_request("a", range(100)), wanted)


def test_one_state_and_those_of_drafts_are_all_a_request_ever_has() -> None:
    tables = Tables(20, mamba("none", num_drafts=2))
    assert forward(tables, 0, 30)
    assert forward(tables, 30, 90, drafts=2, last=30)
    assert forward(tables, 92, 100, last=90)
    assert tables.shape("a") == [1, 1, 1]


def test_columns_that_a_chunk_passes_stay_null() -> None:
    tables = Tables(20, mamba())
    forward(tables, 0, 10)
    assert tables.shape("a") == [0, 0, 1]
    forward(tables, 10, 19, last=10)
    assert tables.shape("a") == [0, 0, 1, 0, 1]
    forward(tables, 19, 20, last=19)
    assert tables.shape("a") == [0, 0, 0, 0, 1]
    forward(tables, 20, 40, last=20)
    tables.coordinator.free("a")
    assert tables.pool.get_num_free_blocks() == 19


def test_a_request_never_holds_more_states_than_its_spec_says() -> None:
    tables = Tables(1 + 4, mamba(num_drafts=2))
    assert forward(tables, 0, 10)
    assert tables.shape("a") == [0, 0, 1, 1, 1]
    assert forward(tables, 10, 31, last=10)
    assert tables.shape("a") == [0, 0, 1, 0, 0, 0, 0, 1, 1, 1]
    assert forward(tables, 31, 32, drafts=2, last=31)
    assert forward(tables, 33, 34, drafts=2, last=32)
    assert forward(tables, 36, 59, last=34)
    assert tables.pool.get_num_free_blocks() == 0
    tables.pool.check()


def test_a_hit_is_the_last_column_whose_end_was_the_end_of_a_forward() -> None:
    tables = Tables(20, mamba())
    forward(tables, 0, 8)
    forward(tables, 8, 15, last=8)
    forward(tables, 15, 18, last=15)
    hit = tables.look_up(make_request("b", range(100)))
    assert hit.num_tokens == 8
    assert [int(b > 0) for b in hit.block_ids[0]] == [0, 1]


def test_the_state_behind_external_tokens_has_its_column() -> None:
    tables = Tables(20, mamba())
    tables.reserve(make_request("a", range(100)), Reservation(9, 30, 30, 0, 30))
    assert tables.shape("a") == [0, 0, 1, 0, 0, 0, 0, 1]


def test_a_hit_is_dropped_where_external_tokens_reach_further() -> None:
    tables = Tables(20, mamba())
    forward(tables, 0, 8)
    request = make_request("b", range(100))
    hit = tables.look_up(request)
    assert hit.num_tokens == 8
    assert tables.reserve(request, Reservation(13, 20, 20, 0, 20), hit)
    assert tables.shape("b") == [0, 0, 0, 1, 1]
    tables.coordinator.free("a")
    tables.coordinator.free("b")
    assert tables.pool.get_num_free_blocks() == 19


def test_a_state_that_can_be_hit_does_not_move() -> None:
    pool, request = BlockPool(20, ordered_groups=()), make_request("a", range(100))
    manager = MambaManager(mamba(num_drafts=1), pool, 0)
    manager.allocate_new_blocks("a", Reservation(0, 9, 0, 0, 8))
    manager.cache_blocks(request, 8)
    manager.allocate_new_blocks("a", Reservation(9, 32, 0, 0, 32, NewestState(8, 1)))
    assert manager.table("a") == [0, 1, 2, 0, 0, 0, 0, 3, 4]


def test_encoder_tokens_are_allocated_once_and_do_not_grow() -> None:
    tables = Tables(20, full(), cross())
    request = make_request("a", range(40))
    assert tables.reserve(request, Reservation(0, 5, 0, num_encoder_tokens=9))
    assert tables.reserve(request, Reservation(5, 40, 0))
    assert [len(ids) for ids in tables.coordinator.get_blocks("a")] == [10, 3]
    tables.coordinator.free("a")
    assert tables.pool.get_num_free_blocks() == 19


# --- the registry --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "manager"),
    [
        (full(), FullAttentionManager),
        (mla(), FullAttentionManager),
        (window(5), SlidingWindowManager),
        (chunked(8), ChunkedLocalAttentionManager),
        (mamba(), MambaManager),
        (cross(), CrossAttentionManager),
    ],
)
def test_every_kind_has_its_manager(
    spec: KVCacheSpec, manager: type[SingleTypeKVCacheManager]
) -> None:
    assert get_manager_for_kv_cache_spec(spec) is manager


class EvenSpec(SlidingWindowSpec):
    """Tokens read the blocks of even index before them, and the last block."""

    kind = "even"

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0


class EvenManager(SingleTypeKVCacheManager):
    """An external kind: a hit needs every block of even index."""

    @staticmethod
    def longest_hit(
        spec: KVCacheSpec,
        is_there: npt.NDArray[np.bool_],
        max_blocks: int,
        *,
        num_extra_blocks: int = 0,
        alignment_blocks: int = 1,
    ) -> range:
        end = 0
        while end < min(len(is_there), max_blocks) and (end % 2 or is_there[end]):
            end += 1
        return range(end - end % alignment_blocks)

    def cacheable_columns(self, request_id: str, start: int, end: int) -> range:
        return range(start + start % 2, end, 2)


def test_a_kind_from_outside_is_served_with_a_manager_of_its_own() -> None:
    spec = EvenSpec(4, 1, 8, sliding_window=5)
    with pytest.raises(ConfigurationError) as error:
        get_manager_for_kv_cache_spec(spec)
    assert str(error.value) == (
        "no manager serves KV cache specs of kind 'even': use one of chunked_local, cross, full, "
        "mamba, mla, sliding_window, or register a manager for it"
    )
    tables = Tables(20, full(), spec, managers={**MANAGERS, "even": EvenManager})
    assert tables.run(make_request("a", range(18)))
    assert tables.pool.num_cached_blocks == 4 + 2
    hit = tables.look_up(make_request("b", range(18)))
    assert [[int(b > 0) for b in ids] for ids in hit.block_ids] == [[1, 1, 1, 1], [1, 0, 1, 0]]


class OddSpec(SlidingWindowSpec):
    kind = "odd"


class StrangeSpec(AttentionSpec):
    kind = "strange"

    def max_memory_usage_bytes(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        return self.page_size_bytes


def test_a_cache_manager_serves_a_kind_from_outside_by_what_it_is_or_refuses_it() -> None:
    manager = KVCacheManager(
        plan(20, OddSpec(4, 1, 8, sliding_window=5)),
        100,
    )
    request = Request("a", list(range(17)))
    manager.allocate_slots(request, 17)
    assert manager.get_computed_blocks(Request("b", list(range(17))))[1] == 16
    with pytest.raises(ConfigurationError, match="no rules for KV cache groups of kind 'strange'"):
        KVCacheManager(plan(20, StrangeSpec(4, 1, 8)), 100)
