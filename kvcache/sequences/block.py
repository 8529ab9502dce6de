"""A block of a sequence: tokens, the block before it, and its physical block.

The allocator makes these objects. A sequence appends tokens to a block, and the block asks its
allocator before anything is written (copy-on-write) and when it is full (caching). Refuses tokens
once it is full, and while it has no physical block.

    first ◀─prev_block─ block ◀─prev_block─ block     digest = H(parent's, tokens, extra)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np

from kvcache.base.arguments import as_bool, as_int, as_text, check_kind, check_methods
from kvcache.base.errors import BlockError, RequestError, shown
from kvcache.requests.hash_algorithms import ExtraKeys
from kvcache.requests.hashing import (
    BlockHash,
    RequestBlockHasher,
    as_extra_keys,
    get_hash_fn,
    get_request_block_hasher,
    hash_block_tokens,
)
from kvcache.requests.tokens import TokenIds, as_token_ids

ExtraHash: TypeAlias = "int | str | ExtraKeys | None"
"""What a sequence's blocks depend on besides tokens: a number, a text, or a request's extra keys
(`generate_block_hash_extra_keys`), so that both have the same digests."""

DEFAULT_HASH = "sha256"


class BlockOwner(Protocol):
    """The interface of a block's allocator."""

    def cow_block_if_not_appendable(self, block: PrefixCachingBlock) -> int:
        """Give the block a physical block that is not shared; return it."""

    def promote_to_immutable_block(self, block: PrefixCachingBlock) -> int:
        """Cache the full block; return the physical block that it is now in."""

    def block_is_computed(self, block_id: int) -> bool:
        """Return whether the bytes of a physical block are computed."""


_OWNER_METHODS = ("cow_block_if_not_appendable", "promote_to_immutable_block", "block_is_computed")


