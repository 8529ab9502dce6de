"""`PrefixCachingBlockAllocator`: sharing, eviction, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache import (
    BlockError,
    ConfigurationError,
    OutOfBlocksError,
    PrefixCachingBlock,
    PrefixCachingBlockAllocator,
)

BLOCK_SIZE = 4


def make_allocator(num_blocks: int, **options: Any) -> PrefixCachingBlockAllocator:
    return PrefixCachingBlockAllocator(num_blocks, BLOCK_SIZE, **options)


def chain_of(
    allocator: PrefixCachingBlockAllocator, token_ids: list[int]
) -> list[PrefixCachingBlock]:
    size = allocator.block_size
    return allocator.allocate_immutable_blocks(
        None, [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
    )


def ids(blocks: list[PrefixCachingBlock]) -> list[int | None]:
    return [block.block_id for block in blocks]


# --- allocating and freeing ------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [1, 100])
def test_mutable_blocks_run_out(num_blocks: int) -> None:
    allocator = make_allocator(num_blocks)
    blocks = [allocator.allocate_mutable_block(None) for _ in range(num_blocks)]
    assert ids(blocks) == list(range(num_blocks))
    with pytest.raises(OutOfBlocksError, match=f"1 blocks are wanted, 0 of {num_blocks} are free"):
        allocator.allocate_mutable_block(None)
    assert allocator.get_num_free_blocks() == 0
    allocator.check()


def test_a_chain_that_is_cached_fits_where_a_new_block_does_not() -> None:
    allocator = make_allocator(8)
    chain = chain_of(allocator, list(range(32)))
    with pytest.raises(OutOfBlocksError, match="1 blocks need 1 free ones, 0 of 8 are free"):
        allocator.allocate_immutable_block(chain[-1], [0, 1, 2, 3])
    assert ids(chain_of(allocator, list(range(32)))) == ids(chain)
    allocator.check()


def test_immutable_blocks_come_all_or_not_at_all() -> None:
    allocator = make_allocator(3)
    allocator.free(chain_of(allocator, list(range(8)))[1])
    with pytest.raises(OutOfBlocksError, match="4 blocks need 3 free ones, 2 of 3 are free"):
        chain_of(allocator, list(range(16)))
    assert allocator.get_num_free_blocks() == 2
    assert allocator.get_prefix_cache_hit_rate() == 0.0
    assert ids(chain_of(allocator, list(range(12)))) == [0, 1, 2]
    allocator.check()


def test_blocks_that_hold_nothing_are_taken_before_anything_is_evicted() -> None:
    allocator = make_allocator(3)
    for block in [allocator.allocate_immutable_block(None, [i] * 4) for i in range(2)]:
        allocator.free(block)
    mutable = allocator.allocate_mutable_block(None)
    assert mutable.block_id == 2
    allocator.free(mutable)
    taken = [allocator.allocate_mutable_block(None) for _ in range(2)]
    assert ids(taken) == [2, 0]
    assert allocator.statistics().num_evictions == 1
    assert allocator.allocate_immutable_block(None, [1] * 4).block_id == 1


def test_freeing_twice_is_an_error() -> None:
    allocator = make_allocator(2)
    block = allocator.allocate_mutable_block(None)
    allocator.free(block)
    with pytest.raises(BlockError, match="is not backed by this allocator: it is unknown here"):
        allocator.free(block)
    assert allocator.get_num_free_blocks() == 2
    allocator.check()


@pytest.mark.parametrize("token_ids", [[], [1, 2, 3], [1, 2, 3, 4, 5]])
def test_an_immutable_block_is_full(token_ids: list[int]) -> None:
    allocator = make_allocator(2)
    with pytest.raises(BlockError, match=r"fi(ll|t)"):
        allocator.allocate_immutable_block(None, token_ids)
    partial = allocator.allocate_mutable_block(None)
    with pytest.raises(BlockError, match="without a digest: fill the blocks before it"):
        allocator.allocate_immutable_block(partial, [1, 2, 3, 4])
    assert allocator.get_num_free_blocks() == 1


def test_blocks_of_another_block_size_or_hash_are_refused() -> None:
    allocator = make_allocator(2)
    foreign = PrefixCachingBlockAllocator(2, 8).allocate_mutable_block(None)
    with pytest.raises(BlockError, match="sha256 over 8 tokens, this allocator has sha256 over 4"):
        allocator.allocate_mutable_block(foreign)
    foreign = make_allocator(2, caching_hash_algo="xxh3_128").allocate_mutable_block(None)
    with pytest.raises(BlockError, match="use one hash, seed and block size"):
        allocator.allocate_mutable_block(foreign)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0: pass an integer of at least 1"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_ids": [1, 2]}, "2 block ids, 2 of them distinct, for 3 blocks"),
        ({"block_ids": [1, 2, 2]}, "3 block ids, 2 of them distinct, for 3 blocks"),
        ({"block_ids": [1, 2, -1]}, "pass integers of at least 0"),
        ({"eviction_policy": "best"}, "unknown eviction policy 'best'"),
        ({"caching_hash_algo": "md5"}, "unknown hash algorithm 'md5'"),
        ({"block_bytes": -1}, "block_bytes is -1"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PrefixCachingBlockAllocator(**{"num_blocks": 3, "block_size": 4, **options})


def test_the_callers_block_ids_are_used() -> None:
    allocator = make_allocator(3, block_ids=[30, 10, 20])
    blocks = [allocator.allocate_mutable_block(None) for _ in range(3)]
    assert ids(blocks) == [30, 10, 20]
    assert [allocator.get_physical_block_id(i) for i in (30, 10, 20)] == [2, 0, 1]
    with pytest.raises(BlockError, match="block 0 is not one of this allocator's 3"):
        allocator.get_physical_block_id(0)


# --- filling blocks --------------------------------------------------------------------------


def test_a_block_that_fills_up_with_cached_content_gives_way_to_the_cached_one() -> None:
    allocator = make_allocator(3, block_bytes=1000)
    cached = allocator.allocate_immutable_block(None, [0, 1, 2, 3])
    allocator.mark_blocks_as_computed([])
    mutable = allocator.allocate_mutable_block(None)
    own = mutable.block_id
    for token in range(4):
        assert mutable.block_id == own
        mutable.append_token_ids([token])
    assert mutable.block_id == cached.block_id
    assert allocator.get_num_references(0) == 2
    assert allocator.get_num_free_blocks() == 2
    assert allocator.clear_copy_on_writes() == []
    assert allocator.allocate_mutable_block(None).block_id == own
    statistics = allocator.statistics()
    assert (statistics.num_merged_blocks, statistics.merged_bytes) == (1, 1000)
    allocator.check()


def test_giving_way_to_a_block_that_is_not_computed_takes_the_bytes_along() -> None:
    allocator = make_allocator(3)
    allocator.allocate_immutable_block(None, [0, 1, 2, 3])
    mutable = allocator.allocate_mutable_block(None)
    mutable.append_token_ids([0, 1, 2])
    mutable.append_token_ids([3])
    assert mutable.block_id == 0
    assert allocator.clear_copy_on_writes() == [(1, 0)]


def test_without_merging_both_blocks_stay_and_the_statistics_say_what_that_costs() -> None:
    allocator = make_allocator(3, merge_duplicates=False, block_bytes=1000)
    allocator.allocate_immutable_block(None, [0, 1, 2, 3])
    mutable = allocator.allocate_mutable_block(None)
    mutable.append_token_ids([0, 1, 2, 3])
    assert mutable.block_id == 1
    statistics = allocator.statistics()
    assert (statistics.num_merged_blocks, statistics.num_duplicate_blocks) == (0, 1)
    assert statistics.duplicate_bytes == 1000
    allocator.free(mutable)
    allocator.check()


def test_a_block_without_a_digest_is_not_promoted() -> None:
    allocator = make_allocator(3)
    first = allocator.allocate_mutable_block(None)
    second = allocator.allocate_mutable_block(first)
    second.append_token_ids([5, 6, 7, 8])
    with pytest.raises(BlockError, match="has no digest: fill it and the blocks before it"):
        allocator.promote_to_immutable_block(second)
    first.append_token_ids([1, 2, 3, 4])
    assert not allocator.is_block_cached(second)
    assert allocator.promote_to_immutable_block(second) == second.block_id == 1
    assert allocator.is_block_cached(second)
    allocator.check()


def test_the_extra_hash_keeps_sequences_apart() -> None:
    allocator = make_allocator(4)
    plain = allocator.allocate_immutable_block(None, [1, 2, 3, 4])
    one = allocator.allocate_immutable_block(None, [1, 2, 3, 4], extra_hash=1)
    again = allocator.allocate_immutable_block(None, [1, 2, 3, 4], extra_hash=1)
    assert ids([plain, one, again]) == [0, 1, 1]
    mutable = allocator.allocate_mutable_block(None, extra_hash=1)
    mutable.append_token_ids([1, 2, 3, 4])
    assert (mutable.block_id, mutable.extra_hash) == (1, 1)


# --- forks and copy-on-write -----------------------------------------------------------------


def test_a_copy_of_a_copy_reads_where_the_bytes_are() -> None:
    allocator = make_allocator(3)
    first = allocator.allocate_mutable_block(None)
    first.append_token_ids([1])
    second = allocator.fork(first)[0]
    assert allocator.cow_block_if_not_appendable(second) == 1
    third = allocator.fork(second)[0]
    assert allocator.cow_block_if_not_appendable(third) == 2
    assert allocator.clear_copy_on_writes() == [(0, 1), (0, 2)]


def test_a_copy_is_void_when_its_destination_is_given_back() -> None:
    allocator = make_allocator(2)
    first = allocator.allocate_mutable_block(None)
    first.append_token_ids([1])
    second = allocator.fork(first)[0]
    second.append_token_ids([2])
    allocator.free(second)
    assert allocator.clear_copy_on_writes() == []


def test_unknown_freed_and_swapped_out_blocks_cannot_be_forked() -> None:
    allocator = make_allocator(4)
    chain = chain_of(allocator, list(range(8)))
    allocator.swap_out([chain[1]])
    with pytest.raises(BlockError, match="unknown here, was freed, or is swapped out"):
        allocator.fork(chain[1])
    allocator.swap_in([chain[1]])
    allocator.free(chain[0])
    with pytest.raises(BlockError, match="is not backed by this allocator"):
        allocator.fork(chain[1])
    with pytest.raises(BlockError, match="is not backed by this allocator"):
        make_allocator(4).fork(chain[1])
    assert [allocator.get_num_references(i) for i in range(4)] == [0, 1, 0, 0]
    allocator.check()


def test_nothing_is_appended_to_an_immutable_freed_or_swapped_out_block() -> None:
    allocator = make_allocator(3)
    full = allocator.allocate_immutable_block(None, [1, 2, 3, 4])
    with pytest.raises(BlockError, match="block 0 is full and immutable"):
        full.append_token_ids([5])
    with pytest.raises(BlockError, match="nothing is appended to an immutable block"):
        allocator.cow_block_if_not_appendable(full)
    partial = allocator.allocate_mutable_block(full)
    allocator.swap_out([partial])
    with pytest.raises(BlockError, match="freed or swapped out: swap it in first"):
        partial.append_token_ids([5])
    assert partial.token_ids == []


# --- swapping --------------------------------------------------------------------------------


def test_swapping_moves_a_sequence_to_the_host_and_back() -> None:
    device = make_allocator(4)
    host = make_allocator(4, block_ids=range(100, 104))
    chain = chain_of(device, list(range(8)))
    chain.append(device.allocate_mutable_block(chain[-1]))
    chain[-1].append_token_ids([8])
    device.mark_blocks_as_computed()

    assert device.swap_out(chain) == [0, 1, 2]
    assert ids(chain) == [None] * 3
    assert host.swap_in(chain) == [100, 101, 102] == ids(chain)
    assert device.get_num_free_blocks() == 4
    assert not host.block_is_computed(100)
    device.check()
    host.check()

    assert device.get_num_full_blocks_touched(chain) == 2
    assert host.swap_out(chain) == [100, 101, 102]
    assert device.swap_in(chain) == [0, 1, 2]
    assert [device.block_is_computed(i) for i in (0, 1, 2)] == [True, True, False]
    chain[-1].append_token_ids([9, 10, 11])
    assert device.is_block_cached(chain[-1])
    device.check()
    host.check()


def test_swapping_in_needs_room_for_all_blocks() -> None:
    allocator = make_allocator(3)
    chain = chain_of(allocator, list(range(8)))
    allocator.swap_out(chain)
    other = [allocator.allocate_mutable_block(None) for _ in range(2)]
    with pytest.raises(OutOfBlocksError, match="2 blocks need 2 free ones, 1 of 3 are free"):
        allocator.swap_in(chain)
    assert ids(chain) == [None, None]
    allocator.free(other[0])
    allocator.swap_in(chain)
    assert sorted(map(str, ids(chain))) == ["0", "2"] or None not in ids(chain)
    allocator.check()


def test_only_swapped_out_blocks_are_swapped_in_and_only_once() -> None:
    allocator = make_allocator(3)
    block = allocator.allocate_immutable_block(None, [1, 2, 3, 4])
    with pytest.raises(BlockError, match="is not swapped out: only such a block is swapped in"):
        allocator.swap_in([block])
    with pytest.raises(BlockError, match="swapped out twice"):
        allocator.swap_out([block, block])
    allocator.swap_out([block])
    with pytest.raises(BlockError, match="swapped in twice"):
        allocator.swap_in([block, block])
    with pytest.raises(BlockError, match="is not backed by this allocator"):
        allocator.swap_out([block])


def test_a_block_that_waits_for_its_copy_is_not_swapped_out() -> None:
    allocator = make_allocator(3)
    block = allocator.allocate_mutable_block(None)
    block.append_token_ids([1])
    twin = allocator.fork(block)[0]
    twin.append_token_ids([2])
    with pytest.raises(BlockError, match=r"blocks \[1\] wait for the copies"):
        allocator.swap_out([twin])
    allocator.clear_copy_on_writes()
    assert allocator.swap_out([twin]) == [1]


def test_only_full_blocks_that_take_a_free_one_count_as_touched() -> None:
    allocator = make_allocator(6)
    chain = chain_of(allocator, list(range(12)))
    chain.append(allocator.allocate_mutable_block(chain[-1]))
    twin = allocator.fork(chain[1])
    allocator.swap_out(chain)
    # The twin holds the first two; the third is cached, unheld; the fourth is not full.
    assert allocator.get_num_full_blocks_touched(chain) == 1
    for block in twin:
        allocator.free(block)
    assert allocator.get_num_full_blocks_touched(chain) == 3
    assert allocator.get_num_full_blocks_touched(chain[3:]) == 0


# --- computed, accessed, cached --------------------------------------------------------------


def test_common_computed_blocks_are_a_prefix_of_all_sequences() -> None:
    allocator = make_allocator(16)
    tokens = list(range(32))
    first = chain_of(allocator, tokens)
    allocator.mark_blocks_as_computed(list(range(8)))
    second = chain_of(allocator, tokens[:18] + [99] * 14)
    common = allocator.get_common_computed_block_ids(
        [[b.block_id or 0 for b in first], [b.block_id or 0 for b in second]]
    )
    assert common == [0, 1, 2, 3]
    assert allocator.get_common_computed_block_ids([[0, 1], []]) == []
    assert allocator.get_common_computed_block_ids([[0, 1]]) == [0, 1]
    assert allocator.get_common_computed_block_ids([]) == []
    assert allocator.get_common_computed_block_ids([[8, 9]]) == []


def test_a_cached_prefix_ends_where_a_block_is_not_computed() -> None:
    allocator = make_allocator(4)
    chain = chain_of(allocator, list(range(12)))
    digests = [block.content_hash for block in chain if block.content_hash]
    assert allocator.find_cached_blocks_prefix(digests) == []
    allocator.mark_blocks_as_computed([0, 2])
    assert allocator.find_cached_blocks_prefix(digests) == digests[:1]
    allocator.mark_blocks_as_computed([])
    assert allocator.find_cached_blocks_prefix(digests) == digests
    for block in chain:
        allocator.free(block)
    assert allocator.find_cached_blocks_prefix(digests) == digests


def test_a_block_freed_before_it_was_computed_is_not_computed_when_it_is_hit() -> None:
    allocator = make_allocator(2)
    allocator.free(allocator.allocate_immutable_block(None, [1, 2, 3, 4]))
    allocator.mark_blocks_as_computed([])
    assert not allocator.block_is_computed(0)
    again = allocator.allocate_immutable_block(None, [1, 2, 3, 4])
    assert (again.block_id, again.computed) == (0, False)
    allocator.mark_blocks_as_computed([])
    assert again.computed


def test_accesses_of_blocks_that_hold_nothing_are_refused() -> None:
    allocator = make_allocator(2)
    with pytest.raises(BlockError, match=r"blocks \[1\] are free and hold nothing"):
        allocator.mark_blocks_as_accessed([1], 3.0)
    with pytest.raises(BlockError, match="block 2 is not one of this allocator's 2"):
        allocator.mark_blocks_as_computed([2])
    with pytest.raises(BlockError, match="access time is nan: pass a finite number"):
        allocator.mark_blocks_as_accessed([], float("nan"))


def test_the_hit_rate_counts_immutable_blocks() -> None:
    allocator = make_allocator(4)
    assert allocator.get_prefix_cache_hit_rate() == 0.0
    chain_of(allocator, list(range(8)))
    chain_of(allocator, list(range(8)))
    assert allocator.get_prefix_cache_hit_rate() == 0.5


def test_the_cache_is_reset_only_while_no_block_is_in_use(caplog: pytest.LogCaptureFixture) -> None:
    allocator = make_allocator(4)
    chain = chain_of(allocator, list(range(8)))
    assert not allocator.reset_prefix_cache()
    assert "2 of 4 blocks are in use: free them first" in caplog.text
    for block in chain:
        allocator.free(block)
    assert allocator.reset_prefix_cache()
    assert not allocator.is_block_cached(chain[0])
    assert allocator.get_num_free_blocks() == 4
    allocator.check()
