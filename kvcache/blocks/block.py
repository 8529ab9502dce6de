"""One block as others see it: its state, and a view of its fields.

A pool keeps its blocks as parallel lists, not as objects. `KVCacheBlock` looks into them and is
made on demand, for tests, tools and callers that think in blocks. Refuses to be written to, but
for `reset_hash`.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from kvcache.hashing import BlockHash

if TYPE_CHECKING:
    from kvcache.blocks.pool import BlockPool


class BlockState(Enum):
    """What may be done with a block. The first that applies, from the bottom up.

    Whether a hittable or sealed block is in use is another question: `ref_cnt` answers it.
    """

    FREE = "free"
    """Nobody holds it, and it holds nothing."""
    OWNED = "owned"
    """Held, and not (or no longer) to be found by its content."""
    HITTABLE = "hittable"
    """Full; its last token is scheduled, its bytes are not confirmed."""
    SEALED = "sealed"
    """Its bytes are there on every rank."""
    IN_FLIGHT = "in flight"
    """A copy reads or writes it: not handed out before the copy ends."""
    QUARANTINED = "quarantined"
    """Somebody may still write to it: never handed out before it is released."""


class KVCacheBlock:
    """A view of one block of a pool: always shows the present, costs nothing to keep."""

    __slots__ = ("_pool", "block_id")

    def __init__(self, pool: BlockPool, block_id: int) -> None:
        """Look at block `block_id` of `pool`; `BlockPool.block` checks the id."""
        self._pool = pool
        self.block_id = block_id

    @property
    def ref_cnt(self) -> int:
        """References of all kinds; always 0 for the null block."""
        return self._pool.num_references(self.block_id)

    @property
    def block_hash(self) -> BlockHash | None:
        """Digest by which the block can be found, None if it cannot."""
        return self._pool.digest(self.block_id)

    @property
    def is_null(self) -> bool:
        """Whether this is the placeholder for skipped positions."""
        return self.block_id == 0

    @property
    def state(self) -> BlockState:
        """What may be done with the block."""
        return self._pool.state(self.block_id)

    def reset_hash(self) -> None:
        """Forget the block's content, and that of its cached descendants; it stays held."""
        self._pool.evict_blocks([self.block_id])

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, KVCacheBlock)
            and other._pool is self._pool
            and other.block_id == self.block_id
        )

    def __hash__(self) -> int:
        return hash((id(self._pool), self.block_id))

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, {self.state.value}, ref_cnt={self.ref_cnt})"
