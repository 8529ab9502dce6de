"""The prefixes that a cache holds, as a tree: from a rank's labels, and from who uses its blocks.

    labels of rank 0 ──chains of digests──▶ nodes: blocks that all of their prompts share
    holders, idle times by block ─────────▶ how many use each, and when it was used last

Below `kvcache prefixes` and `kvcache usage`. Of one group, whose blocks every prompt goes through.
Refuses to show tokens: prefixes are told by digest and length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvcache.metrics.inspection import CacheInspection
from kvcache.protocol.labels import LabelSet
from kvcache.requests.request import Namespace
from kvcache.requests.request_content import parse_namespace_name

SORTS = ("used", "shared", "longest", "recent")


@dataclass(eq=False)
class PrefixNode:
    """Blocks in a row that are continued in one way only; `digest` is the last one's.

    `num_blocks` and `num_tokens` count from the prompt's start. `num_holders` requests and pins use
    all of it now; `num_ends` different prefixes go through it, or end with it. `idle_s`: for how
    long its first block was not used, -1: it is in use, or that is not known.
    """

    digest: bytes
    namespace: Namespace
    num_blocks: int
    num_tokens: int
    num_own_blocks: int
    num_holders: int
    idle_s: float
    num_ends: int = 1
    children: list[PrefixNode] = field(default_factory=list)

    def walk(self) -> Iterator[PrefixNode]:
        """Yield this node and all below, parents first."""
        pending = [self]
        while pending:
            node = pending.pop()
            yield node
            pending += reversed(node.children)


def prefix_roots(labels: LabelSet, inspection: CacheInspection) -> list[PrefixNode]:
    """Return the first nodes of every prompt that is cached. Raises MalformedMessageError for
    namespaces that cannot be read. Blocks of equal content count once."""
    return _Forest(labels, inspection).roots()


def sorted_prefixes(roots: list[PrefixNode], sort: str, count: int) -> list[PrefixNode]:
    """Return the `count` first prefixes by one of `SORTS`: most users now, most continuations,
    most tokens (of those that nothing continues), or least idle."""
    nodes = [node for root in roots for node in root.walk()]
    if sort == "longest":
        ends = [node for node in nodes if not node.children]
        return sorted(ends, key=lambda n: (-n.num_tokens, n.digest))[:count]
    if sort == "shared":
        return sorted(nodes, key=lambda n: (-n.num_ends, -n.num_tokens, n.digest))[:count]
    if sort == "recent":
        return sorted(nodes, key=lambda n: (n.idle_s, -n.num_tokens, n.digest))[:count]
    return sorted(nodes, key=lambda n: (-n.num_holders, -n.num_tokens, n.digest))[:count]


def blocks_by_group(labels: LabelSet) -> dict[int, int]:
    """Return how many sealed blocks each group has."""
    return dict(sorted(Counter(labels.labels.groups.tolist()).items()))


def blocks_by_namespace(labels: LabelSet) -> dict[Namespace, int]:
    """Return how many sealed blocks each namespace has, most first."""
    counts = Counter(labels.labels.namespaces.tolist())
    names = labels.labels.namespace_names
    return {parse_namespace_name(names[i]): count for i, count in counts.most_common()}


class _Forest:
    """The blocks of one group, each with what continues it."""

    def __init__(self, labels: LabelSet, inspection: CacheInspection) -> None:
        self._labels, self._inspection = labels.labels, inspection
        self._size = labels.digest_bytes
        groups = self._labels.groups
        # The group with most blocks: windows and states have few of each prompt.
        group = int(np.bincount(groups).argmax()) if len(groups) else 0
        self._rows: dict[tuple[int, bytes], int] = {}
        for row in np.flatnonzero(groups == group).tolist():
            self._rows.setdefault((self._namespace(row), self._digest(row)), row)
        self._children: dict[int, list[int]] = {}
        self._first: list[int] = []
        for (namespace, _), row in self._rows.items():
            above = self._rows.get((namespace, self._parent(row)))
            if above is None:
                self._first.append(row)
            else:
                self._children.setdefault(above, []).append(row)

    def roots(self) -> list[PrefixNode]:
        roots: list[PrefixNode] = []
        pending: list[tuple[int, PrefixNode | None]] = [(row, None) for row in self._first]
        made: list[PrefixNode] = []
        while pending:
            row, above = pending.pop()
            node, last = self._node(row, above)
            made.append(node)
            (roots if above is None else above.children).append(node)
            pending += [(child, node) for child in self._children.get(last, [])]
        for node in reversed(made):  # children before parents
            node.num_ends = sum(child.num_ends for child in node.children) or 1
            node.children.sort(key=lambda child: (-child.num_ends, -child.num_tokens, child.digest))
        return sorted(roots, key=lambda node: (-node.num_ends, -node.num_tokens, node.digest))

    def _node(self, first: int, above: PrefixNode | None) -> tuple[PrefixNode, int]:
        """Return the node that begins with a row, and its last row: while one continues it, and as
        many use it."""
        row, num_blocks, num_tokens = first, 1, self._num_tokens(first)
        holders = self._inspection.holders
        num_holders = int(holders[self._block(first)])
        while len(below := self._children.get(row, [])) == 1:
            if int(holders[self._block(below[0])]) != num_holders:
                break
            row = below[0]
            num_blocks += 1
            num_tokens += self._num_tokens(row)
        blocks_above = 0 if above is None else above.num_blocks
        tokens_above = 0 if above is None else above.num_tokens
        namespace = parse_namespace_name(self._labels.namespace_names[self._namespace(row)])
        node = PrefixNode(
            self._digest(row),
            namespace,
            blocks_above + num_blocks,
            tokens_above + num_tokens,
            num_blocks,
            num_holders,
            float(self._inspection.idle_s[self._block(first)]),
        )
        return node, row

    def _digest(self, row: int) -> bytes:
        return self._labels.digests[row * self._size : (row + 1) * self._size]

    def _parent(self, row: int) -> bytes:
        return self._labels.parent_digests[row * self._size : (row + 1) * self._size]

    def _namespace(self, row: int) -> int:
        return int(self._labels.namespaces[row])

    def _block(self, row: int) -> int:
        return int(self._labels.block_ids[row])

    def _num_tokens(self, row: int) -> int:
        return int(self._labels.token_counts[row])
