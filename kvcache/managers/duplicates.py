"""Giving up blocks whose content is in another block as well: an option, and the memory it saves.

Beside the coordinator, after steps are complete. Two requests that compute the same tokens at the
same time fill a block each; once both are sealed, the later one's table takes the first block, and
its own becomes empty. Only complete steps count: no failure makes a request write there again, and
forwards under way with the old table run before anybody else gets the block. Refuses to merge
states, which stand where their request's forwards look for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.arrays import int32_array
from kvcache.blocks.run import CachedRun
from kvcache.core import TableChange
from kvcache.managers.coordinators import KVCacheCoordinator


class DuplicateMerger:
    """Merges what runs have sealed, and keeps the table changes until they are taken."""

    def __init__(self, coordinator: KVCacheCoordinator) -> None:
        """Merge in the tables of `coordinator`; nothing is merged yet."""
        self._coordinator = coordinator
        self._pool = coordinator.pool
        self._changes: list[tuple[str, TableChange]] = []
        self.num_merged = 0

    def merge(self, runs: Sequence[CachedRun]) -> None:
        """Let requests give up the blocks of sealed `runs` that are second ones."""
        states = self._coordinator.state_managers
        for run in runs:
            manager = self._coordinator.managers[run.table.group]
            if not run.table.copies or manager in states:
                continue
            for index, block_id in enumerate(run.block_ids):
                first = self._first_of(run, index)
                column = run.first_index + index
                table = manager.table(run.request_id)
                if first is None or column >= len(table) or table[column] != block_id:
                    continue
                self._pool.touch([first])
                manager.replace_block(run.request_id, column, first)
                self._pool.give_back([block_id])
                change = TableChange(manager.group, column, int32_array([first]))
                self._changes.append((run.request_id, change))
                if not self._pool.num_references(block_id):
                    self._pool.forget_copies([block_id])
                    self.num_merged += 1

    def take_changes(self) -> list[tuple[str, TableChange]]:
        """Return the changes since the last call, by request."""
        changes, self._changes = self._changes, []
        return changes

    def _first_of(self, run: CachedRun, index: int) -> int | None:
        """Return the sealed block that look-ups find in place of a run's; None if it is that."""
        digest, block_id = run.digests[index], run.block_ids[index]
        if block_id not in run.table.copies.get(digest, ()):
            return None
        first = run.table.ids[digest]
        return None if first in self._pool.contents.unsealed else first
