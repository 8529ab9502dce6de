"""Which block holds a digest: for who knows contents by their digests alone.

Beside the look-up, which knows tokens and never needs a digest. Reads the packed digests of a
namespace from end to end. Refuses to answer for blocks that are not sealed.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcache.errors import BlockError
from kvcache.extents.block_store import SEALED
from kvcache.extents.parts import CoreParts
from kvcache.extents.run import Run
from kvcache.hashing import BlockHash
from kvcache.request import Namespace


def find_block(parts: CoreParts, digest: BlockHash, namespace: Namespace, group: int) -> int | None:
    """Return the sealed block of a group that holds `digest`, None if none does. O(units).

    Raises:
        BlockError: there is no such group.
    """
    groups = parts.shape.groups
    if not 0 <= group < len(groups):
        raise BlockError(f"KV cache group {group} does not exist: the plan has {len(groups)}")
    root = parts.tree.roots.get(namespace)
    if root is None or len(digest) != parts.shape.digest_bytes:
        return None
    for run in _below(root):
        unit = _unit_of(run, digest)
        if unit is not None:
            block_id = _block_at(parts, run, unit, group)
            return block_id if parts.store.seals[block_id] == SEALED else None
    return None


def _below(root: Run) -> Iterator[Run]:
    pending = list(root.children.values())
    while pending:
        run = pending.pop()
        yield run
        pending += run.children.values()


def _unit_of(run: Run, digest: bytes) -> int | None:
    """Return the unit of a run that has this digest."""
    run.settle()
    at = run.digests.find(digest)
    while at >= 0:
        unit, rest = divmod(at, len(digest))
        if not rest:
            return unit
        at = run.digests.find(digest, at + 1)
    return None


def _block_at(parts: CoreParts, run: Run, unit: int, group: int) -> int:
    """Return the block of a group at a unit, the null block if there is none."""
    shape = parts.shape.groups[group]
    if shape.is_ordered:
        return int(run.ids[shape.place, unit])
    handle = run.handles[shape.place, unit : unit + 1]
    return int(parts.store.ids_of(handle)[0]) if parts.store.are_valid(handle)[0] else 0
