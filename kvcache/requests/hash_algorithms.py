"""The algorithms that compute a block's digest.

hashing.py says what a digest covers. Stateless, and free of requests: parent, token bytes and extra
keys come in, a digest goes out. Does not check arguments; `hash_block_tokens` in hashing.py does.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType, TypeAlias, cast

import cbor2
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvcache.base.errors import ConfigurationError, shown

BlockHash = NewType("BlockHash", bytes)
"""Digest of a full block and its parent's digest: equal digests mean equal prefixes."""

ExtraKey: TypeAlias = "tuple[str, str] | tuple[str, str, str] | tuple[str, str, int]"
ExtraKeys: TypeAlias = "tuple[ExtraKey, ...]"

TOKEN_BYTES = 4
"""Bytes of a token in a digest: little-endian int32."""

quick_chains: dict[str, Callable[[bytes, bytes, int, int], bytes]] = {}
"""Functions that compute a whole chain of plain digests in one call, joined, by the algorithm's
name. Arguments: parent, token bytes, bytes per block, number of blocks. The core registers its
compiled functions here after a check with a test vector."""
_FEW_BLOCKS = 12
"""Up to this many blocks, a call for each is as fast."""

# Below this many tokens, a call of the CBOR encoder per block beats numpy's fixed cost.
_FEW_TOKENS = 128


