"""Digests of prompts that have been seen before, found by their tokens.

Beside a block hasher, which asks here before it hashes. The next prompt of a conversation begins
with all of the last one, so most of its digests have been computed already. Exact: tokens are
compared, byte by byte, and nothing is concluded from a digest. Refuses extra keys: of those a
stretch of tokens says nothing.

    blocks   0 ........ 31 | 32 ....... 63 | 64 .... 78
             a stretch     | a stretch     | hashed
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from xxhash import xxh3_64_intdigest

from kvcache.errors import ConfigurationError, shown
from kvcache.hash_algorithms import TOKEN_BYTES, BlockHash, HashFn

STRETCH_BLOCKS = 32
"""Blocks that are found, and forgotten, together. Fewer cost more look-ups, more leave a longer
rest of each prompt to be hashed."""


_Name: TypeAlias = "tuple[BlockHash, int]"
"""The digest before a stretch, and a hash of its tokens."""


class _Stretch(NamedTuple):
    """Successive blocks: their tokens, as bytes, and their digests."""

    token_bytes: bytes
    digests: list[BlockHash]


class DigestMemo:
    """The digests of stretches of prompts, those that were used last.

    A stretch is found by the digest before it and a hash of its tokens; of two that have both in
    common the newer one stays. There are two generations: what is used enters the younger one, and
    when that is full it becomes the older one, whose place it takes. Of a block it keeps the
    tokens, 4 bytes each, and a digest, which a core's index has anyway while the block is cached.
    """

    def __init__(
        self, hash_fn: HashFn, none_hash: BlockHash, block_size: int, max_blocks: int
    ) -> None:
        """Remember the digests of `max_blocks` blocks at most, and none yet.

        Raises:
            ConfigurationError: `max_blocks` is below 0.
        """
        if max_blocks < 0:
            raise ConfigurationError(
                f"a memo of digests for {shown(max_blocks)} blocks: pass 0 or more"
            )
        self._hash_fn = hash_fn
        self._none_hash = none_hash
        self._block_size = block_size
        self._stretch_bytes = STRETCH_BLOCKS * block_size * TOKEN_BYTES
        self._max_young = max_blocks // (2 * STRETCH_BLOCKS)
        self._young: dict[_Name, _Stretch] = {}
        self._old: dict[_Name, _Stretch] = {}

    def __len__(self) -> int:
        """Return of how many blocks digests are kept, at most."""
        return (len(self._young) + len(self._old)) * STRETCH_BLOCKS

    def digests(self, token_bytes: bytes, num_blocks: int) -> list[BlockHash]:
        """Return the digests of a prompt's first blocks, without extra keys.

        `token_bytes` are their tokens, little-endian int32. What is new is hashed and remembered.
        """
        digests = self._recall(token_bytes, num_blocks // STRETCH_BLOCKS)
        num_known = len(digests)
        if num_known < num_blocks:
            parent = digests[-1] if digests else self._none_hash
            rest = token_bytes[num_known * self._block_size * TOKEN_BYTES :]
            num_new = num_blocks - num_known
            digests += self._hash_fn.chain(parent, rest, self._block_size, num_new)
            if num_new >= STRETCH_BLOCKS:
                self._remember(token_bytes, digests, num_known)
        return digests

    def _recall(self, token_bytes: bytes, num_stretches: int) -> list[BlockHash]:
        """Return the digests of the first stretches, up to the first that is not known."""
        digests: list[BlockHash] = []
        parent, size = self._none_hash, self._stretch_bytes
        for start in range(0, num_stretches * size, size):
            piece = token_bytes[start : start + size]
            name = parent, xxh3_64_intdigest(piece)
            stretch = self._young.get(name)
            if stretch is None:
                stretch = self._old.get(name)
                if stretch is None:
                    break
                self._keep(name, stretch)
            if stretch.token_bytes != piece:
                break
            digests += stretch.digests
            parent = digests[-1]
        return digests

    def _remember(self, token_bytes: bytes, digests: list[BlockHash], first: int) -> None:
        """Keep the stretches of a prompt from block `first` on."""
        size = self._stretch_bytes
        parent = digests[first - 1] if first else self._none_hash
        for start in range(first, len(digests) - STRETCH_BLOCKS + 1, STRETCH_BLOCKS):
            end = start + STRETCH_BLOCKS
            at = start // STRETCH_BLOCKS * size
            piece, part = token_bytes[at : at + size], digests[start:end]
            self._keep((parent, xxh3_64_intdigest(piece)), _Stretch(piece, part))
            parent = part[-1]

    def _keep(self, name: _Name, stretch: _Stretch) -> None:
        """Let a stretch be the youngest."""
        if len(self._young) >= self._max_young:
            self._young, self._old = {}, self._young
        self._young[name] = stretch
