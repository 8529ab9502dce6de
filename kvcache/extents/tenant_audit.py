"""Are the blocks of every tenant counted for it?

Beside the other audits: looks, changes nothing.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvcache.errors import InvariantError
from kvcache.extents.parts import CoreParts
from kvcache.ids import NULL_BLOCK_ID
from kvcache.tenants import TenantLedger


def check_tenants(parts: CoreParts, tenants: TenantLedger) -> None:
    """Raise InvariantError unless all blocks are those of the tenants that hold or cached them."""
    tenants.check()
    store, tree = parts.store, parts.tree
    fresh = store.fresh_blocks()
    owned = np.count_nonzero(tenants.owners)
    if tenants.owners[fresh].any() or owned + len(fresh) != store.num_blocks - 1:
        raise InvariantError(f"{owned} blocks have tenants, but {len(fresh)} are fresh")
    unheld: Counter[int] = Counter()
    ties: Counter[str] = Counter()
    for namespace, root in tree.roots.items():
        account = tenants.account(namespace)
        ties[account.name] += 1
        for run in tree.below(root):
            if run.tenant is not account:
                raise InvariantError(f"{run} is counted for another tenant than {account.name!r}")
            run.settle()
            beside = store.ids_of(run.handles[store.are_valid(run.handles)])
            _require_owner(tenants, run.ids[run.ids != NULL_BLOCK_ID], account.number)
            _require_owner(tenants, beside, account.number)
            if run.entry:
                unheld[account.number] += tree.num_blocks(run)
            singles = beside[store.references[beside] == 0]
            unheld[account.number] += len(singles)
    for row in parts.tables.by_id.values():
        number = tenants.account(row.request.namespace).number
        for group in parts.shape.groups:
            table = parts.table_of(row, group.index)
            _require_owner(tenants, table[table != NULL_BLOCK_ID], number)
    for account in tenants.accounts():
        if unheld[account.number] != account.num_unheld:
            raise InvariantError(
                f"tenant {account.name!r} has {unheld[account.number]} unheld blocks, "
                f"{account.num_unheld} are counted"
            )
        if account.num_ties < ties[account.name]:
            raise InvariantError(f"tenant {account.name!r} is tied {account.num_ties} times")


def _require_owner(tenants: TenantLedger, block_ids: np.ndarray, number: int) -> None:
    others = block_ids[tenants.owners[block_ids] != number]
    if len(others):
        raise InvariantError(
            f"blocks {others[:5].tolist()} are owned by {tenants.owners[others[:5]].tolist()}, "
            f"tenant {number} has them"
        )