@dataclass(frozen=True)
class HashFn(ABC):
    """An algorithm that computes digests of blocks. Stateless; equal ones compute the same.

    `name` is its name in configurations and fingerprints, `digest_bytes` the length of a digest.
    Tokens are little-endian int32 bytes. Arguments are not checked: see `hash_block_tokens`.
    """

    name: str
    digest_bytes: int

    @abstractmethod
    def digest(self, data: bytes) -> bytes:
        """Digest of plain bytes."""

    @abstractmethod
    def chain(
        self,
        parent: BlockHash,
        token_bytes: bytes,
        block_size: int,
        num_blocks: int,
        extra_keys: ExtraKeys | None = None,
    ) -> list[BlockHash]:
        """Digests of `num_blocks` consecutive blocks, all with the same extra keys.

        `token_bytes` holds at least `num_blocks * block_size` tokens; what follows is ignored.
        """

    def hash_block(
        self, parent: BlockHash, token_bytes: bytes, extra_keys: ExtraKeys | None = None
    ) -> BlockHash:
        """Digest of the one block whose tokens are `token_bytes`."""
        return self.chain(parent, token_bytes, len(token_bytes) // TOKEN_BYTES, 1, extra_keys)[0]


def get_hash_fn(name: str) -> HashFn:
    """The algorithm with that name: `sha256`, `sha256_cbor` or `xxh3_128`.

    Raises:
        ConfigurationError: no algorithm has that name; lists those that exist.
    """
    hash_fns: dict[str, HashFn] = {
        hash_fn.name: hash_fn
        for hash_fn in (
            _Sha256("sha256", 32),
            _Sha256Cbor("sha256_cbor", 32),
            _Xxh3("xxh3_128", 16),
        )
    }
    if not isinstance(name, str) or name not in hash_fns:
        raise ConfigurationError(
            f"unknown hash algorithm {shown(name)}: choose one of {', '.join(hash_fns)}"
        )
    return hash_fns[name]


def canonical_cbor(value: object) -> bytes:
    """Canonical CBOR of `value`: equal values have equal bytes (RFC 8949, section 4.2)."""
    return cbor2.dumps(value, canonical=True)


class _PlainHashFn(HashFn):
    """A hash over parent digest, token bytes, and canonical CBOR of the extra keys, if any."""

    def chain(
        self,
        parent: BlockHash,
        token_bytes: bytes,
        block_size: int,
        num_blocks: int,
        extra_keys: ExtraKeys | None = None,
    ) -> list[BlockHash]:
        if num_blocks > _FEW_BLOCKS and extra_keys is None and self.name in quick_chains:
            return self._chain_at_once(parent, token_bytes, block_size, num_blocks)
        pieces = _pieces(token_bytes, block_size, num_blocks, extra_keys)
        return cast("list[BlockHash]", self._digests_after(parent, pieces))

    @abstractmethod
    def _digests_after(self, above: bytes, pieces: list[bytes]) -> list[bytes]:
        """Digests of pieces; each follows the digest before it."""

    def _chain_at_once(
        self, parent: bytes, token_bytes: bytes, block_size: int, num_blocks: int
    ) -> list[BlockHash]:
        make = quick_chains[self.name]
        joined = make(parent, token_bytes, block_size * TOKEN_BYTES, num_blocks)
        hashes: list[BlockHash] = np.frombuffer(joined, f"V{self.digest_bytes}").tolist()
        return hashes


class _Sha256(_PlainHashFn):
    def digest(self, data: bytes) -> bytes:
        return hashlib.sha256(data).digest()

    def _digests_after(self, above: bytes, pieces: list[bytes]) -> list[bytes]:
        sha256 = hashlib.sha256
        return [above := sha256(above + piece).digest() for piece in pieces]


class _Xxh3(_PlainHashFn):
    """XXH3, 128 bits: fast, but not safe against attacks."""

    def digest(self, data: bytes) -> bytes:
        return xxhash.xxh3_128_digest(data)

    def _digests_after(self, above: bytes, pieces: list[bytes]) -> list[bytes]:
        xxh3 = xxhash.xxh3_128_digest
        return [above := xxh3(above + piece) for piece in pieces]


class _Sha256Cbor(HashFn):
    """SHA-256 over the canonical CBOR of `(parent, tokens, extra keys or None)`."""

    def digest(self, data: bytes) -> bytes:
        return hashlib.sha256(data).digest()

    def chain(
        self,
        parent: BlockHash,
        token_bytes: bytes,
        block_size: int,
        num_blocks: int,
        extra_keys: ExtraKeys | None = None,
    ) -> list[BlockHash]:
        sha256 = hashlib.sha256
        above: bytes = parent
        # An array of three items whose first is a byte string of 32 (RFC 8949, section 3).
        head = b"\x83\x58\x20"
        tail = canonical_cbor(extra_keys)
        tokens = np.frombuffer(token_bytes, dtype="<u4", count=num_blocks * block_size)
        pieces = _cbor_token_arrays(tokens.reshape(num_blocks, block_size))
        hashes = [above := sha256(head + above + piece + tail).digest() for piece in pieces]
        return cast("list[BlockHash]", hashes)


def _pieces(
    token_bytes: bytes, block_size: int, num_blocks: int, extra_keys: ExtraKeys | None
) -> list[bytes]:
    """The bytes that follow the parent's digest in each block: tokens, then extra keys."""
    block_bytes = block_size * TOKEN_BYTES
    if num_blocks == 1 and extra_keys is None:
        return [token_bytes[:block_bytes]]
    # A void item becomes a bytes object of its full length, including trailing zeros.
    blocks: list[bytes] = np.frombuffer(token_bytes, f"V{block_bytes}", num_blocks).tolist()
    if extra_keys is None:
        return blocks
    tail = canonical_cbor(extra_keys)
    return [block + tail for block in blocks]


def _cbor_token_arrays(blocks: NDArray[np.uint32]) -> list[bytes]:
    """Canonical CBOR of each row as an array of unsigned integers.

    CBOR (RFC 8949, section 3) writes an integer below 24 as one byte, else as 0x18, 0x19 or 0x1a
    and 1, 2 or 4 bytes, big endian. Every token is laid out in five bytes, aligned right

        v < 24      .  .  .  .  v
        v < 2**8    .  .  .  18 v
        v < 2**16   .  .  19 v  v
        else        1a v  v  v  v

    and the dots are removed.
    """
    if blocks.size < _FEW_TOKENS:
        return [canonical_cbor(block) for block in blocks.tolist()]
    num_blocks, block_size = blocks.shape
    head = canonical_cbor([0] * block_size)[:-block_size]
    tokens = blocks.reshape(-1)
    needs_1, needs_2, needs_4 = tokens >= 24, tokens >= 2**8, tokens >= 2**16
    layout = np.empty((tokens.size, 5), np.uint8)
    layout[:, 0] = 0x1A
    layout[:, 1:] = tokens.astype(">u4").view(np.uint8).reshape(-1, 4)
    layout[needs_2 & ~needs_4, 2] = 0x19
    layout[needs_1 & ~needs_2, 3] = 0x18
    used = np.stack((needs_4, needs_4, needs_2, needs_1, np.ones_like(needs_1)), axis=1)
    body = layout[used].tobytes()
    ends = np.cumsum(np.count_nonzero(used.reshape(num_blocks, -1), axis=1)).tolist()
    return [head + body[start:end] for start, end in zip([0, *ends], ends, strict=False)]
