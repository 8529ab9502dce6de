"""Blocks that nobody holds and that hold nothing, in the order in which they are handed out.

Stands inside the pool, which takes from it before anything cached is evicted. What is named after
single blocks or `_n` validates before it changes anything; the pool, which has counted, uses
`pop_many` and `prepend_many`, which do not.

A linked list in two arrays, as in `policies/entry_queue.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvcache.arguments import MAX_INT, MAX_INT32, as_int, as_integers
from kvcache.arrays import Ids, IndexArray, Int32Array, index_array
from kvcache.errors import BlockError, InvariantError, OutOfBlocksError
from kvcache.policies.entry_queue import OUT, insert_behind, take_first, take_out


class FreeKVCacheBlockQueue:
    """A queue of block ids; any of them can leave it in O(1).

    Invariant: following `_next` from the end leads through `_length` blocks back to the end, and
    following `_before` leads through them in reverse; of all other blocks `_next` is `OUT`.
    """

    def __init__(self, num_blocks: int, block_ids: Iterable[int] = ()) -> None:
        """Make a queue for ids below `num_blocks` that holds `block_ids`, in that order.

        Raises:
            BlockError: a number that is none, an id that is not below `num_blocks` or given twice.
        """
        num_blocks = as_int("num_blocks", num_blocks, 0, MAX_INT32, BlockError)
        self._end = num_blocks
        self._next: Int32Array = np.full(num_blocks + 1, OUT, dtype=np.int32)
        self._before: Int32Array = np.full(num_blocks + 1, OUT, dtype=np.int32)
        self._next[self._end] = self._before[self._end] = self._end
        self._length = 0
        self._insert(self._end, self._absent(block_ids))

    @property
    def num_free_blocks(self) -> int:
        """How many blocks are here."""
        return self._length

    def popleft(self) -> int:
        """Take the first block; raises OutOfBlocksError if there is none."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[int]:
        """Take the first `n` blocks; raises OutOfBlocksError, unchanged, if there are fewer."""
        n = as_int("n", n, error=BlockError)
        if n > self._length:
            raise OutOfBlocksError(
                f"{n} blocks are wanted, {self._length} are in the free queue: free some first"
            )
        block_ids: list[int] = self.pop_many(n).tolist()
        return block_ids

    def pop_many(self, n: int) -> IndexArray:
        """Take the first `n` blocks. There are so many."""
        self._length -= n
        taken: IndexArray = np.empty(n, dtype=np.intp)
        take_first(self._next, self._before, taken)
        return taken

    def remove(self, block_id: int) -> None:
        """Take one block from wherever it stands; raises BlockError if it is not here."""
        self.remove_n([block_id])

    def remove_n(self, block_ids: Sequence[int]) -> None:
        """Take several; raises BlockError, unchanged, if one is not here."""
        ids = self._known(block_ids)
        missing = ids[self._next[ids] == OUT].tolist()
        if missing:
            raise BlockError(f"blocks {missing[:5]} are not in the queue: add them first")
        take_out(self._next, self._before, ids)
        self._length -= len(ids)

    def append(self, block_id: int) -> None:
        """Put one block at the back; raises BlockError if it is here already."""
        self.append_n([block_id])

    def append_n(self, block_ids: Sequence[int]) -> None:
        """Put blocks at the back, in order; raises BlockError, unchanged, if one is here."""
        self._insert(int(self._before[self._end]), self._absent(block_ids))

    def prepend_n(self, block_ids: Sequence[int]) -> None:
        """Put blocks at the front, the first foremost; otherwise as `append_n`."""
        self._insert(self._end, self._absent(block_ids))

    def prepend_many(self, block_ids: Ids) -> None:
        """Put blocks at the front, the first foremost. They are distinct and none is here."""
        self._insert(self._end, index_array(block_ids))

    def get_all_free_blocks(self) -> list[int]:
        """Return all blocks, the next to be taken first. O(n); for tests and audits."""
        block_ids: list[int] = []
        after = self._next.tolist()
        block_id = after[self._end]
        while block_id != self._end and len(block_ids) <= self._length:
            block_ids.append(block_id)
            block_id = after[block_id]
        return block_ids

    def check(self) -> None:
        """Raise InvariantError unless both ways lead through as many blocks as are counted. O(n)"""
        block_ids = self.get_all_free_blocks()
        num_here = int(np.count_nonzero(self._next != OUT)) - 1
        if not len(block_ids) == num_here == self._length:
            raise InvariantError(
                f"a free queue of length {self._length} has {len(block_ids)} blocks in order, and "
                f"{num_here} know a next one"
            )
        ways = zip([self._end, *block_ids], [*block_ids, self._end], strict=True)
        torn = [(one, other) for one, other in ways if self._before[other] != one]
        if torn:
            raise InvariantError(f"a free queue does not lead back from {torn[0][1]} to {torn[0]}")

    def _insert(self, place: int, block_ids: IndexArray) -> None:
        insert_behind(self._next, self._before, place, block_ids)
        self._length += len(block_ids)

    def _absent(self, block_ids: Iterable[int]) -> IndexArray:
        """Return ids as an array; raises BlockError if one is unknown, given twice or here."""
        ids = self._known(block_ids)
        here = ids[self._next[ids] != OUT].tolist()
        if here:
            raise BlockError(f"blocks {here[:5]} are in the queue already: remove them first")
        return ids

    def _known(self, block_ids: Iterable[int]) -> IndexArray:
        """Return ids as an array; raises BlockError if one is unknown or given twice."""
        ids = index_array(as_integers("block_ids", block_ids, -MAX_INT, error=BlockError))
        unknown = ids[(ids < 0) | (ids >= self._end)].tolist()
        if unknown:
            raise BlockError(f"blocks {unknown[:5]} do not exist: use ids below {self._end}")
        distinct, times = np.unique(ids, return_counts=True)
        if len(distinct) < len(ids):
            twice = distinct[times > 1].tolist()
            raise BlockError(f"blocks {twice[:5]} are given twice: give each one once")
        return ids
