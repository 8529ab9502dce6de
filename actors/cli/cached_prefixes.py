"""`kvcache prefixes`: which prompts' beginnings a cluster has cached, and who uses them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from actors.cli.cache_usage import namespace_fields, namespace_text
from actors.cli.clusters import open_cluster
from actors.cli.prefix_tree import SORTS, PrefixNode, prefix_roots, sorted_prefixes
from actors.cli.tables import print_json, print_table
from kvcache.base.errors import ConfigurationError

DIGEST_DIGITS = 16
MAX_DEPTH = 8
"""Levels of a tree that are shown to people."""


def show_prefixes(name: str | None, sort: str, limit: int, as_tree: bool, as_json: bool) -> None:
    """Print the prefixes of a running cluster that come first by `sort`, or all as a tree.

    Raises NotRunningError if there is no cluster, ConfigurationError for an unknown order.
    """
    if sort not in SORTS:
        raise ConfigurationError(f"--sort {sort} is not known: choose {', '.join(SORTS)}")
    with open_cluster(name) as cluster:
        roots = prefix_roots(cluster.collect_labels(0), cluster.inspect())
    if as_tree:
        _show_tree(cluster.name, roots, limit, as_json)
        return
    nodes = sorted_prefixes(roots, sort, limit)
    if as_json:
        rows = [_plain(node) for node in nodes]
        print_json(json.dumps({"name": cluster.name, "sort": sort, "prefixes": rows}, indent=2))
        return
    print_table(Console(file=sys.stdout), f"{cluster.name}: prefixes, {sort} first", _table(nodes))


def _show_tree(name: str, roots: Sequence[PrefixNode], limit: int, as_json: bool) -> None:
    if as_json:
        trees = [_plain_tree(node) for node in roots[:limit]]
        print_json(json.dumps({"name": name, "prefixes": trees}, indent=2))
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
        f"used by {node.num_holders:,}",
        last_use(node.idle_s, node.num_holders),
    ]
    namespace = namespace_text(node.namespace)
    return ", ".join(part for part in (*parts, "" if namespace == "-" else namespace) if part)


def _table(nodes: Sequence[PrefixNode]) -> Table:
    table = Table()
    table.add_column("digest", no_wrap=True)
    for name in ("blocks", "tokens", "used by", "ends below", "last use", "namespace"):
        table.add_column(name)
    for node in nodes:
        table.add_row(
            _digest(node),
            f"{node.num_blocks:,}",
            f"{node.num_tokens:,}",
            f"{node.num_holders:,}",
            f"{node.num_ends:,}",
            last_use(node.idle_s, node.num_holders) or "-",
            namespace_text(node.namespace),
        )
    return table


def last_use(idle_s: float, num_holders: int) -> str:
    """Return when something was used last, in words; empty where it is not known."""
    if num_holders:
        return "in use"
    if idle_s < 0:
        return ""
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if idle_s >= 2 * seconds:
            return f"{idle_s / seconds:.0f} {unit} ago"
    return f"{idle_s:.0f} s ago"


def _digest(node: PrefixNode) -> str:
    return node.digest.hex()[:DIGEST_DIGITS]


def _plain(node: PrefixNode) -> dict[str, Any]:
    return {
        "digest": node.digest.hex(),
        **namespace_fields(node.namespace),
        "num_blocks": node.num_blocks,
        "num_tokens": node.num_tokens,
        "num_own_blocks": node.num_own_blocks,
        "num_holders": node.num_holders,
        "num_ends": node.num_ends,
        "idle_s": None if node.idle_s < 0 else round(node.idle_s, 3),
    }


def _plain_tree(root: PrefixNode) -> dict[str, Any]:
    """Return a node with all below it; not by recursion: a tree of conversations is deep."""
    plain = {id(node): {**_plain(node), "children": []} for node in root.walk()}
    for node in root.walk():
        plain[id(node)]["children"] = [plain[id(child)] for child in node.children]
    return plain[id(root)]
