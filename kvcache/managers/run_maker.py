"""Which blocks of a table can be made hittable, and what the pool must know of them.

Under the managers of all kinds, which decide up to where. Refuses to change anything: it reads a
request's digests and tokens and what its blocks hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from kvcache.arrays import EMPTY_INT32, IndexArray
from kvcache.blocks.contents import NO_TABLE
from kvcache.blocks.pool import BlockPool
from kvcache.blocks.references import NULL_ID
from kvcache.blocks.run import CachedRun
from kvcache.errors import RequestError
from kvcache.hashing import ExtraKeys, generate_block_hash_extra_keys, need_extra_keys
from kvcache.request import BlockHasher, Request
from kvcache.specs import KVCacheSpec


class Part(NamedTuple):
    """Columns `[start, end)` of a table; `ids` are their blocks where an array of them is there."""

    start: int
    end: int
    ids: IndexArray | None = None


class RunMaker:
    """Makes runs of blocks of one group."""

    def __init__(
        self, spec: KVCacheSpec, pool: BlockPool, group: int, hashes_per_block: int
    ) -> None:
        """Work for group `group` of `pool`, whose blocks span `hashes_per_block` digests each."""
        self._spec = spec
        self._pool = pool
        self._group = group
        self._hashes_per_block = hashes_per_block

    def uncached_part(self, table: Sequence[int], column: int) -> Sequence[Part]:
        """Return one column, if its block holds nothing yet."""
        return [Part(column, column + 1)] if self._pool.can_be_cached(table[column]) else []

    def uncached_parts(self, ids: IndexArray, start: int) -> Sequence[Part]:
        """Return the unbroken ranges of blocks that hold nothing yet; `ids` are those from column
        `start` on."""
        end = start + len(ids)
        if self._pool.can_all_be_cached(ids):
            return [Part(start, end, ids)]
        is_new = self._pool.contents.table_numbers[ids] == NO_TABLE
        is_new &= ids != NULL_ID
        for index in self._pool.find_quarantined(ids):
            if self._spec.reads_whole_prefix:
                # What follows would be a content without its prefix.
                is_new[index:] = False
            is_new[index] = False
        flags = is_new.tolist()
        parts = []
        for wanted, positions in groupby(range(start, end), key=lambda i: flags[i - start]):
            if wanted:
                indices = list(positions)
                parts.append(Part(indices[0], indices[-1] + 1))
        return parts

    def run(self, request: Request, table: list[int], part: Part) -> CachedRun:
        """Return the blocks of a part of the request's table as a run of the open step."""
        start, end, ids = part
        pool, size, per_block = self._pool, self._spec.block_size, self._hashes_per_block
        hashes = request.block_hashes
        extra_keys: tuple[ExtraKeys | None, ...] = ()
        if need_extra_keys(request):
            extra_keys = tuple(
                generate_block_hash_extra_keys(request, i * size, (i + 1) * size, 0)[0]
                for i in range(start, end)
            )
        token_ids = EMPTY_INT32
        if pool.tells_tokens:
            token_ids = np.array(request.all_token_ids[start * size : end * size], dtype=np.int32)
        prefix_table = None
        if start and self._spec.reads_whole_prefix:
            # Quicker than a look-up: the block before is cached, or this one could not be.
            prefix_table = pool.contents.table_of(table[start - 1])
        return CachedRun(
            table=prefix_table or pool.contents.table(request.namespace, self._group),
            block_ids=table[start:end],
            digests=hashes[(start + 1) * per_block - 1 : end * per_block : per_block],
            parent=hashes[start * per_block - 1] if start else hasher_of(request).none_hash,
            token_ids=token_ids,
            block_size=size,
            extra_keys=extra_keys,
            request_id=request.request_id,
            first_index=start,
            client_id=pool.ledger.client_id,
            step=pool.ledger.step,
            ids=ids,
        )


def hasher_of(request: Request) -> BlockHasher:
    """Return what computes the digests of a request; raises RequestError if nothing does."""
    hasher = request.block_hasher
    if hasher is None:
        raise RequestError(
            f"request {request.request_id} has no block hasher: attach one before caching"
        )
    return hasher
