"""A block of a sequence: its digest, its tokens, and its refusals."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvcache import (
    BlockError,
    BlockHash,
    PrefixCachingBlock,
    PrefixCachingBlockAllocator,
    Request,
    RequestError,
    get_hash_fn,
    get_request_block_hasher,
)


def make_block(
    prev_block: PrefixCachingBlock | None, token_ids: list[int], block_size: int = 4
) -> PrefixCachingBlock:
    return PrefixCachingBlock(
        prev_block, token_ids, block_size, MagicMock(spec=PrefixCachingBlockAllocator)
    )


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_first_block_has_a_digest_exactly_when_it_is_full(block_size: int) -> None:
    tokens = list(range(block_size))
    full = make_block(None, tokens, block_size)
    assert full.content_hash == PrefixCachingBlock.hash_block_tokens(True, None, tokens)
    assert make_block(None, tokens[:-1], block_size).content_hash is None


@pytest.mark.parametrize("has_parent_digest", [True, False])
def test_a_later_block_has_a_digest_only_behind_one_that_has(has_parent_digest: bool) -> None:
    parent_digest = BlockHash(random.Random(1).randbytes(32)) if has_parent_digest else None
    previous = MagicMock(spec=PrefixCachingBlock)
    previous.content_hash = parent_digest
    block = make_block(previous, [1, 2, 3, 4])
    if parent_digest is None:
        assert block.content_hash is None
    else:
        expected = PrefixCachingBlock.hash_block_tokens(False, parent_digest, [1, 2, 3, 4])
        assert block.content_hash == expected
    assert make_block(previous, [1, 2, 3]).content_hash is None


def test_equal_chains_have_equal_digests_and_those_of_requests() -> None:
    tokens = list(range(12))
    hasher = get_request_block_hasher(4, get_hash_fn("sha256"))
    chains = []
    for _ in range(2):
        chain: list[PrefixCachingBlock] = []
        for start in range(0, 12, 4):
            block = make_block(chain[-1] if chain else None, [])
            for token in tokens[start : start + 4]:
                block.append_token_ids([token])
            chain.append(block)
        chains.append([block.content_hash for block in chain])
        assert [block.num_tokens_total for block in chain] == [4, 8, 12]
    assert chains[0] == chains[1] == Request("r", tokens, block_hasher=hasher).block_hashes


def test_a_digest_appears_when_the_block_before_is_filled_late() -> None:
    first = make_block(None, [])
    second = make_block(first, [5, 6, 7, 8])
    assert second.content_hash is None
    first.append_token_ids([1, 2, 3, 4])
    assert second.content_hash is not None


def test_the_extra_hash_sets_contents_apart() -> None:
    hashes = {
        PrefixCachingBlock.hash_block_tokens(True, None, [1, 2], extra)
        for extra in (None, 0, 1, -1, 2**70, "1", "", (("lora", "a", "path"),), (("mm", "x", -3),))
    }
    assert len(hashes) == 9


@pytest.mark.parametrize("extra", [True, 1.5, b"x", [("lora", "a", "b")], (("lora", 1),), "\ud800"])
def test_an_extra_hash_that_cannot_be_hashed_is_refused(extra: Any) -> None:
    with pytest.raises(RequestError, match="extra hash"):
        PrefixCachingBlock.hash_block_tokens(True, None, [1, 2], extra)


def test_a_block_refuses_more_tokens_than_fit_and_keeps_those_it_has() -> None:
    block = make_block(None, [1, 2])
    with pytest.raises(BlockError, match="3 tokens are appended to a block with room for 2: fill"):
        block.append_token_ids([3, 4, 5])
    with pytest.raises(RequestError, match="token id at index 1 is -1"):
        block.append_token_ids([3, -1])
    assert (block.token_ids, block.num_empty_slots, block.is_full) == ([1, 2], 2, False)
    with pytest.raises(BlockError, match="5 tokens do not fit a block of 4"):
        make_block(None, [1, 2, 3, 4, 5])


def test_a_full_block_is_immutable() -> None:
    block = make_block(None, [1, 2, 3, 4])
    with pytest.raises(BlockError, match="is full and immutable: allocate a block behind it"):
        block.append_token_ids([5])
    block.append_token_ids([])
    assert block.token_ids == [1, 2, 3, 4]


def test_a_later_block_without_its_parents_digest_cannot_be_hashed() -> None:
    with pytest.raises(RequestError, match="no digest while the block before it has none"):
        PrefixCachingBlock.hash_block_tokens(False, None, [1, 2])


def test_the_token_list_handed_out_is_a_copy() -> None:
    block = make_block(None, [1, 2])
    block.token_ids.append(3)
    assert block.token_ids == [1, 2]
