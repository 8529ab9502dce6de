"""From tokens to chained digests, which identify cached blocks.

A request calls its hasher only when digests are needed; look-ups by tokens never need them. A
digest covers the parent's digest, the block's tokens and its extra keys, so equal digests mean
equal prefixes. The none hash, the parent of every first block, follows from the algorithm and a
seed, and is passed around. Digests do not cover the model epoch and the tenant: look-ups separate
them by namespace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NewType

from kvcache.base.arguments import as_bytes, as_int, as_text, as_tuple, check_kind
from kvcache.base.errors import ConfigurationError, InvalidInputError, RequestError, shown
from kvcache.requests.hash_algorithms import (
    TOKEN_BYTES,
    BlockHash,
    ExtraKey,
    ExtraKeys,
    HashFn,
    canonical_cbor,
    get_hash_fn,
)
from kvcache.requests.request import Request
from kvcache.requests.tokens import TokenIds, as_token_ids

__all__ = [
    "DEFAULT_HASH_SEED",
    "BlockHash",
    "BlockHashWithGroupId",
    "ExtraKeys",
    "HashFn",
    "RequestBlockHasher",
    "generate_block_hash_extra_keys",
    "get_block_hash",
    "get_group_id",
    "get_hash_fn",
    "get_hash_value",
    "get_request_block_hasher",
    "hash_block_tokens",
    "init_none_hash",
    "make_block_hash_with_group_id",
    "need_extra_keys",
]

BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)
"""A block's digest followed by its KV cache group's index as 4 bytes, big endian."""

DEFAULT_HASH_SEED = "vllm-none-hash"
"""The default seed of engines; with it, `sha256_cbor` digests equal vLLM's without any setting."""

_GROUP_ID_BYTES = 4


