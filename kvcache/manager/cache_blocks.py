"""The blocks of one request, as per-request calls hand them out and take them back.

What `get_computed_blocks` found and `allocate_slots` added, per KV cache group. A snapshot: it
holds ids, no references, and refuses nothing; the manager checks it when it comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.ids import NULL_BLOCK_ID


@dataclass(frozen=True)
class TableBlock:
    """One position of a block table: which block, and whether its content has a hash."""

    block_id: int
    has_hash: bool

    @property
    def is_null(self) -> bool:
        """Whether the position is skipped: the null block stands there."""
        return self.block_id == NULL_BLOCK_ID


class KVCacheBlocks:
    """Blocks per group, in order of position; null blocks at skipped positions. Immutable."""

    __slots__ = ("_block_ids", "_unhashed_ids", "look_up_number")

    def __init__(
        self,
        block_ids: Sequence[Sequence[int]],
        unhashed_ids: Sequence[Sequence[int]] | None = None,
        look_up_number: int | None = None,
    ) -> None:
        """Hold `block_ids[g]` for group `g`.

        `unhashed_ids[g]` are those of them whose content had no hash when this was made: partial
        blocks, mostly. `look_up_number` says which state of the cache a hit was found in, None
        for blocks that no look-up found.
        """
        self._block_ids = tuple(tuple(ids) for ids in block_ids)
        self._unhashed_ids = (
            tuple(tuple(ids) for ids in unhashed_ids)
            if unhashed_ids is not None
            else tuple(() for _ in self._block_ids)
        )
        self.look_up_number = look_up_number

    @property
    def blocks(self) -> tuple[tuple[TableBlock, ...], ...]:
        """The blocks of each group: `blocks[group][i]`. Made anew on each call."""
        unhashed = [set(ids) for ids in self._unhashed_ids]
        return tuple(
            tuple(TableBlock(block, block not in without) for block in ids)
            for ids, without in zip(self._block_ids, unhashed, strict=True)
        )

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return the ids of each group as new lists."""
        return tuple(list(ids) for ids in self._block_ids)

    def get_unhashed_block_ids(self) -> tuple[list[int], ...]:
        """Return, per group, the ids of the blocks whose content had no hash."""
        return tuple(list(ids) for ids in self._unhashed_ids)

    def new_empty(self) -> KVCacheBlocks:
        """Return no blocks, for as many groups."""
        return KVCacheBlocks([() for _ in self._block_ids])

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """Return the blocks of `self` followed by those of `other`, group by group."""
        ids = zip(self._block_ids, other._block_ids, strict=True)
        unhashed = zip(self._unhashed_ids, other._unhashed_ids, strict=True)
        return KVCacheBlocks([a + b for a, b in ids], [a + b for a, b in unhashed])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVCacheBlocks):
            return NotImplemented
        return self._block_ids == other._block_ids

    def __hash__(self) -> int:
        return hash(self._block_ids)

    def __bool__(self) -> bool:
        return any(self._block_ids)

    def __repr__(self) -> str:
        return f"KVCacheBlocks({self._block_ids})"
