"""When sequences were last accessed, for the eviction order of their blocks.

An engine records accesses per sequence, which is cheap, and passes them on to the blocks only
before they are freed. Refuses unknown sequences.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kvcache.base.arguments import as_integers, as_number, check_hashable, check_kind
from kvcache.base.errors import BlockError, ConfigurationError, RequestError, shown
from kvcache.sequences.allocator import PrefixCachingBlockAllocator


class LastAccessBlocksTracker:
    """The last access of each running sequence, in whatever unit the caller counts time."""

    def __init__(self, allocator: PrefixCachingBlockAllocator) -> None:
        """Track no sequence yet; accesses are passed to blocks of `allocator`.

        Raises ConfigurationError for another object.
        """
        check_kind("allocator", allocator, PrefixCachingBlockAllocator, ConfigurationError)
        self._allocator = allocator
        self._last_access: dict[Hashable, float | None] = {}

    def add_seq(self, seq_id: Hashable) -> None:
        """Start tracking a sequence; raises RequestError if it is tracked already."""
        check_hashable("seq_id", seq_id, RequestError)
        if seq_id in self._last_access:
            raise RequestError(f"sequence {shown(seq_id)} is tracked already: remove it first")
        self._last_access[seq_id] = None

    def remove_seq(self, seq_id: Hashable) -> None:
        """Stop tracking a sequence; raises RequestError if it is not tracked."""
        self._require_tracked(seq_id)
        del self._last_access[seq_id]

    def update_last_access(self, seq_id: Hashable, time: float) -> None:
        """Record an access.

        Raises RequestError if the sequence is not tracked, or `time` is not a finite number.
        """
        self._require_tracked(seq_id)
        time = as_number("time", time, error=RequestError)
        self._last_access[seq_id] = time

    def update_seq_blocks_last_access(self, seq_id: Hashable, block_ids: Sequence[int]) -> None:
        """Pass the sequence's last access on to its blocks; no effect before its first access.

        Raises:
            RequestError: the sequence is not tracked.
            BlockError: a block is unknown, or free and empty.
        """
        self._require_tracked(seq_id)
        block_ids = as_integers("block_ids", block_ids, error=BlockError).tolist()
        time = self._last_access[seq_id]
        if time is not None:
            self._allocator.mark_blocks_as_accessed(block_ids, time)

    def _require_tracked(self, seq_id: Hashable) -> None:
        check_hashable("seq_id", seq_id, RequestError)
        if seq_id not in self._last_access:
            raise RequestError(f"sequence {shown(seq_id)} is not tracked: add it first")
