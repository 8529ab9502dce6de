"""Do the books of a pool add up? And the whole of them as plain values.

Beside the pool: looks into its lists, changes nothing. Refuses to repair.
"""

from __future__ import annotations

from collections import Counter

from kvcache.blocks.pool import BlockPool
from kvcache.blocks.references import KINDS_APART, NULL_ID
from kvcache.core import ReferenceKind
from kvcache.errors import InvariantError
from kvcache.hashing import BlockHash
from kvcache.tenants import TenantLedger
from kvcache.tenants.ledger import NOBODY


def check_pool(pool: BlockPool) -> None:
    """Raise InvariantError with the first sum that fails. O(blocks)."""
    _check_places(pool)
    _check_contents(pool)
    _check_order(pool)
    _check_unsealed(pool)
    if pool.tenants is not None:
        _check_tenants(pool, pool.tenants)


def dump_pool(pool: BlockPool) -> dict[str, object]:
    """Return references, contents and orders as plain values; equal for pools that act alike."""
    contents = pool.contents
    tables = [contents.table_of(block_id) for block_id in range(pool.num_blocks)]
    blocks = {
        block_id: {
            "state": pool.state(block_id).value,
            "references": {
                kind.value: pool.num_references(block_id, kind)
                for kind in ReferenceKind
                if pool.num_references(block_id, kind)
            },
            "digest": _hex(contents.digests[block_id]),
            "parent": _hex(contents.parents[block_id]),
            "group": None if table is None else table.group,
            "namespace": None if table is None else str(table.namespace),
        }
        for block_id, table in enumerate(tables)
        if table is not None or pool.num_references(block_id)
    }
    return {
        "num_blocks": pool.num_blocks,
        "blocks": blocks,
        "free_order": pool.get_all_free_blocks(),
        "quarantined": sorted(pool.quarantined_blocks()),
        "unsealed": {
            block_id: [run.client_id, run.step]
            for block_id, run in sorted(contents.unsealed.items())
        },
    }


def _check_places(pool: BlockPool) -> None:
    """Every block is in the free queue, in the policy, quarantined or held."""
    free = pool.get_all_free_blocks()
    queued = set(free)
    if len(queued) != len(free):
        raise InvariantError(f"{len(free)} free places hold {len(queued)} distinct blocks")
    if pool.num_references(NULL_ID) or NULL_ID in queued or pool.digest(NULL_ID) is not None:
        raise InvariantError("the null block is held, free or cached")
    quarantined = pool.quarantined_blocks()
    for block_id in range(1, pool.num_blocks):
        total = pool.num_references(block_id)
        if total < 0 or pool.num_references(block_id, ReferenceKind.REQUEST) < 0:
            raise InvariantError(f"block {block_id} has {total} references, fewer than by kinds")
        should_be_free = not total and block_id not in quarantined
        if should_be_free != (block_id in queued):
            raise InvariantError(
                f"block {block_id} ({pool.state(block_id).value}) has {total} references and is "
                f"{'' if block_id in queued else 'not '}free"
            )
        if block_id in quarantined and pool.digest(block_id) is not None:
            raise InvariantError(f"quarantined block {block_id} can be found by its digest")
    for kind in KINDS_APART:
        wrong = {b: n for b, n in pool.blocks_held(kind).items() if n < 1}
        if wrong:
            raise InvariantError(f"{kind.value} references below one: {wrong}")
    empty = [b for b in free if pool.digest(b) is None]
    if free[: len(empty)] != empty:
        raise InvariantError("an empty block would be handed out after a cached one is evicted")
    if pool.num_empty_blocks() != len(empty):
        raise InvariantError(f"{pool.num_empty_blocks()} blocks queue as empty, {len(empty)} are")


def _check_tenants(pool: BlockPool, tenants: TenantLedger) -> None:
    """Blocks with contents are their namespaces' tenants', and others those of their holders."""
    tenants.check()
    unheld: Counter[int] = Counter()
    for block_id in range(1, pool.num_blocks):
        table, owner = pool.contents.table_of(block_id), int(tenants.owners[block_id])
        is_used = table is not None or pool.num_references(block_id) > 0
        if (owner != NOBODY) != is_used:
            raise InvariantError(
                f"block {block_id} is tenant {owner}'s and {'in' if is_used else 'out of'} use"
            )
        if table is not None and tenants.account(table.namespace).number != owner:
            raise InvariantError(
                f"block {block_id} of {table.namespace} is counted for tenant {owner}"
            )
        if table is not None and not pool.num_references(block_id):
            unheld[owner] += 1
    for account in tenants.accounts():
        if unheld[account.number] != account.num_unheld:
            raise InvariantError(
                f"tenant {account.name!r} has {unheld[account.number]} unheld blocks, "
                f"{account.num_unheld} are counted"
            )


