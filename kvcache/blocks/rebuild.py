"""An index from labels: what a restarted coordinator may keep of what workers still hold.

Stands between the label sets of all ranks and an empty pool. Kept is what every rank agrees on;
one block of duplicate contents; in ordered groups no child without all its ancestors. Refuses to
guess: whatever does not fit is dropped, cold is correct.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvcache.arrays import IndexArray, index_array, int32_array
from kvcache.blocks.pool import BlockPool
from kvcache.blocks.run import CachedRun
from kvcache.core.group_labels import FIRST_BLOCK, NO_ROW, FittingLabels, fitting_labels
from kvcache.core.label_chains import NO_CHAIN, Chains, chains_of, depths_of
from kvcache.errors import BlockError
from kvcache.hashing import BlockHash
from kvcache.label_agreement import agreed_labels, labelled_blocks
from kvcache.labels import LabelSet

_GONE_FIRST = np.iinfo(np.intp).max
"""The rank of blocks beside which the leading group has none: they are evicted before others."""


@dataclass(frozen=True, eq=False)
class _GroupChains:
    """What is kept of one group."""

    group: int
    depths: IndexArray
    chains: Chains


def rebuild(
    pool: BlockPool, labels: Sequence[LabelSet], none_hash: BlockHash, block_sizes: Sequence[int]
) -> int:
    """Fill an empty pool from labels; return how many blocks were kept, all of them evictable.

    `block_sizes[g]` is that of group `g`; labels of other sizes or groups are dropped. Withdraws
    every label that is not kept, and tells the event sink: cleared, then all that is there.

    Raises:
        BlockError: something is held or cached already; nothing was changed.
    """
    if pool.num_blocks_in_use() or pool.contents.num_cached:
        raise BlockError(
            f"cannot restore: {pool.num_blocks_in_use()} blocks are in use and "
            f"{pool.contents.num_cached} are cached: restore an empty pool"
        )
    fitting = fitting_labels(agreed_labels(labels), pool.num_blocks, block_sizes, none_hash)
    found = [_chains(pool, fitting, group, none_hash) for group in range(len(block_sizes))]
    victims = _victims(pool, fitting, found)
    pool.contents.outbox.cleared()
    labelled = labelled_blocks(labels, pool.num_blocks)
    pool.contents.outbox.unlabel(np.setdiff1d(labelled, victims, assume_unique=True).tolist())
    pool.adopt([run for each in found for run in _runs(pool, fitting, each)], victims)
    return len(victims)


def _chains(
    pool: BlockPool, fitting: FittingLabels, group: int, none_hash: BlockHash
) -> _GroupChains:
    """Return the chains of a group; where it is not ordered they may begin anywhere."""
    above = fitting.groups[group].parent_rows(none_hash)
    if not pool.contents.is_ordered(group):
        above[above == NO_ROW] = FIRST_BLOCK
    depths = depths_of(above)
    return _GroupChains(group, depths, chains_of(above, depths))


def _victims(pool: BlockPool, fitting: FittingLabels, found: Sequence[_GroupChains]) -> IndexArray:
    """Return all kept blocks in the order in which they are to be evicted.

    As if the leading group's chains had been freed one by one, the last one first, and with each of
    them what other groups have beside it: blocks that can go one by one before those of ordered
    groups, tails before heads. Leading is the ordered group of the shortest blocks.
    """
    if not found:
        return index_array(())
    contents, sizes = pool.contents, [labels.tokens.shape[1] for labels in fitting.groups]
    leading = min(found, key=lambda each: (not contents.is_ordered(each.group), sizes[each.group]))
    leading_labels = fitting.groups[leading.group]
    chain_of = leading.chains.of_rows(len(leading_labels))
    blocks, ranks, kinds, depths = [], [], [], []
    for each in found:
        labels, rows = fitting.groups[each.group], each.chains.rows
        places = rows
        if each is not leading:
            places = leading_labels.rows_of([labels.names[row] for row in rows.tolist()])
        # The last ones stand for rows that are not there.
        chain = np.append(chain_of, NO_CHAIN)[places]
        blocks.append(labels.block_ids[rows])
        ranks.append(np.where(chain == NO_CHAIN, _GONE_FIRST, chain))
        kind = len(found) if contents.is_ordered(each.group) else each.group
        kinds.append(np.full(len(rows), kind))
        depths.append(np.append(leading.depths, NO_ROW)[places])
    order = np.lexsort((-np.concatenate(depths), np.concatenate(kinds), -np.concatenate(ranks)))
    victims: IndexArray = np.concatenate(blocks)[order]
    return victims


def _runs(pool: BlockPool, fitting: FittingLabels, found: _GroupChains) -> Iterator[CachedRun]:
    """Yield a run for each chain of a group, each after the one it continues."""
    labels, rows = fitting.groups[found.group], found.chains.rows
    size, digest_bytes = labels.tokens.shape[1], labels.digests.shape[1]
    block_ids = labels.block_ids[rows].tolist()
    digests = labels.digests[rows].view(f"V{digest_bytes}").ravel().tolist()
    tokens = labels.tokens[rows].ravel()
    keys = labels.keys[rows]
    starts = found.chains.starts.tolist()
    for start, end in pairwise(starts):
        namespace = fitting.namespaces[int(labels.namespaces[rows[start]])]
        extra_keys = [fitting.extra_keys[key] for key in keys[start:end].tolist()]
        yield CachedRun(
            table=pool.contents.table(namespace, found.group),
            block_ids=block_ids[start:end],
            digests=digests[start:end],
            parent=BlockHash(labels.parents[rows[start]].tobytes()),
            token_ids=int32_array(tokens[start * size : end * size]),
            block_size=size,
            extra_keys=tuple(extra_keys) if any(extra_keys) else (),
            request_id="",
            first_index=0,
        )
