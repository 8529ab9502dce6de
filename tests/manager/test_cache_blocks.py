"""Blocks and hits as values: equal by content, arrays inside, lists outside."""

from __future__ import annotations

from kvcache.base.arrays import EMPTY_INT32, int32_array
from kvcache.core import CacheHit
from kvcache.manager.cache_blocks import KVCacheBlocks


def hit(num_tokens: int, *tables: list[int]) -> CacheHit:
    return CacheHit(tuple(map(int32_array, tables)), num_tokens)


def test_blocks_are_equal_by_their_ids_whatever_they_were_made_from() -> None:
    from_lists = KVCacheBlocks([[1, 2], [0, 5]])
    from_arrays = KVCacheBlocks([int32_array([1, 2]), int32_array([0, 5])], [[2], []])
    assert from_lists == from_arrays
    assert hash(from_lists) == hash(from_arrays)
    assert from_lists != KVCacheBlocks([[1], [2, 0, 5]])
    assert from_lists != KVCacheBlocks([[1, 2]])
    assert from_lists != ([1, 2], [0, 5])


def test_ids_come_as_new_lists_of_plain_integers() -> None:
    blocks = KVCacheBlocks([int32_array([3, 4])], [int32_array([4])])
    ids = blocks.get_block_ids()
    ids[0].append(9)
    assert blocks.get_block_ids() == ([3, 4],)
    assert blocks.get_unhashed_block_ids() == ([4],)
    assert all(type(block_id) is int for block_id in blocks.get_block_ids()[0])
    assert repr(blocks) == "KVCacheBlocks(([3, 4],))"


def test_adding_blocks_joins_them_group_by_group() -> None:
    both = KVCacheBlocks([[1], []], [[1], []]) + KVCacheBlocks([[2, 3], [4]], [[3], [4]])
    assert both.get_block_ids() == ([1, 2, 3], [4])
    assert both.get_unhashed_block_ids() == ([1, 3], [4])
    assert [[(b.block_id, b.has_hash) for b in group] for group in both.blocks] == [
        [(1, False), (2, True), (3, False)],
        [(4, False)],
    ]


def test_blocks_are_false_where_no_group_has_any() -> None:
    assert not KVCacheBlocks([])
    assert not KVCacheBlocks([EMPTY_INT32, []])
    assert KVCacheBlocks([[], [0]])
    assert not KVCacheBlocks([[1], [2]]).new_empty()
    assert KVCacheBlocks([[1], [2]]).new_empty() == KVCacheBlocks([[], []])


def test_hits_are_equal_by_content() -> None:
    assert hit(8, [1, 2], [0, 3]) == hit(8, [1, 2], [0, 3])
    assert hash(hit(8, [1, 2], [0, 3])) == hash(hit(8, [1, 2], [0, 3]))
    assert hit(8, [1, 2], [0, 3]) != hit(8, [1, 2], [0, 4])
    assert hit(8, [1, 2], [0, 3]) != hit(8, [1, 2])
    assert hit(8, [1, 2]) != hit(4, [1, 2])
    assert hit(8, [1, 2]) != hit(8, [1, 2, 3])
    assert hit(0) != 0