def _check_contents(pool: BlockPool) -> None:
    """Blocks and digest tables say the same, both ways."""
    contents = pool.contents
    listed = 0
    for table in contents.all_tables():
        if not table.ids or not set(table.copies) <= set(table.ids):
            raise InvariantError(f"a digest table of group {table.group} is empty or inconsistent")
        for digest in table.ids:
            for block_id in table.blocks(digest):
                listed += 1
                if contents.digests[block_id] != digest or contents.table_of(block_id) is not table:
                    raise InvariantError(
                        f"{digest.hex()} of group {table.group} is looked up in block {block_id}, "
                        f"which holds {_hex(contents.digests[block_id])}"
                    )
    held = [b for b in range(pool.num_blocks) if contents.digests[b] is not None]
    if not listed == len(held) == contents.num_cached:
        raise InvariantError(
            f"{len(held)} blocks have digests, {listed} are in tables, "
            f"{contents.num_cached} are counted"
        )
    for block_id in range(pool.num_blocks):
        fields = (contents.digests[block_id], contents.parents[block_id])
        holder = contents.table_of(block_id)
        if (None in fields) != (holder is None) or fields.count(None) == 1:
            raise InvariantError(f"block {block_id} is half cached: {fields}")
        if bool(contents.is_copied[block_id]) != (
            holder is not None and fields[0] in holder.copies
        ):
            raise InvariantError(
                f"block {block_id} is {'' if contents.is_copied[block_id] else 'not '}noted as one "
                "of several with its content"
            )


def _check_order(pool: BlockPool) -> None:
    """In ordered tables children are counted, and every parent is there or is one of no block."""
    contents = pool.contents
    num_children = [0] * pool.num_blocks
    for table in contents.all_tables():
        if not table.is_ordered:
            continue
        orphans: set[BlockHash] = set()
        for digest in table.ids:
            for block_id in table.blocks(digest):
                parent = contents.parents[block_id]
                parent_block = table.ids.get(parent, NULL_ID)
                if parent_block == NULL_ID:
                    orphans.add(parent)
                if contents.parent_blocks[block_id] != parent_block:
                    raise InvariantError(
                        f"the parent of block {block_id} is looked up in {parent_block}, but noted "
                        f"in {contents.parent_blocks[block_id]}"
                    )
                num_children[parent_block] += block_id == table.ids[digest]
        if len(orphans) > 1 or (pool.none_hash and orphans - {pool.none_hash}):
            raise InvariantError(
                f"group {table.group} has cached children of {len(orphans)} digests that are not "
                "cached: a parent was evicted before its child"
            )
    for block_id in range(1, pool.num_blocks):
        if contents.num_children[block_id] != num_children[block_id]:
            raise InvariantError(
                f"block {block_id} has {num_children[block_id]} cached children, "
                f"{contents.num_children[block_id]} are counted"
            )


def _check_unsealed(pool: BlockPool) -> None:
    """Unsealed blocks are cached, and their runs are in the ledger."""
    known = set(map(id, pool.ledger.runs()))
    for block_id, run in pool.contents.unsealed.items():
        if id(run) not in known or block_id not in run.block_ids:
            raise InvariantError(f"block {block_id} waits for a step that nobody will settle")
        if pool.contents.table_of(block_id) is not run.table:
            raise InvariantError(f"unsealed block {block_id} is not cached")
    counted = pool.contents.unsealed.num_by_client()
    actual: dict[str, int] = {}
    for _, run in pool.contents.unsealed.items():
        actual[run.client_id] = actual.get(run.client_id, 0) + 1
    if counted != actual:
        raise InvariantError(f"unsealed blocks by client: counted {counted}, there are {actual}")


def _hex(digest: BlockHash | None) -> str | None:
    return None if digest is None else digest.hex()
