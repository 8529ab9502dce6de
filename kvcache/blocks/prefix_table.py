"""Which digest is in which block, for one namespace and one KV cache group.

Stands inside the content index: look-up reads `ids`, nothing else. Refuses to know references,
steps or events.
"""

from __future__ import annotations

from collections.abc import Sequence

import cbor2

from kvcache.errors import MalformedMessageError
from kvcache.hashing import BlockHash
from kvcache.request import Namespace

DEFAULT_NAMESPACE = Namespace(model_epoch=0, lora=None, salt=None, tenant=None)
"""Where requests without adapter, salt or tenant live while the first weights are loaded."""


class PrefixTable:
    """Digests of one namespace and group.

    Invariants: a digest in `copies` is in `ids`, and its blocks are other ones; where the table is
    ordered, `children[d]` counts the digests here whose parent is `d`, and every digest counted in
    `children` is here itself or is a first block's parent.
    """

    __slots__ = ("children", "copies", "group", "ids", "is_ordered", "namespace", "published")

    def __init__(self, namespace: Namespace, group: int, is_ordered: bool) -> None:
        """Make an empty table. Only in an ordered one are children counted."""
        self.namespace = namespace
        self.group = group
        self.is_ordered = is_ordered
        self.ids: dict[BlockHash, int] = {}
        self.copies: dict[BlockHash, list[int]] = {}
        self.children: dict[BlockHash, int] = {}
        self.published: set[BlockHash] = set()

    def add(
        self, block_ids: Sequence[int], digests: Sequence[BlockHash], parent: BlockHash
    ) -> None:
        """Enter successive blocks; `parent` is the digest before the first one."""
        if self.ids.keys().isdisjoint(digests):
            self.ids.update(zip(digests, block_ids, strict=True))
            if self.is_ordered:
                self.children[parent] = self.children.get(parent, 0) + 1
                self.children.update(dict.fromkeys(digests[:-1], 1))
            return
        for block_id, digest in zip(block_ids, digests, strict=True):
            if digest in self.ids:
                self.copies.setdefault(digest, []).append(block_id)
            else:
                self.ids[digest] = block_id
                if self.is_ordered:
                    self.children[parent] = self.children.get(parent, 0) + 1
            parent = digest

    def is_needed(self, digest: BlockHash) -> bool:
        """Whether a cached child would lose its parent with one copy of `digest`."""
        return digest in self.children and digest not in self.copies

    def discard(self, block_id: int, digest: BlockHash, parent: BlockHash) -> bool:
        """Remove one block; return whether `digest` is gone with it."""
        if digest in self.copies:
            self._discard_copy(block_id, digest)
            return False
        del self.ids[digest]
        if self.is_ordered:
            left = self.children.pop(parent) - 1
            if left:
                self.children[parent] = left
        return True

    def blocks(self, digest: BlockHash) -> list[int]:
        """Return all blocks that hold `digest`, the one that look-ups use first."""
        first = self.ids.get(digest)
        return [] if first is None else [first, *self.copies.get(digest, ())]

    def _discard_copy(self, block_id: int, digest: BlockHash) -> None:
        copies = self.copies[digest]
        if self.ids[digest] == block_id:
            self.ids[digest] = copies.pop(0)
        else:
            copies.remove(block_id)
        if not copies:
            del self.copies[digest]


def namespace_name(namespace: Namespace) -> bytes:
    """Return the canonical bytes of a namespace, as labels carry them."""
    return cbor2.dumps(
        [namespace.model_epoch, namespace.lora, namespace.salt, namespace.tenant], canonical=True
    )


def parse_namespace_name(name: bytes) -> Namespace:
    """Return the namespace that `namespace_name` made `name` from; raises MalformedMessageError."""
    try:
        epoch, *rest = cbor2.loads(name)
    except (cbor2.CBORDecodeError, TypeError, ValueError) as error:
        raise MalformedMessageError(f"namespace name {name!r} is not readable: {error}") from error
    if (
        type(epoch) is not int
        or len(rest) != 3
        or not all(part is None or isinstance(part, str) for part in rest)
    ):
        raise MalformedMessageError(f"namespace name {name!r} is not an epoch and three texts")
    return Namespace(epoch, *rest)
