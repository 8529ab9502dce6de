"""`kvcache usage` and `prefixes`: what the blocks hold, and which prefixes are cached.

    labels of rank 0 ──chains of digests──▶ nodes: runs of blocks with one continuation
    users and idle time of each block ────▶ how many requests use a node, and its last use

The tree covers the group with the most blocks. Prefixes are shown by digest and length, never by
tokens.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from actors.cli.clusters import open_cluster
from actors.cli.command import (
    JsonOption,
    NameOption,
    VllmOption,
    command,
    print_facts,
    print_json,
    print_table,
)
from actors.cli.status import tenant_usage_table, tier_table
from kvcache.base.errors import ConfigurationError, NotRunningError, legible

if TYPE_CHECKING:
    from kvcache.coordinator.settings import CoordinatorStatistics
    from kvcache.metrics.inspection import CacheInspection
    from kvcache.offload.statistics import TierStatistics
    from kvcache.protocol.labels import LabelSet
    from kvcache.requests.request import Namespace
    from kvcache.tenants import TenantStatistics

MAX_NAMESPACES = 20
SORTS = ("used", "shared", "longest", "recent")
DIGEST_DIGITS = 16
MAX_DEPTH = 8
"""Levels of the tree that are printed."""


@command
def usage(name: NameOption = None, vllm: VllmOption = None, as_json: JsonOption = False) -> None:
    """Count a running cluster's blocks by state, group, tenant and tier."""
    if vllm is not None:
        from actors.cli.engines import show_usage

        show_usage(vllm, as_json)
        return

    with open_cluster(name) as cluster:
        statistics = cluster.coordinator_statistics()
        inspection, labels = cluster.inspect(), cluster.collect_labels(0)
    if statistics is None:
        raise NotRunningError(f"{cluster.name} is still starting: wait until it is ready")
    found = usage_of(statistics, inspection, labels)
    if as_json:
        print_json({"name": cluster.name, **_plain_usage(found)})
        return
    print_facts(f"{cluster.name}: device blocks", _texts(found.states))
    print_table("sealed blocks by group", _groups(found))
    print_table("sealed blocks by namespace", _namespaces(found))
    if found.tiers:
        print_table("tiers below the device", tier_table(found.tiers))
    if found.tenants:
        print_table("tenants", tenant_usage_table(found.tenants))


