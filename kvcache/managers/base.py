"""What every attention kind's manager does: keep the block tables of one KV cache group.

Stands between a coordinator, which asks every group the same, and the pool. A kind says which
prefix it can start from (`longest_match`), and its spec which tokens it no longer reads; the rest
is here. Refuses to decide across groups: whoever allocates has counted first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvcache.blocks.contents import Finder
from kvcache.blocks.pool import BlockPool
from kvcache.blocks.prefix_table import DEFAULT_NAMESPACE
from kvcache.blocks.references import NULL_ID
from kvcache.blocks.run import CachedRun
from kvcache.core import ForkOrigin, Reservation
from kvcache.errors import ConfigurationError, RequestError
from kvcache.hashing import BlockHash
from kvcache.managers.run_maker import RunMaker
from kvcache.request import Namespace, Request
from kvcache.specs import KVCacheSpec, ceil_div

NEVER = 1 << 62

UNBOUNDED_TOKENS = 1 << 40
"""Tokens per column where a table does not grow with them; sums and products stay in 64 bits."""


@dataclass(frozen=True, slots=True)
class MatchLimits:
    """What a match must fit, in blocks: at most `max_blocks` long, a multiple of
    `alignment_blocks`; its last `num_extra_blocks` will be dropped, and the rest must still do."""

    max_blocks: int
    num_extra_blocks: int = 0
    alignment_blocks: int = 1


@dataclass(frozen=True, slots=True)
class SharedColumn:
    """A column that parent and child of a fork share, and that both may write."""

    of_parent: int
    of_child: int


class SingleTypeKVCacheManager(ABC):
    """Block tables of one group, by request id.

    A table for `n` tokens has `ceil(n / tokens_per_column) + num_extra_columns` columns. These are
    a request's own tokens where states are kept, those that it has slots for everywhere else.

    Invariants: the first `num_cached_blocks` blocks of a table were made hittable, are null or
    were adopted as hits, unless they were withdrawn since; the first `_first_kept` are null.
    """

    supports_eagle: ClassVar[bool] = True
    """Whether the last block of a hit can be dropped."""

    hits_open_step: ClassVar[bool] = True
    """Whether a request can start from what the step that admits it only just writes."""

    def __init__(
        self, spec: KVCacheSpec, pool: BlockPool, group: int, hash_block_size: int
    ) -> None:
        """Manage group `group` of `pool`; requests have a digest per `hash_block_size` tokens.

        Raises:
            ConfigurationError: the group's block size is no multiple of that.
        """
        if spec.block_size % hash_block_size:
            raise ConfigurationError(
                f"group {group} has blocks of {spec.block_size} tokens and digests come every "
                f"{hash_block_size}: hash at a divisor of every group's block size"
            )
        self.spec = spec
        self.group = group
        self.block_size = spec.block_size
        self.tokens_per_column = spec.block_size
        self.num_extra_columns = 0
        self._pool = pool
        self._hashes_per_block = spec.block_size // hash_block_size
        self._runs = RunMaker(spec, pool, group, self._hashes_per_block)
        self._tables: dict[str, list[int]] = {}
        self._num_cached: dict[str, int] = {}
        self._first_kept: dict[str, int] = {}

    # --- what a kind answers -------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def longest_match(
        cls,
        find: Finder,
        digests: Sequence[BlockHash],
        spec: KVCacheSpec,
        limits: MatchLimits,
    ) -> list[int]:
        """Return the longest prefix within `limits` that a request can start from.

        Null for blocks it would not read. Changes nothing.
        """

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Return how many leading blocks nobody reads any more after so many computed tokens."""
        return self.spec.num_skipped_tokens(num_computed_tokens) // self.block_size

    @abstractmethod
    def get_num_common_prefix_blocks(self, request_id: str, num_running_requests: int) -> int:
        """Return how many leading blocks every running request shares."""

    def next_skip_tokens(self, request_id: str) -> int:
        """Return the computed tokens from which on one more block is skipped; NEVER if none."""
        return NEVER

    # --- look-up -------------------------------------------------------------------------------

    @classmethod
    def find_longest_cache_hit(  # noqa: PLR0917 - the field's signature
        cls,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        group_ids: Sequence[int],
        pool: BlockPool,
        spec: KVCacheSpec,
        use_eagle: bool = False,
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> tuple[list[int], ...]:
        """Return, per group, the block ids of the longest prefix that hits in all of `group_ids`.

        `block_hashes` come one per block of `spec`. At most `max_length` tokens; with `use_eagle`
        the last matched block is dropped. Null blocks for skipped positions. Changes nothing.
        """
        max_blocks = min(len(block_hashes), max_length // spec.block_size)
        finders = [cls.finder(pool, namespace, group) for group in group_ids]
        limits = MatchLimits(max_blocks, num_extra_blocks=int(use_eagle))
        matches = cls.match_all(finders, block_hashes, spec, limits)
        if use_eagle:
            for match in matches:
                del match[-1:]
        return matches

    @classmethod
    def finder(cls, pool: BlockPool, namespace: Namespace, group: int) -> Finder:
        """Return what finds the blocks from which a request may start now."""
        return pool.contents.finder(namespace, group, finds_open_step=cls.hits_open_step)

    @classmethod
    def match_all(
        cls,
        finders: Sequence[Finder],
        digests: Sequence[BlockHash],
        spec: KVCacheSpec,
        limits: MatchLimits,
    ) -> tuple[list[int], ...]:
        """Do `longest_match` for several groups of one spec: a digest hits if all have it."""
        if len(finders) == 1:
            return (cls.longest_match(finders[0], digests, spec, limits),)

        def find_in_all(digest: BlockHash) -> int | None:
            found = [find(digest) for find in finders]
            return None if None in found else found[0]

        match = cls.longest_match(find_in_all, digests, spec, limits)
        return tuple(
            [
                (find(digest) or NULL_ID) if block_id else NULL_ID
                for digest, block_id in zip(digests, match, strict=False)
            ]
            for find in finders
        )

    # --- allocation ----------------------------------------------------------------------------

    def table(self, request_id: str) -> Sequence[int]:
        """Return a request's table, empty if unknown. Belongs to the manager: do not change it."""
        return self._tables.get(request_id, ())

    def request_ids(self) -> Sequence[str]:
        """Return the requests that have a table."""
        return list(self._tables)

    def num_cached_blocks(self, request_id: str) -> int:
        """Return up to where the request's blocks need not be made hittable any more."""
        return self._num_cached.get(request_id, 0)

    def capacity_tokens(self, request_id: str) -> int:
        """Return for how many tokens the request's table is long enough."""
        num_columns = len(self._tables.get(request_id, ()))
        return (num_columns - self.num_extra_columns) * self.tokens_per_column

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        reservation: Reservation,
        new_computed_blocks: Sequence[int] = (),
    ) -> int:
        """Return how many free blocks a reservation takes, hits that are free included.

        Positions that nobody reads after its computed tokens need none. No mutation.
        """
        total = ceil_div(reservation.num_slot_tokens, self.block_size)
        held = len(self._tables.get(request_id, ())) + len(new_computed_blocks)
        skipped = min(self.num_skipped_blocks(reservation.num_computed_tokens), total)
        needed = max(0, total - max(held, skipped))
        if new_computed_blocks:
            needed += self._pool.num_unheld(new_computed_blocks[skipped:])
        return needed

    def save_new_computed_blocks(
        self, request_id: str, block_ids: Sequence[int], num_computed_tokens: int = 0
    ) -> None:
        """Adopt a hit as the start of a request's table; raises RequestError if it has one.

        Where tokens behind the hit come from elsewhere, positions that nobody reads any more after
        `num_computed_tokens` stay null.
        """
        if self._tables.get(request_id):
            raise RequestError(
                f"request {request_id} holds {len(self._tables[request_id])} blocks of group "
                f"{self.group} already: only a request without blocks adopts a hit"
            )
        skipped = min(self.num_skipped_blocks(num_computed_tokens), len(block_ids))
        table = [NULL_ID] * skipped + list(block_ids[skipped:])
        first_kept = next((i for i, block_id in enumerate(table) if block_id), len(table))
        self._pool.touch(table[first_kept:])
        self._tables[request_id] = table
        self._num_cached[request_id] = len(table)
        self._first_kept[request_id] = first_kept

    def allocate_new_blocks(self, request_id: str, reservation: Reservation) -> list[int]:
        """Extend a request's table as reserved; return what entered it, nulls included.

        Raises:
            OutOfBlocksError: too few are free; nothing was changed.
        """
        table = self._tables.get(request_id, [])
        total = ceil_div(reservation.num_slot_tokens, self.block_size)
        missing = total - len(table)
        if missing <= 0:
            self._tables.setdefault(request_id, table)
            return []
        skipped = min(self.num_skipped_blocks(reservation.num_computed_tokens), total)
        num_null = max(0, skipped - len(table))
        new = [NULL_ID] * num_null + self._pool.get_new_blocks(missing - num_null)
        table += new
        self._tables[request_id] = table
        return new

    def extend_table(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Append blocks that the caller took from the pool for this request."""
        self._tables.setdefault(request_id, []).extend(block_ids)

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Free the blocks nobody reads any more, right to left, and put nulls in their place."""
        skipped = self.take_skipped_blocks(request_id, num_computed_tokens)
        if skipped:
            self._pool.give_back(skipped)

    def take_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> list[int]:
        """Put nulls in the place of blocks nobody reads any more; return them, right to left.

        Whoever calls gives the references back.
        """
        table = self._tables.get(request_id)
        if table is None:
            return []
        end = min(self.num_skipped_blocks(num_computed_tokens), len(table))
        start = self._first_kept.get(request_id, 0)
        if end <= start:
            return []
        skipped = table[start:end][::-1]
        if NULL_ID in skipped:
            # States leave nulls between the blocks they keep, so that not the first null ends it.
            skipped = [block_id for block_id in skipped if block_id]
        table[start:end] = [NULL_ID] * (end - start)
        self._first_kept[request_id] = end
        return skipped

    def free(self, request_id: str) -> None:
        """Give all of a request's blocks back, tail first; an unknown request: no effect."""
        self._pool.free_blocks([b for b in reversed(self.forget_request(request_id)) if b])

    def forget_request(self, request_id: str) -> list[int]:
        """Drop a request's table and return it. Whoever calls gives the references back."""
        self._num_cached.pop(request_id, None)
        self._first_kept.pop(request_id, None)
        return self._tables.pop(request_id, [])

    # --- forks ---------------------------------------------------------------------------------

    def fork(self, parent_id: str, child_id: str, origin: ForkOrigin) -> SharedColumn | None:
        """Let `child_id`, which has no table, share the parent's blocks up to the origin.

        Returns the column that both may still write, None where there is none.
        """
        end = ceil_div(origin.num_tokens, self.block_size)
        self._share(parent_id, child_id, self._tables.get(parent_id, [])[:end])
        num_full = origin.num_tokens // self.block_size
        self._num_cached[child_id] = min(self._num_cached.get(parent_id, 0), num_full)
        return SharedColumn(num_full, num_full) if num_full < end else None

    def writes_column(self, column: int, reservation: Reservation) -> bool:
        """Say whether a forward behind the fork's tokens writes a column that was shared there."""
        return True

    def replace_block(self, request_id: str, column: int, block_id: int) -> int:
        """Put another block into a column; return the one that was there."""
        table = self._tables[request_id]
        before, table[column] = table[column], block_id
        return before

    def _share(self, parent_id: str, child_id: str, table: list[int]) -> None:
        """Give `child_id` a table, and a reference to each block in it."""
        self._pool.touch([block_id for block_id in table if block_id])
        self._tables[child_id] = table
        self._first_kept[child_id] = min(self._first_kept.get(parent_id, 0), len(table))

    # --- caching -------------------------------------------------------------------------------

    def group_hashes(self, digests: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Return one digest per block of this group: the last of those its tokens have."""
        if self._hashes_per_block == 1:
            return digests
        return digests[self._hashes_per_block - 1 :: self._hashes_per_block]

    def next_full_tokens(self, request_id: str) -> int:
        """Return the tokens from which on one more block could be made hittable."""
        return (self._num_cached.get(request_id, 0) + 1) * self.block_size

    def note_own_end(  # noqa: B027 - where tokens are kept it does not matter
        self, request_id: str, num_own_tokens: int
    ) -> None:
        """A forward is to end with so many own tokens. Only groups that keep states are told."""

    def rewind(self, request_id: str, num_cached_blocks: int) -> None:
        """Blocks from `num_cached_blocks` on may be made hittable again: they are not yet."""
        if self._num_cached.get(request_id, 0) > num_cached_blocks:
            self._num_cached[request_id] = num_cached_blocks

    def take_back(self, request_id: str, num_cached_blocks: int) -> None:
        """The forward that filled blocks from `num_cached_blocks` on failed: they are not full."""
        self.rewind(request_id, num_cached_blocks)

    def require_cacheable(self, request: Request, num_tokens: int) -> None:
        """Raise RequestError if `cache_blocks` could not do its work. Changes nothing."""
        num_full = num_tokens // self.block_size
        if num_full > request.num_tokens // self.block_size:
            raise RequestError(
                f"request {request.request_id} has {request.num_tokens} tokens, blocks up to token "
                f"{num_tokens} cannot be full: append its tokens first"
            )

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the request's full blocks up to `num_tokens` hittable, in the open step if any.

        Null blocks are left out. Where the block before has lost its content, nothing is cached:
        a content without its prefix could not be found.

        Raises:
            RequestError: it has fewer tokens or blocks; nothing was changed.
        """
        self._pool.cache_runs(self.take_uncached_runs(request, num_tokens))

    def take_uncached_runs(self, request: Request, num_tokens: int) -> list[CachedRun]:
        """Return what `cache_blocks` would cache, and count it as cached. The pool must take it.

        Raises:
            RequestError: it has fewer tokens or blocks; nothing was changed.
        """
        start = self._num_cached.get(request.request_id, 0)
        end = num_tokens // self.block_size
        if end <= start:
            return []
        table = self._tables.get(request.request_id, [])
        if end > len(table):
            raise RequestError(
                f"request {request.request_id} has {len(table)} blocks in group {self.group}, "
                f"{end} cannot be cached: allocate them first"
            )
        hashes = request.block_hashes
        if end * self._hashes_per_block > len(hashes):
            self.require_cacheable(request, num_tokens)
        if start and self.spec.reads_whole_prefix:
            # The block is the request's own: what it holds, if anything, is of its namespace.
            above = hashes[start * self._hashes_per_block - 1]
            if self._pool.contents.digests[table[start - 1]] != above:
                return []
        self._num_cached[request.request_id] = end
        return [
            self._runs.run(request, table, first, stop)
            for first, stop in self._uncached_parts(request.request_id, table, start, end)
        ]

    def _uncached_parts(
        self, request_id: str, table: Sequence[int], start: int, end: int
    ) -> Sequence[tuple[int, int]]:
        """Return the unbroken ranges in `[start, end)` of blocks that can be made hittable."""
        return self._runs.uncached_parts(table, start, end)
