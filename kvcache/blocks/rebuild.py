"""An index from labels: what a restarted coordinator may keep of what workers still hold.

Stands between the label sets of all ranks and an empty pool. Kept is what every rank agrees on;
one block of duplicate contents; in ordered groups no child without all its ancestors. Refuses to
guess: whatever does not fit is dropped, cold is correct.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcache.arrays import int32_array
from kvcache.blocks.extra_keys import parse_extra_keys
from kvcache.blocks.pool import BlockPool
from kvcache.blocks.prefix_table import PrefixTable, parse_namespace_name
from kvcache.blocks.references import NULL_ID
from kvcache.blocks.run import CachedRun
from kvcache.errors import BlockError, MalformedMessageError
from kvcache.hashing import BlockHash
from kvcache.labels import BlockLabel, LabelSet


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
    agreed = agreed_labels(labels, pool.num_blocks, block_sizes)
    chains = _chains(pool, agreed, none_hash)
    kept = {label.block_id for _, chain in chains for label in chain}
    labelled = {label.block_id for label_set in labels for label in label_set}
    pool.contents.outbox.cleared()
    pool.contents.outbox.unlabel(sorted(labelled - kept))
    pool.adopt([_run(table, chain) for table, chain in chains])
    return len(kept)


def agreed_labels(
    labels: Sequence[LabelSet], num_blocks: int, block_sizes: Sequence[int]
) -> list[BlockLabel]:
    """Return the sealed labels that all ranks agree on and that fit the plan."""
    return [
        label
        for label in _agreed(labels)
        if NULL_ID < label.block_id < num_blocks
        and 0 <= label.group < len(block_sizes)
        and len(label.token_ids) == block_sizes[label.group]
        and label.is_sealed
        and _has_readable_keys(label)
    ]


def _agreed(labels: Sequence[LabelSet]) -> list[BlockLabel]:
    """Return the labels that are the same on every rank, owner slots and checksums left aside."""
    if not labels:
        return []
    others = [{label.block_id: _content(label) for label in label_set} for label_set in labels[1:]]
    return [
        label
        for label in labels[0]
        if all(other.get(label.block_id) == _content(label) for other in others)
    ]


def _content(label: BlockLabel) -> tuple[object, ...]:
    return (
        label.group,
        label.digest,
        label.parent_digest,
        label.token_ids,
        label.namespace,
        label.extra_keys,
        label.is_sealed,
    )


def _has_readable_keys(label: BlockLabel) -> bool:
    try:
        parse_extra_keys(label.extra_keys)
    except MalformedMessageError:
        return False
    return True


def _chains(
    pool: BlockPool, labels: Iterable[BlockLabel], none_hash: BlockHash
) -> list[tuple[PrefixTable, list[BlockLabel]]]:
    """Return unbroken chains of labels by table, each after the one it continues."""
    by_table: dict[tuple[bytes, int], dict[bytes, BlockLabel]] = {}
    for label in sorted(labels, key=lambda label: label.block_id):
        by_table.setdefault((label.namespace, label.group), {}).setdefault(label.digest, label)
    chains: list[tuple[PrefixTable, list[BlockLabel]]] = []
    for (name, group), unique in sorted(by_table.items()):
        try:
            namespace = parse_namespace_name(name)
        except MalformedMessageError:
            continue
        children: dict[bytes, list[BlockLabel]] = {}
        for label in unique.values():
            children.setdefault(label.parent_digest, []).append(label)
        roots = [label for label in unique.values() if label.parent_digest == none_hash]
        if not pool.contents.is_ordered(group):
            roots = [label for label in unique.values() if label.parent_digest not in unique]
        found = _walk(roots, children)
        if found:
            table = pool.contents.table(namespace, group)
            chains += [(table, chain) for chain in found]
    return chains


def _walk(
    roots: Sequence[BlockLabel], children: dict[bytes, list[BlockLabel]]
) -> list[list[BlockLabel]]:
    """Follow each root to its end; further children on the way start chains of their own."""
    chains = []
    pending = list(reversed(roots))
    seen: set[bytes] = set()
    while pending:
        chain: list[BlockLabel] = []
        following: BlockLabel | None = pending.pop()
        while following is not None and following.digest not in seen:
            chain.append(following)
            seen.add(following.digest)
            below = children.get(following.digest, [])
            pending += below[1:]
            following = below[0] if below else None
        if chain:
            chains.append(chain)
    return chains


def _run(table: PrefixTable, chain: Sequence[BlockLabel]) -> CachedRun:
    has_keys = any(label.extra_keys for label in chain)
    return CachedRun(
        table=table,
        block_ids=[label.block_id for label in chain],
        digests=[BlockHash(label.digest) for label in chain],
        parent=BlockHash(chain[0].parent_digest),
        token_ids=int32_array([token for label in chain for token in label.token_ids]),
        block_size=len(chain[0].token_ids),
        extra_keys=tuple(parse_extra_keys(label.extra_keys) for label in chain) if has_keys else (),
        request_id="",
        first_index=0,
    )
