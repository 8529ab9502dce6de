"""The blocks themselves, as arrays: who holds a single one, which life it is in, what is free.

Under the tree and the rows. Blocks of runs are held run by run and have no references here; those
of requests alone (partly filled, not yet cached, copies of contents the tree has already) and those
of groups whose blocks can go one by one are counted here. Refuses to choose what is evicted: the
policy proposes, `Evictor` carries out.

    fresh ──take──▶ held ──give_back──▶ fresh                    a block without a content
                      └── gets a content ──give_back──▶ policy   a block of a group without order
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.arrays import IndexArray, Int32Array, index_array, int32_array
from kvcache.errors import BlockError, ConfigurationError
from kvcache.extents.block_moves import end_lives, fill_units, give_back, num_unheld, touch
from kvcache.extents.run import HandleArray
from kvcache.ids import NULL_BLOCK_ID
from kvcache.policies import EvictionPolicy
from kvcache.tenants import TenantAccount, TenantLedger

Int64Array: TypeAlias = npt.NDArray[np.int64]

NO_CONTENT = 0
SEALED = 1
FIRST_CLIENT = 2
"""Seal states of blocks: nothing to be found, sealed, or waiting for a step of this client."""

NULL_HANDLE = -(1 << 32)
"""The handle of no block: it is never valid."""

_LIFE = 1 << 32
_ID_MASK = _LIFE - 1


class BlockStore:
    """Blocks `1..num_blocks - 1`; block 0 is the null block, which is nobody's.

    A *handle* is `life << 32 | block id`. A block's life ends when its content is forgotten, so
    that every handle to it becomes invalid at once, wherever it is written down.

    Block ids come as int32 or as indices; the latter are what arrays are quickest indexed with.

    Invariants: `fresh[:num_fresh]` are the blocks without references and content; the policy holds
    exactly the unheld blocks with content of unordered groups, and the entries of unheld runs;
    `num_unheld_cached` counts the blocks that those stand for, `num_cached` all blocks with a
    content, and `num_unsealed` those that wait for a client, by its number. `tenants`, if any, are
    told of every block that comes to hold something, or nothing, and of unheld ones.
    """

    def __init__(
        self, num_blocks: int, *, has_single: bool, tenants: TenantLedger | None = None
    ) -> None:
        """Let all blocks but the null block be fresh. A policy must be set before one is used.

        `has_single`: there are groups whose blocks with content can go one by one; `is_single`
        marks these blocks.

        Raises:
            ConfigurationError: no block at all.
        """
        if num_blocks < 1:
            raise ConfigurationError(
                f"a pool of {num_blocks} blocks has no room for the null block: use at least 1"
            )
        self.num_blocks = num_blocks
        num_single = num_blocks if has_single else 0
        self.is_single: npt.NDArray[np.bool_] = np.zeros(num_single, dtype=np.bool_)
        self.references: Int32Array = np.zeros(num_blocks, dtype=np.int32)
        self.seals: npt.NDArray[np.int16] = np.zeros(num_blocks, dtype=np.int16)
        self.num_unheld_cached = 0
        self.num_cached = 0
        self.num_evictions = 0
        self.num_unsealed: dict[int, int] = {}
        self.num_cut_short = 0
        """Grows whenever contents are forgotten that were not sealed yet: while it stays, what
        waits for a step is where it was."""
        self.copy_holds: Counter[int] = Counter()
        self.policy: EvictionPolicy
        self.tenants = tenants
        self.handles: HandleArray = np.arange(num_blocks, dtype=np.int64)
        """Of each block its handle in its present life. For reading."""
        self._fresh: Int32Array = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_fresh = max(0, num_blocks - 1)
        """Blocks that hold nothing and are held by nobody."""

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return self.num_fresh + self.num_unheld_cached

    def fresh_blocks(self) -> Int32Array:
        """Return a copy of the fresh blocks, the next one to go last. For audits."""
        fresh: Int32Array = self._fresh[: self.num_fresh].copy()
        return fresh

    def clear(self) -> None:
        """Forget every content. Nobody holds a block."""
        self.policy.discard(self.policy.order())
        cached = np.flatnonzero(self.seals)
        self.num_unsealed.clear()
        self.num_cut_short += 1
        self.end_lives(index_array(cached))
        self.num_unheld_cached = 0
        self.num_fresh = 0
        self.put_fresh(np.arange(1, self.num_blocks, dtype=np.int32))
        if self.tenants is not None:
            self.tenants.clear()

    # --- handles -------------------------------------------------------------------------------

    def handles_of(self, block_ids: IndexArray | Int32Array) -> HandleArray:
        """Return the handles of these blocks in their present lives; null where there is none."""
        handles: HandleArray = self.handles[block_ids]
        if np.count_nonzero(block_ids) < block_ids.size:
            handles[block_ids == NULL_BLOCK_ID] = NULL_HANDLE
        return handles

    def handles_of_all(self, block_ids: IndexArray) -> HandleArray:
        """Do `handles_of` where no block is the null block."""
        handles: HandleArray = self.handles[block_ids]
        return handles

    def ids_of(self, handles: HandleArray) -> IndexArray:
        """Return the blocks that handles mean, valid or not."""
        return index_array(handles & _ID_MASK)

    def are_valid(self, handles: HandleArray) -> npt.NDArray[np.bool_]:
        """Say which handles mean a block in its present life."""
        valid: npt.NDArray[np.bool_] = self.handles[handles & _ID_MASK] == handles
        return valid

    def are_waiting(self, handles: HandleArray, block_ids: IndexArray) -> npt.NDArray[np.bool_]:
        """Say which handles, of these blocks, mean one whose present content is not sealed yet."""
        waiting: npt.NDArray[np.bool_] = self.seals[block_ids] > SEALED
        waiting &= self.handles[block_ids] == handles
        return waiting

    def end_lives(self, block_ids: IndexArray) -> None:
        """The contents of these blocks are forgotten: no handle to them is valid any more."""
        if not end_lives(
            block_ids, self.handles, self.seals, self.is_single, bool(self.num_unsealed)
        ):
            self._count_unsealed(self.seals[block_ids], -1)
            end_lives(block_ids, self.handles, self.seals, self.is_single, False)
        self.num_cached -= len(block_ids)

    def fill(self, block_ids: IndexArray | Int32Array, seal: int) -> None:
        """These blocks have contents from now on: sealed ones, or such as wait for a client."""
        if not len(block_ids):
            return
        self.seals[block_ids] = seal
        self._count_filled(len(block_ids), seal)

    def fill_units(
        self,
        blocks: IndexArray,
        group_places: IndexArray,
        seal: int,
        group_of: npt.NDArray[np.int16],
    ) -> int:
        """Do `fill` for the blocks of units, a row for each group; null blocks are left out.

        Blocks of ordered groups, whose `group_places` are not negative, are a run's: nobody has
        references to them any more. Of the others it is noted that they are single ones, and in
        `group_of` whose. Returns how many have contents from now on.
        """
        count = fill_units(
            blocks, group_places, seal, self.references, self.seals, group_of, self.is_single
        )
        if count:
            self._count_filled(count, seal)
        return count

    def seal(self, block_ids: IndexArray | Int32Array, client: int) -> None:
        """These blocks, which all wait for the client of this number, wait no more."""
        self.seals[block_ids] = SEALED
        left = self.num_unsealed[client] - len(block_ids)
        if left:
            self.num_unsealed[client] = left
        else:
            del self.num_unsealed[client]

    def _count_filled(self, count: int, seal: int) -> None:
        self.num_cached += count
        if seal != SEALED:
            self.num_unsealed[seal] = self.num_unsealed.get(seal, 0) + count

    def _count_unsealed(self, seals: npt.NDArray[np.int16], change: int) -> None:
        is_waiting = seals > SEALED
        if not np.count_nonzero(is_waiting):
            return
        self.num_cut_short += 1
        waiting = seals[is_waiting]
        for client, count in zip(*np.unique(waiting, return_counts=True), strict=True):
            left = self.num_unsealed[int(client)] + change * int(count)
            if left:
                self.num_unsealed[int(client)] = left
            else:
                del self.num_unsealed[int(client)]

    # --- single blocks -------------------------------------------------------------------------

    def take_fresh(self, count: int) -> Int32Array:
        """Take so many fresh blocks, each with one reference. There are enough."""
        taken = self.take_bare(count)
        self.references[index_array(taken)] = 1
        return taken

    def take_bare(self, count: int) -> Int32Array:
        """Take so many fresh blocks without a reference; they get one, or a content, at once."""
        end = self.num_fresh
        self.num_fresh = end - count
        taken: Int32Array = self._fresh[end - count : end][::-1].copy()
        return taken

    def put_fresh(
        self, block_ids: IndexArray | Int32Array, of: TenantAccount | None = None
    ) -> None:
        """These blocks hold nothing and are held by nobody now; the first is handed out first.

        `of`: whose all of them are, where that is known.
        """
        start = self.num_fresh
        self.num_fresh = start + len(block_ids)
        self._fresh[start : self.num_fresh] = block_ids[::-1]
        if self.tenants is not None:
            self.tenants.freed(block_ids, of)

    def leave_fresh(self, block_ids: IndexArray) -> None:
        """These fresh blocks have got contents without being taken. O(fresh)."""
        fresh = self._fresh[: self.num_fresh]
        left = fresh[~np.isin(fresh, block_ids)]
        self.num_fresh = len(left)
        self._fresh[: len(left)] = left

    def touch(self, block_ids: IndexArray | Int32Array) -> None:
        """Take one reference more of each of these distinct blocks of unordered groups or rows.

        Null blocks are left out.

        Raises:
            BlockError: one of them is fresh; nothing was changed.
        """
        ids = int32_array(block_ids)
        unheld: IndexArray = np.empty(len(ids), dtype=np.intp)
        count = touch(ids, self.references, self.seals, unheld)
        if count < 0:
            is_fresh = (self.references[ids] == 0) & (self.seals[ids] == NO_CONTENT)
            empty = ids[is_fresh & (ids != NULL_BLOCK_ID)]
            raise BlockError(
                f"blocks {empty[:5].tolist()} are free and hold nothing: take new ones instead"
            )
        if count:
            self.policy.remove(unheld[:count])
            self._count_unheld(unheld[:count], -1)

    def give_back(self, block_ids: IndexArray | Int32Array) -> None:
        """Give one reference of each back, of repeated ones several; the first is evicted first.

        Null blocks are left out. Blocks with content wait in the policy, others are fresh.
        """
        start = self.num_fresh
        cached: IndexArray = np.empty(len(block_ids) if len(self.is_single) else 0, dtype=np.intp)
        self.num_fresh, num_cached = give_back(
            int32_array(block_ids),
            self.references,
            self.seals,
            self.is_single,
            self._fresh,
            start,
            cached,
        )
        if self.tenants is not None and self.num_fresh > start:
            self.tenants.freed(self._fresh[start : self.num_fresh][::-1])
        if num_cached:
            self.put_unheld(cached[:num_cached])

    def put_unheld(self, block_ids: Sequence[int] | IndexArray) -> None:
        """Single blocks with content have come out of use; the first of them is evicted first."""
        self.policy.insert(block_ids)
        self._count_unheld(block_ids, 1)

    def _count_unheld(self, block_ids: Sequence[int] | IndexArray, sign: int) -> None:
        self.num_unheld_cached += sign * len(block_ids)
        if self.tenants is not None:
            self.tenants.note_unheld(block_ids, sign)

    def own_references(self, block_ids: Int32Array) -> Int64Array:
        """Return the references of blocks without those of copies that wait to be told of."""
        counts = self.references[block_ids].astype(np.int64)
        if self.copy_holds:
            counts -= [self.copy_holds[block_id] for block_id in block_ids.tolist()]
        return counts

    def num_unheld(self, block_ids: IndexArray | Int32Array) -> int:
        """Return how many of these distinct blocks nobody holds, null blocks left out."""
        return num_unheld(int32_array(block_ids), self.references)

    def drop_victims(self, block_ids: IndexArray) -> None:
        """Forget single blocks that the policy has just given out; they are fresh now."""
        self.end_lives(block_ids)
        self._count_unheld(block_ids, -1)
        self.num_evictions += len(block_ids)
        if self.tenants is not None:
            self.tenants.evicted(block_ids)
        self.put_fresh(block_ids)

    def forget(self, block_ids: IndexArray) -> None:
        """Forget the contents of single blocks (of unordered groups); unheld ones become fresh."""
        self.end_lives(block_ids)
        unheld = block_ids[self.references[block_ids] == 0]
        if len(unheld):
            self.policy.discard(unheld)
            self._count_unheld(unheld, -1)
            self.put_fresh(unheld)
