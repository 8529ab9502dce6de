"""Who holds which block, and where blocks wait that nobody holds.

The lower half of the pool: counts references by kind, and puts blocks into the free queue or the
eviction policy when the last one goes. Refuses to give back what was not taken, and to hold what
cannot be held; hands nothing out and forgets no content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from kvcache.arguments import MAX_INT, as_integers, check_kind
from kvcache.arrays import Ids, IndexArray, Int32Array, index_array
from kvcache.blocks.block import BlockState
from kvcache.blocks.contents import NO_TABLE, ContentIndex
from kvcache.blocks.free_queue import FreeKVCacheBlockQueue
from kvcache.blocks.reference_counts import (
    are_holdable,
    count_unheld,
    give_references,
    take_references,
)
from kvcache.core import ReferenceKind
from kvcache.errors import BlockError
from kvcache.hashing import BlockHash
from kvcache.policies import EvictionPolicy
from kvcache.tenants import TenantLedger

NULL_ID = 0
KINDS_APART = (ReferenceKind.PIN, ReferenceKind.FORK, ReferenceKind.TRANSFER)


class ReferencedBlocks:
    """Reference counts of blocks.

    Invariants: a block is in the free queue exactly when it has no reference, no content and no
    quarantine; in the policy exactly when it has no reference, a content and no quarantine.
    `_num_references` counts all kinds together, `_references[kind]` the rare kinds apart.
    """

    def __init__(
        self,
        num_blocks: int,
        contents: ContentIndex,
        policy: EvictionPolicy,
        tenants: TenantLedger | None = None,
    ) -> None:
        """Let all blocks but the null block be free and empty; `tenants` hear of those that are."""
        self.tenants = tenants
        self.num_blocks = num_blocks
        self.contents = contents
        self._policy = policy
        self._num_references: Int32Array = np.zeros(num_blocks, dtype=np.int32)
        self._references: dict[ReferenceKind, dict[int, int]] = {k: {} for k in KINDS_APART}
        self._quarantined: set[int] = set()
        self._blank = FreeKVCacheBlockQueue(num_blocks, range(1, num_blocks))

    @property
    def num_total_blocks(self) -> int:
        """Blocks that can be handed out at all: the null block is not one."""
        return self.num_blocks - 1

    def num_blocks_in_use(self) -> int:
        """Return how many blocks have a reference of any kind."""
        return int(np.count_nonzero(self._num_references))

    def state(self, block_id: int) -> BlockState:
        """Return what may be done with a block; raises BlockError if there is no such block."""
        block_id = self._one_known(block_id)
        if block_id in self._quarantined:
            return BlockState.QUARANTINED
        if block_id in self._references[ReferenceKind.TRANSFER]:
            return BlockState.IN_FLIGHT
        if self.contents.digests[block_id] is not None:
            is_sealed = block_id not in self.contents.unsealed
            return BlockState.SEALED if is_sealed else BlockState.HITTABLE
        return BlockState.OWNED if self._num_references[block_id] else BlockState.FREE

    def digest(self, block_id: int) -> BlockHash | None:
        """Return the digest by which a block can be found, None if it cannot.

        Raises BlockError if there is no such block.
        """
        digest: BlockHash | None = self.contents.digests[self._one_known(block_id)]
        return digest

    def num_references(self, block_id: int, kind: ReferenceKind | None = None) -> int:
        """Return a block's references of one kind, or of all; raises BlockError for no block."""
        block_id = self._one_known(block_id)
        if kind is not None:
            check_kind("kind", kind, ReferenceKind, BlockError)
        total = int(self._num_references[block_id])
        if kind is None:
            return total
        if kind is not ReferenceKind.REQUEST:
            return self._references[kind].get(block_id, 0)
        return total - sum(held.get(block_id, 0) for held in self._references.values())

    def total_references(self) -> int:
        """Return the references of all kinds to all blocks. O(n)."""
        return int(self._num_references.sum())

    def num_unheld(self, block_ids: Ids) -> int:
        """Return how many of these distinct blocks have no reference, null blocks left out."""
        return int(count_unheld(self._num_references, self.known(block_ids)))

    def blocks_held(self, kind: ReferenceKind) -> dict[int, int]:
        """Return a copy of the counts of a kind other than REQUEST: block id to references.

        Raises BlockError for REQUEST, whose references are not counted apart.
        """
        check_kind("kind", kind, ReferenceKind, BlockError)
        if kind is ReferenceKind.REQUEST:
            raise BlockError("request references are not counted apart: ask num_references")
        return dict(self._references[kind])

    def quarantined_blocks(self) -> set[int]:
        """Return a copy of the quarantined ids."""
        return set(self._quarantined)

    def find_quarantined(self, block_ids: IndexArray) -> list[int]:
        """Return the places in `block_ids` where quarantined blocks stand."""
        if not self._quarantined:
            return []
        ids = block_ids.tolist()
        return [i for i, block_id in enumerate(ids) if block_id in self._quarantined]

    def can_be_cached(self, block_id: int) -> bool:
        """Say whether a block that somebody holds can take a content: it has none, and may."""
        is_empty = block_id != NULL_ID and self.contents.table_numbers[block_id] == NO_TABLE
        return bool(is_empty) and block_id not in self._quarantined

    def can_all_be_cached(self, block_ids: IndexArray) -> bool:
        """Say `can_be_cached` of many blocks."""
        is_taken = np.count_nonzero(self.contents.table_numbers[block_ids])
        has_null = np.count_nonzero(block_ids) < len(block_ids)
        return not (is_taken or has_null or self.find_quarantined(block_ids))

    def touch(
        self, block_ids: Sequence[int] | IndexArray, kind: ReferenceKind = ReferenceKind.REQUEST
    ) -> None:
        """Take one reference more of each block, as often as it is named; save it from eviction.

        Raises:
            BlockError: unknown, the null block, quarantined, or free and empty; nothing changed.
        """
        ids = _as_ids(block_ids)
        check_kind("kind", kind, ReferenceKind, BlockError)
        counts = self._num_references
        if self._quarantined or not are_holdable(counts, self.contents.table_numbers, ids):
            self._require_holdable(ids)
        unheld = take_references(counts, ids)
        if len(unheld):
            self._policy.remove(unheld)
        if kind is not ReferenceKind.REQUEST:
            held = self._references[kind]
            for block_id in ids.tolist():
                held[block_id] = held.get(block_id, 0) + 1

    def free_blocks(
        self, block_ids: Sequence[int], kind: ReferenceKind = ReferenceKind.REQUEST
    ) -> None:
        """Give one reference of each block back. Of those now unheld the first is evicted first.

        Cached ones go to the back of the eviction order, others to the front of the free queue.

        Raises:
            BlockError: unknown, or without a reference of this kind; nothing was changed.
        """
        check_kind("kind", kind, ReferenceKind, BlockError)
        block_ids = self.known(block_ids).tolist()
        if not block_ids:
            return
        self._require_references(block_ids, kind)
        if kind is not ReferenceKind.REQUEST:
            held = self._references[kind]
            for block_id in block_ids:
                held[block_id] -= 1
                if not held[block_id]:
                    del held[block_id]
        self.give_back(block_ids)

    def give_back(self, block_ids: Sequence[int] | IndexArray) -> None:
        """Do what `free_blocks` does for request references, on the caller's word that he has them.

        For managers, whose tables are their word; `check` compares the two. A block that is named
        several times goes at the last time.
        """
        empty, cached = give_references(
            self._num_references, self.contents.table_numbers, index_array(block_ids)
        )
        if len(empty):
            self._put_free(empty)
        if len(cached):
            self._policy.insert(cached)

    def begin_transfer(self, block_ids: Sequence[int]) -> None:
        """A copy starts to read or write these blocks: they stay until it has ended."""
        self.touch(block_ids, ReferenceKind.TRANSFER)

    def end_transfer(self, block_ids: Sequence[int]) -> None:
        """A copy has ended on every rank; raises BlockError, unchanged, if none was under way."""
        self.free_blocks(block_ids, ReferenceKind.TRANSFER)

    def _put_free(self, block_ids: IndexArray) -> None:
        """Queue empty blocks that have just lost their last reference."""
        if self.tenants is not None:
            self.tenants.freed(block_ids)
        if self._quarantined:
            block_ids = index_array([b for b in block_ids.tolist() if b not in self._quarantined])
        # Distinct, and nowhere queued: their references have just become zero.
        self._blank.prepend_many(block_ids)

    def _one_known(self, block_id: int) -> int:
        """Return an id; raises BlockError if it is none of a block."""
        if type(block_id) is int and 0 <= block_id < self.num_blocks:
            return block_id
        return int(self.known([block_id])[0])

    def known(self, block_ids: Ids) -> IndexArray:
        """Return ids as an array; raises BlockError if one is none of a block."""
        ids = _as_ids(block_ids)
        # Read as unsigned an id below 0 is beyond all others.
        if len(ids) and int(np.maximum.reduce(ids.view(np.uintp))) >= self.num_blocks:
            self._require_known(ids.tolist())
        return ids

    def _require_holdable(self, block_ids: IndexArray) -> None:
        """Raise BlockError unless all blocks exist, and are held or have a content that is good."""
        ids: list[int] = block_ids.tolist()
        self._require_known(ids)
        if not self._quarantined.isdisjoint(ids):
            bad = sorted(self._quarantined.intersection(ids))
            raise BlockError(f"blocks {bad[:5]} are quarantined: release them first")
        numbers, counts = self.contents.table_numbers, self._num_references
        if NULL_ID in ids:
            raise BlockError("the null block cannot be held: leave it out")
        empty = block_ids[(counts[block_ids] == 0) & (numbers[block_ids] == NO_TABLE)]
        if len(empty):
            raise BlockError(
                f"blocks {empty[:5].tolist()} are free and hold nothing: take new ones instead"
            )

    def _require_known(self, block_ids: Sequence[int]) -> None:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self.num_blocks:
            bad = [b for b in block_ids if not 0 <= b < self.num_blocks]
            raise BlockError(f"blocks {bad[:5]} do not exist: ids are below {self.num_blocks}")

    def _require_references(self, block_ids: Sequence[int], kind: ReferenceKind) -> None:
        """Raise BlockError unless each block has as many references of `kind` as it is given."""
        is_distinct = len(set(block_ids)) == len(block_ids)
        is_plain = kind is ReferenceKind.REQUEST and not any(self._references.values())
        if is_distinct and is_plain and self._num_references[index_array(block_ids)].all():
            return
        wanted: dict[int, int] = {}
        for block_id in block_ids:
            wanted[block_id] = wanted.get(block_id, 0) + 1
        for block_id, count in wanted.items():
            held = self.num_references(block_id, kind)
            if held < count:
                raise BlockError(
                    f"block {block_id} is given back {count} times but has {held} "
                    f"{kind.value} references: free what you hold, once"
                )


_INDEX = np.dtype(np.intp)


def _as_ids(block_ids: Ids) -> IndexArray:
    """Return ids as an array; raises BlockError for what is no list of integers."""
    if type(block_ids) is np.ndarray and block_ids.dtype is _INDEX and block_ids.ndim == 1:
        return cast("IndexArray", block_ids)
    return index_array(as_integers("block_ids", block_ids, -MAX_INT, error=BlockError))
