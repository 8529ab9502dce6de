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

import numpy as np

from kvcache.arguments import as_bool, as_byte_strings, as_int, as_integers, check_kind
from kvcache.arrays import EMPTY_INDEX, Ids, IndexArray, index_array
from kvcache.blocks.contents import Finder
from kvcache.blocks.pool import BlockPool
from kvcache.blocks.references import NULL_ID
from kvcache.blocks.run import CachedRun
from kvcache.core import Reservation
from kvcache.errors import ConfigurationError, RequestError
from kvcache.hashing import BlockHash
from kvcache.managers.block_tables import (
    BlockTables,
    RowLimits,
    check_request_id,
    check_reservation,
)
from kvcache.managers.run_maker import Part, RunMaker
from kvcache.request import Namespace, Request
from kvcache.request_content import DEFAULT_NAMESPACE
from kvcache.specs import KVCacheSpec, ceil_div

_MANY_BLOCKS = 8
"""As many blocks at once, and more, are worth an array."""


@dataclass(frozen=True, slots=True)
class MatchLimits:
    """What a match must fit, in blocks: at most `max_blocks` long, a multiple of
    `alignment_blocks`; its last `num_extra_blocks` will be dropped, and the rest must still do."""

    max_blocks: int
    num_extra_blocks: int = 0
    alignment_blocks: int = 1


