"""What running rows have just filled becomes hittable: mostly one block of each of some rows.

Under the row server. The digest of a row's next block follows from its newest tokens, which are
read from arrays: no request object is brought up to date for that, and the contents of all rows
enter the pool together. Rows of which something else is to be said (several blocks at once, extra
keys, a block that has a content already) go the way of single requests, after the others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvcache.arrays import EMPTY_INT32, IndexArray, Int32Array, index_array
from kvcache.blocks.contents import NO_TABLE
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


class _Filled(NamedTuple):
    """A row whose next block, in column `column` of its table, is full.

    For it to be found block `before` has to hold `above`, the digest before it; where there is
    none, or it does not matter, that is the null block, which holds None.
    """

    row: int
    num_tokens: int
    request: Request
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
        wanted = list(zip(rows.tolist(), batch.num_cached_tokens[rows].tolist(), strict=True))
        tokens = self._extend_digests(batch, wanted)
        for manager in self._coordinator.managers:
            filled, singly = self._sort(manager, batch, wanted)
            if filled:
                singly += self._cache_together(manager, filled, tokens)
            if singly:
                batch.tokens.sync(index_array([row for row, _ in singly]))
                for row, num_tokens in singly:
                    manager.cache_blocks(batch.requests[row], num_tokens)

    def _extend_digests(
        self, batch: RowBatch, wanted: list[tuple[int, int]]
    ) -> dict[int, Int32Array]:
        """Give requests that lack one digest that digest; return the tokens it is of, by row.

        Those that lack more, or have extra keys, are brought up to date: they compute their own.
        """
        quick: list[int] = []
        units: list[int] = []
        parents: list[BlockHash] = []
        requests: list[Request] = []
        behind: list[int] = []
        for row, num_tokens in wanted:
            request: Request = batch.requests[row]
            hashes, num_full = request.known_block_hashes, num_tokens // self._unit_tokens
            num_known = len(hashes)
            if num_known + 1 == num_full and not need_extra_keys(request):
                quick.append(row)
                units.append(num_known)
                parents.append(hashes[-1] if num_known else hasher_of(request).none_hash)
                requests.append(request)
            elif num_known < num_full:
                behind.append(row)
        if behind:
            batch.tokens.sync(index_array(behind))
            for row in behind:
                _ = batch.requests[row].block_hashes  # computes them
        if not quick:
            return {}
        tokens = batch.tokens.newest_units(index_array(quick), index_array(units))
        # A void item becomes a bytes object of its full length, trailing zeros included.
        pieces = tokens.astype("<i4", copy=False).view(f"V{self._unit_tokens * TOKEN_BYTES}")
        hasher = hasher_of(requests[0])  # the others have its equals
        digests = hasher.hash_all_plain(parents, pieces.ravel().tolist())
        for request, digest in zip(requests, digests, strict=True):
            request.note_next_digest(digest)
        return dict(zip(quick, tokens, strict=True)) if self._pool.tells_tokens else {}

    def _sort(
        self, manager: SingleTypeKVCacheManager, batch: RowBatch, wanted: list[tuple[int, int]]
    ) -> tuple[list[_Filled], list[tuple[int, int]]]:
        """Return the rows that have filled one block of the group, and those with several."""
        size, per_block = manager.block_size, manager.block_size // self._unit_tokens
        is_ordered = manager.spec.reads_whole_prefix
        filled: list[_Filled] = []
        several: list[tuple[int, int]] = []
        for row, num_tokens in wanted:
            request: Request = batch.requests[row]
            column = manager.num_cached_blocks(request.request_id)
            num_new = num_tokens // size - column
            table = manager.table(request.request_id)
            if num_new == 1 and column < len(table) and manager.caches_every_block:
                hashes, end = request.known_block_hashes, (column + 1) * per_block
                parent = hashes[end - per_block - 1] if column else hasher_of(request).none_hash
                before, above = (table[column - 1], parent) if column and is_ordered else _NOTHING
                block_id, digest = table[column], hashes[end - 1]
                filled.append(
                    _Filled(
                        row, num_tokens, request, column, block_id, before, above, parent, digest
                    )
                )
            elif num_new > 0:
                several.append((row, num_tokens))
        return filled, several

    def _cache_together(
        self,
        manager: SingleTypeKVCacheManager,
        filled: list[_Filled],
        tokens: dict[int, Int32Array],
    ) -> list[tuple[int, int]]:
        """Make one block of each of these rows hittable; return those for which that is too quick.

        That is where the block is null, has a content, is quarantined or in another row's table
        too, where the one before has lost its content, and where tokens are told and not at hand.
        """
        contents, ids = self._pool.contents, index_array([each.block_id for each in filled])
        fits = contents.table_numbers[ids] == NO_TABLE
        fits &= ids != NULL_ID
        held = contents.digests[index_array([each.before for each in filled])].tolist()
        fits &= [digest == each.above for digest, each in zip(held, filled, strict=True)]
        if self._pool.tells_tokens:
            is_one_unit = manager.block_size == self._unit_tokens
            fits &= [is_one_unit and each.row in tokens for each in filled]
        fits[self._pool.find_quarantined(ids)] = False
        if len(set(ids.tolist())) < len(ids):
            is_first = np.zeros_like(fits)
            is_first[np.unique(ids, return_index=True)[1]] = True
            fits &= is_first
        others: list[tuple[int, int]] = []
        if np.count_nonzero(fits) < len(filled):
            others = [
                (each.row, each.num_tokens)
                for each, is_fit in zip(filled, fits.tolist(), strict=True)
                if not is_fit
            ]
            filled = [each for each, is_fit in zip(filled, fits.tolist(), strict=True) if is_fit]
        self._pool.cache_runs(self._runs(manager, filled, tokens))
        for each in filled:
            manager.note_cached(each.request.request_id, each.column + 1)
        return others

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
            for table, (row, _, request, column, block_id, _, _, parent, digest) in zip(
                tables, filled, strict=True
            )
        ]
