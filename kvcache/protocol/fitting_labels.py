"""The labels that fit a plan, by KV cache group: what a rebuild tries to find a place for.

A label fits if its group, block, size and tokens can exist, and its namespace and extra keys can be
read and belong together. Of labels with the same content, the one with the lowest block id counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import BoolArray, IndexArray, Int32Array, index_array, int32_array
from kvcache.base.errors import MalformedMessageError
from kvcache.protocol.commands import Label
from kvcache.protocol.label_agreement import NO_LABELS
from kvcache.protocol.labels import parse_extra_keys
from kvcache.requests.hash_algorithms import ExtraKey, ExtraKeys
from kvcache.requests.request_content import (
    LoRARequest,
    Namespace,
    lora_label,
    namespace_name,
    parse_namespace_name,
)
from kvcache.specs import NULL_BLOCK_ID

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
) -> BoolArray:
    """Return which rows have a namespace and keys that can belong together."""
    readable: BoolArray = (namespaces != _UNREADABLE) & (keys != _UNREADABLE)
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
