"""Blocks that nobody holds and that hold nothing, in the order in which they are handed out.

For callers that keep a pool of their own; the pools of this package have their list in the columns.
Validates before it changes anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvcache.base.arguments import MAX_INT, MAX_INT32, as_int, as_integers
from kvcache.base.errors import BlockError, OutOfBlocksError
from kvcache.policies.entry_queue import EntryQueue


class FreeKVCacheBlockQueue:
    """A queue of block ids; any of them can leave it in O(1)."""

    def __init__(self, num_blocks: int, block_ids: Iterable[int] = ()) -> None:
        """Make a queue for ids below `num_blocks` that holds `block_ids`, in that order.

        Raises:
            BlockError: a number that is none, an id that is not below `num_blocks` or given twice.
        """
        self._num_blocks = as_int("num_blocks", num_blocks, 0, MAX_INT32, BlockError)
        self._queue = EntryQueue(self._num_blocks)
        self._queue.append_many(self._absent(block_ids))

    @property
    def num_free_blocks(self) -> int:
        """How many blocks are here."""
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
        """Take one block from wherever it stands; raises BlockError if it is not here."""
        (known,) = self._known([block_id])
        if known not in self._queue:
            raise BlockError(f"blocks [{known}] are not in the queue: add them first")
        self._queue.remove_many([known])

    def append(self, block_id: int) -> None:
        """Put one block at the back; raises BlockError if it is here already."""
        self.append_n([block_id])

    def append_n(self, block_ids: Sequence[int]) -> None:
        """Put blocks at the back, in order; raises BlockError, unchanged, if one is here."""
        self._queue.append_many(self._absent(block_ids))

    def prepend_n(self, block_ids: Sequence[int]) -> None:
        """Put blocks at the front, the first foremost; otherwise as `append_n`."""
        self._queue.prepend_many(self._absent(block_ids))

    def get_all_free_blocks(self) -> list[int]:
        """Return all blocks, the next to be taken first. O(n); for tests and audits."""
        return self._queue.to_list()

    def check(self) -> None:
        """Raise InvariantError unless both ways lead through as many blocks as are counted. O(n)"""
        self._queue.check()

    def _absent(self, block_ids: Iterable[int]) -> list[int]:
        """Return ids; raises BlockError if one is unknown, given twice or here."""
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
