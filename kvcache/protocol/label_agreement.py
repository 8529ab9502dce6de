"""The labels on which all ranks agree: those that a rebuild may use.

A restarted coordinator collects the labels of all ranks; the core rebuilds its cache from those
that agree. A block's bytes are spread over all ranks, so its label counts only if each rank has the
same one. Compares whole arrays, and single blocks only where they differ. Whether a label fits the
plan is not checked here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcache.base.arrays import EMPTY_INT32, BoolArray, Int32Array, int32_array
from kvcache.protocol.commands import Label
from kvcache.protocol.labels import LabelSet, label_rows
from kvcache.specs import NULL_BLOCK_ID

NO_LABELS = Label(
    EMPTY_INT32, EMPTY_INT32, EMPTY_INT32, b"", b"", EMPTY_INT32, EMPTY_INT32, EMPTY_INT32
)


def agreed_labels(label_sets: Sequence[LabelSet]) -> Label:
    """Return the labels that are the same on every rank. Changes nothing.

    Owner slots are the first rank's, and may differ, as checksums may. Empty if there are no
    ranks, or if their digests have different lengths.
    """
    if len({label_set.digest_bytes for label_set in label_sets}) != 1:
        return NO_LABELS
    first, size = label_sets[0].labels, label_sets[0].digest_bytes
    others = [each.labels for each in label_sets[1:] if not _are_equal(first, each.labels)]
    if not others:
        return first
    agrees = np.ones(len(first.block_ids), dtype=np.bool_)
    for other in others:
        agrees &= _agreement(first, other, size)
    return label_rows(first, np.flatnonzero(agrees))


def labelled_blocks(label_sets: Sequence[LabelSet], num_blocks: int) -> Int32Array:
    """Return the blocks `[1, num_blocks)` that have a label on any rank, in ascending order."""
    is_labelled = np.zeros(num_blocks, dtype=np.bool_)
    for label_set in label_sets:
        ids = label_set.labels.block_ids
        is_labelled[ids[(ids > NULL_BLOCK_ID) & (ids < num_blocks)]] = True
    return int32_array(np.flatnonzero(is_labelled))


def _are_equal(one: Label, other: Label) -> bool:
    """Return whether two ranks have the same labels in the same arrays."""
    return (
        np.array_equal(one.block_ids, other.block_ids)
        and np.array_equal(one.groups, other.groups)
        and np.array_equal(one.namespaces, other.namespaces)
        and np.array_equal(one.token_counts, other.token_counts)
        and one.digests == other.digests
        and one.parent_digests == other.parent_digests
        and one.namespace_names == other.namespace_names
        and one.extra_keys == other.extra_keys
        and np.array_equal(one.token_ids, other.token_ids)
    )


def _agreement(one: Label, other: Label, digest_bytes: int) -> BoolArray:
    """Return, for each label of `one`, whether `other` has the same for that block."""
    agrees = np.zeros(len(one.block_ids), dtype=np.bool_)
    if not len(other.block_ids):
        return agrees
    order = np.argsort(other.block_ids, kind="stable")
    places = np.searchsorted(other.block_ids, one.block_ids, sorter=order)
    theirs = order[np.minimum(places, len(order) - 1)]
    ours = np.flatnonzero(other.block_ids[theirs] == one.block_ids)
    theirs = theirs[ours]
    numbers: dict[bytes, int] = {}
    same = _names(one, numbers)[ours] == _names(other, numbers)[theirs]
    same &= one.groups[ours] == other.groups[theirs]
    same &= one.token_counts[ours] == other.token_counts[theirs]
    for mine, yours in ((one.digests, other.digests), (one.parent_digests, other.parent_digests)):
        rows = np.frombuffer(mine, np.uint8).reshape(-1, digest_bytes)[ours]
        same &= (rows == np.frombuffer(yours, np.uint8).reshape(-1, digest_bytes)[theirs]).all(1)
    ours, theirs = ours[same], theirs[same]
    agrees[ours[_same_tokens(one, ours, other, theirs)]] = True
    differing = _keys_by_block(one).items() ^ _keys_by_block(other).items()
    if differing:
        agrees &= ~np.isin(one.block_ids, [block_id for block_id, _ in differing])
    return agrees


def _names(label: Label, numbers: dict[bytes, int]) -> Int32Array:
    """Return the namespaces of labels as numbers, equal for all users of `numbers`."""
    known = [numbers.setdefault(name, len(numbers)) for name in label.namespace_names]
    return int32_array(known)[label.namespaces]


def _same_tokens(
    one: Label, ours: npt.NDArray[np.intp], other: Label, theirs: npt.NDArray[np.intp]
) -> BoolArray:
    """Return which labels `ours` of `one` have the tokens of `theirs`; their counts are equal."""
    counts = one.token_counts[ours]
    same = np.ones(len(ours), dtype=np.bool_)
    mine, yours = np.cumsum(one.token_counts), np.cumsum(other.token_counts)
    for count in np.unique(counts).tolist():
        rows = np.flatnonzero(counts == count)
        columns = np.arange(-count, 0)
        tokens = one.token_ids[mine[ours[rows], None] + columns]
        same[rows] = (tokens == other.token_ids[yours[theirs[rows], None] + columns]).all(axis=1)
    return same


def _keys_by_block(label: Label) -> dict[int, bytes]:
    """Return the extra keys of labels by block, without empty ones."""
    block_ids = label.block_ids[list(label.extra_keys)].tolist()
    return {b: keys for b, keys in zip(block_ids, label.extra_keys.values(), strict=True) if keys}
