"""The pool: states, references, order of eviction, refusals that change nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvcache.arrays import Int32Array
from kvcache.blocks.audit import check_pool, dump_pool
from kvcache.blocks.block import BlockState, KVCacheBlock
from kvcache.blocks.pool import BlockPool
from kvcache.blocks.run import CachedRun
from kvcache.core import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    NullOffloadHooks,
    ReferenceKind,
)
from kvcache.errors import (
    BlockError,
    ConfigurationError,
    InvariantError,
    MalformedMessageError,
    OutOfBlocksError,
)
from kvcache.hashing import BlockHash
from kvcache.request import Namespace
from kvcache.request_content import DEFAULT_NAMESPACE, namespace_name, parse_namespace_name


def digest(number: int) -> BlockHash:
    return BlockHash(b"%02d" % number)


def cache(pool: BlockPool, block_ids: Sequence[int], first: int = 0, parent: bytes = b"") -> None:
    """Cache a chain of blocks with the digests `first`, `first + 1`, ..."""
    pool.cache_full_blocks(
        CachedRun(
            table=pool.contents.table(DEFAULT_NAMESPACE, 0),
            block_ids=list(block_ids),
            digests=[digest(first + i) for i in range(len(block_ids))],
            parent=BlockHash(parent),
            token_ids=np.zeros(2 * len(block_ids), dtype=np.int32),
            block_size=2,
            extra_keys=(),
            request_id="r",
            first_index=0,
        )
    )


def cached_chain(pool: BlockPool, length: int, first: int = 0) -> list[int]:
    block_ids = pool.get_new_blocks(length)
    cache(pool, block_ids, first)
    return block_ids


def test_a_new_pool_has_all_blocks_free_but_the_null_block() -> None:
    pool = BlockPool(4)
    assert pool.get_num_free_blocks() == 3
    assert pool.get_usage() == 0.0
    assert pool.get_new_blocks(3) == [1, 2, 3]
    assert pool.get_usage() == 1.0
    assert pool.block(0).is_null
    check_pool(pool)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has no room for the null block: use at least 1"):
        BlockPool(0)


def test_asking_for_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.get_new_blocks(1)
    before = dump_pool(pool)
    with pytest.raises(OutOfBlocksError) as error:
        pool.get_new_blocks(3)
    assert str(error.value) == (
        "3 blocks are wanted, 2 of 3 are free: free requests or raise num_blocks"
    )
    assert dump_pool(pool) == before


def test_a_freed_cached_block_is_evicted_last_and_tails_before_heads() -> None:
    pool = BlockPool(8)
    one = cached_chain(pool, 2, 0)
    two = cached_chain(pool, 2, 10)
    plain = pool.get_new_blocks(1)
    pool.free_blocks(one[::-1])
    pool.free_blocks(two[::-1])
    pool.free_blocks(plain)
    assert pool.get_all_free_blocks()[-4:] == [one[1], one[0], two[1], two[0]]
    assert pool.get_all_free_blocks()[0] == plain[0]
    pool.get_new_blocks(4)
    assert pool.get_cached_block(digest(0), [0]) == [one[0]]
    assert pool.get_cached_block(digest(1), [0]) is None


def test_touching_a_free_block_saves_it() -> None:
    pool = BlockPool(3)
    blocks = cached_chain(pool, 2)
    pool.free_blocks(blocks[::-1])
    pool.touch(blocks[:1])
    assert pool.get_num_free_blocks() == 1
    assert pool.get_new_blocks(1) == blocks[1:]
    assert pool.get_cached_block(digest(0), [0]) == blocks[:1]


@pytest.mark.parametrize(
    ("block_ids", "message"),
    [
        ([1, 1], "block 1 is given back 2 times but has 1 request references"),
        ([3], "block 3 is given back 1 times but has 0 request references"),
        ([1, 0], "block 0 is given back 1 times but has 0 request references"),
        ([9], r"blocks \[9\] do not exist: ids are below 4"),
        ([-1], r"blocks \[-1\] do not exist"),
    ],
)
def test_freeing_what_is_not_held_changes_nothing(block_ids: list[int], message: str) -> None:
    pool = BlockPool(4)
    pool.get_new_blocks(2)
    before = dump_pool(pool)
    with pytest.raises(BlockError, match=message):
        pool.free_blocks(block_ids)
    assert dump_pool(pool) == before


@pytest.mark.parametrize("block_ids", [[3], [0], [9], [1, 3]])
def test_touching_what_holds_nothing_changes_nothing(block_ids: list[int]) -> None:
    pool = BlockPool(4)
    pool.get_new_blocks(1)
    before = dump_pool(pool)
    with pytest.raises(BlockError):
        pool.touch(block_ids)
    assert dump_pool(pool) == before


def test_only_held_blocks_without_a_digest_can_be_cached() -> None:
    pool = BlockPool(4)
    cached = cached_chain(pool, 1)
    for block_ids in (cached, [3], [0]):
        before = dump_pool(pool)
        with pytest.raises(BlockError, match="cannot be cached"):
            cache(pool, block_ids, 5)
        assert dump_pool(pool) == before


def test_duplicates_stand_in_for_each_other() -> None:
    pool = BlockPool(5, enable_kv_cache_events=True)
    one, two = cached_chain(pool, 1), cached_chain(pool, 1)
    assert pool.get_cached_block(digest(0), [0]) == one
    pool.take_events()
    pool.evict_blocks(one)
    assert pool.get_cached_block(digest(0), [0]) == two
    assert pool.take_events() == []
    pool.evict_blocks(two)
    assert pool.take_events() == [BlocksRemoved(0, "device", (digest(0),))]


def test_evicting_forgets_cached_descendants_and_leaves_holders_their_blocks() -> None:
    pool = BlockPool(6)
    blocks = cached_chain(pool, 3)
    pool.free_blocks([blocks[2]])
    pool.evict_blocks(blocks[1:2])
    assert pool.get_cached_block(digest(0), [0]) == blocks[:1]
    assert [pool.state(b) for b in blocks] == [
        BlockState.SEALED,
        BlockState.OWNED,
        BlockState.FREE,
    ]
    check_pool(pool)


def test_a_parent_is_not_evicted_before_its_child() -> None:
    pool = BlockPool(4)
    blocks = cached_chain(pool, 3)
    pool.begin_transfer(blocks[2:])
    pool.free_blocks(blocks[::-1])
    pool.end_transfer(blocks[2:])
    assert pool.get_all_free_blocks() == [blocks[1], blocks[0], blocks[2]]
    assert pool.get_new_blocks(1) == [blocks[2]]
    check_pool(pool)


def test_what_a_copy_reads_is_not_handed_out_but_its_parents_are_if_need_be() -> None:
    pool = BlockPool(4)
    blocks = cached_chain(pool, 3)
    pool.begin_transfer(blocks[2:])
    pool.free_blocks(blocks[::-1])
    assert pool.state(blocks[2]) is BlockState.IN_FLIGHT
    assert pool.get_new_blocks(2) == [blocks[1], blocks[0]]
    check_pool(pool)
    with pytest.raises(OutOfBlocksError):
        pool.get_new_blocks(1)
    pool.end_transfer(blocks[2:])
    assert pool.state(blocks[2]) is BlockState.FREE
    check_pool(pool)


def test_forks_hold_blocks_apart_from_requests() -> None:
    pool = BlockPool(4)
    blocks = cached_chain(pool, 2)
    pool.touch(blocks, ReferenceKind.FORK)
    pool.touch(blocks[:1], ReferenceKind.FORK)
    pool.free_blocks(blocks[::-1])
    assert [pool.num_references(b, ReferenceKind.FORK) for b in blocks] == [2, 1]
    assert [pool.num_references(b, ReferenceKind.REQUEST) for b in blocks] == [0, 0]
    assert pool.get_num_free_blocks() == 1
    before = dump_pool(pool)
    with pytest.raises(BlockError) as error:
        pool.free_blocks([blocks[1], blocks[1]], ReferenceKind.FORK)
    assert str(error.value) == (
        f"block {blocks[1]} is given back 2 times but has 1 fork references: free what you hold, "
        "once"
    )
    assert dump_pool(pool) == before
    pool.free_blocks(blocks[::-1], ReferenceKind.FORK)
    assert pool.get_num_free_blocks() == 2
    pool.free_blocks(blocks[:1], ReferenceKind.FORK)
    assert pool.get_num_free_blocks() == 3
    check_pool(pool)


def test_a_quarantined_block_cannot_be_cached() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.quarantine(blocks[1:])
    with pytest.raises(BlockError, match=r"blocks \[2\] cannot be cached"):
        cache(pool, blocks)
    assert pool.get_cached_block(digest(0), [0]) is None
    assert [pool.state(b) for b in blocks] == [BlockState.OWNED, BlockState.QUARANTINED]


def test_events_are_kept_only_where_they_are_enabled() -> None:
    pool = BlockPool(4)
    pool.free_blocks(cached_chain(pool, 2)[::-1])
    assert pool.reset_prefix_cache()
    assert pool.take_events() == []


def test_a_quarantined_block_is_handed_out_only_after_its_release() -> None:
    pool = BlockPool(4)
    blocks = cached_chain(pool, 2)
    pool.quarantine([blocks[1], 3])
    assert pool.state(blocks[1]) is BlockState.QUARANTINED
    assert pool.get_cached_block(digest(1), [0]) is None
    pool.free_blocks(blocks[::-1])
    check_pool(pool)
    assert pool.get_all_free_blocks() == [blocks[0]]
    with pytest.raises(BlockError, match="not quarantined"):
        pool.release_quarantine([blocks[0]])
    pool.release_quarantine([blocks[1], 3])
    assert pool.get_num_free_blocks() == 3
    check_pool(pool)


def test_a_reset_is_refused_while_a_block_is_in_use() -> None:
    pool = BlockPool(4, enable_kv_cache_events=True)
    blocks = cached_chain(pool, 2)
    assert not pool.reset_prefix_cache()
    pool.free_blocks(blocks[::-1])
    pool.take_events()
    assert pool.reset_prefix_cache()
    assert pool.take_events() == [AllBlocksCleared()]
    assert pool.get_cached_block(digest(0), [0]) is None
    assert pool.get_num_free_blocks() == 3
    check_pool(pool)


def test_a_stored_event_is_told_once() -> None:
    pool = BlockPool(5, enable_kv_cache_events=True)
    cached_chain(pool, 2)
    (event,) = pool.take_events()
    assert isinstance(event, BlocksStored)
    assert event.digests == (digest(0), digest(1))
    cached_chain(pool, 2)
    assert pool.take_events() == []


def test_a_block_view_shows_the_present() -> None:
    pool = BlockPool(4)
    block = pool.block(1)
    assert (block.ref_cnt, block.block_hash, block.is_null) == (0, None, False)
    cached_chain(pool, 1)
    assert (block.ref_cnt, block.block_hash, block.state) == (1, digest(0), BlockState.SEALED)
    block.reset_hash()
    assert block.block_hash is None
    assert block == KVCacheBlock(pool, 1)
    assert repr(block) == "KVCacheBlock(1, owned, ref_cnt=1)"
    with pytest.raises(BlockError, match="do not exist"):
        pool.block(4)


class Watcher(NullOffloadHooks):
    def __init__(self) -> None:
        self.seen: list[tuple[str, list[int]]] = []

    def on_eviction_candidates(self, group: int, block_ids: Int32Array) -> None:
        self.seen.append(("going", block_ids.tolist()))

    def on_sealed(self, group: int, block_ids: Int32Array) -> None:
        self.seen.append(("sealed", block_ids.tolist()))


def test_tiers_below_hear_what_is_sealed_and_what_is_about_to_go() -> None:
    watcher = Watcher()
    pool = BlockPool(3, offload=watcher)
    blocks = cached_chain(pool, 2)
    pool.free_blocks(blocks[::-1])
    pool.get_new_blocks(1)
    assert watcher.seen == [("sealed", blocks), ("going", [blocks[1]])]


def test_check_finds_a_lost_reference() -> None:
    pool = BlockPool(4)
    pool.get_new_blocks(1)
    pool._num_references[1] = 0
    with pytest.raises(InvariantError) as error:
        check_pool(pool)
    assert str(error.value) == "block 1 (free) has 0 references and is not free"


def test_namespaces_are_read_back_from_their_names() -> None:
    namespace = Namespace(3, '["a", "b"]', None, "tenant")
    assert parse_namespace_name(namespace_name(namespace)) == namespace
    for name in (b"", b"\x01", b"\x84\x61a\xf6\xf6\xf6", b"\x82\x01\xf6"):
        with pytest.raises(MalformedMessageError):
            parse_namespace_name(name)