class SingleTypeKVCacheManager(BlockTables, ABC):
    """Block tables of one group, and what of them is cached.

    Invariants: the first `num_cached_blocks` blocks of a table were made hittable, are null or were
    adopted as hits, unless they were withdrawn since. `_leading` holds the first columns of some
    tables once more, as the arrays that they came in.
    """

    hits_open_step: ClassVar[bool] = True
    """Whether a request can start from what the step that admits it only just writes."""

    caches_every_block: ClassVar[bool] = True
    """Whether each full block that the request has becomes hittable."""

    def __init__(
        self, spec: KVCacheSpec, pool: BlockPool, group: int, hash_block_size: int
    ) -> None:
        """Manage group `group` of `pool`; requests have a digest per `hash_block_size` tokens.

        Raises:
            ConfigurationError: the group's block size is no multiple of that.
        """
        check_kind("spec", spec, KVCacheSpec, ConfigurationError)
        check_kind("pool", pool, BlockPool, ConfigurationError)
        group = as_int("group", group, error=ConfigurationError)
        hash_block_size = as_int("hash_block_size", hash_block_size, 1, error=ConfigurationError)
        if spec.block_size % hash_block_size:
            raise ConfigurationError(
                f"group {group} has blocks of {spec.block_size} tokens and digests come every "
                f"{hash_block_size}: hash at a divisor of every group's block size"
            )
        super().__init__(spec, pool, group)
        self._pool = pool
        self._hashes_per_block = spec.block_size // hash_block_size
        self._runs = RunMaker(spec, pool, group, self._hashes_per_block)
        self._num_cached: dict[str, int] = {}
        self._leading: dict[str, IndexArray] = {}

    def free(self, request_id: str) -> None:
        check_request_id(request_id)
        self._pool.free_blocks([b for b in reversed(self.forget_request(request_id)) if b])

    # --- tables --------------------------------------------------------------------------------

    def save_new_computed_blocks(
        self,
        request_id: str,
        block_ids: Ids,
        num_computed_tokens: int = 0,
    ) -> None:
        check_request_id(request_id)
        given = self._as_ids(block_ids)
        num_computed_tokens = as_int("num_computed_tokens", num_computed_tokens, error=RequestError)
        if self._tables.get(request_id):
            raise self._has_blocks(request_id)
        ids = np.array(given, dtype=np.intp)
        ids[: self.num_skipped_blocks(num_computed_tokens)] = NULL_ID
        num_kept, first_kept = np.count_nonzero(ids), 0
        if num_kept < len(ids):
            first_kept = int((ids != NULL_ID).argmax()) if num_kept else len(ids)
        self._pool.touch(ids[first_kept:])
        self._tables[request_id], self._leading[request_id] = ids.tolist(), ids
        self.note_cached(request_id, len(ids))
        self._first_kept[request_id] = first_kept

    def allocate_new_blocks(self, request_id: str, reservation: Reservation) -> list[int]:
        check_request_id(request_id)
        check_reservation(reservation)
        table = self._tables.get(request_id, [])
        leading = self._leading.get(request_id, EMPTY_INDEX)
        total = ceil_div(reservation.num_slot_tokens, self.block_size)
        if len(leading) != len(table) or total < len(table) + _MANY_BLOCKS:
            return super().allocate_new_blocks(request_id, reservation)
        # A whole prompt, or what a hit leaves of it: its blocks stay the array that they come in.
        skipped = min(self.num_skipped_blocks(reservation.num_computed_tokens), total)
        num_null = max(0, skipped - len(table))
        ids = self._pool.take(total - len(table) - num_null)
        new: list[int] = ids.tolist()
        if num_null:
            new = [NULL_ID] * num_null + new
            ids = index_array(new)
        self._tables[request_id] = table + new
        self._leading[request_id] = np.concatenate((leading, ids)) if len(leading) else ids
        return new

    def columns(self, request_id: str, start: int, end: int) -> IndexArray:
        """Return the blocks in columns `[start, end)` of a table. Not to be changed."""
        leading = self._leading.get(request_id, EMPTY_INDEX)
        if end <= len(leading):
            return leading[start:end]
        table = self._tables.get(request_id, [])
        if start >= len(leading):
            return index_array(table[start:end])
        return np.concatenate((leading[start:], table[len(leading) : end]))

    def replace_block(self, request_id: str, column: int, block_id: int) -> int:
        self._leading.pop(request_id, None)
        return super().replace_block(request_id, column, block_id)

    def take_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> list[int]:
        skipped = super().take_skipped_blocks(request_id, num_computed_tokens)
        if skipped:
            self._leading.pop(request_id, None)
        return skipped

    def _as_ids(self, block_ids: Ids) -> IndexArray:
        """Return ids of blocks as an array; raises BlockError for what is none of the pool's."""
        return self._pool.known(block_ids)

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

    def get_num_common_prefix_blocks(self, request_id: str, num_running_requests: int) -> int:
        """Return how many leading blocks every running request shares.

        None, where blocks before a window or chunk are skipped, and where a block is one request's.
        """
        check_request_id(request_id)
        as_int("num_running_requests", num_running_requests, error=RequestError)
        return 0

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
    ) -> tuple[Ids, ...]:
        """Return, per group, the block ids of the longest prefix that hits in all of `group_ids`.

        `block_hashes` come one per block of `spec`. At most `max_length` tokens; with `use_eagle`
        the last matched block is dropped. Null blocks for skipped positions. Changes nothing.

        Raises:
            RequestError: an argument is of another type.
        """
        as_byte_strings("block_hashes", block_hashes, RequestError)
        max_length = as_int("max_length", max_length, error=RequestError)
        groups = as_integers("group_ids", group_ids, error=RequestError).tolist()
        check_kind("pool", pool, BlockPool, RequestError)
        check_kind("spec", spec, KVCacheSpec, RequestError)
        use_eagle = as_bool("use_eagle", use_eagle, RequestError)
        check_kind("namespace", namespace, Namespace, RequestError)
        return cls.longest_hits(block_hashes, max_length, groups, pool, spec, use_eagle, namespace)

    @classmethod
    def longest_hits(  # noqa: PLR0917 - as above
        cls,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        group_ids: Sequence[int],
        pool: BlockPool,
        spec: KVCacheSpec,
        use_eagle: bool,
        namespace: Namespace,
    ) -> tuple[Ids, ...]:
        """Do `find_longest_cache_hit` on the caller's word that the arguments are right."""
        max_blocks = min(len(block_hashes), max_length // spec.block_size)
        limits = MatchLimits(max_blocks, num_extra_blocks=int(use_eagle))
        matches = cls.match_groups(pool, namespace, group_ids, block_hashes, spec, limits)
        return tuple(match[:-1] for match in matches) if use_eagle else matches

    @classmethod
    def finder(cls, pool: BlockPool, namespace: Namespace, group: int) -> Finder:
        """Return what finds the blocks from which a request may start now."""
        return pool.contents.finder(namespace, group, finds_open_step=cls.hits_open_step)

    @classmethod
    def match_groups(  # noqa: PLR0917 - what identifies contents, then what is wanted of them
        cls,
        pool: BlockPool,
        namespace: Namespace,
        group_ids: Sequence[int],
        digests: Sequence[BlockHash],
        spec: KVCacheSpec,
        limits: MatchLimits,
    ) -> tuple[Ids, ...]:
        """Do `longest_match` in some groups of a pool that have one spec."""
        finders = [cls.finder(pool, namespace, group) for group in group_ids]
        return cls.match_all(finders, digests, spec, limits)

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

    # --- caching -------------------------------------------------------------------------------

    def num_cached_blocks(self, request_id: str) -> int:
        """Return up to where the request's blocks need not be made hittable any more."""
        return self._num_cached.get(request_id, 0)

    def group_hashes(self, digests: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Return one digest per block of this group: the last of those its tokens have."""
        if self._hashes_per_block == 1:
            return digests
        return digests[self._hashes_per_block - 1 :: self._hashes_per_block]

    def next_full_tokens(self, request_id: str) -> int:
        """Return the tokens from which on one more block could be made hittable."""
        return (self._num_cached.get(request_id, 0) + 1) * self.block_size

    def row_limits(self, request_id: str) -> RowLimits:
        """Return how far a request can go on before anything must be done for it here."""
        return RowLimits(
            self.capacity_tokens(request_id),
            self.next_full_tokens(request_id),
            self.next_skip_tokens(request_id),
        )

    def forget_request(self, request_id: str) -> list[int]:
        self._num_cached.pop(request_id, None)
        self._leading.pop(request_id, None)
        return super().forget_request(request_id)

    def note_cached(self, request_id: str, num_blocks: int) -> None:
        self._num_cached[request_id] = num_blocks

    def rewind(self, request_id: str, num_cached_blocks: int) -> None:
        """Blocks from `num_cached_blocks` on may be made hittable again: they are not yet."""
        if self._num_cached.get(request_id, 0) > num_cached_blocks:
            self._num_cached[request_id] = num_cached_blocks

    def take_back(self, request_id: str, num_cached_blocks: int) -> None:
        """The forward that filled blocks from `num_cached_blocks` on failed: they are not full."""
        self.rewind(request_id, num_cached_blocks)

    def take_back_run(self, run: CachedRun) -> list[str]:
        """Let all who have blocks of a run, which is to be withdrawn, make them hittable again.

        Forks have, and went on as if theirs were cached. Returns the requests.
        """
        self.take_back(run.request_id, run.first_index)
        unsealed, shared = self._pool.contents.unsealed, []
        is_own = run.request_id in self._tables
        for column, block_id in enumerate(run.block_ids, run.first_index):
            if unsealed.get(block_id) is run and self._blocks.num_references(block_id) > is_own:
                shared.append((column, block_id))
        found = [run.request_id]
        for request_id, table in self._tables.items() if shared else ():
            columns = [c for c, b in shared if c < len(table) and table[c] == b]
            if columns and request_id != run.request_id:
                self.rewind(request_id, columns[0])
                found.append(request_id)
        return found

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
        check_kind("request", request, Request, RequestError)
        num_tokens = as_int("num_tokens", num_tokens, error=RequestError)
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
            self._runs.run(request, table, part)
            for part in self._uncached_parts(request.request_id, table, start, end)
        ]

    def _uncached_parts(
        self, request_id: str, table: Sequence[int], start: int, end: int
    ) -> Sequence[Part]:
        """Return the unbroken ranges in `[start, end)` of blocks that can be made hittable."""
        if end - start == 1:
            return self._runs.uncached_part(table, start)
        return self._runs.uncached_parts(self.columns(request_id, start, end), start)
