"""The units that labels tell of: what a tree is rebuilt from.

Between labels, which speak of blocks, and the rebuild, which makes runs of units. The ordered group
whose blocks are one unit long has a label for each. Where there is none, units are put together
from whoever has them: labels of other groups with such short blocks, and blocks of several units,
whose digest is that of their last one; those of the others are hashed anew. Refuses to say which
units are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvcache.arrays import IndexArray
from kvcache.blocks.label_digests import digests_of_units, keys_of_later_units
from kvcache.core.group_labels import (
    FIRST_BLOCK,
    NO_ROW,
    FittingLabels,
    GroupLabels,
)
from kvcache.extents.shape import GroupShape, TreeShape
from kvcache.hash_algorithms import HashFn
from kvcache.hashing import BlockHash, ExtraKeys
from kvcache.request import Namespace


@dataclass(frozen=True, eq=False)
class LabelUnits:
    """Units, each a row of `labels`, whose `tokens` are `unit_tokens` wide.

    `items[k]` are the multimodal ones of `extra_keys[k]`.
    """

    labels: GroupLabels
    namespaces: tuple[Namespace, ...]
    extra_keys: tuple[ExtraKeys | None, ...]
    items: tuple[ExtraKeys, ...]
    is_of_ordered_group: bool

    def namespace(self, row: int) -> Namespace:
        """Return the namespace of a unit."""
        return self.namespaces[int(self.labels.namespaces[row])]


@dataclass(frozen=True, eq=False)
class UnitLinks:
    """The unit before each one, and how many are before it: see `depths_of`."""

    above: IndexArray
    depths: IndexArray
    none_hash: bytes


def units_of(
    fitting: FittingLabels, shape: TreeShape, hash_fn: HashFn, none_hash: bytes
) -> LabelUnits:
    """Return all units that the labels of a plan tell of, each once. Changes nothing."""
    for group in shape.ordered:
        if group.num_units == 1:
            return _units(fitting, fitting.groups[group.index], fitting.extra_keys, is_ordered=True)
    splitter = _Splitter(fitting, shape, hash_fn, none_hash)
    parts = [
        fitting.groups[group.index] if group.num_units == 1 else splitter.split(group)
        for group in shape.groups
        if group.num_units == 1 or group.is_ordered or not shape.ordered
    ]
    labels = GroupLabels.first_of_each(
        np.concatenate([part.block_ids for part in parts]),
        namespaces=np.concatenate([part.namespaces for part in parts]),
        digests=np.concatenate([part.digests for part in parts]),
        parents=np.concatenate([part.parents for part in parts]),
        tokens=np.concatenate([part.tokens for part in parts]),
        keys=np.concatenate([part.keys for part in parts]),
    )
    return _units(fitting, labels, tuple(splitter.extra_keys), is_ordered=False)


def blocks_beside(
    fitting: FittingLabels, shape: TreeShape, units: LabelUnits, links: UnitLinks
) -> npt.NDArray[np.intp]:
    """Return the block of each group that ends with each unit, 0 where there is none.

    A block whose tokens, keys or parent are not those of the units it stands for is none of theirs.
    Shape: `(groups, units)`. Units without a depth have no blocks.
    """
    blocks = np.zeros((len(shape.groups), len(units.labels)), dtype=np.intp)
    has_depth = links.depths != NO_ROW
    for group in shape.groups:
        labels = fitting.groups[group.index]
        if labels is units.labels:
            blocks[group.index, has_depth] = labels.block_ids[has_depth]
            continue
        rows = labels.rows_of(units.labels.names)
        is_end = has_depth & ((links.depths + 1) % group.num_units == 0)
        found = np.flatnonzero((rows != NO_ROW) & is_end)
        rows = rows[found]
        fits = _are_of_units(labels, rows, units, found, links)
        blocks[group.index, found[fits]] = labels.block_ids[rows[fits]]
    return blocks


def _are_of_units(
    labels: GroupLabels, rows: IndexArray, units: LabelUnits, last: IndexArray, links: UnitLinks
) -> npt.NDArray[np.bool_]:
    """Say which blocks are made of the units that end with `last`."""
    size, width = units.labels.tokens.shape[1], labels.tokens.shape[1]
    fits = np.ones(len(rows), dtype=np.bool_)
    if width == size:
        fits &= labels.keys[rows] == units.labels.keys[last]
    unit = last
    for end in range(width, 0, -size):
        tokens = labels.tokens[rows, end - size : end]
        fits &= (tokens == units.labels.tokens[unit]).all(axis=1)
        unit = links.above[unit]
    digests = np.concatenate((units.labels.digests, [np.frombuffer(links.none_hash, np.uint8)]))
    fits &= (labels.parents[rows] == digests[np.where(unit == FIRST_BLOCK, -1, unit)]).all(axis=1)
    return fits


def _units(
    fitting: FittingLabels,
    labels: GroupLabels,
    extra_keys: tuple[ExtraKeys | None, ...],
    *,
    is_ordered: bool,
) -> LabelUnits:
    items = tuple(tuple(key for key in keys or () if key[0] == "mm") for keys in extra_keys)
    return LabelUnits(labels, fitting.namespaces, extra_keys, items, is_ordered)


class _Splitter:
    """Cuts blocks of several units into these. `extra_keys` are all that units have."""

    def __init__(
        self, fitting: FittingLabels, shape: TreeShape, hash_fn: HashFn, none_hash: bytes
    ) -> None:
        self.extra_keys = list(fitting.extra_keys)
        self._fitting = fitting
        self._shape = shape
        self._hash_fn = hash_fn
        self._none_hash = none_hash
        self._numbers = {keys: number for number, keys in enumerate(fitting.extra_keys)}

    def split(self, group: GroupShape) -> GroupLabels:
        """Return the units of a group's blocks, but for blocks whose digest is not theirs.

        Nor for those with multimodal items: their keys do not say which units items end in.
        """
        labels, count = self._fitting.groups[group.index], group.num_units
        firsts: list[int] = []
        digests: list[bytes] = []
        keys: list[int] = []
        for row in range(len(labels)):
            found = self._digests(labels, row, count)
            if found is not None:
                firsts.append(row)
                digests += found[0]
                keys += found[1]
        rows = np.repeat(np.array(firsts, dtype=np.intp), count)
        size = self._shape.digest_bytes
        packed = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, size)
        parents = np.roll(packed, 1, axis=0)
        parents[::count] = labels.parents[rows[::count]]
        return replace(
            labels,
            block_ids=labels.block_ids[rows],
            namespaces=labels.namespaces[rows],
            digests=packed,
            parents=parents,
            tokens=labels.tokens[rows[::count]].reshape(-1, self._shape.unit_tokens),
            keys=np.array(keys, dtype=np.int32),
            names=[],
            rows={},
        )

    def _digests(
        self, labels: GroupLabels, row: int, count: int
    ) -> tuple[list[BlockHash], list[int]] | None:
        """Return digests and numbers of keys of a block's units, None where they do not fit."""
        extra_keys = self.extra_keys[int(labels.keys[row])]
        tokens, parent = labels.tokens[row].tobytes(), BlockHash(labels.parents[row].tobytes())
        size = self._shape.unit_tokens
        digests = digests_of_units(self._hash_fn, parent, tokens, size, extra_keys)
        if digests is None or digests[-1] != labels.digests[row].tobytes():
            return None
        later = self._number(keys_of_later_units(extra_keys))
        return digests, [self._number(extra_keys)] + [later] * (count - 1)

    def _number(self, keys: ExtraKeys | None) -> int:
        number = self._numbers.setdefault(keys, len(self.extra_keys))
        if number == len(self.extra_keys):
            self.extra_keys.append(keys)
        return number
