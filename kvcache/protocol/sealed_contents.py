"""Which blocks are sealed, and with what: what every rank's labels must say, in few arrays.

From a core, which decides, to the audit that compares it with the ranks, which hold the bytes. Data
only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcache.base.arrays import Int32Array


@dataclass(frozen=True, eq=False)
class SealedContents:
    """All sealed blocks in rising order. Shapes: `block_ids`, `groups` `(n,)`, `digests`
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
    """Return contents in rising order of blocks."""
    order = block_ids.argsort()
    packed = np.frombuffer(digests, np.uint8).reshape(len(block_ids), digest_bytes)
    return SealedContents(block_ids[order], groups[order], packed[order].tobytes())
