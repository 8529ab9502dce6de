"""A queue of free, empty blocks, in the order in which they are handed out.

It is for callers with a pool of their own; the pools of this package keep their free list in the
columns. Every method validates before it changes anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvcache.base.arguments import MAX_INT, MAX_INT32, as_int, as_integers
from kvcache.base.errors import BlockError, OutOfBlocksError
from kvcache.policies.entry_queue import EntryQueue


class FreeKVCacheBlockQueue:
    """A queue of block ids. Any block can leave it in O(1)."""

    def __init__(self, num_blocks: int, block_ids: Iterable[int] = ()) -> None:
        """Make a queue of `block_ids`, in that order, for ids below `num_blocks`.

        Raises:
            BlockError: `num_blocks` is not a number, or an id is not below it or given twice.
        """
        self._num_blocks = as_int("num_blocks", num_blocks, 0, MAX_INT32, BlockError)
        self._queue = EntryQueue(self._num_blocks)
        self._queue.append_many(self._absent(block_ids))

    @property
    def num_free_blocks(self) -> int:
        return len(self._queue)

    def popleft(self) -> int:
        """Take the first block; raises OutOfBlocksError if there is none."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[int]:
        """Take the first `n` blocks; raises OutOfBlocksError, unchanged, if there are fewer."""
        n = as_int("n", n, error=BlockError)
        if n > len(self._queue):
            raise OutOfBlocksError(
                f"{n} blocks are wanted, {len(self._queue)} are in the free queue: free some first"
            )
        taken: list[int] = self._queue.pop_many(n).tolist()
        return taken

    def remove(self, block_id: int) -> None:
        """Remove one block from anywhere in the queue; raises BlockError if it is not in it."""
        (known,) = self._known([block_id])
        if known not in self._queue:
            raise BlockError(f"blocks [{known}] are not in the queue: add them first")
        self._queue.remove_many([known])

    def append(self, block_id: int) -> None:
        """Add one block at the back; raises BlockError if it is in the queue already."""
        self.append_n([block_id])

    def append_n(self, block_ids: Sequence[int]) -> None:
        """Add blocks at the back, in order; raises BlockError, unchanged, if one is in it."""
        self._queue.append_many(self._absent(block_ids))

    def prepend_n(self, block_ids: Sequence[int]) -> None:
        """Add blocks at the front, the first one foremost; raises as `append_n` does."""
        self._queue.prepend_many(self._absent(block_ids))

    def get_all_free_blocks(self) -> list[int]:
        """Return all blocks, the next one first. O(n), for tests and audits."""
        return self._queue.to_list()

    def check(self) -> None:
        """Raise InvariantError unless both directions lead through as many blocks. O(n)."""
        self._queue.check()

    def _absent(self, block_ids: Iterable[int]) -> list[int]:
        """Return ids; raises BlockError if one is unknown, given twice or in the queue."""
        ids = self._known(block_ids)
        here = [b for b in ids if b in self._queue]
        if here:
            raise BlockError(f"blocks {here[:5]} are in the queue already: remove them first")
        if len(set(ids)) < len(ids):
            twice = [b for b, count in Counter(ids).items() if count > 1]
            raise BlockError(f"blocks {twice[:5]} are given twice: give each one once")
        return ids

    def _known(self, block_ids: Iterable[int]) -> list[int]:
        """Return ids; raises BlockError if one is unknown."""
        ids: list[int] = as_integers("block_ids", block_ids, -MAX_INT, error=BlockError).tolist()
        unknown = [b for b in ids if not 0 <= b < self._num_blocks]
        if unknown:
            raise BlockError(f"blocks {unknown[:5]} do not exist: use ids below {self._num_blocks}")
        return ids
