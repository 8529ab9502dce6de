"""What every block holds, and where every content is: the hash side of the pool.

Stands under `BlockPool`, which counts references and hands out blocks. A content becomes hittable
when a step schedules its last token (`add`), is sealed when that step is complete, and is
forgotten when its block is evicted or it is withdrawn. Refuses to know who holds a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from kvcache.blocks.outbox import Outbox
from kvcache.blocks.prefix_table import PrefixTable
from kvcache.blocks.run import CachedRun
from kvcache.errors import BlockError
from kvcache.hashing import BlockHash
from kvcache.request import Namespace

Finder: TypeAlias = Callable[[BlockHash], "int | None"]
"""Says which block holds a digest, for the client whose step is open."""


def find_nothing(digest: BlockHash) -> int | None:
    """Be the finder of a namespace in which nothing is cached."""
    return None


class ContentIndex:
    """Contents of blocks, as lists over block ids and as digest tables.

    Invariants: `digests[b]`, `parents[b]` and `tables[b]` are all set or all None; they are set
    exactly when the table has `digests[b]` in block `b`; `unsealed` has only such blocks.
    """

    def __init__(self, num_blocks: int, ordered_groups: frozenset[int], outbox: Outbox) -> None:
        """Know no content. In `ordered_groups` parents outlive their children."""
        self.digests: list[BlockHash | None] = [None] * num_blocks
        self.parents: list[BlockHash | None] = [None] * num_blocks
        self.tables: list[PrefixTable | None] = [None] * num_blocks
        self.unsealed: dict[int, CachedRun] = {}
        self.num_cached = 0
        self.client_id: str | None = None
        self._ordered_groups = ordered_groups
        self._outbox = outbox
        self._num_unsealed: dict[str, int] = {}
        self._tables_by_key: dict[tuple[Namespace, int], PrefixTable] = {}

    @property
    def outbox(self) -> Outbox:
        """Where commands and events go."""
        return self._outbox

    def all_tables(self) -> list[PrefixTable]:
        """Return every table that holds something."""
        return list(self._tables_by_key.values())

    def is_ordered(self, group: int) -> bool:
        """Whether blocks of a group are of no use without all blocks before them."""
        return group in self._ordered_groups

    def num_unsealed_by_client(self) -> dict[str, int]:
        """Return a copy of the counts of unsealed blocks."""
        return dict(self._num_unsealed)

    def table(self, namespace: Namespace, group: int) -> PrefixTable:
        """Return the table of a namespace and group, a new one where there is none."""
        key = (namespace, group)
        table = self._tables_by_key.get(key)
        if table is None:
            table = PrefixTable(namespace, group, group in self._ordered_groups)
            self._tables_by_key[key] = table
        return table

    def finder(self, namespace: Namespace, group: int) -> Finder:
        """Return what finds blocks of one namespace and group. Valid until the next mutation.

        Blocks that are not sealed are found by the client of the open step if they are its own.
        """
        table = self._tables_by_key.get((namespace, group))
        if table is None:
            return find_nothing
        foreign = len(self._num_unsealed) - (self.client_id in self._num_unsealed)
        if not foreign:
            return table.ids.get

        def find_usable(digest: BlockHash) -> int | None:
            if digest not in table.ids:
                return None
            for block_id in table.blocks(digest):
                run = self.unsealed.get(block_id)
                if run is None or run.client_id == self.client_id:
                    return block_id
            return None

        return find_usable

    def holds(self, block_id: int, digest: BlockHash, namespace: Namespace, group: int) -> bool:
        """Whether the block can be found as `digest` in this namespace and group."""
        table = self.tables[block_id]
        return (
            table is not None
            and self.digests[block_id] == digest
            and table.group == group
            and table.namespace == namespace
        )

    def add(self, run: CachedRun, *, is_labelled: bool = False) -> None:
        """Make the blocks of `run` hittable; none of them has a content. Unsealed if in a step.

        `is_labelled`: the workers know already, no label is sent.
        """
        digests, parents, tables, table = self.digests, self.parents, self.tables, run.table
        table.add(run.block_ids, run.digests, run.parent)
        parent = run.parent
        for block_id, digest in zip(run.block_ids, run.digests, strict=True):
            digests[block_id] = digest
            parents[block_id] = parent
            tables[block_id] = table
            parent = digest
        self.num_cached += len(run.block_ids)
        if run.client_id:
            self.unsealed.update(dict.fromkeys(run.block_ids, run))
            count = self._num_unsealed.get(run.client_id, 0)
            self._num_unsealed[run.client_id] = count + len(run.block_ids)
        else:
            self._outbox.sealed(run, list(range(len(run.block_ids))), is_labelled=is_labelled)

    def seal(self, run: CachedRun) -> list[int]:
        """Seal what is left of `run`; return these blocks."""
        unsealed = self.unsealed
        live = [i for i, block_id in enumerate(run.block_ids) if unsealed.get(block_id) is run]
        block_ids = [run.block_ids[i] for i in live]
        for block_id in block_ids:
            self._no_longer_unsealed(block_id)
        if live:
            self._outbox.sealed(run, live)
        return block_ids

    def evict(self, candidates: Iterable[int]) -> tuple[list[int], list[int]]:
        """Forget candidates one after the other, but for those a cached child needs.

        Returns what was forgotten, and what must stay for now.
        """
        forgotten: list[int] = []
        kept: list[int] = []
        unlabelled: list[int] = []
        removed: dict[PrefixTable, list[BlockHash]] = {}
        digests, parents, tables, unsealed = self.digests, self.parents, self.tables, self.unsealed
        for block_id in candidates:
            table, digest, parent = tables[block_id], digests[block_id], parents[block_id]
            if table is None or digest is None or parent is None:
                raise BlockError(f"block {block_id} holds nothing that could be forgotten")
            if digest in table.children and digest not in table.copies:
                kept.append(block_id)
                continue
            if table.discard(block_id, digest, parent) and table.published:
                removed.setdefault(table, []).append(digest)
            digests[block_id] = parents[block_id] = tables[block_id] = None
            forgotten.append(block_id)
            if block_id in unsealed:
                self._no_longer_unsealed(block_id)
            else:
                unlabelled.append(block_id)
            if not table.ids:
                self._tables_by_key.pop((table.namespace, table.group), None)
        self.num_cached -= len(forgotten)
        self._outbox.unlabel(unlabelled)
        for table, gone in removed.items():
            self._outbox.removed(table, gone)
        return forgotten, kept

    def forget(self, block_ids: Iterable[int]) -> list[int]:
        """Forget these blocks' contents and those of descendants that lose their ancestor.

        Blocks that hold nothing are left out. Returns what was forgotten, descendants first.
        """
        doomed = [b for b in dict.fromkeys(block_ids) if self.tables[b] is not None]
        if not doomed:
            return []
        return self.evict(self.with_descendants(doomed))[0]

    def with_descendants(self, block_ids: Sequence[int]) -> list[int]:
        """Return these cached blocks and all blocks whose digests would lose their ancestors.

        Descendants come first. A digest that stays in another block keeps its children. O(cached).
        """
        children: dict[tuple[int, BlockHash], list[int]] = {}
        for block_id, parent in enumerate(self.parents):
            table = self.tables[block_id]
            if table is not None and parent is not None:
                children.setdefault((id(table), parent), []).append(block_id)
        doomed = dict.fromkeys(block_ids)
        pending = list(block_ids)
        while pending:
            block_id = pending.pop()
            table, digest = self.tables[block_id], self.digests[block_id]
            if (
                table is None
                or digest is None
                or any(copy not in doomed for copy in table.blocks(digest))
            ):
                continue
            for child in children.get((id(table), digest), ()):
                if child not in doomed:
                    doomed[child] = None
                    pending.append(child)
        return self._descendants_first(list(doomed))

    def clear(self) -> list[int]:
        """Forget everything; return the blocks that held something."""
        block_ids = [b for b, table in enumerate(self.tables) if table is not None]
        for block_id in block_ids:
            self.digests[block_id] = self.parents[block_id] = self.tables[block_id] = None
        self._outbox.unlabel([b for b in block_ids if b not in self.unsealed])
        self._outbox.cleared()
        self._tables_by_key.clear()
        self.unsealed.clear()
        self._num_unsealed.clear()
        self.num_cached = 0
        return block_ids

    def _descendants_first(self, block_ids: list[int]) -> list[int]:
        """Order blocks so that every block comes before its ancestors."""
        digests, parents, tables = self.digests, self.parents, self.tables
        above = {(id(tables[b]), digests[b]): parents[b] for b in block_ids}
        depths: dict[tuple[int, BlockHash | None], int] = {}
        for start in above:
            path = []
            key = start
            while key in above and key not in depths:
                path.append(key)
                key = (key[0], above[key])
            depth = depths.get(key, 0)
            for step in reversed(path):
                depth += 1
                depths[step] = depth
        return sorted(block_ids, key=lambda b: -depths[id(tables[b]), digests[b]])

    def _no_longer_unsealed(self, block_id: int) -> None:
        client_id = self.unsealed.pop(block_id).client_id
        left = self._num_unsealed[client_id] - 1
        if left:
            self._num_unsealed[client_id] = left
        else:
            del self._num_unsealed[client_id]
