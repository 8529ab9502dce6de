"""Rebuild: fills an empty core from the labels that workers have after a coordinator restarts.

A block is kept if every rank agrees on its label and its place in the tree is known. Of duplicate
blocks one is kept. A block of a prefix group also needs the block before it. Each node's digest is
recomputed from its tokens and must match the label. Everything else is dropped: a cold block is
always correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvcache.base.arrays import EMPTY_INT32, IndexArray, Int32Array, int32_array
from kvcache.base.errors import BlockError
from kvcache.core.columns import columns_of
from kvcache.core.kinds.rule import FULL, KIND, LENGTH, SIZE
from kvcache.core.machine import CORE, INT, INT_ROWS, INTS, NEW_INTS, NOTHING, address_of, kernel
from kvcache.core.names import *
from kvcache.core.pool import release_all, take_listed
from kvcache.core.prefix_tree import add_child, find_child, prune, put_block
from kvcache.protocol.fitting_labels import FIRST_BLOCK, NO_ROW, FittingLabels, fitting_labels
from kvcache.protocol.label_agreement import agreed_labels, labelled_blocks
from kvcache.protocol.labels import LabelSet
from kvcache.requests.hash_algorithms import ExtraKeys

if TYPE_CHECKING:
    from kvcache.core.prefix_cache import PrefixCache


@kernel(INT, CORE, INTS, INTS, INTS, INT_ROWS, INT_ROWS, NEW_INTS, checks_types=True)
def add_nodes(
    core: Any, order: Any, above: Any, behind: Any, tokens: Any, keys: Any, nodes: Any
) -> int:
    """Add the nodes of labels, parents first, and write the last node of each label to `nodes`.

    Label `i` has `tokens[i]` and, unit by unit, the extra keys `keys[i]`. It continues label
    `above[i]` if that is not negative, otherwise node `behind[i]` (0: its place is unknown). Return
    how many nodes did not fit.
    """
    c = columns_of(core)
    unit, lacking = c.tokens.shape[1], 0
    for k in range(len(order)):
        i = order[k]
        n = np.int64(behind[i])
        if above[i] >= 0:
            n = np.int64(nodes[above[i]])
        u, at = 0, address_of(tokens, i)
        while n and u < keys.shape[1]:
            child = find_child(core, n, np.int64(keys[i, u]), at)
            if child == 0:
                child = add_child(core, n, np.int64(keys[i, u]), at)
                lacking += child == 0
            n = child
            u += 1
            at += 4 * unit
        nodes[i] = n
    return lacking


@kernel(NOTHING, CORE, INTS)
def prune_all(core: Any, nodes: Any) -> None:
    """Remove nodes that nothing keeps alive."""
    for i in range(len(nodes)):
        prune(core, np.int64(nodes[i]))


class _Kept(NamedTuple):
    """The kept blocks of one group, with their nodes and the numbers of their namespaces."""

    group: int
    block_ids: Int32Array
    nodes: Int32Array
    namespaces: Int32Array


def rebuild(cache: PrefixCache, labels: Sequence[LabelSet]) -> int:
    """Fill an empty core; return how many blocks were kept. All of them are evictable.

    Drops every label that is not kept, and emits events: cleared, then everything kept.

    Raises:
        BlockError: a block is referenced or cached already; nothing was changed.
    """
    c = cache.store.columns
    num_blocks = len(c.block)
    num_held = num_blocks - 1 - cache.num_free_blocks()
    num_cached = int(np.count_nonzero(c.block[:, NODE]))
    if num_held or num_cached:
        raise BlockError(
            f"cannot restore: {num_held} blocks are in use and {num_cached} are cached: restore an "
            "empty pool"
        )
    sizes = c.group[:, SIZE].tolist() if cache.can_hit else []
    fitting = fitting_labels(agreed_labels(labels), num_blocks, sizes, cache.none_hash)
    kept = _rebuild_groups(cache, fitting) if sizes else []
    ranks = _ranks(cache)
    victims = _victims(cache, kept, ranks)
    labelled = labelled_blocks(labels, num_blocks)
    cache.notifier.cleared()
    cache.notifier.unlabel(int32_array(np.setdiff1d(labelled, victims, assume_unique=True)))
    take_listed(cache.store.address, victims)
    for g, ids, nodes, namespaces in kept:
        for b, n in zip(ids.tolist(), nodes.tolist(), strict=True):
            put_block(cache.store.address, n, g, b)
        np.subtract.at(cache.store.columns.node[:, ROWS], nodes, 1)
        if cache.tenants is not None:
            for number in np.unique(namespaces).tolist():
                account = cache.tenants.account(fitting.namespaces[number])
                cache.tenants.took(ids[namespaces == number], account)
    release_all(cache.store.address, victims)
    for g, _, nodes, _ in kept:
        notes = np.zeros((len(nodes), 5), np.int32)
        notes[:, 0] = nodes[np.argsort(ranks[nodes])]
        notes[:, 1], notes[:, 2] = g, -1
        notes[:, 4] = [cache.store.root_of(n) for n in notes[:, 0].tolist()]
        cache.notifier.sealed(notes, is_labelled=True)
    return len(victims)


def _rebuild_groups(cache: PrefixCache, fitting: FittingLabels) -> list[_Kept]:
    """Add the nodes of all labels whose place is known. Prefix groups come first, and short blocks
    before long ones, because other groups find their places from their nodes."""
    c = cache.store.columns
    groups = sorted(
        range(cache.store.num_groups), key=lambda g: (c.group[g, KIND] != FULL, c.group[g, SIZE])
    )
    places: dict[tuple[int, bytes], int] = {}
    return [_rebuild_group(cache, fitting, g, places) for g in groups]


def _rebuild_group(
    cache: PrefixCache, fitting: FittingLabels, g: int, places: dict[tuple[int, bytes], int]
) -> _Kept:
    labels, length = fitting.groups[g], int(cache.store.columns.group[g, LENGTH])
    is_prefix_group = cache.store.columns.group[g, KIND] == FULL
    above = labels.parent_rows(cache.none_hash)
    count = len(labels)
    behind = np.zeros(count, np.int32)
    roots = cache.roots_of(fitting.namespaces)
    namespaces = labels.namespaces.tolist()
    for row in np.flatnonzero(above == FIRST_BLOCK).tolist():
        behind[row] = roots[namespaces[row]]
    keys = _unit_keys(cache, fitting, labels.keys, length)
    unknown = (keys < 0).any(axis=1)
    if not is_prefix_group:
        # The previous label may be lost or wrong, but other groups may know the place.
        for row in np.flatnonzero(above != FIRST_BLOCK).tolist():
            name = roots[namespaces[row]], labels.parents[row].tobytes()
            behind[row] = places.get(name, 0)
    nodes = np.zeros(count, np.int32)
    for row in np.flatnonzero(unknown).tolist():
        # Other groups may know the node that ends there.
        name = roots[namespaces[row]], labels.digests[row].tobytes()
        nodes[row] = _node_of_block(cache, places.get(name, 0), labels.tokens[row])
    order = _in_order(above, behind)
    cache.reach_nodes(count * length)
    above_32 = int32_array(np.where(behind > 0, NO_ROW, above))
    tokens = np.ascontiguousarray(labels.tokens, np.int32)
    add_nodes(
        cache.store.address, order[~unknown[order]], above_32, behind, tokens,
        np.ascontiguousarray(keys, np.int32), nodes,
    )  # fmt: skip
    rows = np.flatnonzero(nodes)
    cache.digester.make(int32_array(nodes[rows]))
    c = cache.store.columns
    is_kept = np.zeros(count, np.bool_)
    is_kept[rows] = (c.digest[nodes[rows]] == labels.digests[rows]).all(axis=1)
    if is_prefix_group:
        is_whole = np.zeros(count, np.bool_)
        for row in order.tolist():
            is_whole[row] = is_kept[row] and (behind[row] or is_whole[above[row]])
        is_kept = is_whole
    rows = np.flatnonzero(is_kept)
    for row in rows[~unknown[rows]].tolist():
        n, root = int(nodes[row]), roots[namespaces[row]]
        for _ in range(length):
            places[root, c.digest[n].tobytes()] = n
            n = int(c.node[n, PARENT])
    np.add.at(c.node[:, ROWS], nodes[rows], 1)  # keeps them alive until they have blocks
    prune_all(cache.store.address, nodes[(nodes != 0) & ~is_kept])
    block_ids = int32_array(labels.block_ids[rows])
    return _Kept(g, block_ids, nodes[rows], labels.namespaces[rows])


def _in_order(above: IndexArray, behind: Any) -> Int32Array:
    """Return the rows with a known place: those behind a known node, and those that continue them,
    each after the one before it. `above` and `behind` are those of `add_nodes`."""
    following: dict[int, list[int]] = {}
    for row in np.flatnonzero(behind == 0).tolist():
        following.setdefault(int(above[row]), []).append(row)
    order = np.flatnonzero(behind).tolist()
    for row in order:  # grows on the way
        order += following.get(row, ())
    return int32_array(order)


def _node_of_block(cache: PrefixCache, n: int, tokens: Any) -> int:
    """Return node `n` if a block with these tokens ends there, else 0."""
    c, end = cache.store.columns, n
    for own in reversed(tokens.reshape(-1, c.tokens.shape[1])):
        if not end or not np.array_equal(c.tokens[end], own):
            return 0
        end = int(c.node[end, PARENT])
    return n


def _unit_keys(cache: PrefixCache, fitting: FittingLabels, numbers: Any, length: int) -> Any:
    """Return the numbers of the extra keys of each unit of blocks with these keys. -1: unknown,
    because a multimodal item may reach into any unit of a longer block."""
    table = np.zeros((len(fitting.extra_keys), length), np.int32)
    for i, keys in enumerate(fitting.extra_keys):
        if not keys:
            continue
        if length > 1 and any(key[0] == "mm" for key in keys):
            table[i] = -1
            continue
        table[i] = cache.digester.number_of(keys)
        if length > 1:
            others: ExtraKeys = tuple([key for key in keys if key[0] != "cache_salt"])
            table[i, 1:] = cache.digester.number_of(others)
    return table[numbers]


def _ranks(cache: PrefixCache) -> Int32Array:
    """Return the rank of each node in a walk that goes through each branch of the tree, from its
    first node on, before the next."""
    c = cache.store.columns
    following: dict[int, list[int]] = {}
    for n, parent in enumerate(c.node[: c.number[NEXT_NODE], PARENT].tolist()):
        if parent:
            following.setdefault(parent, []).append(n)
    ranks, left, rank = np.zeros(len(c.node), np.int32), list(cache.roots.values()), 0
    while left:
        ranks[n := left.pop()] = rank
        rank += 1
        left += following.get(n, ())
    return ranks


def _victims(cache: PrefixCache, found: Sequence[_Kept], ranks: Int32Array) -> Int32Array:
    """Return all kept blocks in the order in which they are to be evicted: branch by branch, each
    from its last node on. Of one node, blocks of windowed groups go before those of prefix
    groups."""
    if not found:
        return EMPTY_INT32
    blocks = np.concatenate([each.block_ids for each in found])
    places = ranks[np.concatenate([each.nodes for each in found])]
    are_last = cache.store.columns.group[[each.group for each in found], KIND] == FULL
    kinds = np.repeat(are_last, [len(each.nodes) for each in found])
    return int32_array(blocks[np.lexsort((kinds, -places))])
