"""What every block holds, and where every content is: the hash side of the pool.

Stands under `BlockPool`, which counts references and hands out blocks. A content becomes hittable
when a step schedules its last token (`add`), is sealed when that step is complete, and is
forgotten when its block is evicted or it is withdrawn. Refuses to know who holds a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.arrays import EMPTY_INT32, Int32Array, int32_array
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


ObjectArray: TypeAlias = npt.NDArray[np.object_]
"""One object per block, so that many are read or written in one call."""

NO_TABLE = 0
"""Table number of a block that holds nothing."""

_FEW_BLOCKS = 8
"""Below so many blocks a plain loop is quicker than array operations."""


class ContentIndex:
    """Contents of blocks, as arrays over block ids and as digest tables.

    Invariants: `digests[b]` and `parents[b]` are set exactly when `table_numbers[b]` is that of a
    table, which then has `digests[b]` in block `b`; `unsealed` has only such blocks. In an ordered
    table `num_children[b]` counts the digests whose parent is `digests[b]` where look-ups find `b`
    for it, and is 0 for other blocks.
    """

    def __init__(self, num_blocks: int, ordered_groups: frozenset[int], outbox: Outbox) -> None:
        """Know no content. In `ordered_groups` parents outlive their children."""
        self.digests: ObjectArray = np.full(num_blocks, None, dtype=object)
        self.parents: ObjectArray = np.full(num_blocks, None, dtype=object)
        self.table_numbers: Int32Array = np.full(num_blocks, NO_TABLE, dtype=np.int32)
        self.num_children: Int32Array = np.zeros(num_blocks, dtype=np.int32)
        self.unsealed: dict[int, CachedRun] = {}
        self.num_cached = 0
        self.client_id: str | None = None
        self._ordered_groups = ordered_groups
        self._outbox = outbox
        self._num_unsealed: dict[str, int] = {}
        self._tables_by_key: dict[tuple[Namespace, int], PrefixTable] = {}
        self._tables_by_number: dict[int, PrefixTable] = {}
        self._last_number = NO_TABLE

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
            self._last_number += 1
            is_ordered = group in self._ordered_groups
            table = PrefixTable(namespace, group, self._last_number, is_ordered=is_ordered)
            self._tables_by_key[key] = self._tables_by_number[table.number] = table
        return table

    def table_of(self, block_id: int) -> PrefixTable | None:
        """Return the table in which the block can be found, None if it holds nothing."""
        return self._tables_by_number.get(int(self.table_numbers[block_id]))

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

    def add(self, run: CachedRun, *, is_labelled: bool = False) -> None:
        """Make the blocks of `run` hittable; none of them has a content. Unsealed if in a step.

        `is_labelled`: the workers know already, no label is sent.
        """
        block_ids, table = run.block_ids, run.table
        parents = [run.parent, *run.digests[:-1]]
        self._write(block_ids, run.digests, parents, table.number)
        firsts = table.add(block_ids, run.digests)
        if table.is_ordered:
            self._count_new_children(table, block_ids, firsts, parents)
        self.num_cached += len(block_ids)
        if run.client_id:
            self.unsealed.update(dict.fromkeys(block_ids, run))
            count = self._num_unsealed.get(run.client_id, 0)
            self._num_unsealed[run.client_id] = count + len(block_ids)
        else:
            self._outbox.sealed(run, list(range(len(block_ids))), is_labelled=is_labelled)

    def seal(self, run: CachedRun) -> list[int]:
        """Seal what is left of `run`; return these blocks."""
        unsealed = self.unsealed
        live = [i for i, block_id in enumerate(run.block_ids) if unsealed.get(block_id) is run]
        if not live:
            return []
        block_ids = [run.block_ids[i] for i in live]
        self._no_longer_unsealed(block_ids)
        self._outbox.sealed(run, live)
        return block_ids

    def evict(self, candidates: Sequence[int] | Int32Array) -> tuple[Int32Array, list[int]]:
        """Forget candidates one after the other, but for those a cached child needs.

        Returns what was forgotten, and what must stay for now.
        """
        ids = int32_array(candidates)
        if (self.table_numbers[ids] == NO_TABLE).any():
            empty = ids[self.table_numbers[ids] == NO_TABLE].tolist()
            raise BlockError(f"blocks {empty[:5]} hold nothing that could be forgotten")
        forgotten: list[Int32Array] = []
        kept: list[int] = []
        for chain in self._chains(ids):
            if len(chain) >= _FEW_BLOCKS and self._forget_chain(chain):
                forgotten.append(chain)
            else:
                gone = self._forget_singly(chain.tolist(), kept)
                forgotten.append(int32_array(gone))
        return np.concatenate(forgotten) if forgotten else EMPTY_INT32, kept

    def forget(self, block_ids: Iterable[int]) -> list[int]:
        """Forget these blocks' contents and those of descendants that lose their ancestor.

        Blocks that hold nothing are left out. Returns what was forgotten, descendants first.
        """
        doomed = [b for b in dict.fromkeys(block_ids) if self.table_numbers[b] != NO_TABLE]
        if not doomed:
            return []
        return self.evict(self.with_descendants(doomed))[0].tolist()

    def with_descendants(self, block_ids: Sequence[int]) -> list[int]:
        """Return these cached blocks and all blocks whose digests would lose their ancestors.

        Descendants come first. A digest that stays in another block keeps its children. O(cached).
        """
        children: dict[tuple[int, BlockHash], list[int]] = {}
        cached = np.flatnonzero(self.table_numbers)
        keys = zip(self.table_numbers[cached].tolist(), self.parents[cached].tolist(), strict=True)
        for block_id, key in zip(cached.tolist(), keys, strict=True):
            children.setdefault(key, []).append(block_id)
        doomed = dict.fromkeys(block_ids)
        pending = list(block_ids)
        while pending:
            block_id = pending.pop()
            table, digest = self.table_of(block_id), self.digests[block_id]
            if table is None or any(copy not in doomed for copy in table.blocks(digest)):
                continue
            for child in children.get((table.number, digest), ()):
                if child not in doomed:
                    doomed[child] = None
                    pending.append(child)
        return self._descendants_first(list(doomed))

    def clear(self) -> list[int]:
        """Forget everything; return the blocks that held something."""
        cached = int32_array(np.flatnonzero(self.table_numbers))
        block_ids = cached.tolist()
        self._erase(cached)
        self.num_children[:] = 0
        self._outbox.unlabel([b for b in block_ids if b not in self.unsealed])
        self._outbox.cleared()
        self._tables_by_key.clear()
        self._tables_by_number.clear()
        self.unsealed.clear()
        self._num_unsealed.clear()
        self.num_cached = 0
        return block_ids

    def _write(
        self,
        block_ids: Sequence[int],
        digests: Sequence[BlockHash],
        parents: Sequence[BlockHash],
        number: int,
    ) -> None:
        if len(block_ids) >= _FEW_BLOCKS:
            ids = int32_array(block_ids)
            self.digests[ids] = digests
            self.parents[ids] = parents
            self.table_numbers[ids] = number
            return
        for block_id, digest, parent in zip(block_ids, digests, parents, strict=True):
            self.digests[block_id] = digest
            self.parents[block_id] = parent
            self.table_numbers[block_id] = number

    def _erase(self, block_ids: Int32Array) -> None:
        self.digests[block_ids] = None
        self.parents[block_ids] = None
        self.table_numbers[block_ids] = NO_TABLE

    def _count_new_children(
        self,
        table: PrefixTable,
        block_ids: Sequence[int],
        firsts: Sequence[int],
        parents: Sequence[BlockHash],
    ) -> None:
        """Count blocks just added as children of their parents; a copy is no further child."""
        if firsts == block_ids:
            if len(block_ids) > 1:
                self.num_children[int32_array(block_ids[:-1])] = 1
            self._count_child(table, parents[0], 1)
            return
        for block_id, first, parent in zip(block_ids, firsts, parents, strict=True):
            if first == block_id:
                self._count_child(table, parent, 1)

    def _count_child(self, table: PrefixTable, parent: BlockHash, change: int) -> None:
        """Note that the digest `parent` has more or fewer children; a none hash is in no block."""
        block_id = table.ids.get(parent)
        if block_id is not None:
            self.num_children[block_id] += change

    def _chains(self, block_ids: Int32Array) -> Iterator[Int32Array]:
        """Cut blocks into runs in which each block is the parent of the one before it."""
        digests = self.digests[block_ids].tolist()
        parents = self.parents[block_ids].tolist()
        numbers = self.table_numbers[block_ids]
        start = 0
        if parents[:-1] != digests[1:] or (numbers[:-1] != numbers[1:]).any():
            for end in range(1, len(digests)):
                if parents[end - 1] != digests[end] or numbers[end - 1] != numbers[end]:
                    yield block_ids[start:end]
                    start = end
        if len(block_ids):
            yield block_ids[start:]

    def _forget_chain(self, chain: Int32Array) -> bool:
        """Forget a whole chain, its last block first; False, unchanged, where it is not that easy.

        It is where nothing else continues the chain and none of it has copies.
        """
        table = self._tables_by_number[int(self.table_numbers[chain[0]])]
        digests = self.digests[chain].tolist()
        if table.is_ordered:
            num_children = self.num_children[chain]
            if num_children[0] or (num_children[1:] != 1).any():
                return False
        if table.has_copies(digests):
            return False
        parent = self.parents[chain[-1]]
        table.discard_all(digests)
        self._count_child(table, parent, -table.is_ordered)
        self._erase(chain)
        self.num_children[chain] = 0
        self.num_cached -= len(chain)
        self._outbox.removed(table, digests)
        self._say_forgotten(chain.tolist())
        self._drop_if_empty(table)
        return True

    def _forget_singly(self, block_ids: Sequence[int], kept: list[int]) -> list[int]:
        """Forget blocks one by one; add to `kept` what a child needs, return the others."""
        forgotten: list[int] = []
        for block_id in block_ids:
            table = self._tables_by_number[int(self.table_numbers[block_id])]
            digest, parent = self.digests[block_id], self.parents[block_id]
            num_children = int(self.num_children[block_id])
            if num_children and digest not in table.copies:
                kept.append(block_id)
                continue
            first = table.discard(block_id, digest)
            self.num_children[block_id] = 0
            if first is not None:
                # Where look-ups find a copy from now on, that copy has the children.
                self.num_children[first] += num_children
            else:
                self._count_child(table, parent, -table.is_ordered)
                self._outbox.removed(table, [digest])
            self._erase(int32_array([block_id]))
            forgotten.append(block_id)
            self._drop_if_empty(table)
        self.num_cached -= len(forgotten)
        self._say_forgotten(forgotten)
        return forgotten

    def _say_forgotten(self, block_ids: list[int]) -> None:
        """Withdraw the labels of blocks; those that are not sealed yet have none."""
        if self.unsealed and not self.unsealed.keys().isdisjoint(block_ids):
            self._no_longer_unsealed([b for b in block_ids if b in self.unsealed])
            block_ids = [b for b in block_ids if b not in self.unsealed]
        self._outbox.unlabel(block_ids)

    def _drop_if_empty(self, table: PrefixTable) -> None:
        if not table.ids:
            del self._tables_by_number[table.number]
            del self._tables_by_key[table.namespace, table.group]

    def _descendants_first(self, block_ids: list[int]) -> list[int]:
        """Order blocks so that every block comes before its ancestors."""
        numbers, digests, parents = self.table_numbers, self.digests, self.parents
        keys = {b: (int(numbers[b]), digests[b]) for b in block_ids}
        above = {key: parents[b] for b, key in keys.items()}
        depths: dict[tuple[int, BlockHash], int] = {}
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
        return sorted(block_ids, key=lambda b: -depths[keys[b]])

    def _no_longer_unsealed(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            client_id = self.unsealed.pop(block_id).client_id
            left = self._num_unsealed[client_id] - 1
            if left:
                self._num_unsealed[client_id] = left
            else:
                del self._num_unsealed[client_id]
