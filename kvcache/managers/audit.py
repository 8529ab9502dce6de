"""Do requests' block tables and the pool's references say the same?

Beside the coordinator: looks, changes nothing.
"""

from __future__ import annotations

from kvcache.blocks.pool import BlockPool
from kvcache.blocks.references import NULL_ID
from kvcache.core import ReferenceKind
from kvcache.errors import InvariantError
from kvcache.managers.coordinators import KVCacheCoordinator


def check_tables(pool: BlockPool, coordinator: KVCacheCoordinator) -> None:
    """Raise InvariantError unless request references are exactly the entries of all tables."""
    counts: dict[int, int] = {}
    for manager in coordinator.managers:
        for request_id in manager.request_ids():
            table = manager.table(request_id)
            kept = [block_id for block_id in table if block_id != NULL_ID]
            if len(set(kept)) != len(kept):
                raise InvariantError(f"a block stands twice in the table of {request_id}")
            keeps_states = manager.spec.num_state_blocks is not None
            if kept and list(table[-len(kept) :]) != kept and not keeps_states:
                raise InvariantError(f"request {request_id} has a null block behind a kept one")
            if manager.spec.reads_whole_prefix and len(kept) != len(table):
                raise InvariantError(f"request {request_id} has a null block in full attention")
            for block_id in kept:
                counts[block_id] = counts.get(block_id, 0) + 1
                content = pool.contents.table_of(block_id)
                if content is not None and content.group != manager.group:
                    raise InvariantError(
                        f"block {block_id} of {request_id} is in group {manager.group} and cached "
                        f"for group {content.group}"
                    )
    for block_id in range(1, pool.num_blocks):
        held = pool.num_references(block_id, ReferenceKind.REQUEST)
        if held != counts.get(block_id, 0):
            raise InvariantError(
                f"block {block_id} has {held} request references and stands in "
                f"{counts.get(block_id, 0)} tables"
            )


def dump_tables(coordinator: KVCacheCoordinator) -> dict[str, list[list[int]]]:
    """Return every request's tables, one list per group."""
    ids = sorted({request_id for m in coordinator.managers for request_id in m.request_ids()})
    return {request_id: list(coordinator.get_blocks(request_id)) for request_id in ids}
