"""Audits of a core: `check_core` verifies its invariants, `dump_core` returns its whole state.

Nothing is changed or repaired; only digests that were not made yet are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.base.arrays import int32_array
from kvcache.base.errors import InvariantError
from kvcache.core.columns import ColumnStore
from kvcache.core.kinds.rule import FULL, KIND, LENGTH
from kvcache.core.names import *
from kvcache.core.prefix_tree import child_of
from kvcache.tenants import TenantLedger
from kvcache.tenants.ledger import UNOWNED

if TYPE_CHECKING:
    from kvcache.core.flat_core import FlatCore


def check_core(core: FlatCore) -> None:
    """Raise InvariantError at the first invariant that does not hold. O(blocks)."""
    check_list(core.store)
    check_nodes(core.store, core.cache.roots.values(), core.rows.values())
    _check_contents(core)
    duplicates = _check_rows(core)
    _check_references(core, duplicates)
    if core.cache.order is not None:
        core.cache.order.check()
    if core.tenants is not None:
        _check_tenants(core, core.tenants)
    number = core.store.columns.number
    num_waiting = 0 if number[HAS_POLICY] else max(0, number[LOGS_USES] - 1)
    for log, most in [(NUM_CHANGES, 0), (NUM_NOTES, 0), (NUM_GONE, 0), (NUM_MOVED, num_waiting)]:
        _require(number[log] <= most, f"{number[log]} entries of log {log} were never taken")


def dump_core(core: FlatCore) -> dict[str, object]:
    """Return contents, rows and orders as plain values. Cores that act alike have equal dumps."""
    c = core.store.columns
    contents = core.store.contents()
    core.cache.digester.make(int32_array([n for n, _, _, _ in contents]))
    serials = {step.serial: (client, step.step) for client, step in core.steps.waiting()}
    return {
        "num_blocks": len(c.block),
        "contents": sorted(
            (
                b,
                g,
                str(core.cache.namespaces[core.store.root_of(n)]),
                c.digest[n].tobytes().hex(),
                None if is_sealed else serials.get(int(c.node[n, OWNER + 2 * g])),
            )
            for n, g, b, is_sealed in contents
        ),
        "free": free_list(core.store),
        "order": [] if core.cache.order is None else core.cache.order.policy.order(),
        "tables": {
            name: [core.store.table(r, g).tolist() for g in range(core.store.num_groups)]
            for name, r in sorted(core.rows.items())
        },
        "ends": {
            name: (np.flatnonzero(c.forward[r, ENDS:]) + 1).tolist()
            for name, r in sorted(core.rows.items())
        },
        "units": {name: int(c.row[r, UNITS]) for name, r in sorted(core.rows.items())},
        "hashless": sorted(name for name, r in core.rows.items() if c.row[r, FLAGS] & NO_CACHING),
        "pins": sorted(core.cache.pins.items()),
        "shared": {
            core.requests[r]: sorted((*column, n) for column, n in columns.items())
            for r, columns in sorted(core.forks.shared.items())
        },
        "is_caching": core.cache.is_caching,
    }


def free_list(store: ColumnStore) -> list[int]:
    """Return the blocks in the free list, the next one first."""
    block = store.columns.block
    found: list[int] = []
    b = block.item(0, NEXT)  # not in a kernel: a broken list must not read other memory
    while b and len(found) < len(block):
        found.append(b)
        b = block.item(b, NEXT)
    return found


def _require(is_right: object, message: str) -> None:
    if not is_right:
        raise InvariantError(message)


def check_list(store: ColumnStore) -> None:
    """Raise InvariantError unless the free list is intact and its counts are right."""
    c, listed = store.columns, free_list(store)
    way = [0, *listed, 0]
    for one, other in pairwise(way):
        _require(c.block[other, PREV] == one, f"block {other} does not link back to {one}")
    held = [b for b in listed if c.block[b, REF]]
    _require(not held, f"blocks {held[:5]} are referenced, and in the free list")
    cached = [bool(c.block[b, NODE]) for b in listed]
    _require(cached == sorted(cached), "blocks without content come after cached ones")
    num_blank = len(cached) - sum(cached)
    _require(num_blank == c.number[BLANK], f"{num_blank} blocks are blank, not {c.number[BLANK]}")
    if c.number[HAS_POLICY]:
        _require(not any(cached), "a cached block is in the free list, but a policy orders it")
    else:
        _require(
            len(listed) == c.number[FREE], f"{len(listed)} blocks are free, not {c.number[FREE]}"
        )
    unheld = int(np.count_nonzero(c.block[1:, REF] == 0))
    _require(unheld == c.number[FREE], f"{unheld} blocks are unheld, {c.number[FREE]} are free")


def check_nodes(store: ColumnStore, all_roots: Iterable[int], rows: Iterable[int]) -> None:
    """Raise InvariantError unless the nodes form trees with exactly these roots, and `rows` are
    counted at their newest nodes."""
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
    num_rows = Counter(int(c.row[r, LAST]) for r in rows)
    num_indexed = 0
    for n in [*living, *roots]:
        _require(children[n] == node[n, CHILDREN], f"node {n} has a wrong number of children")
        _require(num_rows[n] == node[n, ROWS], f"node {n} has a wrong number of rows")
        child = int(node[n, CHILD])
        _require(not child or node[child, PARENT] == n, f"node {n} has a CHILD of another node")
    for n in living:
        parent = int(node[n, PARENT])
        is_living = node[parent, PARENT] or parent in roots
        _require(is_living, f"node {n} continues node {parent}, which is gone")
        has_digests = node[parent, KEYS] & 1 or not node[n, KEYS] & 1
        _require(has_digests, f"node {n} has a digest, and its parent {parent} has none")
        has_block = any(node[n, BLOCK + 2 * g] for g in range(num_groups))
        is_kept = has_block or node[n, CHILDREN] or node[n, ROWS]
        _require(is_kept, f"nothing keeps node {n} alive")
        num_indexed += node[parent, CHILD] != n
        found = child_of(store.address, parent, int(node[n, KEYS]) >> 1, c.tokens[n])
        _require(found == n, f"node {n} is found as {found}")
    _require(
        num_indexed == c.number[NUM_INDEXED] == np.count_nonzero(c.index),
        f"{num_indexed} nodes belong in the index, {c.number[NUM_INDEXED]} are counted",
    )
    _require(
        2 * num_indexed <= len(c.index),
        f"{num_indexed} nodes are in an index of {len(c.index)} places: half of them stay empty",
    )
    _require(not c.mark.any(), "marks were left behind")


def _check_contents(core: FlatCore) -> None:
    c, contents = core.store.columns, core.store.contents()
    open_serials = {step.serial for _, step in core.steps.waiting()}
    for n, g, b, is_sealed in contents:
        owner = int(c.node[n, OWNER + 2 * g])
        _require(c.block[b, NODE] == n, f"block {b} does not name node {n}, which it caches")
        _require(
            is_sealed or owner in open_serials,
            f"node {n} waits for serial {owner}, which no step has",
        )
        above = n
        for _ in range(int(c.group[g, LENGTH])):
            above = int(c.node[above, PARENT])
        if c.group[g, KIND] == FULL and c.node[above, PARENT]:
            _require(
                c.node[above, BLOCK + 2 * g],
                f"block {b} of group {g} is cached, but not the one before it",
            )
            is_held = c.block[b, REF] > core.forks.copied[b] and not c.number[HAS_GAPS]
            _require(
                not is_held or c.block[c.node[above, BLOCK + 2 * g], REF],
                f"block {b} of group {g} is referenced, but not the one before it",
            )
    counted = int(np.count_nonzero(c.block[:, NODE]))
    _require(
        len(contents) == counted,
        f"{counted} blocks have a node, nodes have {len(contents)} blocks",
    )
    _require(c.block[0, NODE] == 0 == c.block[0, REF], "the null block is referenced or cached")


def _check_rows(core: FlatCore) -> Counter[int]:
    """Check tables and paths. Return how many references rows have to cached blocks that their own
    blocks duplicate."""
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
                mine, cached = (
                    int(core.store.table(r, g)[u // length - 1]),
                    int(c.node[n, BLOCK + 2 * g]),
                )
                _require(cached, f"{name} continues node {n}, which has lost its block")
                if mine != cached:
                    duplicates += 1
                    held[cached] += 1
            n = int(c.node[n, PARENT])
            u -= 1
        _require(n == c.row[r, ROOT], f"{name} is under another root than its row says")
        _require(duplicates == c.row[r, DUPLICATES], f"{name} has {duplicates} duplicate blocks")
        for g in range(num_groups):
            kept = int(c.row[r, KEPT + 2 * g])
            _require(
                kept <= c.row[r, COLUMNS + 2 * g], f"{name} has skipped more than its table has"
            )
            _require(
                not core.store.table(r, g)[:kept].any(), f"{name} has blocks that it has skipped"
            )
    closed = np.setdiff1d(np.arange(len(c.row)), list(core.rows.values()))
    _require(not c.forward[closed, ENDS:].any(), "forwards are noted of closed rows")
    return held


def _check_tenants(core: FlatCore, tenants: TenantLedger) -> None:
    """Check that cached blocks belong to their namespace's tenant, and all other blocks to the
    tenant of the rows that reference them."""
    c, owners = core.store.columns, tenants.owners
    tenants.check()
    is_used = (c.block[:, REF] != 0) | (c.block[:, NODE] != 0)
    wrong = np.flatnonzero((owners != UNOWNED) != is_used)
    _require(not len(wrong), f"blocks {wrong[:5]} have a tenant but are unused, or the reverse")
    unheld: Counter[int] = Counter()
    for n, _, b, _ in core.store.contents():
        namespace = core.cache.namespaces[core.store.root_of(n)]
        number = tenants.account(namespace).number
        _require(owners[b] == number, f"block {b} of {namespace} is tenant {owners[b]}'s")
        unheld[number] += c.block[b, REF] == 0
    for name, r in core.rows.items():
        number = tenants.account(core.cache.namespaces[int(c.row[r, ROOT])]).number
        for g in range(core.store.num_groups):
            table = core.store.table(r, g)
            others = table[(table != 0) & (owners[table] != number)]
            _require(not len(others), f"{name} has blocks {others[:5]} of another tenant")
    for account in tenants.accounts():
        _require(
            unheld[account.number] == account.num_unheld,
            f"tenant {account.name!r} has {unheld[account.number]} unreferenced blocks, "
            f"{account.num_unheld} are counted",
        )


def _check_references(core: FlatCore, duplicates: Counter[int]) -> None:
    counts: Any = core.store.blocks_in_tables()
    for others in (core.cache.pins, core.forks.copied, duplicates):
        for b, count in others.items():
            counts[b] += count
    wrong = np.flatnonzero(counts != core.store.columns.block[:, REF])
    if len(wrong):
        b = int(wrong[0])
        raise InvariantError(
            f"block {b} has {counts[b]} references, counted are {core.store.columns.block[b, REF]}"
        )
