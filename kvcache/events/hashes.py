"""What routers call a block: the low 64 bits of its digest.

Below the codec. Refuses to hash: digests come from the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvcache.base.errors import InvalidInputError
from kvcache.events.wire_events import Hashes
from kvcache.requests.digests import PackedDigests
from kvcache.requests.hashing import BlockHash

_WORD_BYTES: Final = 8
_NO_HASH: Final = 0
_STAND_IN: Final = 1
"""What a digest whose low 64 bits are zero is called: routers read zero as no hash."""


def short_hashes(digests: Sequence[BlockHash]) -> Hashes:
    """Return the low 64 bits of each digest, shape `(n,)`, never zero.

    Packed digests are read where they lie: no object is made per block.

    Raises:
        InvalidInputError: digests of differing lengths, or no multiple of 8 bytes long.
    """
    if not digests:
        return np.empty(0, np.uint64)
    if isinstance(digests, PackedDigests):
        joined, size = digests.data, digests.digest_bytes
    else:
        joined, size = b"".join(digests), len(digests[0])
    if size % _WORD_BYTES or not size or len(joined) != size * len(digests):
        raise InvalidInputError(
            f"{len(digests)} digests of {len(joined)} bytes, the first of {size}: digests of one "
            "event come from one algorithm and are whole 64-bit words"
        )
    words = np.frombuffer(joined, ">u8")
    hashes: Hashes = words[size // _WORD_BYTES - 1 :: size // _WORD_BYTES].astype(np.uint64)
    if np.count_nonzero(hashes) != len(hashes):
        hashes[hashes == _NO_HASH] = _STAND_IN
    return hashes


def short_hash(digest: BlockHash) -> int:
    """Return the low 64 bits of one digest, never zero.

    Raises:
        InvalidInputError: the digest is no multiple of 8 bytes long.
    """
    if len(digest) % _WORD_BYTES or not digest:
        raise InvalidInputError(f"a digest of {len(digest)} bytes: digests are whole 64-bit words")
    return int.from_bytes(digest[-_WORD_BYTES:], "big") or _STAND_IN


def are_distinct(hashes: Hashes) -> bool:
    """Whether no hash stands there twice."""
    if len(hashes) < 2:
        return True
    ordered = np.sort(hashes)
    return not (ordered[1:] == ordered[:-1]).any()


def ends_before_repeats(hashes: Hashes) -> list[int]:
    """Return where to cut so that no part holds a hash twice; nearly always at the end only."""
    if are_distinct(hashes):
        return [len(hashes)]
    ends: list[int] = []
    seen: set[int] = set()
    for index, value in enumerate(hashes.tolist()):
        if value in seen:
            ends.append(index)
            seen.clear()
        seen.add(value)
    return [*ends, len(hashes)]
