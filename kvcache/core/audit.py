"""Do the columns add up? And the whole of them as plain values.

Beside the core: looks, changes nothing but digests that were not made yet. Refuses to repair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.base.arrays import int32_array
from kvcache.base.errors import InvariantError
from kvcache.core.columns import (
    BLANK,
    BLOCK,
    CHILD,
    CHILDREN,
    COLUMNS,
    DUPLICATES,
    ENDS,
    FLAGS,
    FREE,
    HAS_GAPS,
    HAS_POLICY,
    KEPT,
    KEYS,
    LAST,
    NEXT,
    NEXT_NODE,
    NO_CACHING,
    NODE,
    NUM_CHANGES,
    NUM_GONE,
    NUM_INDEXED,
    NUM_MOVED,
    NUM_NOTES,
    NUM_SPARE,
    OWNER,
    PARENT,
    PREV,
    REF,
    ROOT,
    ROWS,
    SEALED_BELOW,
    SPARE_NODE,
    UNITS,
    ColumnStore,
)
from kvcache.core.kinds.rule import FULL, KIND, LENGTH
from kvcache.core.prefix_tree import child_of
from kvcache.tenants import TenantLedger
from kvcache.tenants.ledger import UNOWNED

if TYPE_CHECKING:
    from kvcache.core.flat_core import FlatCore


def check_core(core: FlatCore) -> None:
    """Raise InvariantError with the first sum that fails. O(blocks)."""
    check_list(core.store)
    check_nodes(core.store, core.roots.values(), core.rows.values())
    _check_contents(core)
    duplicates = _check_rows(core)
    _check_references(core, duplicates)
    if core.order is not None:
        core.order.check()
    if core.tenants is not None:
        _check_tenants(core, core.tenants)
    number = core.store.columns.number
    for log in (NUM_CHANGES, NUM_NOTES, NUM_GONE, NUM_MOVED):
        _require(number[log] == 0, f"{number[log]} entries of log {log} were never taken")


def dump_core(core: FlatCore) -> dict[str, object]:
    """Return contents, rows and orders as plain values; equal for cores that act alike."""
    c = core.store.columns
    contents = list(core.contents())
    core.digester.make(int32_array([n for n, _, _, _ in contents]))
    serials = {step.serial: (client, step.step) for client, step in core.steps.waiting()}
    return {
        "num_blocks": len(c.block),
        "contents": sorted(
            (
                b,
                g,
                str(core.namespaces[core.root_of(n)]),
                c.digest[n].tobytes().hex(),
                None if is_sealed else serials.get(int(c.node[n, OWNER + 2 * g])),
            )
            for n, g, b, is_sealed in contents
        ),
        "free": free_list(core.store),
        "order": [] if core.order is None else core.order.policy.order(),
        "tables": {
            name: [core.table(r, g).tolist() for g in range(core.store.num_groups)]
            for name, r in sorted(core.rows.items())
        },
        "ends": {
            name: (np.flatnonzero(c.forward[r, ENDS:]) + 1).tolist()
            for name, r in sorted(core.rows.items())
        },
        "units": {name: int(c.row[r, UNITS]) for name, r in sorted(core.rows.items())},
        "hashless": sorted(name for name, r in core.rows.items() if c.row[r, FLAGS] & NO_CACHING),
        "pins": sorted(core.pins.items()),
        "shared": {
            core.requests[r]: sorted((*column, n) for column, n in columns.items())
            for r, columns in sorted(core.forks.shared.items())
        },
        "hits_stopped": core.hits_stopped,
    }


def free_list(store: ColumnStore) -> list[int]:
    """Return the blocks in the list of free ones, the next first."""
    block = store.columns.block
    found: list[int] = []
    b = block.item(0, NEXT)
    while b and len(found) < len(block):
        found.append(b)
        b = block.item(b, NEXT)
    return found


def _require(is_right: object, message: str) -> None:
    if not is_right:
        raise InvariantError(message)


def check_list(store: ColumnStore) -> None:
    """Raise InvariantError unless the list of free blocks is whole and counted."""
    c, listed = store.columns, free_list(store)
    way = [0, *listed, 0]
    for one, other in pairwise(way):
        _require(c.block[other, PREV] == one, f"block {other} does not lead back to {one}")
    held = [b for b in listed if c.block[b, REF]]
    _require(not held, f"blocks {held[:5]} are held, and in the list of free ones")
    cached = [bool(c.block[b, NODE]) for b in listed]
    _require(cached == sorted(cached), "blocks without content stand behind cached ones")
    num_blank = len(cached) - sum(cached)
    _require(num_blank == c.number[BLANK], f"{num_blank} blocks are blank, not {c.number[BLANK]}")
    if c.number[HAS_POLICY]:
        _require(not any(cached), "a cached block is in the list, but a policy orders those")
    else:
        _require(
            len(listed) == c.number[FREE], f"{len(listed)} blocks are free, not {c.number[FREE]}"
        )
    unheld = int(np.count_nonzero(c.block[1:, REF] == 0))
    _require(unheld == c.number[FREE], f"{unheld} blocks are unheld, {c.number[FREE]} are free")


def check_nodes(store: ColumnStore, all_roots: Iterable[int], rows: Iterable[int]) -> None:
    """Raise InvariantError unless all nodes hang together; with these roots and rows."""
    c, roots = store.columns, set(all_roots)
    end, num_groups = int(c.number[NEXT_NODE]), store.num_groups
    node = c.node[:end]
    spare: set[int] = set()
    n = int(c.number[SPARE_NODE])
    while n and n not in spare:
        spare.add(n)
        n = int(node[n, CHILD])
    _require(
        len(spare) == c.number[NUM_SPARE],
        f"{len(spare)} nodes are spare, not {c.number[NUM_SPARE]}",
    )
    living = np.flatnonzero(node[:, PARENT]).tolist()
    _require(
        len(living) + len(roots) + len(spare) == end - 1,
        f"{len(living)} nodes, {len(roots)} roots and {len(spare)} spare ones are not {end - 1}",
    )
    children = np.bincount(node[living, PARENT], minlength=end)
    standing = Counter(int(c.row[r, LAST]) for r in rows)
    num_indexed = 0
    for n in [*living, *roots]:
        _require(children[n] == node[n, CHILDREN], f"node {n} counts its children wrongly")
        _require(standing[n] == node[n, ROWS], f"node {n} counts rows wrongly")
        child = int(node[n, CHILD])
        _require(not child or node[child, PARENT] == n, f"node {n} has a child of another")
    for n in living:
        parent = int(node[n, PARENT])
        is_living = node[parent, PARENT] or parent in roots
        _require(is_living, f"node {n} continues node {parent}, which is gone")
        has_digests = node[parent, KEYS] & 1 or not node[n, KEYS] & 1
        _require(has_digests, f"node {n} has a digest, and node {parent} before it has none")
        has_block = any(node[n, BLOCK + 2 * g] for g in range(num_groups))
        is_kept = has_block or node[n, CHILDREN] or node[n, ROWS]
        _require(is_kept, f"nothing keeps node {n} alive")
        num_indexed += node[parent, CHILD] != n
        found = child_of(store.address, parent, int(node[n, KEYS]) >> 1, c.tokens[n])
        _require(found == n, f"node {n} is found as {found}")
    _require(
        num_indexed == c.number[NUM_INDEXED] == np.count_nonzero(c.index),
        f"{num_indexed} nodes belong into the index, {c.number[NUM_INDEXED]} are counted",
    )
    _require(
        2 * num_indexed <= len(c.index),
        f"{num_indexed} nodes are in an index of {len(c.index)} places: half of them stay empty",
    )
    _require(not c.mark.any(), "marks were left behind")


def _check_contents(core: FlatCore) -> None:
    c = core.store.columns
    end = int(c.number[NEXT_NODE])
    cached = 0
    open_serials = {step.serial for _, step in core.steps.waiting()}
    for g in range(core.store.num_groups):
        length, is_prefix_group = int(c.group[g, LENGTH]), c.group[g, KIND] == FULL
        for n in np.flatnonzero(c.node[:end, BLOCK + 2 * g]).tolist():
            b, owner = int(c.node[n, BLOCK + 2 * g]), int(c.node[n, OWNER + 2 * g])
            cached += 1
            _require(c.block[b, NODE] == n, f"block {b} does not know that it caches node {n}")
            is_open = owner >= c.number[SEALED_BELOW] and not core.is_sealed(n, g)
            _require(
                not is_open or owner in open_serials,
                f"node {n} waits for serial {owner}, of which no step is known",
            )
            above = n
            for _ in range(length):
                above = int(c.node[above, PARENT])
            if is_prefix_group and c.node[above, PARENT]:
                _require(
                    c.node[above, BLOCK + 2 * g],
                    f"block {b} of group {g} is cached, but not the one before it",
                )
                is_held = c.block[b, REF] > core.forks.copied[b] and not c.number[HAS_GAPS]
                _require(
                    not is_held or c.block[c.node[above, BLOCK + 2 * g], REF],
                    f"block {b} of group {g} is held, but not the one before it",
                )
    counted = int(np.count_nonzero(c.block[:, NODE]))
    _require(cached == counted, f"{counted} blocks cache something, nodes have {cached}")
    _require(c.block[0, NODE] == 0 == c.block[0, REF], "the null block is held or cached")


def _check_rows(core: FlatCore) -> Counter[int]:
    """Check tables and paths; return how often rows hold cached blocks beside their own."""
    c, num_groups = core.store.columns, core.store.num_groups
    held: Counter[int] = Counter()
    for name, r in core.rows.items():
        _require(core.requests.get(r) == name, f"row {r} is not that of {name}")
        n, u, duplicates = int(c.row[r, LAST]), int(c.row[r, UNITS]), 0
        while u:
            for g in range(num_groups):
                length = int(c.group[g, LENGTH])
                if c.group[g, KIND] != FULL or u % length:
                    continue
                mine, cached = int(core.table(r, g)[u // length - 1]), int(c.node[n, BLOCK + 2 * g])
                _require(cached, f"{name} stands behind node {n}, which has lost its block")
                if mine != cached:
                    duplicates += 1
                    held[cached] += 1
            n = int(c.node[n, PARENT])
            u -= 1
        _require(n == c.row[r, ROOT], f"{name} stands elsewhere than its row says")
        _require(duplicates == c.row[r, DUPLICATES], f"{name} has {duplicates} contents twice")
        for g in range(num_groups):
            kept = int(c.row[r, KEPT + 2 * g])
            _require(kept <= c.row[r, COLUMNS + 2 * g], f"{name} has skipped what it never had")
            _require(not core.table(r, g)[:kept].any(), f"{name} has blocks that it has skipped")
    closed = np.setdiff1d(np.arange(len(c.row)), list(core.rows.values()))
    _require(not c.forward[closed, ENDS:].any(), "forwards are noted of rows that have gone")
    return held


def _check_tenants(core: FlatCore, tenants: TenantLedger) -> None:
    """Blocks with contents are their namespaces' tenants', others those of the rows they are in."""
    c, owners = core.store.columns, tenants.owners
    tenants.check()
    is_used = (c.block[:, REF] != 0) | (c.block[:, NODE] != 0)
    wrong = np.flatnonzero((owners != UNOWNED) != is_used)
    _require(not len(wrong), f"blocks {wrong[:5]} are used, or have a tenant, but not both")
    unheld: Counter[int] = Counter()
    for n, _, b, _ in core.contents():
        namespace = core.namespaces[core.root_of(n)]
        number = tenants.account(namespace).number
        _require(owners[b] == number, f"block {b} of {namespace} is tenant {owners[b]}'s")
        unheld[number] += c.block[b, REF] == 0
    for name, r in core.rows.items():
        number = tenants.account(core.namespaces[int(c.row[r, ROOT])]).number
        for g in range(core.store.num_groups):
            table = core.table(r, g)
            others = table[(table != 0) & (owners[table] != number)]
            _require(not len(others), f"{name} has blocks {others[:5]} of another tenant")
    for account in tenants.accounts():
        _require(
            unheld[account.number] == account.num_unheld,
            f"tenant {account.name!r} has {unheld[account.number]} unheld blocks, "
            f"{account.num_unheld} are counted",
        )


def _check_references(core: FlatCore, duplicates: Counter[int]) -> None:
    counts: Any = core.blocks_in_tables()
    for others in (core.pins, core.forks.copied, duplicates):
        for b, count in others.items():
            counts[b] += count
    wrong = np.flatnonzero(counts != core.store.columns.block[:, REF])
    if len(wrong):
        b = int(wrong[0])
        raise InvariantError(
            f"block {b} is held {counts[b]} times, counted are {core.store.columns.block[b, REF]}"
        )
