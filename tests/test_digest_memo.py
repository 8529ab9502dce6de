"""A memo of digests: the same digests as without it, less hashing, and a bound."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import starmap

import numpy as np
import pytest

from kvcache import digest_memo
from kvcache.digest_memo import STRETCH_BLOCKS, DigestMemo
from kvcache.errors import ConfigurationError
from kvcache.hash_algorithms import BlockHash, ExtraKeys, HashFn
from kvcache.hashing import get_hash_fn, get_request_block_hasher
from kvcache.request import LoRARequest, Request

SIZE = 4
SEED = "seed"


@dataclass(frozen=True)
class CountingHashFn(HashFn):
    """Another algorithm that notes how many blocks it has hashed."""

    inner: HashFn = field(default_factory=lambda: get_hash_fn("sha256"))
    counts: list[int] = field(default_factory=list, compare=False)

    def digest(self, data: bytes) -> bytes:
        return self.inner.digest(data)

    def chain(
        self,
        parent: BlockHash,
        token_bytes: bytes,
        block_size: int,
        num_blocks: int,
        extra_keys: ExtraKeys | None = None,
    ) -> list[BlockHash]:
        self.counts.append(num_blocks)
        return self.inner.chain(parent, token_bytes, block_size, num_blocks, extra_keys)


def prompts(seed: int, count: int) -> list[list[int]]:
    """Return prompts most of which go on from somewhere in an earlier one."""
    rng = random.Random(seed)
    made: list[list[int]] = []
    for _ in range(count):
        before = rng.choice(made) if made and rng.random() < 0.8 else []
        kept = before[: rng.randrange(len(before) + 1)]
        fresh = [rng.randrange(3) for _ in range(rng.randrange(1, 5 * STRETCH_BLOCKS * SIZE))]
        made.append(kept + fresh)
    return made


@pytest.mark.parametrize("has_collisions", [False, True])
@pytest.mark.parametrize("num_remembered", [2, 6 * STRETCH_BLOCKS, 10_000])
@pytest.mark.parametrize("seed", range(4))
def test_digests_are_those_that_hashing_gives(
    seed: int, num_remembered: int, has_collisions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_collisions:
        monkeypatch.setattr(digest_memo, "xxh3_64_intdigest", len)
    hash_fn = get_hash_fn("sha256")
    plain = get_request_block_hasher(SIZE, hash_fn, SEED)
    hasher = get_request_block_hasher(SIZE, hash_fn, SEED, num_remembered)
    assert hasher == plain
    for tokens in prompts(seed, 60):
        expected = Request("p", tokens, block_hasher=plain).block_hashes
        assert Request("r", tokens, block_hasher=hasher).block_hashes == expected
        assert hasher.memo is not None
        assert len(hasher.memo) <= max(num_remembered, 2 * STRETCH_BLOCKS)


def test_what_was_hashed_is_not_hashed_again() -> None:
    hash_fn = CountingHashFn("counting", 32)
    hasher = get_request_block_hasher(SIZE, hash_fn, SEED, 100 * STRETCH_BLOCKS)
    tokens = np.arange(SIZE * (3 * STRETCH_BLOCKS + 5), dtype=np.int32)
    first = list(Request("a", tokens, block_hasher=hasher).block_hashes)
    longer = np.append(tokens, tokens[: 7 * SIZE])
    assert Request("b", longer, block_hasher=hasher).block_hashes[: len(first)] == first
    assert hash_fn.counts == [3 * STRETCH_BLOCKS + 5, 5 + 7]


def test_what_was_used_last_is_kept() -> None:
    hash_fn = CountingHashFn("counting", 32)
    hasher = get_request_block_hasher(SIZE, hash_fn, SEED, 4 * STRETCH_BLOCKS)
    stretch = STRETCH_BLOCKS * SIZE
    used, *others = ([number] * stretch for number in range(6))
    for tokens in others:
        for prompt in (used, tokens):
            _ = Request("r", prompt, block_hasher=hasher).block_hashes
    # The first prompt once, each of the others once.
    assert hash_fn.counts == [STRETCH_BLOCKS] * 6


def test_extra_keys_are_no_part_of_what_is_remembered() -> None:
    plain = get_request_block_hasher(SIZE, get_hash_fn("sha256"), SEED)
    hasher = get_request_block_hasher(SIZE, get_hash_fn("sha256"), SEED, 1000)
    tokens = list(range(2 * STRETCH_BLOCKS * SIZE))
    adapters = (None, LoRARequest("one", "path"), None, LoRARequest("two", "path"))

    def digests(name: str, lora: LoRARequest | None) -> tuple[BlockHash, ...]:
        request, expected = (
            Request(name, tokens, lora=lora, block_hasher=each) for each in (hasher, plain)
        )
        assert request.block_hashes == expected.block_hashes
        return tuple(request.block_hashes)

    found = list(starmap(digests, zip("abcd", adapters, strict=True)))
    assert len(set(found)) == 3


def test_a_memo_of_fewer_than_no_blocks_is_refused() -> None:
    with pytest.raises(ConfigurationError) as error:
        DigestMemo(get_hash_fn("sha256"), BlockHash(b""), SIZE, -1)
    assert str(error.value) == "a memo of digests for -1 blocks: pass 0 or more"
