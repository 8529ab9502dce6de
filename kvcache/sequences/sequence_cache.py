"""Contents, readiness and accesses of sequences' blocks, with statistics.

The read-only base of the allocator: nothing here changes who holds a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.base.arguments import (
    as_byte_strings,
    as_int,
    as_integers,
    as_number,
    as_tuple,
    check_kind,
)
from kvcache.base.errors import BlockError, shown
from kvcache.base.logs import get_logger
from kvcache.core.notifier import PendingCopies
from kvcache.requests.hashing import BlockHash, RequestBlockHasher
from kvcache.sequences.block import PrefixCachingBlock
from kvcache.sequences.held_blocks import HeldBlocks


@dataclass(frozen=True)
class AllocatorStatistics:
    """Statistics at one moment. Queried and hit blocks are counted since the last reset, evicted
    and merged ones since the start.

    `num_merged_blocks` were replaced by a block of equal content, which saved `merged_bytes`.
    `num_duplicate_blocks` are held now although another block has their content: merging is off.
    """

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_evictions: int
    num_queried_blocks: int
    num_hit_blocks: int
    num_pending_copies: int
    num_merged_blocks: int
    merged_bytes: int
    num_duplicate_blocks: int
    duplicate_bytes: int


logger = get_logger(__name__)


class SequenceCache:
    """Contents of held and cached blocks, by digest and by id."""

    def __init__(self, held: HeldBlocks, block_bytes: int) -> None:
        """Use `held`, whose blocks take `block_bytes` each."""
        self._held = held
        self._block_bytes = block_bytes
        self._copies = PendingCopies()
        self._num_queries = 0
        self._num_hits = 0
        self._num_merged = 0

    # --- blocks --------------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._held.hasher.block_size

    @property
    def hasher(self) -> RequestBlockHasher:
        """The hasher of this allocator's blocks."""
        return self._held.hasher

    def get_num_total_blocks(self) -> int:
        return len(self._held.block_ids)

    def get_num_free_blocks(self) -> int:
        """Return how many blocks could be taken now, including cached ones without a reference."""
        return self._held.pool.get_num_free_blocks()

    def get_physical_block_id(self, absolute_id: int) -> int:
        """Return the place of a block id among all ids in ascending order, from 0.

        Raises BlockError for an id of another allocator.
        """
        return self._held.physical_id(as_int("absolute_id", absolute_id, error=BlockError))

    def get_num_references(self, block_id: int) -> int:
        """Return how many blocks of sequences have a physical block."""
        return self._held.num_references(as_int("block_id", block_id, error=BlockError))

    def get_prefix_cache_hit_rate(self) -> float:
        """Return the share of requested immutable blocks that were cached; 0.0 before the first."""
        return self._num_hits / self._num_queries if self._num_queries else 0.0

    # --- contents ------------------------------------------------------------------------------

    def is_block_cached(self, block: PrefixCachingBlock) -> bool:
        """Return whether the content of a block is cached; False without a digest."""
        check_kind("block", block, PrefixCachingBlock, BlockError)
        digest = block.content_hash
        return digest is not None and self._held.find(digest) is not None

    def find_cached_blocks_prefix(self, block_hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Return the leading digests whose blocks are cached and computed."""
        as_byte_strings("block_hashes", block_hashes, BlockError)
        found: list[BlockHash] = []
        for digest in block_hashes:
            block_id = self._held.find(digest)
            if block_id is None or not self._held.is_computed(block_id):
                break
            found.append(digest)
        return found

    def get_common_computed_block_ids(
        self, computed_seq_block_ids: Sequence[Sequence[int]]
    ) -> list[int]:
        """Return the computed leading block ids that all sequences have in common.

        Empty if a sequence has no blocks. Raises BlockError for an unknown block.
        """
        what = "computed_seq_block_ids"
        sequences = [
            _as_block_ids(f"{what}[{place}]", block_ids)
            for place, block_ids in enumerate(as_tuple(what, computed_seq_block_ids, BlockError))
        ]
        common: list[int] = []
        for ids in zip(*sequences, strict=False):
            if len(set(ids)) > 1 or not self._held.is_computed(ids[0]):
                break
            common.append(ids[0])
        return common

    def mark_blocks_as_accessed(self, block_ids: Sequence[int], now: float) -> None:
        """Record that blocks were accessed at `now`: the oldest access is evicted first.

        Raises:
            BlockError: a block is unknown, or free and empty; or `now` is not a finite number.
        """
        time = as_number("access time", now, error=BlockError)
        self._held.mark_accessed(_as_block_ids("block_ids", block_ids), time)

    def mark_blocks_as_computed(self, block_ids: Sequence[int] = ()) -> None:
        """Mark these blocks as computed; without ids, every full block that is held.

        Raises:
            BlockError: a block is unknown, or free and empty.
        """
        self._held.mark_computed(_as_block_ids("block_ids", block_ids))

    def block_is_computed(self, block_id: int) -> bool:
        """Return whether a block's bytes are computed; raises BlockError if it is unknown."""
        return self._held.is_computed(as_int("block_id", block_id, error=BlockError))

    def reset_prefix_cache(self) -> bool:
        """Forget every content; returns False, unchanged, while a block is in use."""
        num_held = self._held.reset()
        if num_held:
            logger.warning(
                "the prefix cache is not reset: %d of %d blocks are in use: free them first",
                num_held,
                self.get_num_total_blocks(),
            )
            return False
        self._num_queries = self._num_hits = 0
        return True

    def statistics(self) -> AllocatorStatistics:
        pool = self._held.pool
        return AllocatorStatistics(
            num_blocks=self.get_num_total_blocks(),
            num_free_blocks=pool.get_num_free_blocks(),
            num_cached_blocks=pool.num_cached_blocks,
            num_evictions=pool.num_evictions,
            num_queried_blocks=self._num_queries,
            num_hit_blocks=self._num_hits,
            num_pending_copies=len(self._copies),
            num_merged_blocks=self._num_merged,
            merged_bytes=self._num_merged * self._block_bytes,
            num_duplicate_blocks=self._held.num_duplicate_blocks,
            duplicate_bytes=self._held.num_duplicate_blocks * self._block_bytes,
        )

    def get_num_full_blocks_touched(self, blocks: Sequence[PrefixCachingBlock]) -> int:
        """Return how many free blocks the full ones of `blocks` need when they are swapped in.

        Contents that a sequence holds need none; blocks that are not full are ignored.
        """
        blocks = as_tuple("blocks", blocks, BlockError, PrefixCachingBlock)
        full = [block for block in blocks if block.is_full]
        hits, num_missing = self._find_contents(full)
        return num_missing + self._held.num_unheld(dict.fromkeys(hits.values()))

    def _find_contents(
        self, blocks: Sequence[PrefixCachingBlock]
    ) -> tuple[dict[BlockHash, int], int]:
        """Return the blocks that hold digests of `blocks`, and how many blocks the others need."""
        digests = [block.content_hash for block in blocks]
        hits: dict[BlockHash, int] = {}
        missing: set[BlockHash] = set()
        for digest in digests:
            if digest is not None and digest not in hits:
                block_id = self._held.find(digest)
                if block_id is None:
                    missing.add(digest)
                else:
                    hits[digest] = block_id
        return hits, len(missing) + digests.count(None)

    def _require_compatible(self, block: PrefixCachingBlock) -> None:
        if not isinstance(block, PrefixCachingBlock):
            raise BlockError(f"{shown(block)} is not a block of a sequence: pass an allocated one")
        if block.hasher != self.hasher:
            raise BlockError(
                f"{block!r} has digests of {block.hasher.hash_fn.name} over {block.block_size} "
                f"tokens, this allocator has {self.hasher.hash_fn.name} over "
                f"{self.block_size}: use one hash, seed and block size"
            )


def _as_block_ids(what: str, block_ids: Sequence[int]) -> list[int]:
    ids: list[int] = as_integers(what, block_ids, error=BlockError).tolist()
    return ids
