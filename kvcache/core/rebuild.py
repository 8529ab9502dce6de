"""A tree from labels: what a restarted coordinator may keep of what workers still hold.

Stands between the label sets of all ranks and an empty core. Kept is what every rank agrees on; one
block of duplicate contents; in ordered groups no block without the one before it; in others no
block whose place in the tree nobody knows. A node's digest is made again from its tokens and must
be the label's. Refuses to guess: whatever does not fit is dropped, cold is correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.base.arrays import EMPTY_INT32, IndexArray, index_array, int32_array
from kvcache.base.errors import BlockError
from kvcache.core.columns import NODE, PARENT, STANDING, columns_of
from kvcache.core.group_labels import FIRST_BLOCK, NO_ROW, FittingLabels, fitting_labels
from kvcache.core.kinds.rule import FULL, KIND, LENGTH, SIZE
from kvcache.core.label_chains import NO_CHAIN, Chains, chains_of, depths_of
from kvcache.core.machine import (
    BOOK,
    INT,
    INT_ROWS,
    INTS,
    NEW_INTS,
    NOTHING,
    address_of,
    kernel,
)
from kvcache.core.pool import release_all, take_listed
from kvcache.core.prefix_tree import add_child, find_child, prune, put_block
from kvcache.protocol.label_agreement import agreed_labels, labelled_blocks
from kvcache.protocol.labels import LabelSet
from kvcache.requests.hash_algorithms import ExtraKeys

if TYPE_CHECKING:
    from kvcache.core.flat_core import FlatCore

_GONE_FIRST = np.iinfo(np.intp).max
"""The rank of blocks beside which the leading group has none: they are evicted before others."""


@kernel(INT, BOOK, INTS, INTS, INTS, INT_ROWS, INT_ROWS, NEW_INTS, checks_types=True)
def plant(
    book: Any, order: Any, above: Any, behind: Any, tokens: Any, keys: Any, nodes: Any
) -> int:
    """Make the nodes of labels, parents first, and write the last one of each label to `nodes`.

    Label `i` has `tokens[i]` and, unit by unit, the extra keys `keys[i]`. It continues label
    `above[i]`, or node `behind[i]` where that is not negative; 0: its place is not known. Returns
    how many nodes there was no room for.
    """
    c = columns_of(book)
    unit, lacking = c.tokens.shape[1], 0
    for k in range(len(order)):
        i = order[k]
        n = np.int64(behind[i])
        if above[i] >= 0:
            n = np.int64(nodes[above[i]])
        u, at = 0, address_of(tokens, i)
        while n and u < keys.shape[1]:
            child = find_child(book, n, np.int64(keys[i, u]), at)
            if child == 0:
                child = add_child(book, n, np.int64(keys[i, u]), at)
                lacking += child == 0
            n = child
            u += 1
            at += 4 * unit
        nodes[i] = n
    return lacking


@kernel(NOTHING, BOOK, INTS)
def prune_all(book: Any, nodes: Any) -> None:
    """Let nodes go that nothing keeps alive."""
    for i in range(len(nodes)):
        prune(book, np.int64(nodes[i]))


@dataclass(frozen=True, eq=False)
class _Kept:
    """What is kept of one group: chains of rows of its labels, the node of each row, and how many
    rows are before each (`NO_ROW`: it is not kept)."""

    group: int
    chains: Chains
    nodes: Any
    depths: IndexArray

    @property
    def rows(self) -> IndexArray:
        """All rows that are kept, chain after chain."""
        return self.chains.rows


def rebuild(core: FlatCore, labels: Sequence[LabelSet]) -> int:
    """Fill an empty core; return how many blocks were kept, all of them evictable.

    Withdraws every label that is not kept, and tells listeners: cleared, then all there is.

    Raises:
        BlockError: something is held or cached already; nothing was changed.
    """
    c = core.books.columns
    num_blocks = len(c.block)
    num_held = num_blocks - 1 - core.num_free_blocks()
    num_cached = int(np.count_nonzero(c.block[:, NODE]))
    if num_held or num_cached:
        raise BlockError(
            f"cannot restore: {num_held} blocks are in use and {num_cached} are cached: restore an "
            "empty pool"
        )
    sizes = c.group[:, SIZE].tolist() if core.can_hit else []
    fitting = fitting_labels(agreed_labels(labels), num_blocks, sizes, core.none_hash)
    kept = _plant_groups(core, fitting) if sizes else []
    victims = _victims(core, fitting, kept)
    labelled = labelled_blocks(labels, num_blocks)
    core.teller.cleared()
    core.teller.unlabel(int32_array(np.setdiff1d(labelled, victims, assume_unique=True)))
    take_listed(core.books.book, victims)
    for each in kept:
        ids = fitting.groups[each.group].block_ids
        for row in each.rows.tolist():
            put_block(core.books.book, int(each.nodes[row]), each.group, int(ids[row]))
        np.subtract.at(core.books.columns.node[:, STANDING], each.nodes[each.rows], 1)
        if core.tenants is not None:
            namespaces = fitting.groups[each.group].namespaces[each.rows]
            for place in np.unique(namespaces).tolist():
                account = core.tenants.account(fitting.namespaces[place])
                core.tenants.took(ids[each.rows[namespaces == place]], account)
    release_all(core.books.book, victims)
    for each in kept:
        if len(each.rows):
            core.teller.sealed(_notes(core, each), is_labelled=True)
    return len(victims)


def _plant_groups(core: FlatCore, fitting: FittingLabels) -> list[_Kept]:
    """Make the nodes of all labels whose place is known; ordered groups first, short blocks first,
    since others find their places behind those."""
    c = core.books.columns
    groups = sorted(
        range(core.books.num_groups), key=lambda g: (c.group[g, KIND] != FULL, c.group[g, SIZE])
    )
    places: dict[tuple[int, bytes], int] = {}
    return [_plant_group(core, fitting, g, places) for g in groups]


def _plant_group(
    core: FlatCore, fitting: FittingLabels, g: int, places: dict[tuple[int, bytes], int]
) -> _Kept:
    labels, length = fitting.groups[g], int(core.books.columns.group[g, LENGTH])
    is_ordered = core.books.columns.group[g, KIND] == FULL
    above = labels.parent_rows(core.none_hash)
    count = len(labels)
    behind = np.zeros(count, np.int32)
    roots = core.roots_of(fitting.namespaces)
    namespaces = labels.namespaces.tolist()
    for row in np.flatnonzero(above == FIRST_BLOCK).tolist():
        behind[row] = roots[namespaces[row]]
    keys = _unit_keys(core, fitting, labels.keys, length)
    unknown = (keys < 0).any(axis=1)
    if not is_ordered:  # the label before one may be lost or wrong, where others know the place
        for row in np.flatnonzero(above != FIRST_BLOCK).tolist():
            name = roots[namespaces[row]], labels.parents[row].tobytes()
            behind[row] = places.get(name, 0)
    nodes = np.zeros(count, np.int32)
    for row in np.flatnonzero(unknown).tolist():  # where others know what ends there
        name = roots[namespaces[row]], labels.digests[row].tobytes()
        nodes[row] = _node_of_block(core, places.get(name, 0), labels.tokens[row])
    depths = depths_of(np.where(behind > 0, FIRST_BLOCK, above))
    order = np.argsort(depths, kind="stable")
    order = order[(depths[order] != NO_ROW) & ~unknown[order]]
    core.reach_nodes(count * length)
    above_32 = int32_array(np.where(behind > 0, NO_ROW, above))
    tokens = np.ascontiguousarray(labels.tokens, np.int32)
    plant(
        core.books.book, int32_array(order), above_32, behind, tokens,
        np.ascontiguousarray(keys, np.int32), nodes,
    )  # fmt: skip
    rows = np.flatnonzero(nodes)
    core.digester.make(int32_array(nodes[rows]))
    c = core.books.columns
    is_right = (c.digest[nodes[rows]] == labels.digests[rows]).all(axis=1)
    rows = rows[is_right]
    if is_ordered:
        rows = _unbroken(rows, above, depths)
    dropped = np.setdiff1d(np.flatnonzero(nodes), rows)
    for row in rows[~unknown[rows]].tolist():
        n, root = int(nodes[row]), roots[namespaces[row]]
        for _ in range(length):
            places[root, c.digest[n].tobytes()] = n
            n = int(c.node[n, PARENT])
    np.add.at(c.node[:, STANDING], nodes[rows], 1)  # nothing else keeps them alive yet
    if len(dropped):
        prune_all(core.books.book, int32_array(nodes[dropped[np.argsort(-depths[dropped])]]))
    is_kept = np.zeros(count + 1, np.bool_)
    is_kept[rows] = True
    above = np.where(is_kept[np.maximum(above, NO_ROW)], above, FIRST_BLOCK)
    depths = np.where(is_kept[:count], depths_of(above), NO_ROW)
    return _Kept(g, chains_of(above, depths), nodes, depths)


def _node_of_block(core: FlatCore, n: int, tokens: Any) -> int:
    """Return node `n` if a block with these tokens ends there, else 0."""
    c, end = core.books.columns, n
    for own in reversed(tokens.reshape(-1, c.tokens.shape[1])):
        if not end or not np.array_equal(c.tokens[end], own):
            return 0
        end = int(c.node[end, PARENT])
    return n


def _unbroken(rows: IndexArray, above: IndexArray, depths: IndexArray) -> IndexArray:
    """Return those of `rows` all of whose rows above are among them."""
    is_kept = np.zeros(len(above) + 1, np.bool_)
    for row in rows[np.argsort(depths[rows], kind="stable")].tolist():
        is_kept[row] = above[row] == FIRST_BLOCK or is_kept[above[row]]
    found: IndexArray = rows[is_kept[rows]]
    return found


def _unit_keys(core: FlatCore, fitting: FittingLabels, numbers: Any, length: int) -> Any:
    """Return the numbers of extra keys, unit by unit, of blocks with these keys; -1 where they
    cannot be told: an item may reach into any unit of a longer block."""
    table = np.zeros((len(fitting.extra_keys), length), np.int32)
    for i, keys in enumerate(fitting.extra_keys):
        if not keys:
            continue
        if length > 1 and any(key[0] == "mm" for key in keys):
            table[i] = -1
            continue
        table[i] = core.digester.number_of(keys)
        if length > 1:
            others: ExtraKeys = tuple([key for key in keys if key[0] != "cache_salt"])
            table[i, 1:] = core.digester.number_of(others)
    return table[numbers]


def _victims(core: FlatCore, fitting: FittingLabels, found: Sequence[_Kept]) -> Any:
    """Return all kept blocks in the order in which they are to be evicted.

    As if the leading group's chains had been freed one by one, the last one first, and with each of
    them what other groups have beside it: blocks that can go one by one before those of ordered
    groups, tails before heads. Leading is the ordered group of the shortest blocks.
    """
    if not found:
        return EMPTY_INT32
    group = core.books.columns.group
    leading = found[0]
    chain_of = np.append(leading.chains.of_rows(len(leading.depths)), NO_CHAIN)
    lead_depths = np.append(leading.depths, NO_ROW)
    row_of_node = {int(leading.nodes[row]): row for row in leading.rows.tolist()}
    blocks, ranks, kinds, depths = [], [], [], []
    for each in found:
        places = index_array(
            [row_of_node.get(int(each.nodes[row]), NO_ROW) for row in each.rows.tolist()]
        )
        chain, depth = chain_of[places], lead_depths[places]
        if group[each.group, KIND] == FULL:
            depth = each.depths[each.rows] * int(group[each.group, LENGTH])
            _follow_children(core, each, chain, depth)
        blocks.append(fitting.groups[each.group].block_ids[each.rows])
        ranks.append(np.where(chain == NO_CHAIN, _GONE_FIRST, chain))
        kind = len(found) if group[each.group, KIND] == FULL else each.group
        kinds.append(np.full(len(each.rows), kind))
        depths.append(depth)
    order = np.lexsort((-np.concatenate(depths), np.concatenate(kinds), -np.concatenate(ranks)))
    return int32_array(np.concatenate(blocks)[order])


def _follow_children(core: FlatCore, kept: _Kept, chain: Any, depth: Any) -> None:
    """Evict blocks that are in no leading chain with the first chain that continues them."""
    c = core.books.columns
    place_of = {int(kept.nodes[row]): i for i, row in enumerate(kept.rows.tolist())}
    for i in np.argsort(-depth, kind="stable").tolist():
        n = int(kept.nodes[kept.rows[i]])
        for _ in range(c.group.item(kept.group, LENGTH)):
            n = c.node.item(n, PARENT)
        above = place_of.get(n)
        if above is None or chain[i] == NO_CHAIN:
            continue
        if chain[above] == NO_CHAIN or chain[i] < chain[above]:
            chain[above] = chain[i]


def _notes(core: FlatCore, kept: _Kept) -> Any:
    """Return what there is to tell of one group, chain after chain, parents first."""
    notes = np.zeros((len(kept.rows), 5), np.int32)
    notes[:, 0] = kept.nodes[kept.rows]
    notes[:, 1], notes[:, 2] = kept.group, -1
    notes[:, 4] = [core.root_of(n) for n in notes[:, 0].tolist()]
    return notes
