"""The blocks of one request, as per-request calls return and accept them.

They are the blocks that `get_computed_blocks` found or `allocate_slots` added, per KV cache group.
A snapshot: it holds ids but no references, and the manager checks it when a caller passes it in.
Ids are kept as arrays; lists are made on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvcache.base.arguments import MAX_INT32, as_integers, as_tuple, check_kind
from kvcache.base.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.base.errors import InvalidInputError
from kvcache.core import CacheHit
from kvcache.specs import NULL_BLOCK_ID

_Ids: TypeAlias = "Sequence[int] | Int32Array"


@dataclass(frozen=True)
class TableBlock:
    """One position of a block table: which block, and whether its content has a hash."""

    block_id: int
    has_hash: bool

    @property
    def is_null(self) -> bool:
        """Whether the position is skipped: it holds the null block."""
        return self.block_id == NULL_BLOCK_ID


class KVCacheBlocks:
    """Blocks per group, in order of position; null blocks at skipped positions. Immutable."""

    __slots__ = ("_block_ids", "_unhashed_ids", "found")

    found: CacheHit | None
    """The hit of the look-up that returned these blocks; None if they come from elsewhere."""

    def __init__(
        self, block_ids: Sequence[_Ids], unhashed_ids: Sequence[_Ids] | None = None
    ) -> None:
        """Hold `block_ids[g]` for group `g`. Arrays are not copied: do not write to them.

        `unhashed_ids[g]` are those whose content had no hash when this was made, mostly partial
        blocks.

        Raises:
            InvalidInputError: an argument is not a list of block ids per group.
        """
        self._block_ids = _id_arrays("block_ids", block_ids)
        self._unhashed_ids = (
            (EMPTY_INT32,) * len(self._block_ids)
            if unhashed_ids is None
            else _id_arrays("unhashed_ids", unhashed_ids)
        )
        self.found = None

    @property
    def id_arrays(self) -> tuple[Int32Array, ...]:
        """The ids of each group, not copied: do not write to them."""
        return self._block_ids

    @property
    def blocks(self) -> tuple[tuple[TableBlock, ...], ...]:
        """The blocks of each group: `blocks[group][i]`. Each access builds them."""
        unhashed = [set(ids.tolist()) for ids in self._unhashed_ids]
        return tuple(
            tuple(TableBlock(block, block not in without) for block in ids.tolist())
            for ids, without in zip(self._block_ids, unhashed, strict=True)
        )

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return the ids of each group as new lists."""
        return tuple(ids.tolist() for ids in self._block_ids)

    def get_unhashed_block_ids(self) -> tuple[list[int], ...]:
        """Return, per group, the ids of the blocks whose content had no hash."""
        return tuple(ids.tolist() for ids in self._unhashed_ids)

    def new_empty(self) -> KVCacheBlocks:
        """Return an object without blocks, with as many groups."""
        return KVCacheBlocks([EMPTY_INT32] * len(self._block_ids))

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """Return the blocks of `self` followed by those of `other`, group by group."""
        check_kind("what is added to blocks", other, KVCacheBlocks)
        if len(other._block_ids) != len(self._block_ids):
            raise InvalidInputError(
                f"blocks of {len(self._block_ids)} groups and of {len(other._block_ids)} cannot be "
                "added: pass blocks of one manager"
            )
        ids = zip(self._block_ids, other._block_ids, strict=True)
        unhashed = zip(self._unhashed_ids, other._unhashed_ids, strict=True)
        return KVCacheBlocks(list(map(np.concatenate, ids)), list(map(np.concatenate, unhashed)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVCacheBlocks):
            return NotImplemented
        return self.get_block_ids() == other.get_block_ids()

    def __hash__(self) -> int:
        return hash(tuple(ids.tobytes() for ids in self._block_ids))

    def __bool__(self) -> bool:
        return any(map(len, self._block_ids))

    def __repr__(self) -> str:
        return f"KVCacheBlocks({self.get_block_ids()})"


def blocks_of(
    block_ids: tuple[Int32Array, ...],
    unhashed_ids: tuple[Int32Array, ...],
    found: CacheHit | None = None,
) -> KVCacheBlocks:
    """Return blocks from arrays of ids, unchecked."""
    blocks = _new_object(KVCacheBlocks)
    blocks._block_ids, blocks._unhashed_ids, blocks.found = block_ids, unhashed_ids, found
    return blocks


_INT32 = np.dtype(np.int32)
_new_object = object.__new__


def _id_arrays(what: str, tables: Sequence[_Ids]) -> tuple[Int32Array, ...]:
    """Return the tables of all groups as int32 arrays; int32 arrays are not copied."""
    if type(tables) is not tuple and type(tables) is not list:
        tables = as_tuple(what, tables)
    return tuple(
        [
            table
            if type(table) is np.ndarray
            and table.dtype is _INT32
            and table.ndim == 1
            and table.flags.c_contiguous
            else int32_array(as_integers(f"{what}[{group}]", table, 0, MAX_INT32))
            for group, table in enumerate(tables)
        ]
    )
