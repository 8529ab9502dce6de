"""Blocks for engines that manage sequences themselves: shared, forked, copied, swapped.

An alternative to `KVCacheManager` on the same kind of pool, for beam search, parallel sampling and
swapping. The engine keeps a list of `PrefixCachingBlock` per sequence, and asks this allocator for
physical blocks. The allocator moves no bytes. In every step the engine does the following in this
order, then its forward:

    swap out (reads) ─▶ copies of `clear_copy_on_writes` ─▶ swap in (writes) ─▶ forward
    afterwards `mark_blocks_as_computed`; a sequence is forked when its tokens are computed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvcache.base.arguments import as_bool, as_int, as_tuple
from kvcache.base.errors import BlockError, ConfigurationError, OutOfBlocksError, shown
from kvcache.requests.hashing import DEFAULT_HASH_SEED, get_hash_fn, get_request_block_hasher
from kvcache.requests.tokens import TokenIds
from kvcache.sequences.block import DEFAULT_HASH, ExtraHash, PrefixCachingBlock, chain_to
from kvcache.sequences.held_blocks import HeldBlocks, checked_block_ids
from kvcache.sequences.sequence_cache import SequenceCache


class PrefixCachingBlockAllocator(SequenceCache):
    """Physical blocks for sequences, shared where their content is equal.

    Mutable blocks are filled token by token; full ones are immutable and found by their content.
    Empty blocks are used before anything is evicted. A raise changes nothing.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        block_ids: Iterable[int] | None = None,
        eviction_policy: str = "lru",
        *,
        caching_hash_algo: str = DEFAULT_HASH,
        hash_seed: str = DEFAULT_HASH_SEED,
        merge_duplicates: bool = True,
        block_bytes: int = 0,
    ) -> None:
        """Create a pool of `num_blocks` blocks of `block_size` tokens, named `block_ids` or from 0.

        With `merge_duplicates`, a block that fills up with cached content is replaced by the
        cached one. Without, both stay while the second is held, and look-ups find the first.
        `block_bytes` is the size of a block on all layers, for the statistics.

        Raises:
            ConfigurationError: sizes below 1, ids that are not as many and distinct, or an unknown
                policy or hash algorithm.
        """
        block_bytes = as_int("block_bytes", block_bytes, error=ConfigurationError)
        merge_duplicates = as_bool("merge_duplicates", merge_duplicates, ConfigurationError)
        ids = checked_block_ids(num_blocks, block_ids)
        hasher = get_request_block_hasher(block_size, get_hash_fn(caching_hash_algo), hash_seed)
        super().__init__(HeldBlocks(ids, hasher, eviction_policy), block_bytes)
        self._merge_duplicates = merge_duplicates
        # All block objects with a physical block; check() compares them with the references.
        self._backed: set[PrefixCachingBlock] = set()

    # --- allocating ----------------------------------------------------------------------------

    def allocate_mutable_block(
        self, prev_block: PrefixCachingBlock | None, extra_hash: ExtraHash = None
    ) -> PrefixCachingBlock:
        """Return an empty block after `prev_block` (None: the first of a sequence).

        Raises:
            OutOfBlocksError: no block is free.
            BlockError: `prev_block` has another block size or hash.
        """
        block = self._new_block(prev_block, (), extra_hash)
        self._attach(block, self._held.take(1)[0])
        return block

    def allocate_immutable_block(
        self,
        prev_block: PrefixCachingBlock | None,
        token_ids: TokenIds,
        extra_hash: ExtraHash = None,
    ) -> PrefixCachingBlock:
        """Return a full block after `prev_block`: the cached one if its content is cached.

        Raises the errors of `allocate_immutable_blocks`.
        """
        return self.allocate_immutable_blocks(prev_block, [token_ids], extra_hash)[0]

    def allocate_immutable_blocks(
        self,
        prev_block: PrefixCachingBlock | None,
        block_token_ids: Sequence[TokenIds],
        extra_hash: ExtraHash = None,
    ) -> list[PrefixCachingBlock]:
        """Return full blocks, each after the one before, or none at all.

        Raises:
            OutOfBlocksError: too few blocks are free for the uncached contents.
            BlockError: tokens that do not fill a block exactly, or a `prev_block` without a digest.
            RequestError: a value is not a token id.
        """
        blocks: list[PrefixCachingBlock] = []
        for token_ids in as_tuple("block_token_ids", block_token_ids, BlockError):
            before = blocks[-1] if blocks else prev_block
            block = self._new_block(before, token_ids, extra_hash)
            if block.content_hash is None:
                raise BlockError(
                    f"an immutable block of {self.block_size - block.num_empty_slots} tokens, "
                    f"of {self.block_size} that fill one, behind a block "
                    f"{'with' if block.parent_hash is not None else 'without'} a digest: fill the "
                    "blocks before it, or allocate a mutable one"
                )
            blocks.append(block)
        num_hits = self._back(blocks)
        self._num_queries += len(blocks)
        self._num_hits += num_hits
        return blocks

    def promote_to_immutable_block(self, block: PrefixCachingBlock) -> int:
        """Cache a block that has become full; return the physical block that it is now in.

        If its content is cached already and duplicates are merged, that is the other block, and
        the block's own is freed. If the other block is not computed yet, a copy into it is
        recorded, because this sequence computes the tokens only in its own block.

        Raises:
            BlockError: it is not full, has no digest, or has no block of this allocator.
        """
        own = self._require_backed(block)
        digest = block.content_hash
        if digest is None:
            raise BlockError(
                f"{block!r} has no digest: fill it and the blocks before it, then promote it"
            )
        if block.num_tokens_before_append is not None:
            self._held.has_become_full(own)
        cached = self._held.find(digest)
        if cached is None or self._held.is_cached(own) or not self._merge_duplicates:
            self._held.cache(block, own, digest)
            return own
        if block.num_tokens_before_append != 0 and not self._held.is_computed(cached):
            self._copies.add(own, cached)
        self._held.share([cached])
        block.block_id = cached
        if self._held.give_back(own):
            self._copies.drop(own)
            self._num_merged += 1
        return cached

    # --- sharing -------------------------------------------------------------------------------

    def fork(self, last_block: PrefixCachingBlock) -> list[PrefixCachingBlock]:
        """Return the blocks of a new sequence that shares every block up to `last_block`.

        Raises:
            BlockError: one of them has no block of this allocator: unknown, freed or swapped out.
        """
        self._require_backed(last_block)
        chain = chain_to(last_block)
        block_ids = [self._require_backed(block) for block in chain]
        self._held.share(block_ids)
        forked: list[PrefixCachingBlock] = []
        for block, block_id in zip(chain, block_ids, strict=True):
            before = forked[-1] if forked else None
            twin = self._new_block(before, block.token_ids, block.extra_hash)
            self._attach(twin, block_id)
            forked.append(twin)
        return forked

    def free(self, block: PrefixCachingBlock) -> None:
        """Free a block; its content stays cached until it is evicted.

        Raises:
            BlockError: it has no block of this allocator: unknown, freed already or swapped out.
        """
        self._require_backed(block)
        self._detach(block)

    def cow_block_if_not_appendable(self, block: PrefixCachingBlock) -> int:
        """Give `block` a physical block that is not shared, and return it: another one, with a copy
        recorded, if its block is shared.

        Raises:
            OutOfBlocksError: a copy is needed, and no block is free.
            BlockError: the block is full, or has no block of this allocator.
        """
        source = self._require_backed(block)
        if block.is_full:
            raise BlockError(f"{block!r} is full: nothing is appended to an immutable block")
        if self._held.num_references(source) == 1:
            return source
        destination = self._held.take(1)[0]
        self._held.give_back(source)
        self._copies.add(source, destination)
        block.block_id = destination
        return destination

    def clear_copy_on_writes(self) -> list[tuple[int, int]]:
        """Return and clear the copies (source, destination) since the last call.

        Every rank runs them before the forward, reading all sources before it writes.
        """
        return self._copies.take()

    # --- swapping ------------------------------------------------------------------------------

    def swap_out(self, blocks: Sequence[PrefixCachingBlock]) -> list[int]:
        """Free the physical blocks of sequences; return them, to copy from.

        Tokens and digests stay with the blocks, for `swap_in` here or into another allocator.

        Raises:
            BlockError: one is given twice, has no block of this allocator, or waits for a copy.
        """
        blocks = as_tuple("blocks", blocks, BlockError)
        block_ids = [self._require_backed(block) for block in blocks]
        if len(set(blocks)) != len(blocks):
            raise BlockError("a block is swapped out twice: give each one once")
        waiting = [block_id for block_id in block_ids if self._copies.is_waiting(block_id)]
        if waiting:
            raise BlockError(
                f"blocks {waiting[:5]} wait for the copies of clear_copy_on_writes: take and run "
                "them first, then swap out"
            )
        for block in blocks:
            self._detach(block)
        return block_ids

    def swap_in(self, blocks: Sequence[PrefixCachingBlock]) -> list[int]:
        """Allocate physical blocks for blocks that were swapped out; return their ids, to copy to.

        Blocks must be in the order of their sequence. A block with cached content is shared, and
        needs no copy if it is computed.

        Raises:
            OutOfBlocksError: too few blocks are free.
            BlockError: one is given twice, has a block already, or has another block size or hash.
        """
        blocks = as_tuple("blocks", blocks, BlockError)
        for block in blocks:
            self._require_compatible(block)
            if block.block_id is not None or not block.is_released:
                raise BlockError(f"{block!r} is not swapped out: only such a block is swapped in")
        if len(set(blocks)) != len(blocks):
            raise BlockError("a block is swapped in twice: give each one once")
        self._back(blocks)
        return [self._require_backed(block) for block in blocks]

    def check(self) -> None:
        """Raise InvariantError with the sum that fails if the state is inconsistent. O(blocks)."""
        self._held.check(Counter(self._require_backed(block) for block in self._backed))

    # --- inside --------------------------------------------------------------------------------

    def _new_block(
        self, prev_block: PrefixCachingBlock | None, token_ids: TokenIds, extra_hash: ExtraHash
    ) -> PrefixCachingBlock:
        if prev_block is not None:
            self._require_compatible(prev_block)
        return PrefixCachingBlock(
            prev_block, token_ids, self.block_size, self, extra_hash, self.hasher
        )

    def _back(self, blocks: Sequence[PrefixCachingBlock]) -> int:
        """Allocate blocks, full ones by cached content; return how many were cached.

        Equal contents share one block; all or nothing.
        """
        hits, num_missing = self._find_contents(blocks)
        shared = list(dict.fromkeys(hits.values()))
        needed, num_free = num_missing + self._held.num_unheld(shared), self.get_num_free_blocks()
        if needed > num_free:
            raise OutOfBlocksError(
                f"{len(blocks)} blocks need {needed} free ones, {num_free} of "
                f"{self.get_num_total_blocks()} are free: free sequences or use more blocks"
            )
        # Reference hits before anything is taken, so that they are not evicted.
        self._held.share(shared)
        new = iter(self._held.take(num_missing))
        is_unused = set(shared)
        by_digest = dict(hits)
        num_hits = 0
        for block in blocks:
            digest = block.content_hash
            block_id = None if digest is None else by_digest.get(digest)
            if block_id is None:
                block_id = next(new)
                self._attach(block, block_id)
                if block.is_full:
                    self._held.has_become_full(block_id)
                if digest is not None:
                    by_digest[digest] = block_id
                    self._held.cache(block, block_id, digest)
                continue
            num_hits += digest in hits
            if block_id in is_unused:
                is_unused.remove(block_id)
            else:
                self._held.share([block_id])
            self._attach(block, block_id)
        return num_hits

    def _attach(self, block: PrefixCachingBlock, block_id: int) -> None:
        block.attach(block_id, self)
        self._backed.add(block)

    def _detach(self, block: PrefixCachingBlock) -> None:
        block_id = self._require_backed(block)
        self._backed.discard(block)
        block.detach()
        if self._held.give_back(block_id):
            self._copies.drop(block_id)

    def _require_backed(self, block: PrefixCachingBlock) -> int:
        is_backed = isinstance(block, PrefixCachingBlock) and block in self._backed
        block_id = block.block_id if is_backed else None
        if block_id is None:
            raise BlockError(
                f"{shown(block)} is not backed by this allocator: it is unknown here, was freed, "
                "or is swapped out"
            )
        return block_id
