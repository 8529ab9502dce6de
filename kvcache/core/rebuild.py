"""Rebuild: fills an empty core from the labels that workers have after a coordinator restarts.

A block is kept if every rank agrees on its label and its place in the tree is known. Of duplicate
blocks one is kept. A block of a prefix group also needs the block before it. Each node's digest is
recomputed from its tokens and must match the label. Everything else is dropped: a cold block is
always correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import EMPTY_INT32, IndexArray, Int32Array, index_array, int32_array
from kvcache.base.errors import BlockError, MalformedMessageError
from kvcache.core.columns import columns_of
from kvcache.core.kinds.rule import FULL, KIND, LENGTH, SIZE
from kvcache.core.machine import (
    CORE,
    INT,
    INT_ROWS,
    INTS,
    NEW_INTS,
    NOTHING,
    address_of,
    kernel,
)
from kvcache.core.names import *
from kvcache.core.pool import release_all, take_listed
from kvcache.core.prefix_tree import add_child, find_child, prune, put_block
from kvcache.protocol.commands import Label
from kvcache.protocol.label_agreement import NO_LABELS, agreed_labels, labelled_blocks
from kvcache.protocol.labels import LabelSet, parse_extra_keys
from kvcache.requests.hash_algorithms import ExtraKey, ExtraKeys
from kvcache.requests.request_content import (
    LoRARequest,
    Namespace,
    lora_label,
    namespace_name,
    parse_namespace_name,
)
from kvcache.specs import NULL_BLOCK_ID

if TYPE_CHECKING:
    from kvcache.core.flat_core import FlatCore

DigestRows: TypeAlias = npt.NDArray[np.uint8]
"""Digests, one per row."""

TokenRows: TypeAlias = npt.NDArray[np.int32]
"""Tokens of blocks, one block per row."""

NO_ROW = -1
"""Stands for the number of a row if there is none."""

FIRST_BLOCK = -2
"""Stands for the number of the previous row if a row is a first block."""

_NO_KEYS = 0
_UNREADABLE = -1


@dataclass(frozen=True, eq=False)
class GroupLabels:
    """The contents of one group, each in one block, in order of block ids. Immutable.

    `namespaces` and `keys` are indices into the lists of `FittingLabels`. `rows` has the row of
    each content by its name; see `content_names`.
    """

    block_ids: IndexArray
    namespaces: Int32Array
    digests: DigestRows
    parents: DigestRows
    tokens: TokenRows
    keys: Int32Array
    rows: dict[bytes, int]

    def __len__(self) -> int:
        return len(self.block_ids)

    def parent_rows(self, none_hash: bytes) -> IndexArray:
        """Return the row before each one; `FIRST_BLOCK` if its parent digest is the none hash."""
        names = content_names(self.namespaces, self.parents)
        above = np.fromiter(map(self.rows.get, names, repeat(NO_ROW)), np.intp, len(names))
        above[(self.parents == np.frombuffer(none_hash, np.uint8)).all(axis=1)] = FIRST_BLOCK
        return above


@dataclass(frozen=True, eq=False)
class FittingLabels:
    """The labels that fit a plan, by group; the namespaces and extra keys that they refer to."""

    groups: tuple[GroupLabels, ...]
    namespaces: tuple[Namespace, ...]
    extra_keys: tuple[ExtraKeys | None, ...]


def content_names(namespaces: Int32Array, digests: DigestRows) -> list[bytes]:
    """Return bytes for each content; equal exactly for equal namespaces and digests."""
    count, size = digests.shape
    if not count:
        return []
    names = np.empty((count, 4 + size), dtype=np.uint8)
    names[:, :4] = namespaces.astype("<i4").view(np.uint8).reshape(-1, 4)
    names[:, 4:] = digests
    # A void item becomes a bytes object of its full length, trailing zeros included.
    found: list[bytes] = names.view(f"V{4 + size}").ravel().tolist()
    return found


def fitting_labels(
    label: Label, num_blocks: int, block_sizes: Sequence[int], none_hash: bytes
) -> FittingLabels:
    """Return the sealed labels that fit a plan. Changes nothing, raises nothing.

    `block_sizes[g]` is the block size of group `g`. Nothing fits unless digests are as long as
    `none_hash`.
    """
    size = len(none_hash)
    if len(label.digests) != len(label.block_ids) * size:
        label = NO_LABELS
    sizes = int32_array([*block_sizes, -1])  # the last one stands for no group
    is_group = (label.groups >= 0) & (label.groups < len(block_sizes))
    fits = label.token_counts == sizes[np.where(is_group, label.groups, len(block_sizes))]
    fits &= (label.block_ids > NULL_BLOCK_ID) & (label.block_ids < num_blocks)
    digests = np.frombuffer(label.digests, np.uint8).reshape(-1, size)
    fits &= (digests != np.frombuffer(none_hash, np.uint8)).any(axis=1)
    if len(label.token_ids) and int(label.token_ids.min()) < 0:
        below = np.flatnonzero(label.token_ids < 0)
        fits[np.searchsorted(np.cumsum(label.token_counts), below, side="right")] = False
    rows = np.flatnonzero(fits)
    return _read(label, rows[np.argsort(label.block_ids[rows])], block_sizes, size)


def _read(
    label: Label, rows: IndexArray, block_sizes: Sequence[int], digest_bytes: int
) -> FittingLabels:
    """Read the namespaces and extra keys of these labels, and sort the labels by group."""
    numbers, namespaces = _namespaces(label, rows)
    keys, extra_keys = _extra_keys(label)
    is_readable = _are_readable(numbers[rows], namespaces, keys[rows], extra_keys)
    rows = rows[is_readable]
    groups = []
    ends = np.cumsum(label.token_counts)
    digests = np.frombuffer(label.digests, np.uint8).reshape(-1, digest_bytes)
    parents = np.frombuffer(label.parent_digests, np.uint8).reshape(-1, digest_bytes)
    for group, block_size in enumerate(block_sizes):
        here = rows[label.groups[rows] == group]
        names = content_names(numbers[here], digests[here])
        firsts: dict[bytes, int] = {}  # the first block of each content
        for place, name in enumerate(names):
            firsts.setdefault(name, place)
        here = here[[*firsts.values()]]
        groups.append(
            GroupLabels(
                index_array(label.block_ids[here]),
                namespaces=numbers[here],
                digests=digests[here],
                parents=parents[here],
                tokens=label.token_ids[ends[here, None] + np.arange(-block_size, 0)],
                keys=keys[here],
                rows={name: row for row, name in enumerate(firsts)},
            )
        )
    return FittingLabels(tuple(groups), namespaces, extra_keys)


def _namespaces(label: Label, rows: IndexArray) -> tuple[Int32Array, tuple[Namespace, ...]]:
    """Return each label's namespace number, `_UNREADABLE` if it has none, and the namespaces."""
    known: dict[Namespace, int] = {}
    numbers = np.full(len(label.namespace_names), _UNREADABLE, dtype=np.int32)
    for index in np.unique(label.namespaces[rows]).tolist():
        name = label.namespace_names[index]
        try:
            namespace = parse_namespace_name(name)
        except MalformedMessageError:
            continue
        if namespace_name(namespace) == name:  # each namespace has one name, so it has one tree
            numbers[index] = known.setdefault(namespace, len(known))
    return numbers[label.namespaces], tuple(known)


