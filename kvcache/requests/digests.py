"""Digests of many blocks, packed into one bytes object.

The core makes digests of whole prefixes; readers of events use them. `hashing` computes digests;
this module only stores them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from kvcache.base.errors import InvalidInputError, shown
from kvcache.requests.hash_algorithms import BlockHash

__all__ = ["PackedDigests", "join_digests"]

_PIECE = 256
"""Most digests that are joined at a time: `join` needs 80 bytes for each while it makes the
result, and thousands would leave a hole of 16 bytes per block in the heap for every prompt."""


def join_digests(digests: Sequence[BlockHash]) -> bytes:
    """Return the digests joined."""
    if len(digests) <= _PIECE:
        return b"".join(digests)
    starts = range(0, len(digests), _PIECE)
    return b"".join([b"".join(digests[start : start + _PIECE]) for start in starts])


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class PackedDigests(Sequence[BlockHash]):
    """An immutable sequence of digests of equal length, packed in `data`.

    Digest `i` is `data[i * digest_bytes : (i + 1) * digest_bytes]`; a bytes object for it is made
    only on access. Equal to every sequence of the same digests, with the hash of the tuple of
    them. Slices are packed, too.

    Raises:
        InvalidInputError: `data` is not bytes, or not made of digests of that length.
    """

    data: bytes
    digest_bytes: int

    def __post_init__(self) -> None:
        if type(self.digest_bytes) is not int or self.digest_bytes < 1:
            raise InvalidInputError(
                f"digests of {shown(self.digest_bytes)} bytes: pass an integer of at least 1"
            )
        if type(self.data) is not bytes:
            raise InvalidInputError(
                f"packed digests {shown(self.data)}: pass the bytes of all digests joined"
            )
        if len(self.data) % self.digest_bytes:
            raise InvalidInputError(
                f"{len(self.data)} bytes of packed digests of {self.digest_bytes} bytes each: "
                "pass whole digests"
            )

    def __len__(self) -> int:
        return len(self.data) // self.digest_bytes

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> PackedDigests: ...
    def __getitem__(self, index: int | slice) -> BlockHash | PackedDigests:
        """Return one digest, or a slice, packed."""
        size = self.digest_bytes
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return PackedDigests(self.data[start * size : stop * size], size)
            return PackedDigests(b"".join(self[i] for i in range(start, stop, step)), size)
        start = range(len(self))[index] * size
        return BlockHash(self.data[start : start + size])

    def __iter__(self) -> Iterator[BlockHash]:
        size = self.digest_bytes
        for start in range(0, len(self.data), size):
            yield BlockHash(self.data[start : start + size])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedDigests):
            if not self.data or self.digest_bytes == other.digest_bytes:
                return self.data == other.data
            return False
        if not isinstance(other, Sequence) or isinstance(other, (bytes, bytearray, str)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"PackedDigests({len(self)} of {self.digest_bytes} bytes)"
