"""Blocks that appear in a tier or disappear from it, and the cache events for them.

The coordinator takes them, and decides what routers get (the last copy in a medium; full blocks
only).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from kvcache.base.arguments import MAX_INT32, as_integers, check_kind
from kvcache.base.arrays import IndexArray, index_array
from kvcache.base.errors import InvalidInputError
from kvcache.core import BlocksRemoved, BlocksStored
from kvcache.offload.keys import OffloadKey
from kvcache.offload.specs import DEVICE_MEDIUM, FILE_MEDIUM, HOST_MEDIUM
from kvcache.protocol.commands import Label
from kvcache.protocol.labels import parse_extra_keys
from kvcache.requests.digests import PackedDigests
from kvcache.requests.hash_algorithms import BlockHash
from kvcache.requests.request_content import Namespace, parse_namespace_name

EVENT_MEDIA: Mapping[str, str] = MappingProxyType(
    {DEVICE_MEDIUM: "device", HOST_MEDIUM: "host", FILE_MEDIUM: "storage"}
)
"""Media as cache events name them; for routers, every other medium is storage."""


@dataclass(frozen=True, eq=False)
class OffloadingEvent:
    """Blocks that a medium now has, or (`removed`) no longer has.

    `contents` describes them, one row per labelled key in the order of `keys`, with addresses as
    block ids: digests, parents, tokens, groups, namespaces, extra keys. None if the tier keeps no
    labels; blocks without a label (partial block swaps) have no row.
    """

    keys: tuple[OffloadKey, ...]
    medium: str
    removed: bool
    contents: Label | None = None


def cache_events(
    event: OffloadingEvent, block_sizes: Sequence[int], none_hash: bytes
) -> list[BlocksStored | BlocksRemoved]:
    """Return the cache events of an event: one for each chain of blocks.

    `block_sizes` are tokens per block, by group; blocks that are not full are left out. Parents
    equal to the `none_hash` become None. Empty for an event without contents.

    Raises InvalidInputError for a group that has no block size.
    """
    check_kind("event", event, OffloadingEvent)
    check_kind("none_hash", none_hash, bytes)
    sizes = as_integers("block_sizes", block_sizes, at_most=MAX_INT32)
    labels = event.contents
    if labels is None or not len(labels.block_ids):
        return []
    groups = labels.groups
    if not 0 <= int(groups.min()) <= int(groups.max()) < len(sizes):
        raise InvalidInputError(
            f"tier event for group {int(groups.max())}, block sizes of {len(sizes)} groups "
            "are known: pass one per KV cache group"
        )
    size = len(labels.digests) // len(groups)
    digests = PackedDigests(labels.digests, size)
    parents = PackedDigests(labels.parent_digests, size)
    is_full = labels.token_counts == sizes[groups]
    medium = EVENT_MEDIA.get(event.medium, EVENT_MEDIA[FILE_MEDIUM])
    ends = np.cumsum(labels.token_counts)
    namespaces: dict[int, Namespace] = {}
    found: list[BlocksStored | BlocksRemoved] = []
    for first, end in _runs(labels, digests, parents, is_full.tolist(), event.removed):
        group = int(groups[first])
        if event.removed:
            found.append(BlocksRemoved(group, medium, digests[first:end]))
            continue
        parent = parents[first]
        number = int(labels.namespaces[first])
        if number not in namespaces:
            namespaces[number] = parse_namespace_name(labels.namespace_names[number])
        keys = [labels.extra_keys.get(row, b"") for row in range(first, end)]
        start = int(ends[first]) - int(labels.token_counts[first])
        found.append(
            BlocksStored(
                group=group,
                medium=medium,
                digests=digests[first:end],
                parent_digest=None if parent == none_hash else BlockHash(parent),
                token_ids=labels.token_ids[start : int(ends[end - 1])],
                block_size=int(sizes[group]),
                namespace=namespaces[number],
                extra_keys=tuple(map(parse_extra_keys, keys)) if any(keys) else (),
            )
        )
    return found


def parents_first(labels: Label) -> IndexArray:
    """Return the rows of labels in an order with every parent before its children.

    Chains are together. Subscribers cannot place a child without its parent.
    """
    count = len(labels.block_ids)
    size = len(labels.digests) // count if count else 1
    digests = PackedDigests(labels.digests, size)
    parents = PackedDigests(labels.parent_digests, size)
    places = list(zip(labels.groups.tolist(), labels.namespaces.tolist(), strict=True))
    rows = {
        (*place, digest): row
        for row, (place, digest) in enumerate(zip(places, digests, strict=True))
    }
    above = [rows.get((*place, parent)) for place, parent in zip(places, parents, strict=True)]
    order: list[int] = []
    is_done = [False] * count
    for start in range(count):
        chain: list[int] = []
        row: int | None = start
        while row is not None and not is_done[row]:
            is_done[row] = True
            chain.append(row)
            row = above[row]
        order += reversed(chain)
    return index_array(order)


def _runs(
    labels: Label,
    digests: PackedDigests,
    parents: PackedDigests,
    is_full: list[bool],
    removed: bool,
) -> list[tuple[int, int]]:
    """Return the half-open ranges of rows that fit into one event."""
    runs: list[tuple[int, int]] = []
    groups, namespaces = labels.groups.tolist(), labels.namespaces.tolist()
    first = None
    for row in range(len(groups) + 1):
        if first is not None:
            continues = (
                row < len(groups)
                and is_full[row]
                and groups[row] == groups[row - 1]
                and (
                    removed
                    or (namespaces[row] == namespaces[row - 1] and parents[row] == digests[row - 1])
                )
            )
            if continues:
                continue
            runs.append((first, row))
        first = row if row < len(groups) and is_full[row] else None
    return runs