def _extra_keys(label: Label) -> tuple[Int32Array, tuple[ExtraKeys | None, ...]]:
    """Return each label's extra keys by number, `_UNREADABLE` if they are none, and the keys."""
    column = np.full(len(label.block_ids), _NO_KEYS, dtype=np.int32)
    found: dict[ExtraKeys | None, int] = {None: _NO_KEYS}
    numbers: dict[bytes, int] = {}
    for data in dict.fromkeys(label.extra_keys.values()):
        try:
            numbers[data] = found.setdefault(parse_extra_keys(data), len(found))
        except MalformedMessageError:
            numbers[data] = _UNREADABLE
    if numbers:
        column[list(label.extra_keys)] = [numbers[data] for data in label.extra_keys.values()]
    return column, tuple(found)


def _are_readable(
    namespaces: Int32Array,
    names: Sequence[Namespace],
    keys: Int32Array,
    extra_keys: Sequence[ExtraKeys | None],
) -> npt.NDArray[np.bool_]:
    """Return which rows have a namespace and keys that can belong together."""
    readable: npt.NDArray[np.bool_] = (namespaces != _UNREADABLE) & (keys != _UNREADABLE)
    if len(names) <= 1 and len(extra_keys) == 1:
        return readable & all(_belong(name, None) for name in names)
    pairs = namespaces.astype(np.int64) * len(extra_keys) + keys
    found, places = np.unique(pairs[readable], return_inverse=True)
    belong = [
        _belong(names[pair // len(extra_keys)], extra_keys[pair % len(extra_keys)])
        for pair in found.tolist()
    ]
    readable[readable] = np.array(belong, dtype=np.bool_)[places]
    return readable


def _belong(namespace: Namespace, keys: ExtraKeys | None) -> bool:
    """Return whether a block of a namespace can have these keys: its adapter, and no other salt."""
    adapters = [_adapter(key) for key in keys or () if key[0] == "lora"]
    salts = [key[1] for key in keys or () if key[0] == "cache_salt"]
    return adapters == ([] if namespace.lora is None else [namespace.lora]) and (
        not salts or salts == [namespace.salt]
    )


def _adapter(key: ExtraKey) -> str | None:
    """Return the name that the adapter of an extra key has in a namespace."""
    if len(key) != 3 or not key[1] or not isinstance(key[2], str):
        return None
    return lora_label(LoRARequest(key[1], key[2]))


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


def rebuild(core: FlatCore, labels: Sequence[LabelSet]) -> int:
    """Fill an empty core; return how many blocks were kept. All of them are evictable.

    Drops every label that is not kept, and emits events: cleared, then everything kept.

    Raises:
        BlockError: a block is referenced or cached already; nothing was changed.
    """
    c = core.store.columns
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
    kept = _rebuild_groups(core, fitting) if sizes else []
    ranks = _ranks(core)
    victims = _victims(core, kept, ranks)
    labelled = labelled_blocks(labels, num_blocks)
    core.notifier.cleared()
    core.notifier.unlabel(int32_array(np.setdiff1d(labelled, victims, assume_unique=True)))
    take_listed(core.store.address, victims)
    for g, ids, nodes, namespaces in kept:
        for b, n in zip(ids.tolist(), nodes.tolist(), strict=True):
            put_block(core.store.address, n, g, b)
        np.subtract.at(core.store.columns.node[:, ROWS], nodes, 1)
        if core.tenants is not None:
            for number in np.unique(namespaces).tolist():
                account = core.tenants.account(fitting.namespaces[number])
                core.tenants.took(ids[namespaces == number], account)
    release_all(core.store.address, victims)
    for g, _, nodes, _ in kept:
        notes = np.zeros((len(nodes), 5), np.int32)
        notes[:, 0] = nodes[np.argsort(ranks[nodes])]
        notes[:, 1], notes[:, 2] = g, -1
        notes[:, 4] = [core.store.root_of(n) for n in notes[:, 0].tolist()]
        core.notifier.sealed(notes, is_labelled=True)
    return len(victims)


def _rebuild_groups(core: FlatCore, fitting: FittingLabels) -> list[_Kept]:
    """Add the nodes of all labels whose place is known. Prefix groups come first, and short blocks
    before long ones, because other groups find their places from their nodes."""
    c = core.store.columns
    groups = sorted(
        range(core.store.num_groups), key=lambda g: (c.group[g, KIND] != FULL, c.group[g, SIZE])
    )
    places: dict[tuple[int, bytes], int] = {}
    return [_rebuild_group(core, fitting, g, places) for g in groups]


def _rebuild_group(
    core: FlatCore, fitting: FittingLabels, g: int, places: dict[tuple[int, bytes], int]
) -> _Kept:
    labels, length = fitting.groups[g], int(core.store.columns.group[g, LENGTH])
    is_prefix_group = core.store.columns.group[g, KIND] == FULL
    above = labels.parent_rows(core.none_hash)
    count = len(labels)
    behind = np.zeros(count, np.int32)
    roots = core.roots_of(fitting.namespaces)
    namespaces = labels.namespaces.tolist()
    for row in np.flatnonzero(above == FIRST_BLOCK).tolist():
        behind[row] = roots[namespaces[row]]
    keys = _unit_keys(core, fitting, labels.keys, length)
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
        nodes[row] = _node_of_block(core, places.get(name, 0), labels.tokens[row])
    order = _in_order(above, behind)
    core.reach_nodes(count * length)
    above_32 = int32_array(np.where(behind > 0, NO_ROW, above))
    tokens = np.ascontiguousarray(labels.tokens, np.int32)
    add_nodes(
        core.store.address, order[~unknown[order]], above_32, behind, tokens,
        np.ascontiguousarray(keys, np.int32), nodes,
    )  # fmt: skip
    rows = np.flatnonzero(nodes)
    core.digester.make(int32_array(nodes[rows]))
    c = core.store.columns
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
    prune_all(core.store.address, nodes[(nodes != 0) & ~is_kept])
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


def _node_of_block(core: FlatCore, n: int, tokens: Any) -> int:
    """Return node `n` if a block with these tokens ends there, else 0."""
    c, end = core.store.columns, n
    for own in reversed(tokens.reshape(-1, c.tokens.shape[1])):
        if not end or not np.array_equal(c.tokens[end], own):
            return 0
        end = int(c.node[end, PARENT])
    return n


def _unit_keys(core: FlatCore, fitting: FittingLabels, numbers: Any, length: int) -> Any:
    """Return the numbers of the extra keys of each unit of blocks with these keys. -1: unknown,
    because a multimodal item may reach into any unit of a longer block."""
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


def _ranks(core: FlatCore) -> Int32Array:
    """Return the rank of each node in a walk that goes through each branch of the tree, from its
    first node on, before the next."""
    c = core.store.columns
    following: dict[int, list[int]] = {}
    for n, parent in enumerate(c.node[: c.number[NEXT_NODE], PARENT].tolist()):
        if parent:
            following.setdefault(parent, []).append(n)
    ranks, left, rank = np.zeros(len(c.node), np.int32), list(core.roots.values()), 0
    while left:
        ranks[n := left.pop()] = rank
        rank += 1
        left += following.get(n, ())
    return ranks


def _victims(core: FlatCore, found: Sequence[_Kept], ranks: Int32Array) -> Int32Array:
    """Return all kept blocks in the order in which they are to be evicted: branch by branch, each
    from its last node on. Of one node, blocks of windowed groups go before those of prefix
    groups."""
    if not found:
        return EMPTY_INT32
    blocks = np.concatenate([each.block_ids for each in found])
    places = ranks[np.concatenate([each.nodes for each in found])]
    are_last = core.store.columns.group[[each.group for each in found], KIND] == FULL
    kinds = np.repeat(are_last, [len(each.nodes) for each in found])
    return int32_array(blocks[np.lexsort((kinds, -places))])
