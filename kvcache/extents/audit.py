"""Do the books of the fast core add up? And the whole of them as plain values.

Beside the core: looks, changes nothing. Refuses to repair.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvcache.errors import InvariantError
from kvcache.extents.block_store import NO_CONTENT, SEALED, BlockStore
from kvcache.extents.forks import RowForks
from kvcache.extents.parts import CoreParts
from kvcache.extents.pins import PinnedRuns
from kvcache.extents.rows import Row, RowTables
from kvcache.extents.run import Run
from kvcache.extents.shape import TreeShape
from kvcache.extents.tenant_audit import check_tenants
from kvcache.extents.tree import RunTree
from kvcache.ids import NULL_BLOCK_ID


def check_core(parts: CoreParts, pins: PinnedRuns, forks: RowForks) -> None:
    """Raise InvariantError with the first sum that fails. O(blocks)."""
    shape, store, tree, tables = parts.shape, parts.store, parts.tree, parts.tables
    runs = list(tree.runs())
    _check_links(shape, tree, runs)
    _check_holders(tree, tables, pins, runs)
    of_runs = _check_contents(shape, store, runs)
    _check_rows(shape, tables)
    _check_references(parts, pins, forks)
    _check_places(store, tree, runs, of_runs)
    if store.tenants is not None:
        check_tenants(parts, store.tenants)


def dump_core(parts: CoreParts, pins: PinnedRuns, forks: RowForks) -> dict[str, object]:
    """Return tree, rows and orders as plain values; equal for cores that act alike."""
    shape, store, tree, tables = parts.shape, parts.store, parts.tree, parts.tables
    names = {id(root): str(namespace) for namespace, root in tree.roots.items()}
    return {
        "num_blocks": store.num_blocks,
        "runs": sorted(_dump_run(shape, store, run, names) for run in tree.runs()),
        "fresh": store.fresh_blocks().tolist(),
        "order": _order(store, tree),
        "tables": {
            request_id: [parts.table_of(row, group.index).tolist() for group in shape.groups]
            for request_id, row in sorted(tables.by_id.items())
        },
        "hashless": sorted(row.request.request_id for row in tables.by_id.values() if row.is_mute),
        "pins": sorted((run.end, ids.tolist()) for run, ids in pins.holders()),
        "shared": forks.dump_state(),
    }


def _dump_run(
    shape: TreeShape, store: BlockStore, run: Run, names: dict[int, str]
) -> tuple[object, ...]:
    run.settle()
    root = run
    while root.parent is not None:
        root = root.parent
    valid = store.are_valid(run.handles)
    return (
        names[id(root)],
        run.start,
        run.digests.hex(),
        run.ids.tolist(),
        np.where(valid, store.ids_of(run.handles), 0).tolist(),
        store.seals[run.ids].tolist(),
        run.num_holders,
    )


def _order(store: BlockStore, tree: RunTree) -> list[object]:
    """Return what would be evicted, first victims first: single blocks, and blocks of runs."""
    order: list[object] = []
    for entry in store.policy.order():
        run = tree.run_by_entry.get(entry)
        order.append(entry if run is None else tree.blocks_of(run, 0).tolist())
    return order


def _check_links(shape: TreeShape, tree: RunTree, runs: list[Run]) -> None:
    if len(runs) != tree.num_runs or sum(run.num_units for run in runs) != tree.num_units:
        raise InvariantError(
            f"{len(runs)} runs of {sum(run.num_units for run in runs)} units hang in the tree, "
            f"counted are {tree.num_runs} of {tree.num_units}"
        )
    for run in runs:
        if run.waiting is not None and (run.num_holders > 1 or run.children):
            raise InvariantError(f"{run} lets units wait, but is not a leaf of one row")
        run.settle()
        parent = run.parent
        if parent is None or parent.children.get(run.tokens[: shape.unit_bytes]) is not run:
            raise InvariantError(f"{run} is not a child of its parent {parent}")
        if run.start != parent.end or run.num_units < 1 or run.merged_into is not None:
            raise InvariantError(f"{run} does not continue its parent {parent}")
        lengths = (
            len(run.tokens) // shape.unit_bytes,
            len(run.digests) // shape.digest_bytes,
            run.ids.shape[1],
            run.handles.shape[1],
        )
        if set(lengths) != {run.num_units}:
            raise InvariantError(f"{run} has {run.num_units} units, its arrays {lengths}")


def _check_holders(tree: RunTree, tables: RowTables, pins: PinnedRuns, runs: list[Run]) -> None:
    held = Counter(id(row.run) for row in tables.by_id.values())
    held.update(id(run) for run, _ in pins.holders())
    for run in [*tree.roots.values(), *runs]:
        for child in run.children.values():
            held[id(run)] += child.num_holders > 0
    for run in [*tree.roots.values(), *runs]:
        if held[id(run)] != run.num_holders:
            raise InvariantError(f"{run} has {held[id(run)]} holders, counted otherwise")
        if run.parent is None:
            if not run.children and not run.num_holders:
                raise InvariantError("a root without children is held by nobody")
        elif bool(run.entry) != (not run.num_holders and tree.num_blocks(run) > 0):
            raise InvariantError(f"{run} has entry {run.entry} in the eviction policy")
        elif run.entry and tree.run_by_entry.get(run.entry) is not run:
            raise InvariantError(f"entry {run.entry} is not that of {run}")
    for row in tables.by_id.values():
        if row.run.end != int(tables.published[row.index]):
            raise InvariantError(
                f"request {row.request.request_id} has published "
                f"{int(tables.published[row.index])} units, its run ends with {row.run.end}"
            )


def _check_contents(shape: TreeShape, store: BlockStore, runs: list[Run]) -> Counter[int]:
    """Blocks of runs have contents, each one once; return them."""
    of_runs: Counter[int] = Counter()
    for run in runs:
        for group in shape.groups:
            if group.is_ordered:
                ids = run.ids[group.place]
                ends = (np.arange(run.start, run.end) + 1) % group.num_units == 0
                if ((ids != NULL_BLOCK_ID) != ends).any():
                    raise InvariantError(f"{run} lacks blocks of group {group.index}: {ids}")
            else:
                handles = run.handles[group.place]
                ids = store.ids_of(handles[store.are_valid(handles)])
            kept = ids[ids != NULL_BLOCK_ID]
            if (store.seals[kept] == NO_CONTENT).any():
                raise InvariantError(f"{run} has blocks without content in group {group.index}")
            of_runs.update(kept.tolist())
    twice = [block for block, count in of_runs.items() if count > 1]
    cached = np.flatnonzero(store.seals).tolist()
    if twice or sorted(of_runs) != cached or store.num_cached != len(cached):
        raise InvariantError(
            f"{len(of_runs)} blocks stand in runs ({twice[:5]} twice), {len(cached)} have "
            f"contents, {store.num_cached} are counted"
        )
    states = store.seals[cached]
    waiting = dict(Counter(states[states > SEALED].tolist()))
    if waiting != store.num_unsealed:
        raise InvariantError(
            f"unsealed blocks by client: counted {store.num_unsealed}, there are {waiting}"
        )
    return of_runs


def _check_rows(shape: TreeShape, tables: RowTables) -> None:
    for request_id, row in tables.by_id.items():
        for group in shape.in_rows:
            table = tables.columns(group.index, row.index)
            first = int(tables.first_kept[group.index, row.index])
            kept = table[table != NULL_BLOCK_ID]
            if len(np.unique(kept)) != len(kept):
                raise InvariantError(f"a block stands twice in the table of {request_id}")
            is_kept = table != NULL_BLOCK_ID
            if is_kept[:first].any() or not is_kept[first:].all():
                raise InvariantError(
                    f"request {request_id} keeps blocks of group {group.index} from column "
                    f"{first} on, its table is {table.tolist()}"
                )
            _check_own_blocks(shape, tables, row)


def _check_own_blocks(shape: TreeShape, tables: RowTables, row: Row) -> None:
    """Published columns that are no doubles have the blocks of the row's runs."""
    path: list[Run] = []
    run: Run | None = row.run
    while run is not None and run.parent is not None:
        path.append(run)
        run = run.parent
    for group in shape.ordered:
        num_of_tree = row.run.end // group.num_units
        if not path:
            continue
        units = np.concatenate([each.ids[group.place] for each in reversed(path)])
        theirs = units[units != NULL_BLOCK_ID]
        ours = tables.columns(group.index, row.index)[:num_of_tree]
        differs = np.flatnonzero(ours != theirs).tolist()
        if differs != sorted(row.doubles.get(group.index, ())):
            raise InvariantError(
                f"request {row.request.request_id} differs from its runs in columns {differs} of "
                f"group {group.index}, noted as doubles are {row.doubles.get(group.index)}"
            )


