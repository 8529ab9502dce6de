"""Which digest is in which block, for one namespace and one KV cache group.

Stands inside the content index: look-up reads `ids`, nothing else. Refuses to know references,
steps or events.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.hashing import BlockHash
from kvcache.request import Namespace


class PrefixTable:
    """Digests of one namespace and group; `number` tells it from all other tables of a pool.

    Invariant: a digest in `copies` is in `ids`, and its blocks are other ones. Where the table is
    ordered a block is of no use without all blocks before it.
    """

    __slots__ = ("copies", "group", "ids", "is_ordered", "namespace", "number", "published")

    def __init__(self, namespace: Namespace, group: int, number: int, *, is_ordered: bool) -> None:
        """Make an empty table."""
        self.namespace = namespace
        self.group = group
        self.number = number
        self.is_ordered = is_ordered
        self.ids: dict[BlockHash, int] = {}
        self.copies: dict[BlockHash, list[int]] = {}
        self.published: set[BlockHash] = set()

    def add(self, block_ids: list[int], digests: Sequence[BlockHash]) -> list[int]:
        """Enter blocks; return, for each, the block that look-ups find for its digest now.

        That is another one where the digest was here already; where none was, it is `block_ids`.
        """
        firsts = list(map(self.ids.setdefault, digests, block_ids))
        if firsts == block_ids:
            return block_ids
        for first, block_id, digest in zip(firsts, block_ids, digests, strict=True):
            if first != block_id:
                self.copies.setdefault(digest, []).append(block_id)
        return firsts

    def discard(self, block_id: int, digest: BlockHash) -> int | None:
        """Remove one block; return the block that look-ups find now, None where none is left."""
        copies = self.copies.get(digest)
        if copies is None:
            del self.ids[digest]
            return None
        if self.ids[digest] == block_id:
            self.ids[digest] = copies.pop(0)
        else:
            copies.remove(block_id)
        if not copies:
            del self.copies[digest]
        return self.ids[digest]

    def discard_all(self, digests: Sequence[BlockHash]) -> None:
        """Remove digests that have no copies."""
        ids = self.ids
        for digest in digests:
            del ids[digest]

    def blocks(self, digest: BlockHash) -> list[int]:
        """Return all blocks that hold `digest`, the one that look-ups use first."""
        first = self.ids.get(digest)
        return [] if first is None else [first, *self.copies.get(digest, ())]
