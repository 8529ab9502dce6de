"""The pool: states, references, order of eviction, refusals that change nothing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from kvcache import (
    AllBlocksCleared,
    BlockError,
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    ConfigurationError,
    InvariantError,
    LoRARequest,
    Namespace,
    OutOfBlocksError,
    ReferenceKind,
    Request,
    RequestError,
    get_hash_fn,
    get_request_block_hasher,
)
from kvcache.core.block_pool import BlockPool, BlockState, KVCacheBlock
from kvcache.core.columns import REF

SIZE = 2
HASHER = get_request_block_hasher(SIZE, get_hash_fn("sha256"))


def make_request(first_token: int = 0, length: int = 5, **options: object) -> Request:
    """Return a request of `length` blocks."""
    tokens = range(first_token, first_token + SIZE * length)
    return Request("r", list(tokens), block_hasher=HASHER, **options)  # type: ignore[arg-type]


def digest(number: int, first_token: int = 0) -> BlockHash:
    return make_request(first_token).block_hashes[number]


def cache(pool: BlockPool, block_ids: Sequence[int], first_token: int = 0, group: int = 0) -> None:
    """Cache the first blocks of a request."""
    request = make_request(first_token)
    pool.cache_full_blocks(request, block_ids, 0, len(block_ids), SIZE, group)


def cached_chain(pool: BlockPool, length: int, first_token: int = 0) -> list[int]:
    block_ids = pool.get_new_blocks(length)
    cache(pool, block_ids, first_token)
    return block_ids


def state(pool: BlockPool, block_id: int) -> BlockState:
    return pool.block(block_id).state


def state_of(pool: BlockPool) -> object:
    """The visible state of a pool."""
    blocks = [pool.block(b) for b in range(pool.num_blocks)]
    references = [[pool.num_references(b.block_id, kind) for kind in ReferenceKind] for b in blocks]
    shown = [(b.state, b.ref_cnt, b.block_hash) for b in blocks]
    return shown, references, pool.get_all_free_blocks(), pool.num_evictions


def test_a_new_pool_has_all_blocks_free_but_the_null_block() -> None:
    pool = BlockPool(4)
    assert pool.get_num_free_blocks() == 3
    assert pool.get_usage() == 0.0
    assert pool.get_new_blocks(3) == [1, 2, 3]
    assert pool.get_usage() == 1.0
    assert pool.block(0).is_null
    pool.check()


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has no room for the null block: use at least 1"):
        BlockPool(0)


def test_asking_for_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.get_new_blocks(1)
    before = state_of(pool)
    with pytest.raises(OutOfBlocksError) as error:
        pool.get_new_blocks(3)
    assert str(error.value) == (
        "3 blocks are wanted, 2 of 3 are free: free requests or raise num_blocks"
    )
    assert state_of(pool) == before


def test_a_freed_cached_block_is_evicted_last_and_tails_before_heads() -> None:
    pool = BlockPool(8)
    one = cached_chain(pool, 2, 0)
    two = cached_chain(pool, 2, 100)
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
    before = state_of(pool)
    with pytest.raises(BlockError, match=message):
        pool.free_blocks(block_ids)
    assert state_of(pool) == before


@pytest.mark.parametrize("block_ids", [[3], [0], [9], [1, 3]])
def test_touching_what_holds_nothing_changes_nothing(block_ids: list[int]) -> None:
    pool = BlockPool(4)
    pool.get_new_blocks(1)
    before = state_of(pool)
    with pytest.raises(BlockError):
        pool.touch(block_ids)
    assert state_of(pool) == before


def test_only_held_blocks_without_a_digest_can_be_cached() -> None:
    pool = BlockPool(4)
    cached = cached_chain(pool, 1)
    for block_ids in (cached, [3]):
        before = state_of(pool)
        with pytest.raises(BlockError, match="cannot be cached"):
            cache(pool, block_ids, 100)
        assert state_of(pool) == before


def test_a_second_block_of_a_content_stays_its_holders_own() -> None:
    pool = BlockPool(5, enable_kv_cache_events=True)
    one = cached_chain(pool, 1)
    pool.take_events()
    two = cached_chain(pool, 1)
    assert pool.take_events() == []
    assert pool.get_cached_block(digest(0), [0]) == one
    assert state(pool, two[0]) is BlockState.OWNED
    pool.evict_blocks(one)
    assert pool.get_cached_block(digest(0), [0]) is None
    assert pool.take_events() == [BlocksRemoved(0, "device", (digest(0),))]
    pool.check()


def test_what_continues_another_requests_block_is_cached_behind_it() -> None:
    pool = BlockPool(9)
    one = cached_chain(pool, 2)
    two = cached_chain(pool, 3)
    assert pool.get_cached_block(digest(2), [0]) == two[2:]
    assert set(pool.evict_blocks(one[:1])) == {*one, two[2]}
    pool.check()


def test_behind_a_block_that_cannot_be_found_nothing_is_cached() -> None:
    pool = BlockPool(9)
    request, blocks = make_request(), cached_chain(pool, 1) + pool.get_new_blocks(2)
    pool.evict_blocks(blocks[:1])
    pool.cache_full_blocks(request, blocks, 1, 3, SIZE)
    assert pool.num_cached_blocks == 0


def test_blocks_of_other_groups_go_one_by_one() -> None:
    pool = BlockPool(9, ordered_groups=())
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(make_request(), [0, *blocks[1:]], 0, 4, SIZE)
    assert pool.get_cached_block(digest(0), [0]) is None
    assert pool.evict_blocks(blocks[1:2]) == blocks[1:2]
    pool.free_blocks(blocks)
    assert pool.get_new_blocks(7)[-1] == blocks[2]
    assert pool.get_cached_block(digest(3), [0]) == blocks[3:]
    pool.check()


def test_a_digest_hits_where_all_groups_have_it() -> None:
    pool = BlockPool(9)
    one, two = pool.get_new_blocks(2), pool.get_new_blocks(1)
    cache(pool, one)
    assert pool.get_cached_block(digest(0), [0, 1]) is None
    cache(pool, two, group=1)
    assert pool.get_cached_block(digest(0), [0, 1]) == [one[0], two[0]]
    assert pool.get_cached_block(digest(1), [0, 1]) is None


def test_a_coarser_block_is_found_by_its_last_digest() -> None:
    pool = BlockPool(9)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(make_request(), blocks, 0, 2, 2 * SIZE)
    assert pool.get_cached_block(digest(1), [0]) == blocks[:1]
    assert pool.get_cached_block(digest(3), [0]) == blocks[1:]
    with pytest.raises(RequestError, match="a digest per 2 tokens, which does not divide a block"):
        pool.cache_full_blocks(make_request(), blocks, 0, 2, 3)


def test_namespaces_have_contents_of_their_own() -> None:
    pool = BlockPool(9)
    blocks = pool.get_new_blocks(1)
    request = make_request(tenant="t")
    pool.cache_full_blocks(request, blocks, 0, 1, SIZE)
    assert pool.get_cached_block(digest(0), [0]) is None
    assert pool.get_cached_block(digest(0), [0], Namespace(0, None, None, "t")) == blocks


def test_more_is_not_cached_than_there_are_tokens_and_blocks() -> None:
    pool = BlockPool(9)
    blocks = pool.get_new_blocks(3)
    before = state_of(pool)
    for num_full, length in ((4, 5), (3, 2)):
        with pytest.raises(RequestError, match=r"blocks \[0, \d\) cannot be cached, with 3 blocks"):
            pool.cache_full_blocks(make_request(length=length), blocks, 0, num_full, SIZE)
    assert state_of(pool) == before


def test_without_caching_nothing_is_cached() -> None:
    pool = BlockPool(9, enable_caching=False)
    cached_chain(pool, 2)
    assert pool.num_cached_blocks == 0


def test_evicting_forgets_cached_descendants_and_leaves_holders_their_blocks() -> None:
    pool = BlockPool(6)
    blocks = cached_chain(pool, 3)
    pool.free_blocks([blocks[2]])
    pool.evict_blocks(blocks[1:2])
    assert pool.get_cached_block(digest(0), [0]) == blocks[:1]
    assert [state(pool, b) for b in blocks] == [
        BlockState.SEALED,
        BlockState.OWNED,
        BlockState.FREE,
    ]
    pool.check()


def test_a_parent_is_not_evicted_before_its_child() -> None:
    pool = BlockPool(4)
    blocks = cached_chain(pool, 3)
    pool.touch(blocks[2:], ReferenceKind.TRANSFER)
    pool.free_blocks(blocks[::-1])
    pool.free_blocks(blocks[2:], ReferenceKind.TRANSFER)
    assert pool.get_all_free_blocks() == [blocks[1], blocks[0], blocks[2]]
    assert pool.get_new_blocks(1) == [blocks[2]]
    pool.check()


def test_what_a_copy_reads_is_not_handed_out_but_its_parents_are_if_need_be() -> None:
    pool = BlockPool(4)
    blocks = cached_chain(pool, 3)
    pool.touch(blocks[2:], ReferenceKind.TRANSFER)
    pool.free_blocks(blocks[::-1])
    assert state(pool, blocks[2]) is BlockState.IN_FLIGHT
    assert pool.get_new_blocks(2) == [blocks[1], blocks[0]]
    pool.check()
    with pytest.raises(OutOfBlocksError):
        pool.get_new_blocks(1)
    pool.free_blocks(blocks[2:], ReferenceKind.TRANSFER)
    assert state(pool, blocks[2]) is BlockState.FREE
    pool.check()


def test_forks_hold_blocks_apart_from_requests() -> None:
    pool = BlockPool(4)
    blocks = cached_chain(pool, 2)
    pool.touch(blocks, ReferenceKind.FORK)
    pool.touch(blocks[:1], ReferenceKind.FORK)
    pool.free_blocks(blocks[::-1])
    assert [pool.num_references(b, ReferenceKind.FORK) for b in blocks] == [2, 1]
    assert [pool.num_references(b, ReferenceKind.REQUEST) for b in blocks] == [0, 0]
    assert pool.get_num_free_blocks() == 1
    before = state_of(pool)
    with pytest.raises(BlockError) as error:
        pool.free_blocks([blocks[1], blocks[1]], ReferenceKind.FORK)
    assert str(error.value) == (
        f"block {blocks[1]} is given back 2 times but has 1 fork references: free what you hold, "
        "once"
    )
    assert state_of(pool) == before
    pool.free_blocks(blocks[::-1], ReferenceKind.FORK)
    assert pool.get_num_free_blocks() == 2
    pool.free_blocks(blocks[:1], ReferenceKind.FORK)
    assert pool.get_num_free_blocks() == 3
    pool.check()


def test_a_quarantined_block_cannot_be_cached() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.quarantine(blocks[1:])
    with pytest.raises(BlockError, match=r"blocks \[2\] cannot be cached"):
        cache(pool, blocks)
    assert pool.get_cached_block(digest(0), [0]) is None
    assert [state(pool, b) for b in blocks] == [BlockState.OWNED, BlockState.QUARANTINED]


def test_events_are_kept_only_where_they_are_enabled() -> None:
    pool = BlockPool(4)
    pool.free_blocks(cached_chain(pool, 2)[::-1])
    assert pool.reset_prefix_cache()
    assert pool.take_events() == []


def test_a_quarantined_block_is_handed_out_only_after_its_release() -> None:
    pool = BlockPool(4)
    blocks = cached_chain(pool, 2)
    pool.quarantine([blocks[1], 3])
    assert state(pool, blocks[1]) is BlockState.QUARANTINED
    assert pool.get_cached_block(digest(1), [0]) is None
    pool.free_blocks(blocks[::-1])
    pool.check()
    assert pool.get_all_free_blocks() == [blocks[0]]
    with pytest.raises(BlockError, match="not quarantined"):
        pool.release_quarantine([blocks[0]])
    pool.release_quarantine([blocks[1], 3])
    assert pool.get_num_free_blocks() == 3
    pool.check()


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
    pool.check()


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


def test_check_finds_a_lost_reference() -> None:
    pool = BlockPool(4)
    pool.get_new_blocks(1)
    pool._store.columns.block[1, REF] = 0
    with pytest.raises(InvariantError) as error:
        pool.check()
    assert str(error.value) == "3 blocks are unheld, 2 are free"


def test_check_finds_a_content_without_a_name() -> None:
    pool = BlockPool(4)
    cached_chain(pool, 1)
    del pool.names[1]
    with pytest.raises(InvariantError) as error:
        pool.check()
    assert str(error.value) == "1 blocks have nodes, 0 have names, 1 are found"


def test_stored_events_say_all_that_a_router_needs() -> None:
    pool = BlockPool(9, enable_kv_cache_events=True)
    blocks = cached_chain(pool, 1) + pool.get_new_blocks(2)
    pool.take_events()
    request = make_request(lora=LoRARequest("a", "b"))
    pool.cache_full_blocks(make_request(), blocks, 1, 3, SIZE)
    pool.cache_full_blocks(request, pool.get_new_blocks(1), 0, 1, SIZE)
    one, two = pool.take_events()
    assert isinstance(one, BlocksStored)
    assert isinstance(two, BlocksStored)
    assert one.digests == (digest(1), digest(2))
    assert (one.parent_digest, two.parent_digest) == (digest(0), None)
    assert one.token_ids.tolist() == [2, 3, 4, 5]
    assert (one.group, one.medium, one.block_size) == (0, "device", SIZE)
    assert (one.extra_keys, two.extra_keys) == ((), ((("lora", "a", "b"),),))
    assert two.namespace == request.namespace


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
@pytest.mark.seeds(5, long=20)
def test_a_pool_does_what_counting_says(seed: int, policy: str) -> None:
    rng = random.Random(seed)
    pool = BlockPool(12, eviction_policy=policy, enable_kv_cache_events=True)
    held: list[tuple[int, list[int]]] = []
    stored: set[BlockHash] = set()
    for _ in range(150):
        if rng.random() < 0.5:
            first, count = rng.randrange(3), rng.randint(1, 4)
            hits: list[int] = []
            while len(hits) < count:
                found = pool.get_cached_block(digest(len(hits), first), [0])
                if found is None:
                    break
                hits += found
            pool.touch(hits)
            if count - len(hits) > pool.get_num_free_blocks():
                with pytest.raises(OutOfBlocksError):
                    pool.get_new_blocks(count - len(hits))
                pool.free_blocks(hits[::-1])
                continue
            blocks = hits + pool.get_new_blocks(count - len(hits))
            pool.cache_full_blocks(make_request(first), blocks, len(hits), count, SIZE)
            held.append((first, blocks))
        elif held:
            _, blocks = held.pop(rng.randrange(len(held)))
            pool.free_blocks(blocks[::-1])
        if rng.random() < 0.1:
            pool.evict_blocks([rng.randrange(12)])
        pool.check()
        for event in pool.take_events():
            if isinstance(event, BlocksStored):
                assert stored.isdisjoint(event.digests)
                stored.update(event.digests)
            elif isinstance(event, BlocksRemoved):
                assert stored.issuperset(event.digests)
                stored.difference_update(event.digests)
        counts = Counter(b for _, blocks in held for b in blocks)
        for b in range(12):
            block = pool.block(b)
            assert block.ref_cnt == counts[b]
            assert block.block_hash is None or block.block_hash in stored
        assert len(stored) == pool.num_cached_blocks
        assert pool.get_num_free_blocks() == 11 - len(counts)
