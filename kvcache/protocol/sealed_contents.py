"""All sealed blocks and their contents, which every rank's labels must match.

The core makes it; the audit compares it with the labels of the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcache.base.arrays import Int32Array


@dataclass(frozen=True, eq=False)
class SealedContents:
    """All sealed blocks in ascending order. Shapes: `block_ids`, `groups` `(n,)`, `digests`
    `n * digest_bytes`."""

    block_ids: Int32Array
    groups: Int32Array
    digests: bytes

    def between(self, first_block: int, end_block: int) -> SealedContents:
        """Return those of the blocks `[first_block, end_block)`."""
        first, end = np.searchsorted(self.block_ids, (first_block, end_block)).tolist()
        size = len(self.digests) // len(self.block_ids) if len(self.block_ids) else 0
        return SealedContents(
            self.block_ids[first:end],
            self.groups[first:end],
            self.digests[first * size : end * size],
        )


def sorted_contents(
    block_ids: Int32Array, groups: Int32Array, digests: bytes, digest_bytes: int
) -> SealedContents:
    """Return contents in ascending order of blocks."""
    order = block_ids.argsort()
    packed = np.frombuffer(digests, np.uint8).reshape(len(block_ids), digest_bytes)
    return SealedContents(block_ids[order], groups[order], packed[order].tobytes())
