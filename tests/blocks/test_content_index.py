"""What blocks hold: prefixes found from their end, copies, and blocks whose step is under way."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.arrays import EMPTY_INT32
from kvcache.blocks.audit import check_pool
from kvcache.blocks.pool import BlockPool
from kvcache.blocks.run import CachedRun
from kvcache.blocks.unsealed import UnsealedBlocks
from kvcache.errors import InvariantError
from kvcache.hashing import BlockHash
from kvcache.request_content import DEFAULT_NAMESPACE

LENGTH = 11


def digests(name: bytes, count: int) -> list[BlockHash]:
    return [BlockHash(name + b"%02d" % i) for i in range(count)]


def run_of(
    pool: BlockPool, block_ids: list[int], names: list[BlockHash], parent: bytes = b""
) -> CachedRun:
    return CachedRun(
        table=pool.contents.table(DEFAULT_NAMESPACE, 0),
        block_ids=block_ids,
        digests=names,
        parent=BlockHash(parent),
        token_ids=EMPTY_INT32,
        block_size=2,
        extra_keys=(),
        request_id="r",
        first_index=0,
        client_id=pool.ledger.client_id,
        step=pool.ledger.step,
    )


def cache(pool: BlockPool, names: list[BlockHash], parent: bytes = b"") -> list[int]:
    block_ids = pool.get_new_blocks(len(names))
    pool.cache_full_blocks(run_of(pool, block_ids, names, parent))
    return block_ids


def leading(pool: BlockPool, names: list[BlockHash], max_blocks: int) -> list[int] | None:
    found = pool.contents.leading_blocks(DEFAULT_NAMESPACE, 0, names, max_blocks)
    return None if found is None else found.tolist()


@pytest.mark.parametrize("num_cached", range(LENGTH + 1))
def test_a_prefix_is_found_whatever_its_length_and_the_limit(num_cached: int) -> None:
    pool = BlockPool(40)
    names = digests(b"a", LENGTH)
    block_ids = cache(pool, names[:num_cached]) if num_cached else []
    cache(pool, digests(b"b", 3), names[1] if num_cached > 1 else b"")
    for max_blocks in range(LENGTH + 2):
        assert leading(pool, names, max_blocks) == block_ids[:max_blocks]
    check_pool(pool)


def test_of_copies_the_first_is_on_the_way_up() -> None:
    pool = BlockPool(40)
    names = digests(b"a", 4)
    first = cache(pool, names[:3])
    second = cache(pool, names)
    assert leading(pool, names, 4) == [*first, second[3]]
    pool.free_blocks(first[::-1])
    pool.forget_copies(first[::-1])
    assert leading(pool, names, 4) == second
    check_pool(pool)


def test_blocks_of_a_step_under_way_are_found_by_their_client_alone() -> None:
    pool = BlockPool(40)
    names = digests(b"a", 4)
    pool.ledger.open("one", 1)
    block_ids = cache(pool, names)
    pool.contents.client_id = "one"
    assert leading(pool, names, 4) == block_ids
    pool.contents.client_id = "other"
    assert leading(pool, names, 4) is None
    pool.seal(pool.ledger.take_through("one", 1))
    assert leading(pool, names, 4) == block_ids


def test_a_block_that_waits_for_a_later_run_is_not_sealed_by_an_earlier_one() -> None:
    pool = BlockPool(40)
    pool.ledger.open("one", 1)
    names = digests(b"a", 3)
    early, late = run_of(pool, [1, 2], names[:2]), run_of(pool, [2, 3], names[1:])
    unsealed = UnsealedBlocks()
    unsealed.add([early])
    unsealed.remove([2])
    unsealed.add([late])
    assert unsealed.take([early]) == [(early, [0])]
    assert set(unsealed) == {2, 3}
    assert unsealed.num_by_client() == {"one": 2}
    assert [(run, list(places)) for run, places in unsealed.take([late])] == [(late, [0, 1])]
    assert not unsealed
    assert unsealed.num_by_client() == {}


def test_an_eviction_takes_copies_one_by_one_and_what_stands_between_them_together() -> None:
    pool = BlockPool(25)
    names = digests(b"a", 20)
    block_ids = cache(pool, names)
    (copy,) = cache(pool, names[19:], names[18])
    pool.free_blocks([copy])
    pool.free_blocks(block_ids[::-1])
    assert pool.get_new_blocks(24)[-21:] == [copy, *block_ids[::-1]]
    assert pool.num_evictions == 21
    check_pool(pool)


def test_an_audit_finds_a_copy_that_is_not_noted_as_one() -> None:
    pool = BlockPool(25)
    cache(pool, digests(b"a", 2))
    copies = cache(pool, digests(b"a", 2))
    check_pool(pool)
    assert np.count_nonzero(pool.contents.is_copied) == 4
    pool.contents.is_copied[copies[0]] = False
    with pytest.raises(InvariantError, match=f"^block {copies[0]} is not noted as one of several"):
        check_pool(pool)