@dataclass(frozen=True)
class RequestBlockHasher:
    """Computes a request's further digests. Stateless, shared by many requests."""

    block_size: int
    hash_fn: HashFn
    none_hash: BlockHash

    def __call__(self, request: Request, known: Sequence[BlockHash]) -> list[BlockHash]:
        """Digests of the request's full blocks that follow the `known` ones. Changes nothing."""
        parent = known[-1] if known else self.none_hash
        return self.digests(request, len(known), request.num_tokens // self.block_size, parent)

    def digests(
        self, request: Request, first: int, last: int, parent: BlockHash
    ) -> list[BlockHash]:
        """Digests of the request's full blocks `[first, last)`; `parent` is the one before.

        Changes nothing. The blocks before need no digests.
        """
        size = self.block_size
        token_bytes = request.token_bytes(first * size, last * size)
        if not need_extra_keys(request):
            return self.hash_fn.chain(parent, token_bytes, size, last - first)

        block_bytes = size * TOKEN_BYTES
        hashes: list[BlockHash] = []
        block, mm_idx = first, 0
        while block < last:
            keys, mm_idx = generate_block_hash_extra_keys(
                request, block * size, (block + 1) * size, mm_idx
            )
            stop = min(last, _end_of_equal_keys(request, block, size, keys, mm_idx))
            run = token_bytes[(block - first) * block_bytes : (stop - first) * block_bytes]
            hashes += self.hash_fn.chain(parent, run, size, stop - block, keys)
            parent, block = hashes[-1], stop
        return hashes


def init_none_hash(hash_fn: HashFn, seed: str = DEFAULT_HASH_SEED) -> BlockHash:
    """Parent of every first block: the digest of the seed, encoded as a CBOR text string.

    Processes that agree on algorithm and seed agree on every digest.

    Raises:
        ConfigurationError: no algorithm, or the seed is not text that UTF-8 can encode.
    """
    check_kind("hash_fn", hash_fn, HashFn, ConfigurationError)
    seed = as_text("hash seed", seed, ConfigurationError, may_be_empty=True)
    return BlockHash(hash_fn.digest(canonical_cbor(seed)))


def get_request_block_hasher(
    block_size: int, hash_fn: HashFn, seed: str = DEFAULT_HASH_SEED
) -> RequestBlockHasher:
    """Return a `block_hasher` for requests, with one digest per `block_size` tokens.

    Equal arguments give the same object, which managers recognise faster than an equal one.

    Raises:
        ConfigurationError: the block size is not a positive integer, `hash_fn` no algorithm, or
            the seed no text.
    """
    block_size = as_int("block_size", block_size, 1, error=ConfigurationError)
    none_hash = init_none_hash(hash_fn, seed)
    try:
        return _request_block_hasher(block_size, hash_fn, none_hash)
    except TypeError:  # an algorithm of the caller's own that cannot be a key
        return RequestBlockHasher(block_size, hash_fn, none_hash)


_request_block_hasher = lru_cache(RequestBlockHasher)


def hash_block_tokens(
    hash_fn: HashFn, parent: BlockHash, tokens: TokenIds, extra_keys: ExtraKeys | None = None
) -> BlockHash:
    """Digest of one full block.

    Args:
        parent: digest of the block before, or the none hash for a first block.
        tokens: all tokens of the block.
        extra_keys: the result of `generate_block_hash_extra_keys`; `None` and `()` are equal.

    Raises:
        RequestError: the parent is no digest of this algorithm, there are no tokens, one of them
            is not a token id, or an extra key cannot be hashed.
    """
    check_kind("hash_fn", hash_fn, HashFn, RequestError)
    if not isinstance(parent, bytes) or len(parent) != hash_fn.digest_bytes:
        raise RequestError(
            f"parent {shown(parent)} is no {hash_fn.name} digest of {hash_fn.digest_bytes} bytes: "
            "pass the digest of the block before, or init_none_hash(hash_fn) for a first block"
        )
    token_ids = as_token_ids(tokens, "token id")
    if token_ids.size == 0:
        raise RequestError("a block without tokens has no digest: pass all tokens of a full block")
    keys = None if extra_keys is None else as_extra_keys("extra_keys", extra_keys)
    token_bytes = token_ids.astype("<i4", copy=False).tobytes()
    return hash_fn.hash_block(parent, token_bytes, keys or None)


def as_extra_keys(what: str, keys: object) -> ExtraKeys:
    """Return extra keys in a list or tuple as a tuple.

    Raises:
        RequestError: a key is not a tuple of two texts, or of two texts and a text or an integer.
    """
    listed = as_tuple(what, keys, RequestError)
    for place, key in enumerate(listed):
        name = f"{what}[{place}]"
        if not isinstance(key, tuple) or not 2 <= len(key) <= 3:
            raise RequestError(
                f"{name} is {shown(key)}: pass a tuple of two texts, or of two texts and a text or "
                "an integer"
            )
        for at, part in enumerate(key):
            if at < 2 or type(part) is not int:
                as_text(f"{name}[{at}]", part, RequestError, may_be_empty=True)
    return listed


def need_extra_keys(request: Request) -> bool:
    """Return whether any block of the request can have extra keys; raises RequestError for
    others."""
    check_kind("request", request, Request, RequestError)
    return bool(request.lora or request.mm_hashes or request.cache_salt)


def generate_block_hash_extra_keys(
    request: Request, start_token: int, end_token: int, start_mm_idx: int
) -> tuple[ExtraKeys | None, int]:
    """Return the extra keys of the block at `[start_token, end_token)`. Changes nothing.

        tokens   0       4       8       12
                 |   ####|#######|##     |      an item at [2, 10): starts 2, -2, -6

    Args:
        start_mm_idx: index of the first multimodal item that may overlap the block; 0 always works.

    Returns:
        The keys: LoRA, multimodal items in order of position with their start relative to the
        block, and for the block at token 0 the cache salt; `None` without any. And
        `start_mm_idx` for the block that follows.

    Raises:
        RequestError: the tokens are no block, or a number is not an integer of at least 0.
    """
    check_kind("request", request, Request, RequestError)
    start_token = as_int("start_token", start_token, error=RequestError)
    end_token = as_int("end_token", end_token, error=RequestError)
    start_mm_idx = as_int("start_mm_idx", start_mm_idx, error=RequestError)
    if start_token >= end_token:
        raise RequestError(
            f"request {request.request_id}: no block at tokens [{start_token}, {end_token}): "
            "pass a start before the end"
        )
    keys: list[ExtraKey] = []
    if request.lora is not None:
        keys.append(("lora", request.lora.name, request.lora.path))
    next_mm_idx = None
    for mm_idx in range(start_mm_idx, len(request.mm_positions)):
        position = request.mm_positions[mm_idx]
        if next_mm_idx is None and position.end > end_token:
            next_mm_idx = mm_idx
        if position.offset >= end_token:
            break
        if position.end > start_token:
            keys.append(("mm", request.mm_hashes[mm_idx], position.offset - start_token))
    if next_mm_idx is None:
        next_mm_idx = len(request.mm_positions)
    if start_token == 0 and request.cache_salt is not None:
        keys.append(("cache_salt", request.cache_salt))
    return tuple(keys) or None, next_mm_idx


def make_block_hash_with_group_id(block_hash: BlockHash, group_id: int) -> BlockHashWithGroupId:
    """The key of a block in one KV cache group.

    Raises:
        InvalidInputError: the digest is not bytes, or the group id does not fit 4 bytes.
    """
    digest = as_bytes("block_hash", block_hash)
    number = as_int("group_id", group_id, at_most=2**32 - 1)
    return BlockHashWithGroupId(digest + number.to_bytes(_GROUP_ID_BYTES, "big"))


def get_block_hash(key: BlockHashWithGroupId) -> BlockHash:
    """Return the digest in a key, without the group id; raises InvalidInputError for others."""
    _check_key(key)
    return BlockHash(key[:-_GROUP_ID_BYTES])


def get_hash_value(key: BlockHashWithGroupId) -> BlockHash:
    """Return the digest in a key, without the group id: an alias of `get_block_hash`."""
    return get_block_hash(key)


def get_group_id(key: BlockHashWithGroupId) -> int:
    """Return the KV cache group's index in a key; raises InvalidInputError for others."""
    _check_key(key)
    return int.from_bytes(key[-_GROUP_ID_BYTES:], "big")


def _check_key(key: object) -> None:
    if not isinstance(key, bytes) or len(key) <= _GROUP_ID_BYTES:
        raise InvalidInputError(
            f"key is {shown(key)}: pass bytes made by make_block_hash_with_group_id"
        )


def _end_of_equal_keys(
    request: Request, block: int, block_size: int, keys: ExtraKeys | None, next_mm_idx: int
) -> int:
    """Return the next block whose extra keys may differ from `keys`, those of `block`."""
    if keys is not None and any(key[0] != "lora" for key in keys):
        return block + 1
    if next_mm_idx == len(request.mm_positions):
        return request.num_tokens // block_size
    return request.mm_positions[next_mm_idx].offset // block_size