@command
def prefixes(
    name: NameOption = None,
    *,
    sort: Annotated[
        str, typer.Option("--sort", "-s", help="used (now), shared, longest or recent first.")
    ] = "used",
    limit: Annotated[int, typer.Option("--limit", "-l", help="Show the first N.", min=1)] = 20,
    tree: Annotated[bool, typer.Option("--tree", help="Show a tree instead.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show which prefixes a running cluster has cached, and who uses them."""

    if sort not in SORTS:
        raise ConfigurationError(f"--sort {sort} is not known: choose {', '.join(SORTS)}")
    with open_cluster(name) as cluster:
        roots = prefix_roots(cluster.collect_labels(0), cluster.inspect())
    if tree:
        _show_tree(cluster.name, roots, limit, as_json)
        return
    nodes = sorted_prefixes(roots, sort, limit)
    if as_json:
        rows = [_plain_node(node) for node in nodes]
        print_json({"name": cluster.name, "sort": sort, "prefixes": rows})
        return
    print_table(f"{cluster.name}: prefixes, {sort} first", _prefix_table(nodes))


@dataclass(frozen=True)
class Usage:
    """Counts of blocks. `states`: device blocks; shared blocks in use are counted separately.
    `groups` and `namespaces`: sealed device blocks; the largest namespace is first."""

    states: dict[str, int]
    groups: dict[int, int]
    namespaces: dict[Namespace, int]
    tiers: dict[str, TierStatistics]
    tenants: tuple[TenantStatistics, ...] = ()


def usage_of(
    statistics: CoordinatorStatistics, inspection: CacheInspection, labels: LabelSet
) -> Usage:
    """Count the blocks, from statistics of one moment or of moments close together.

    Raises NotRunningError while there is no cache, before an epoch begins.
    """
    from kvcache.metrics.samples import tenants_of

    manager, offload = statistics.manager, statistics.offload
    if manager is None:
        raise NotRunningError("the coordinator has no cache at the moment: wait until it is ready")
    core = manager.core
    num_shared = int((inspection.reference_counts > 1).sum())
    states = {
        "all": core.num_blocks,
        "in use": core.num_blocks - core.num_free_blocks,
        "in use, shared": num_shared,
        "pinned": core.num_pinned_blocks,
        "free": core.num_free_blocks,
        "cached": core.num_cached_blocks,
        "sealed": core.num_sealed_blocks,
        "in flight": core.num_in_flight_blocks,
        "quarantined": core.num_quarantined_blocks,
    }
    tiers = {} if offload is None else offload.tiers.by_name
    tenants = tenants_of(statistics)
    namespaces = blocks_by_namespace(labels)
    return Usage(states, blocks_by_group(labels), namespaces, tiers, tenants)


def namespace_text(namespace: Namespace) -> str:
    """Describe a namespace in words."""
    parts = {
        "tenant": namespace.tenant,
        "adapter": namespace.lora,
        "salt": None if namespace.salt is None else "set",  # a salt may be a secret
    }
    told = ", ".join(f"{what} {value}" for what, value in parts.items() if value is not None)
    return legible(told) or "-"


def namespace_fields(namespace: Namespace) -> dict[str, Any]:
    """Describe a namespace for programs."""
    return {
        "model_epoch": namespace.model_epoch,
        "tenant": namespace.tenant,
        "lora": namespace.lora,
        "has_salt": namespace.salt is not None,
    }


def _texts(states: dict[str, int]) -> dict[str, str]:
    num_all = max(1, states["all"])
    return {name: f"{count:,} ({count / num_all:.1%})" for name, count in states.items()}


def _groups(usage: Usage) -> Table:
    table = Table("group", "blocks")
    for group, count in usage.groups.items():
        table.add_row(str(group), f"{count:,}")
    return table


def _namespaces(usage: Usage) -> Table:
    table = Table("namespace", "model epoch", "blocks")
    counts = list(usage.namespaces.items())
    for namespace, count in counts[:MAX_NAMESPACES]:
        table.add_row(namespace_text(namespace), str(namespace.model_epoch), f"{count:,}")
    rest = counts[MAX_NAMESPACES:]
    if rest:
        table.add_row(f"{len(rest):,} others", "", f"{sum(count for _, count in rest):,}")
    return table


def _plain_usage(usage: Usage) -> dict[str, Any]:
    return {
        "states": {
            name.replace(", ", "_").replace(" ", "_"): n for name, n in usage.states.items()
        },
        "groups": {str(group): count for group, count in usage.groups.items()},
        "namespaces": [
            {**namespace_fields(namespace), "num_blocks": count}
            for namespace, count in usage.namespaces.items()
        ],
        "tiers": {name: asdict(tier) for name, tier in usage.tiers.items()},
        "tenants": [asdict(tenant) for tenant in usage.tenants],
    }


def _show_tree(name: str, roots: Sequence[PrefixNode], limit: int, as_json: bool) -> None:
    if as_json:
        trees = [_plain_tree(node) for node in roots[:limit]]
        print_json({"name": name, "prefixes": trees})
        return
    tree = Tree(f"{name}: {len(roots):,} first blocks")
    for node in roots[:limit]:
        _grow(tree, node, 1, limit)
    if len(roots) > limit:
        tree.add(f"... {len(roots) - limit:,} more")
    Console(file=sys.stdout).print(tree, markup=False)


def _grow(tree: Tree, node: PrefixNode, depth: int, limit: int) -> None:
    branch = tree.add(_line(node))
    if depth == MAX_DEPTH and node.children:
        branch.add(f"... {node.num_ends:,} ends below")
        return
    for child in node.children[:limit]:
        _grow(branch, child, depth + 1, limit)
    if len(node.children) > limit:
        branch.add(f"... {len(node.children) - limit:,} more")


def _line(node: PrefixNode) -> str:
    parts = [
        f"{_digest(node)} {node.num_own_blocks:,} blocks to token {node.num_tokens:,}",
        f"used by {node.num_references:,}",
        last_use(node.idle_s, node.num_references),
    ]
    namespace = namespace_text(node.namespace)
    return ", ".join(part for part in (*parts, "" if namespace == "-" else namespace) if part)


def _prefix_table(nodes: Sequence[PrefixNode]) -> Table:
    table = Table()
    table.add_column("digest", no_wrap=True)
    for name in ("blocks", "tokens", "used by", "ends below", "last use", "namespace"):
        table.add_column(name)
    for node in nodes:
        table.add_row(
            _digest(node),
            f"{node.num_blocks:,}",
            f"{node.num_tokens:,}",
            f"{node.num_references:,}",
            f"{node.num_ends:,}",
            last_use(node.idle_s, node.num_references) or "-",
            namespace_text(node.namespace),
        )
    return table


def last_use(idle_s: float, num_references: int) -> str:
    """Return the time of the last use, in words; empty if unknown."""
    if num_references:
        return "in use"
    if idle_s < 0:
        return ""
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if idle_s >= 2 * seconds:
            return f"{idle_s / seconds:.0f} {unit} ago"
    return f"{idle_s:.0f} s ago"


def _digest(node: PrefixNode) -> str:
    return node.digest.hex()[:DIGEST_DIGITS]


def _plain_node(node: PrefixNode) -> dict[str, Any]:
    return {
        "digest": node.digest.hex(),
        **namespace_fields(node.namespace),
        "num_blocks": node.num_blocks,
        "num_tokens": node.num_tokens,
        "num_own_blocks": node.num_own_blocks,
        "num_holders": node.num_references,
        "num_ends": node.num_ends,
        "idle_s": None if node.idle_s < 0 else round(node.idle_s, 3),
    }


def _plain_tree(root: PrefixNode) -> dict[str, Any]:
    """Return a node and its subtree, without recursion: trees of conversations are deep."""
    plain = {id(node): {**_plain_node(node), "children": []} for node in root.walk()}
    for node in root.walk():
        plain[id(node)]["children"] = [plain[id(child)] for child in node.children]
    return plain[id(root)]


@dataclass(eq=False)
class PrefixNode:
    """A run of blocks with only one continuation each; `digest` is that of the last block.

    `num_blocks` and `num_tokens` count from the prompt's start. `num_references` requests and pins
    use the whole run now; `num_ends` different prefixes pass through it or end with it. `idle_s`:
    how long its first block has been idle; -1 if it is in use, or the time is unknown.
    """

    digest: bytes
    namespace: Namespace
    num_blocks: int
    num_tokens: int
    num_own_blocks: int
    num_references: int
    idle_s: float
    num_ends: int = 1
    children: list[PrefixNode] = field(default_factory=list)

    def walk(self) -> Iterator[PrefixNode]:
        """Yield this node and its subtree, parents first."""
        pending = [self]
        while pending:
            node = pending.pop()
            yield node
            pending += reversed(node.children)


def prefix_roots(labels: LabelSet, inspection: CacheInspection) -> list[PrefixNode]:
    """Return the roots of the tree of cached prefixes. Raises MalformedMessageError for unreadable
    namespaces. Blocks of equal content count once."""
    return _Forest(labels, inspection).roots()


def sorted_prefixes(roots: list[PrefixNode], sort: str, count: int) -> list[PrefixNode]:
    """Return the first `count` prefixes in one of `SORTS`: most users now, most continuations,
    most tokens (of the leaves only), or least idle."""
    nodes = [node for root in roots for node in root.walk()]
    if sort == "longest":
        nodes = [node for node in nodes if not node.children]
    first: dict[str, Callable[[PrefixNode], float]] = {
        "used": lambda node: -node.num_references,
        "shared": lambda node: -node.num_ends,
        "longest": lambda node: 0,
        "recent": lambda node: node.idle_s,
    }
    return sorted(nodes, key=lambda n: (first[sort](n), -n.num_tokens, n.digest))[:count]


def blocks_by_group(labels: LabelSet) -> dict[int, int]:
    """Count the sealed blocks of each group."""
    return dict(sorted(Counter(labels.labels.groups.tolist()).items()))


def blocks_by_namespace(labels: LabelSet) -> dict[Namespace, int]:
    """Count the sealed blocks of each namespace, most first."""
    from kvcache.requests.request_content import parse_namespace_name

    counts = Counter(labels.labels.namespaces.tolist())
    names = labels.labels.namespace_names
    return {parse_namespace_name(names[i]): count for i, count in counts.most_common()}


class _Forest:
    """The blocks of one group, each with its children."""

    def __init__(self, labels: LabelSet, inspection: CacheInspection) -> None:
        import numpy as np

        from kvcache.requests.request_content import parse_namespace_name

        columns = labels.labels
        self._names = [parse_namespace_name(name) for name in columns.namespace_names]
        self._namespaces = columns.namespaces.tolist()
        self._digests = _cut(columns.digests, labels.digest_bytes)
        parents = _cut(columns.parent_digests, labels.digest_bytes)
        self._num_tokens = columns.token_counts.tolist()
        self._reference_counts = inspection.reference_counts[columns.block_ids].tolist()
        self._idle_s = inspection.idle_s[columns.block_ids].tolist()
        # The group with the most blocks: windows and states keep few blocks of a prompt.
        group = int(np.bincount(columns.groups).argmax()) if len(columns.groups) else 0
        rows: dict[tuple[int, bytes], int] = {}
        for row in np.flatnonzero(columns.groups == group).tolist():
            rows.setdefault((self._namespaces[row], self._digests[row]), row)
        self._children: dict[int, list[int]] = {}
        self._first: list[int] = []
        for (namespace, _), row in rows.items():
            above = rows.get((namespace, parents[row]))
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
        """Return the node that begins with row `first`, and the node's last row. A node extends
        while a block has one child, with as many users."""
        row, num_blocks, num_tokens = first, 1, self._num_tokens[first]
        num_references = self._reference_counts[first]
        while len(below := self._children.get(row, [])) == 1:
            if self._reference_counts[below[0]] != num_references:
                break
            row = below[0]
            num_blocks += 1
            num_tokens += self._num_tokens[row]
        node = PrefixNode(
            self._digests[row],
            self._names[self._namespaces[row]],
            num_blocks + (0 if above is None else above.num_blocks),
            num_tokens + (0 if above is None else above.num_tokens),
            num_blocks,
            num_references,
            self._idle_s[first],
        )
        return node, row


def _cut(digests: bytes, size: int) -> list[bytes]:
    """Return the digests that follow one another in `digests`."""
    return [digests[start : start + size] for start in range(0, len(digests), size)]
