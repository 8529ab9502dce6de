"""What running rows have just filled becomes hittable: mostly one block of each of some rows.

Under the row server. The digest of a row's next block follows from its newest tokens, which are
read from arrays: no request object is brought up to date for that, and the contents of all rows
enter the pool together. Rows of which something else is to be said (several blocks at once, extra
keys, a block that has a content already) go the way of single requests, after the others.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcache.arrays import EMPTY_INT32, IndexArray, Int32Array, index_array
from kvcache.blocks.references import NULL_ID
from kvcache.blocks.run import CachedRun
from kvcache.core import RowBatch
from kvcache.hash_algorithms import TOKEN_BYTES
from kvcache.hashing import BlockHash, need_extra_keys
from kvcache.managers.base import SingleTypeKVCacheManager
from kvcache.managers.coordinators import KVCacheCoordinator
from kvcache.managers.run_maker import hasher_of
from kvcache.request import Request

_NOTHING = (NULL_ID, None)
"""Before a block that can be found whatever is before it."""


class _Wanted(NamedTuple):
    """A row whose full blocks up to `num_tokens` are to be hittable."""

    row: int
    request: Request
    num_tokens: int


class _Filled(NamedTuple):
    """A row whose next block, in column `column` of its table, is full.

    For it to be found block `before` has to hold `above`, the digest before it; where there is
    none, or it does not matter, that is the null block, which holds None.
    """

    wanted: _Wanted
    column: int
    block_id: int
    before: int
    above: BlockHash | None
    parent: BlockHash
    digest: BlockHash


class RowCacher:
    """Makes full blocks of rows hittable in all groups of one coordinator."""

    def __init__(self, coordinator: KVCacheCoordinator) -> None:
        """Cache in the coordinator's pool."""
        self._coordinator = coordinator
        self._pool = coordinator.pool
        self._unit_tokens = coordinator.hash_block_size

    def cache(self, batch: RowBatch, rows: IndexArray) -> None:
        """Make the full blocks of these rows hittable, up to their tokens to cache."""
        columns = (
            rows.tolist(),
            batch.requests[rows].tolist(),
            batch.num_cached_tokens[rows].tolist(),
        )
        wanted = list(map(_Wanted, *columns))
        tokens = self._extend_digests(batch, wanted)
        for manager in self._coordinator.managers:
            filled, singly = self._sort(manager, wanted)
            if filled:
                singly += self._cache_together(manager, filled, tokens)
            if singly:
                batch.tokens.sync(index_array([each.row for each in singly]))
                for _, request, num_tokens in singly:
                    manager.cache_blocks(request, num_tokens)

    def _extend_digests(self, batch: RowBatch, wanted: list[_Wanted]) -> dict[int, Int32Array]:
        """Give requests that lack one digest that digest; return the tokens it is of, by row.

        Those that lack more, or have extra keys, are brought up to date: they compute their own.
        """
        quick: list[int] = []
        units: list[int] = []
        requests: list[Request] = []
        behind: list[_Wanted] = []
        for each in wanted:
            row, request, num_tokens = each
            num_known, num_full = len(request.known_block_hashes), num_tokens // self._unit_tokens
            if num_known + 1 == num_full and not need_extra_keys(request):
                quick.append(row)
                units.append(num_known)
                requests.append(request)
            elif num_known < num_full:
                behind.append(each)
        if behind:
            batch.tokens.sync(index_array([each.row for each in behind]))
            for each in behind:
                _ = each.request.block_hashes  # computes them
        if not quick:
            return {}
        tokens = batch.tokens.newest_units(index_array(quick), index_array(units))
        # A void item becomes a bytes object of its full length, trailing zeros included.
        pieces = tokens.astype("<i4", copy=False).view(f"V{self._unit_tokens * TOKEN_BYTES}")
        hasher = hasher_of(requests[0])  # the others have its equals
        known = [request.known_block_hashes for request in requests]
        parents = [hashes[-1] if hashes else hasher.none_hash for hashes in known]
        digests = hasher.hash_all_plain(parents, pieces.ravel().tolist())
        for request, digest in zip(requests, digests, strict=True):
            request.note_next_digest(digest)
        return dict(zip(quick, tokens, strict=True)) if self._pool.tells_tokens else {}

    def _sort(
        self, manager: SingleTypeKVCacheManager, wanted: list[_Wanted]
    ) -> tuple[list[_Filled], list[_Wanted]]:
        """Return the rows that have filled one block of the group, and those with several."""
        size, per_block = manager.block_size, manager.block_size // self._unit_tokens
        is_ordered = manager.spec.reads_whole_prefix
        filled: list[_Filled] = []
        several: list[_Wanted] = []
        for each in wanted:
            _, request, num_tokens = each
            column = manager.num_cached_blocks(request.request_id)
            num_new = num_tokens // size - column
            table = manager.table(request.request_id)
            if num_new == 1 and column < len(table) and manager.caches_every_block:
                hashes, end = request.known_block_hashes, (column + 1) * per_block
                parent = hashes[end - per_block - 1] if column else hasher_of(request).none_hash
                before, above = (table[column - 1], parent) if column and is_ordered else _NOTHING
                digest = hashes[end - 1]
                filled.append(_Filled(each, column, table[column], before, above, parent, digest))
            elif num_new > 0:
                several.append(each)
        return filled, several

    def _cache_together(
        self,
        manager: SingleTypeKVCacheManager,
        filled: list[_Filled],
        tokens: dict[int, Int32Array],
    ) -> list[_Wanted]:
        """Make one block of each of these rows hittable; return those for which that is too quick.

        That is where the block is null, has a content, is quarantined or in another row's table
        too, where the one before has lost its content, and where tokens are told and not at hand.
        """
        others: list[_Wanted] = []
        if not self._fit_together(manager, filled, tokens):
            fits = self._fit_singly(manager, filled, tokens)
            others = [each.wanted for each, is_fit in zip(filled, fits, strict=True) if not is_fit]
            filled = [each for each, is_fit in zip(filled, fits, strict=True) if is_fit]
        self._pool.cache_runs(self._runs(manager, filled, tokens))
        for each in filled:
            manager.note_cached(each.wanted.request.request_id, each.column + 1)
        return others

    def _fit_together(
        self,
        manager: SingleTypeKVCacheManager,
        filled: list[_Filled],
        tokens: dict[int, Int32Array],
    ) -> bool:
        """Say whether all of these rows can be cached together, as mostly they can."""
        if self._pool.tells_tokens:
            is_one_unit = manager.block_size == self._unit_tokens
            if not (is_one_unit and all(each.wanted.row in tokens for each in filled)):
                return False
        block_ids = [each.block_id for each in filled]
        above = self._pool.contents.digests[index_array([each.before for each in filled])]
        return (
            above.tolist() == [each.above for each in filled]
            and len(set(block_ids)) == len(block_ids)
            and self._pool.can_all_be_cached(index_array(block_ids))
        )

    def _fit_singly(
        self,
        manager: SingleTypeKVCacheManager,
        filled: list[_Filled],
        tokens: dict[int, Int32Array],
    ) -> list[bool]:
        """Say which of these rows can be cached together, looking at each."""
        pool, digests = self._pool, self._pool.contents.digests
        is_one_unit = manager.block_size == self._unit_tokens
        fits: list[bool] = []
        seen: set[int] = set()
        for each in filled:
            is_new = each.block_id not in seen and pool.can_be_cached(each.block_id)
            is_told = not pool.tells_tokens or (is_one_unit and each.wanted.row in tokens)
            fits.append(is_new and is_told and digests[each.before] == each.above)
            seen.add(each.block_id)
        return fits

    def _runs(
        self,
        manager: SingleTypeKVCacheManager,
        filled: list[_Filled],
        tokens: dict[int, Int32Array],
    ) -> list[CachedRun]:
        """Return each row's block as a run of the open step."""
        contents, ledger, size = self._pool.contents, self._pool.ledger, manager.block_size
        client_id, step = ledger.client_id, ledger.step
        # Quicker than a look-up, where the block before is known to be cached.
        tables = contents.tables_of(index_array([each.before for each in filled]))
        return [
            CachedRun(
                table or contents.table(request.namespace, manager.group),
                [block_id],
                [digest],
                parent,
                tokens.get(row, EMPTY_INT32),
                size,
                (),
                request.request_id,
                column,
                client_id,
                step,
            )
            for table, ((row, request, _), column, block_id, _, _, parent, digest) in zip(
                tables, filled, strict=True
            )
        ]
