"""Requests that share blocks they may still write: forks, and the copies before their writes.

Beside the coordinator. A fork shares every block of its parent; all but the partly filled one of
each group (the newest state, where states are kept) are never written again. Whoever of the two
writes that one first gets a block of its own, with the bytes copied before the forward writes. So
does the last one that holds it, where what the other made of it can be found by its content.

    parent  [b1 b2 b3']    fork    [b1 b2 b3']    child writes    [b1 b2 b3']
                          ─────▶   [b1 b2 b3']    ───────────▶    [b1 b2 b7']    copy b3 -> b7

Holding shared blocks is by request references, like any other table entry: parent and child are
equals, either may go first, and what all running requests share is counted in them. Fork references
hold both ends of a copy until its command has been taken, so that neither block is handed out,
zeroed or copied into before. Refuses to share what a parent has no blocks for.
"""

from __future__ import annotations

from typing import TypeAlias

from kvcache.arrays import int32_array
from kvcache.blocks.outbox import Outbox
from kvcache.blocks.references import NULL_ID
from kvcache.core import ForkOrigin, ReferenceKind, Reservation, TableChange
from kvcache.errors import RequestError
from kvcache.managers.base import SingleTypeKVCacheManager
from kvcache.managers.coordinators import KVCacheCoordinator

_Columns: TypeAlias = "dict[tuple[int, int], int]"
"""Columns (group, column) that a request may write behind so many tokens."""


class TableForks:
    """Forks of requests on one coordinator."""

    def __init__(self, coordinator: KVCacheCoordinator, outbox: Outbox) -> None:
        """Know no fork. Copies go to `outbox`, where there are workers."""
        self._coordinator = coordinator
        self._pool = coordinator.pool
        self._outbox = outbox
        self._shared: dict[str, _Columns] = {}
        self._held: list[int] = []
        self.num_copies = 0

    def fork(self, parent_id: str, child_id: str, origin: ForkOrigin) -> list[TableChange]:
        """Give a request without tables those of its parent; return them.

        Raises:
            RequestError: the parent has no blocks for so many tokens; nothing was changed.
        """
        self._require_blocks(parent_id, origin.num_tokens)
        # A parent may still share others: where states are kept, each fork can leave it elsewhere.
        of_parent = self._shared.get(parent_id, {})
        of_child: _Columns = {}
        changes = []
        for manager in self._coordinator.managers:
            column = manager.fork(parent_id, child_id, origin)
            table = manager.table(child_id)
            if table:
                changes.append(TableChange(manager.group, 0, int32_array(table)))
            if column is not None and table[column.of_child] != NULL_ID:
                key = manager.group, column.of_parent
                of_parent[key] = min(of_parent.get(key, origin.num_tokens), origin.num_tokens)
                of_child[manager.group, column.of_child] = origin.num_tokens
        if of_child:
            self._shared[parent_id], self._shared[child_id] = of_parent, of_child
        return changes

    @property
    def has_any(self) -> bool:
        """Whether any request shares what it may write."""
        return bool(self._shared)

    def is_sharing(self, request_id: str) -> bool:
        """Say whether a write of the request may need a copy."""
        return request_id in self._shared

    def due_copies(
        self, request_id: str, reservation: Reservation
    ) -> list[tuple[SingleTypeKVCacheManager, int]]:
        """Return the shared columns that a reserved forward writes; each takes a block.

        Changes nothing.
        """
        managers = self._coordinator.managers
        return [
            (managers[group], column)
            for (group, column), num_tokens in self._shared.get(request_id, {}).items()
            if reservation.num_slot_tokens > num_tokens
            and managers[group].writes_column(column, reservation)
            and self._is_read_elsewhere(managers[group].table(request_id)[column])
        ]

    def copy(
        self,
        request_id: str,
        reservation: Reservation,
        due: list[tuple[SingleTypeKVCacheManager, int]],
    ) -> list[TableChange]:
        """Put a new block into each of these columns; return that. There is room.

        Columns that the forward may write as they are, are shared no more.
        """
        changes = []
        for (manager, column), new in zip(due, self._pool.get_new_blocks(len(due)), strict=True):
            old = manager.replace_block(request_id, column, new)
            if self._outbox.has_workers:
                self._pool.touch([old, new], ReferenceKind.FORK)
                self._held += [old, new]
                self._outbox.copies.add(old, new)
            self._pool.give_back([old])
            self.num_copies += 1
            changes.append(TableChange(manager.group, column, int32_array([new])))
        self._forget_settled(request_id, reservation)
        return changes

    def forget(self, request_id: str) -> None:
        """The request has given its blocks back."""
        self._shared.pop(request_id, None)

    def release_copied(self) -> None:
        """The commands of all copies so far have been taken."""
        held, self._held = self._held, []
        self._pool.free_blocks(held, ReferenceKind.FORK)

    def dump_state(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return what requests share, by request: group, column, and behind how many tokens."""
        return {
            request_id: sorted((*key, num_tokens) for key, num_tokens in columns.items())
            for request_id, columns in sorted(self._shared.items())
        }

    def _require_blocks(self, parent_id: str, num_tokens: int) -> None:
        """Refuse a parent that counts tokens as computed for which it has no slots."""
        for manager in self._coordinator.managers:
            capacity = manager.capacity_tokens(parent_id)
            # Where a state is after accepted drafts, its table does not tell.
            if capacity < num_tokens and manager not in self._coordinator.state_managers:
                raise RequestError(
                    f"request {parent_id} has blocks for {capacity} tokens in group "
                    f"{manager.group}, {num_tokens} computed ones cannot be shared: allocate slots "
                    "before tokens are computed"
                )

    def _forget_settled(self, request_id: str, reservation: Reservation) -> None:
        """Forget the columns that a reserved forward owns from now on."""
        managers = self._coordinator.managers
        shared = {
            (group, column): num_tokens
            for (group, column), num_tokens in self._shared[request_id].items()
            if reservation.num_slot_tokens <= num_tokens
            or self._is_held_elsewhere(managers[group].table(request_id)[column])
        }
        if shared:
            self._shared[request_id] = shared
        else:
            del self._shared[request_id]

    def _is_read_elsewhere(self, block_id: int) -> bool:
        """Say whether others hold a block too, or can find it by its content."""
        is_cached = self._pool.digest(block_id) is not None
        return block_id != NULL_ID and (is_cached or self._is_held_elsewhere(block_id))

    def _is_held_elsewhere(self, block_id: int) -> bool:
        """Say whether somebody holds a block beside one request and the copies that wait."""
        num_held = self._pool.num_references(block_id)
        return num_held - self._pool.num_references(block_id, ReferenceKind.FORK) > 1
