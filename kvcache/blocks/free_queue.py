"""Blocks that nobody holds and that hold nothing, in the order in which they are handed out.

Stands inside the pool, which takes from it before anything cached is evicted. What is named after
single blocks or `_n` validates before it changes anything; the pool, which has counted, uses the
unchecked bulk operations of `EntryQueue`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcache.errors import OutOfBlocksError
from kvcache.policies.entry_queue import EntryQueue


class FreeKVCacheBlockQueue(EntryQueue):
    """A queue of block ids; any of them can leave it in O(1)."""

    def __init__(self, num_blocks: int, block_ids: Iterable[int] = ()) -> None:
        """Make a queue for ids below `num_blocks` that holds `block_ids`, in that order.

        Raises:
            BlockError: an id is not below `num_blocks`, or given twice.
        """
        super().__init__(num_blocks)
        self.append_n(list(block_ids))

    @property
    def num_free_blocks(self) -> int:
        """How many blocks are here."""
        return len(self)

    def popleft(self) -> int:
        """Take the first block; raises OutOfBlocksError if there is none."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[int]:
        """Take the first `n` blocks; raises OutOfBlocksError, unchanged, if there are fewer."""
        if n > len(self):
            raise OutOfBlocksError(
                f"{n} blocks are wanted, {len(self)} are in the free queue: free some first"
            )
        block_ids: list[int] = self.pop_many(n).tolist()
        return block_ids

    def remove(self, block_id: int) -> None:
        """Take one block from wherever it stands; raises BlockError if it is not here."""
        self.remove_n([block_id])

    def remove_n(self, block_ids: Sequence[int]) -> None:
        """Take several; raises BlockError, unchanged, if one is not here."""
        self.require_present(block_ids)
        self.remove_many(block_ids)

    def append(self, block_id: int) -> None:
        """Put one block at the back; raises BlockError if it is here already."""
        self.append_n([block_id])

    def append_n(self, block_ids: Sequence[int]) -> None:
        """Put blocks at the back, in order; raises BlockError, unchanged, if one is here."""
        self.require_absent(block_ids)
        self.append_many(block_ids)

    def prepend_n(self, block_ids: Sequence[int]) -> None:
        """Put blocks at the front, the first foremost; otherwise as `append_n`."""
        self.require_absent(block_ids)
        self.prepend_many(block_ids)

    def get_all_free_blocks(self) -> list[int]:
        """Return all blocks, the next to be taken first. O(n); for tests and audits."""
        return self.to_list()