class PrefixCachingBlock:
    """Up to `block_size` tokens of one sequence. Allocators make these; callers keep them in order.

    `block_id` is the physical block; None before one is given, after `free` and while swapped out.
    `num_tokens_before_append` is set during an append: later tokens are not written yet.
    """

    __slots__ = (
        "_content_hash",
        "_is_released",
        "_token_ids",
        "allocator",
        "block_id",
        "block_size",
        "extra_hash",
        "hasher",
        "num_tokens_before_append",
        "prev_block",
    )

    def __init__(  # noqa: PLR0917 - the field's signature
        self,
        prev_block: PrefixCachingBlock | None,
        token_ids: TokenIds,
        block_size: int,
        allocator: BlockOwner,
        extra_hash: ExtraHash = None,
        hasher: RequestBlockHasher | None = None,
    ) -> None:
        """Store a copy of `token_ids` after `prev_block`, without a physical block.

        `hasher` is the allocator's; the default is `sha256` with the default seed.

        Raises:
            BlockError: more tokens than fit, or an argument of another type.
            RequestError: a value is not a token id, or an extra hash cannot be hashed.
        """
        check_kind("prev_block", prev_block, (PrefixCachingBlock, type(None)), BlockError)
        check_kind("hasher", hasher, (RequestBlockHasher, type(None)), BlockError)
        block_size = as_int("block_size", block_size, 1, error=BlockError)
        check_methods("allocator", allocator, _OWNER_METHODS, BlockError)
        tokens: list[int] = as_token_ids(token_ids, "token id").tolist()
        if len(tokens) > block_size:
            raise BlockError(
                f"{len(tokens)} tokens do not fit a block of {block_size}: use several blocks"
            )
        extra_keys_of(extra_hash)
        self.prev_block = prev_block
        self.block_size = block_size
        self.allocator = allocator
        self.extra_hash = extra_hash
        self.hasher = hasher or default_hasher(block_size)
        self.block_id: int | None = None
        self._token_ids = tokens
        self._content_hash: BlockHash | None = None
        self._is_released = False
        self.num_tokens_before_append: int | None = None
        self._find_content_hash()

    def __repr__(self) -> str:
        return (
            f"PrefixCachingBlock(block_id={self.block_id}, {len(self._token_ids)} of "
            f"{self.block_size} tokens)"
        )

    @property
    def token_ids(self) -> list[int]:
        """The tokens, as a new list."""
        return list(self._token_ids)

    @property
    def is_full(self) -> bool:
        """Whether it is full: the block is immutable."""
        return len(self._token_ids) == self.block_size

    @property
    def num_empty_slots(self) -> int:
        """How many more tokens fit."""
        return self.block_size - len(self._token_ids)

    @property
    def num_tokens_total(self) -> int:
        """Tokens of the sequence up to the end of this block. O(blocks before it)."""
        total, block = 0, self
        while block.prev_block is not None:
            total += len(block._token_ids)
            block = block.prev_block
        return total + len(block._token_ids)

    @property
    def content_hash(self) -> BlockHash | None:
        """Digest of all tokens up to the end of this block, and of their extra hashes.

        None until the block is full, and while the block before it has none.
        """
        return self._find_content_hash()

    @property
    def parent_hash(self) -> BlockHash | None:
        """Digest before this block: the none hash for a first block, None if not known."""
        if self.prev_block is None:
            return self.hasher.none_hash
        return self.prev_block.content_hash

    @property
    def computed(self) -> bool:
        """Whether its bytes are computed; False without a physical block."""
        return self.block_id is not None and self.allocator.block_is_computed(self.block_id)

    @property
    def is_released(self) -> bool:
        """Whether it had a physical block and lost it: freed, or swapped out."""
        return self._is_released

    def append_token_ids(self, token_ids: TokenIds) -> None:
        """Append tokens that the next forward writes.

        A shared physical block is left to the others: this block gets another one, and the
        allocator records the copy. A block that becomes full is cached, and may move to the
        physical block that has its content already.

        Raises:
            BlockError: it is full, more tokens are given than fit, or it was freed or swapped out.
            OutOfBlocksError: a copy is needed, and no block is free.
            RequestError: a value is not a token id. Every error leaves all unchanged.
        """
        new: list[int] = as_token_ids(token_ids, "token id").tolist()
        if self._is_released:
            raise BlockError(
                "tokens are appended to a block that was freed or swapped out: swap it in first"
            )
        if new and self.is_full:
            raise BlockError(
                f"block {self.block_id} is full and immutable: allocate a block behind it"
            )
        if len(new) > self.num_empty_slots:
            raise BlockError(
                f"{len(new)} tokens are appended to a block with room for "
                f"{self.num_empty_slots}: fill it, then allocate a block behind it"
            )
        if not new:
            return
        if self.block_id is not None:
            self.block_id = self.allocator.cow_block_if_not_appendable(self)
        self.num_tokens_before_append = len(self._token_ids)
        self._token_ids += new
        if self._find_content_hash() is not None and self.block_id is not None:
            self.block_id = self.allocator.promote_to_immutable_block(self)
        self.num_tokens_before_append = None

    def attach(self, block_id: int, allocator: BlockOwner) -> None:
        """Set the physical block of `allocator`, which counts the reference."""
        self.block_id, self.allocator = block_id, allocator
        self._is_released = False

    def detach(self) -> None:
        """Clear the physical block; the allocator drops the reference."""
        self.block_id = None
        self._is_released = True

    @staticmethod
    def hash_block_tokens(
        is_first_block: bool,
        prev_block_hash: BlockHash | None,
        cur_block_token_ids: TokenIds,
        extra_hash: ExtraHash = None,
        hasher: RequestBlockHasher | None = None,
    ) -> BlockHash:
        """Return the digest of a full block; `prev_block_hash` is not read for a first one.

        Raises:
            RequestError: a later block without its parent's digest, no tokens, no token ids, or an
                argument of another type.
        """
        is_first_block = as_bool("is_first_block", is_first_block, RequestError)
        check_kind("hasher", hasher, (RequestBlockHasher, type(None)), RequestError)
        hasher = hasher or default_hasher(block_size=1)
        parent = hasher.none_hash if is_first_block else prev_block_hash
        if parent is None:
            raise RequestError(
                "a block has no digest while the block before it has none: fill that one first"
            )
        return hash_block_tokens(
            hasher.hash_fn, parent, cur_block_token_ids, extra_keys_of(extra_hash)
        )

    def _find_content_hash(self) -> BlockHash | None:
        if self._content_hash is None and self.is_full:
            parent = self.parent_hash
            if parent is not None:
                self._content_hash = hash_block_tokens(
                    self.hasher.hash_fn, parent, self._token_ids, extra_keys_of(self.extra_hash)
                )
        return self._content_hash


def default_hasher(block_size: int) -> RequestBlockHasher:
    return get_request_block_hasher(block_size, get_hash_fn(DEFAULT_HASH))


def extra_keys_of(extra_hash: ExtraHash) -> ExtraKeys | None:
    """Return an extra hash as a digest covers it; a number and a text always differ.

    Raises:
        RequestError: it has another type.
    """
    if extra_hash is None:
        return None
    if type(extra_hash) is int:
        return (("extra_hash", "number", extra_hash),)
    if isinstance(extra_hash, str):
        text = as_text("extra hash", extra_hash, RequestError, may_be_empty=True)
        return (("extra_hash", "text", text),)
    if isinstance(extra_hash, tuple):
        return as_extra_keys("extra hash", extra_hash) or None
    given: object = extra_hash
    if isinstance(given, np.integer):
        number = as_int("extra hash", given, -(2**63), 2**64 - 1, RequestError)
        return (("extra_hash", "number", number),)
    raise RequestError(
        f"extra hash {shown(extra_hash)}: pass an integer, a text, or a tuple of extra keys"
    )


def chain_to(last_block: PrefixCachingBlock) -> Sequence[PrefixCachingBlock]:
    """Return the blocks of a sequence from its first to `last_block`."""
    chain = [last_block]
    while (before := chain[-1].prev_block) is not None:
        chain.append(before)
    return chain[::-1]