def _check_references(parts: CoreParts, pins: PinnedRuns, forks: RowForks) -> None:
    """Single blocks have a reference for each row, pin and copy that holds them."""
    shape, store, tables = parts.shape, parts.store, parts.tables
    held = forks.held_blocks()
    for _, block_ids in pins.holders():
        held.update(block_ids.tolist())
    for row in tables.by_id.values():
        published = int(tables.published[row.index])
        for group in shape.groups:
            table = parts.table_of(row, group.index)
            if group.is_ordered:
                own = table[published // group.num_units :].tolist()
                own += table[row.doubles.get(group.index, [])].tolist()
            else:
                own = table[table != NULL_BLOCK_ID].tolist()
            held.update(own)
    counted = {b: int(store.references[b]) for b in np.flatnonzero(store.references).tolist()}
    if counted != dict(held):
        wrong = {b: (counted.get(b, 0), held[b]) for b in {*counted, *held}}
        wrong = {b: pair for b, pair in wrong.items() if pair[0] != pair[1]}
        raise InvariantError(f"references of single blocks, counted and held: {wrong}")


def _check_places(store: BlockStore, tree: RunTree, runs: list[Run], of_runs: Counter[int]) -> None:
    """Every block is fresh, held or in the policy."""
    fresh = store.fresh_blocks().tolist()
    in_runs = {b for run in runs for b in run.ids[run.ids != NULL_BLOCK_ID].tolist()}
    unheld_runs = [run for run in runs if not run.num_holders]
    singles = [b for b in of_runs if b not in in_runs and not store.references[b]]
    entries = sorted([run.entry for run in unheld_runs if run.entry] + singles)
    if sorted(store.policy.order()) != entries:
        raise InvariantError(f"the policy has {sorted(store.policy.order())}, unheld are {entries}")
    leased = [
        b for run in unheld_runs for b in run.ids[run.ids != NULL_BLOCK_ID] if store.references[b]
    ]
    if leased:
        raise InvariantError(f"blocks {leased[:5]} of unheld runs have references")
    num_unheld = sum(tree.num_blocks(run) for run in unheld_runs) + len(singles)
    if num_unheld != store.num_unheld_cached:
        raise InvariantError(
            f"{num_unheld} cached blocks are unheld, {store.num_unheld_cached} are counted"
        )
    empty = {
        b
        for b in range(1, store.num_blocks)
        if not store.references[b] and store.seals[b] == NO_CONTENT
    }
    if sorted(fresh) != sorted(empty):
        raise InvariantError(f"{len(fresh)} blocks are fresh, {len(empty)} hold nothing")
