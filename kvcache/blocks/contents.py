"""What every block holds, and where every content is: the hash side of the pool.

Stands under `BlockPool`, which counts references and hands out blocks. A content becomes hittable
when a step schedules its last token (`add`), is sealed when that step is complete, and is
forgotten when its block is evicted or it is withdrawn. Refuses to know who holds a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.arrays import EMPTY_INT32, IndexArray, Int32Array, index_array
from kvcache.blocks.descendants import with_descendants
from kvcache.blocks.lineage import enter_runs, way_to
from kvcache.blocks.outbox import Outbox
from kvcache.blocks.prefix_table import PrefixTable
from kvcache.blocks.run import NO_STEP, CachedRun
from kvcache.blocks.unsealed import UnsealedBlocks
from kvcache.errors import BlockError
from kvcache.hashing import BlockHash
from kvcache.ids import NULL_BLOCK_ID
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


@dataclass(eq=False)
class _Eviction:
    """What an eviction has come to: blocks kept, digests that are gone."""

    kept: list[int] = field(default_factory=list)
    removed: dict[PrefixTable, list[BlockHash]] = field(default_factory=dict)

    def note(self, table: PrefixTable, digests: list[BlockHash]) -> None:
        """Note digests that no block holds any more."""
        if digests and table.published:
            self.removed.setdefault(table, []).extend(digests)


class ContentIndex:
    """Contents of blocks, as arrays over block ids and as digest tables.

    Invariants: `digests[b]` and `parents[b]` are set exactly when `table_numbers[b]` is that of a
    table, which then has `digests[b]` in block `b`; `unsealed` has only such blocks. In ordered
    tables `parent_blocks[b]` is the block in which look-ups find `parents[b]` (0: in none, it is a
    none hash), and `num_children[b]` counts the digests that are found in blocks whose parent
    block is `b`. Both are 0 elsewhere. `is_copied[b]` says that another block of the table holds
    `digests[b]` as well.
    """

    def __init__(self, num_blocks: int, ordered_groups: frozenset[int], outbox: Outbox) -> None:
        """Know no content. In `ordered_groups` parents outlive their children."""
        self.digests: ObjectArray = np.full(num_blocks, None, dtype=object)
        self.parents: ObjectArray = np.full(num_blocks, None, dtype=object)
        self.table_numbers: Int32Array = np.full(num_blocks, NO_TABLE, dtype=np.int32)
        self.parent_blocks: Int32Array = np.zeros(num_blocks, dtype=np.int32)
        self.num_children: Int32Array = np.zeros(num_blocks, dtype=np.int32)
        self.is_copied: npt.NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        self.unsealed = UnsealedBlocks()
        self.num_cached = 0
        self.client_id: str | None = None
        self.step = NO_STEP
        self._ordered_groups = ordered_groups
        self._outbox = outbox
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

    def tables_of(self, block_ids: IndexArray) -> list[PrefixTable | None]:
        """Do `table_of` for many blocks."""
        return list(map(self._tables_by_number.get, self.table_numbers[block_ids].tolist()))

    def finder(self, namespace: Namespace, group: int, *, finds_open_step: bool = True) -> Finder:
        """Return what finds blocks of one namespace and group. Valid until the next mutation.

        Blocks that are not sealed are found by the client of the open step if they are its own;
        those of the open step itself only if it `finds_open_step`.
        """
        table = self._tables_by_key.get((namespace, group))
        if table is None:
            return find_nothing
        if self.unsealed.are_of(self.client_id) and (
            finds_open_step or not self.unsealed.has_any_of(self.client_id)
        ):
            return table.ids.get
        barred_step = NO_STEP if finds_open_step else self.step

        def find_usable(digest: BlockHash) -> int | None:
            if digest not in table.ids:
                return None
            for block_id in table.blocks(digest):
                run = self.unsealed.get(block_id)
                if run is None:
                    return block_id
                if run.client_id == self.client_id and run.step != barred_step:
                    return block_id
            return None

        return find_usable

    def leading_blocks(
        self, namespace: Namespace, group: int, digests: Sequence[BlockHash], max_blocks: int
    ) -> Int32Array | None:
        """Return the blocks of the first digests, `max_blocks` at most, up to the first miss.

        None where the group is not ordered, or some blocks are to be found by others alone: then
        they have to be looked for one after the other. Changes nothing.
        """
        table = self._tables_by_key.get((namespace, group))
        if table is None:
            return EMPTY_INT32
        if not (table.is_ordered and self.unsealed.are_of(self.client_id)):
            return None
        # What is before a cached block is cached too: so halving finds the first miss, and the way
        # up from the last hit all others.
        found, missed = 0, min(max_blocks, len(digests)) + 1
        middle = missed - 1
        while found + 1 < missed:
            if digests[middle - 1] in table.ids:
                found = middle
            else:
                missed = middle
            middle = (found + missed) // 2
        if not found:
            return EMPTY_INT32
        block_id = table.ids[digests[found - 1]]
        blocks: Int32Array = way_to(self.parent_blocks, block_id, found)
        return blocks

    def find_sealed(self, digest: BlockHash, namespace: Namespace, group: int) -> int | None:
        """Return a sealed block that holds a digest, for whoever asks; None if there is none."""
        table = self._tables_by_key.get((namespace, group))
        blocks = [] if table is None else table.blocks(digest)
        return next((block_id for block_id in blocks if block_id not in self.unsealed), None)

    def add(
        self, runs: Sequence[CachedRun], block_ids: IndexArray, *, is_labelled: bool = False
    ) -> None:
        """Make the blocks of `runs` hittable; none of them has a content. Unsealed if in a step.

        All runs belong to the open step, or to none. `block_ids` are the blocks of all runs
        together. `is_labelled`: the workers know already, no label is sent.
        """
        digests: list[BlockHash] = []
        starts: list[int] = []
        for run in runs:
            starts.append(len(digests))
            digests += run.digests
        # From a list of bytes numpy makes objects slowly: once, then, and one place further on,
        # behind the blocks before, which are parents of all but the first of each run.
        objects: ObjectArray = np.empty(len(digests) + 1, dtype=object)
        objects[1:] = digests
        self.digests[block_ids] = objects[1:]
        if len(runs) == 1:
            objects[0] = runs[0].parent
        else:
            objects[starts] = [run.parent for run in runs]
        self.parents[block_ids] = objects[:-1]
        self.num_cached += len(block_ids)
        table = runs[0].table
        if len(runs) == 1 or [run.table for run in runs].count(table) == len(runs):
            self._enter(table, runs, block_ids, digests)
        else:
            end = 0
            for table, entering in groupby(runs, key=lambda run: run.table):
                same = list(entering)
                start, end = end, end + sum(len(run.block_ids) for run in same)
                self._enter(table, same, block_ids[start:end], digests[start:end])
        if runs[0].client_id:
            self.unsealed.add(runs)
        else:
            for run in runs:
                self._outbox.sealed(run, range(len(run.block_ids)), is_labelled=is_labelled)

    def seal(self, runs: Sequence[CachedRun]) -> list[tuple[CachedRun, Sequence[int]]]:
        """Seal what is left of `runs`; return those of which something is, and these places."""
        sealed = self.unsealed.take(runs) if runs else []
        if self._outbox.tells_tokens:
            for run, places in sealed:
                self._outbox.sealed(run, places)
        return sealed

    def evict(self, candidates: Sequence[int] | IndexArray) -> tuple[IndexArray, list[int]]:
        """Forget candidates one after the other, but for those a cached child needs.

        Returns what was forgotten, and what must stay for now, both in the order given.
        """
        ids = index_array(candidates)
        numbers = self.table_numbers[ids]
        if np.count_nonzero(numbers) < len(ids):
            empty = ids[numbers == NO_TABLE].tolist()
            raise BlockError(f"blocks {empty[:5]} hold nothing that could be forgotten")
        going = _Eviction()
        for part in self._parts(ids, numbers):
            if len(part) < _FEW_BLOCKS:
                self._forget_singly(part.tolist(), going)
            elif not self._forget(part, going):
                # Beside branches that go too, or what must stay: in smaller parts.
                for chain in self._chains(part):
                    if len(chain) < _FEW_BLOCKS or not self._forget(chain, going):
                        self._forget_singly(chain.tolist(), going)
        forgotten = ids if not going.kept else ids[~np.isin(ids, going.kept)]
        self.num_cached -= len(forgotten)
        if self.unsealed or self._outbox.has_workers:
            self._outbox.unlabel(self._drop_unsealed(forgotten))
        for table, digests in going.removed.items():
            self._outbox.removed(table, digests)
        if going.kept:
            kept = set(going.kept)
            going.kept[:] = [block_id for block_id in ids.tolist() if block_id in kept]
        return forgotten, going.kept

    def forget(self, block_ids: Iterable[int]) -> list[int]:
        """Forget these blocks' contents and those of descendants that lose their ancestor.

        Blocks that hold nothing are left out. Returns what was forgotten, descendants first.
        """
        doomed = [b for b in dict.fromkeys(block_ids) if self.table_numbers[b] != NO_TABLE]
        if not doomed:
            return []
        forgotten: list[int] = self.evict(with_descendants(self, doomed))[0].tolist()
        return forgotten

    def clear(self) -> list[int]:
        """Forget everything; return the blocks that held something."""
        cached = index_array(np.flatnonzero(self.table_numbers))
        block_ids: list[int] = cached.tolist()
        self._erase(cached)
        self._outbox.unlabel([b for b in block_ids if b not in self.unsealed])
        self._outbox.cleared()
        self._tables_by_key.clear()
        self._tables_by_number.clear()
        self.unsealed.clear()
        self.num_cached = 0
        return block_ids

    def _erase(self, block_ids: IndexArray | int) -> None:
        self.digests[block_ids] = None
        self.parents[block_ids] = None
        self.table_numbers[block_ids] = NO_TABLE
        self.parent_blocks[block_ids] = NULL_BLOCK_ID
        self.num_children[block_ids] = 0
        self.is_copied[block_ids] = False

    def _enter(
        self,
        table: PrefixTable,
        runs: Sequence[CachedRun],
        block_ids: IndexArray,
        digests: Sequence[BlockHash],
    ) -> None:
        """Enter runs into their table, and count blocks as children of their parents."""
        entered: list[int] = runs[0].block_ids if len(runs) == 1 else block_ids.tolist()
        firsts = table.add(entered, digests)
        self.table_numbers[block_ids] = table.number
        first_blocks = block_ids
        if firsts is not entered:
            first_blocks = index_array(firsts)
            is_second = first_blocks != block_ids
            self.is_copied[block_ids[is_second]] = self.is_copied[first_blocks[is_second]] = True
        if table.is_ordered:
            above = [table.ids.get(run.parent, NULL_BLOCK_ID) for run in runs]
            ends = list(accumulate([len(run.block_ids) for run in runs]))
            enter_runs(
                self.parent_blocks,
                self.num_children,
                block_ids,
                first_blocks,
                index_array(ends),
                index_array(above),
            )

    def _parts(self, block_ids: IndexArray, numbers: Int32Array) -> Iterator[IndexArray]:
        """Cut blocks into those of one table each, and blocks with copies from all others.

        Tables do not concern each other, and requests with several groups are freed group beside
        group: so the blocks are sorted by table first.
        """
        is_cut = numbers[1:] != numbers[:-1]
        if np.count_nonzero(is_cut):
            order = numbers.argsort(kind="stable")
            block_ids, numbers = block_ids[order], numbers[order]
            is_cut = numbers[1:] != numbers[:-1]
        is_copied = self.is_copied[block_ids]
        if np.count_nonzero(is_copied):
            is_cut |= is_copied[1:] | is_copied[:-1]
        return _split(block_ids, is_cut)

    def _chains(self, block_ids: IndexArray) -> Iterator[IndexArray]:
        """Cut blocks of one table; in an ordered one each block continues the next."""
        if self._tables_by_number[int(self.table_numbers[block_ids[0]])].is_ordered:
            return _split(block_ids, self.parent_blocks[block_ids[:-1]] != block_ids[1:])
        return iter((block_ids,))

    def _forget(self, block_ids: IndexArray, going: _Eviction) -> bool:
        """Forget blocks of one table together; False, unchanged, if that cannot be done.

        In an ordered table they are chains, one behind the other, children first. It cannot be
        done if something else continues one of them, or if there are copies.
        """
        table = self._tables_by_number[int(self.table_numbers[block_ids[0]])]
        if table.is_ordered:
            above = self.parent_blocks[block_ids]
            is_continued = above[:-1] == block_ids[1:]
            num_children = self.num_children[block_ids]
            if num_children[0] or np.count_nonzero(num_children[1:] != is_continued):
                return False
        if np.count_nonzero(self.is_copied[block_ids]):
            return False
        digests = self.digests[block_ids].tolist()
        table.discard_all(digests)
        if table.is_ordered:
            for last in np.flatnonzero(~is_continued).tolist():
                self.num_children[above[last]] -= 1
            self.num_children[above[-1]] -= 1
            self.num_children[NULL_BLOCK_ID] = 0
        self._erase(block_ids)
        going.note(table, digests)
        self._drop_if_empty(table)
        return True

    def _forget_singly(self, block_ids: Sequence[int], going: _Eviction) -> None:
        """Forget blocks one by one, but for those that a child needs."""
        for block_id in block_ids:
            table = self._tables_by_number[int(self.table_numbers[block_id])]
            digest, num_children = self.digests[block_id], int(self.num_children[block_id])
            if num_children and digest not in table.copies:
                going.kept.append(block_id)
                continue
            first = table.discard(block_id, digest)
            if first is None:
                if table.is_ordered:
                    self.num_children[self.parent_blocks[block_id]] -= 1
                    self.num_children[NULL_BLOCK_ID] = 0
                going.note(table, [digest])
            else:
                self.is_copied[first] = digest in table.copies
                if num_children:
                    self._hand_on_children(block_id, first)
            self._erase(block_id)
            self._drop_if_empty(table)

    def _hand_on_children(self, block_id: int, first: int) -> None:
        """Look-ups find a copy in `first` from now on: it is the parent block. O(blocks), rare."""
        self.num_children[first] = self.num_children[block_id]
        self.parent_blocks[self.parent_blocks == block_id] = first

    def _drop_unsealed(self, block_ids: IndexArray) -> list[int]:
        """Let blocks wait for no step any more; return those that waited for none."""
        ids: list[int] = block_ids.tolist()
        if waiting := self.unsealed.among(ids):
            self.unsealed.remove(waiting)
            return [block_id for block_id in ids if block_id not in waiting]
        return ids

    def _drop_if_empty(self, table: PrefixTable) -> None:
        if not table.ids:
            del self._tables_by_number[table.number]
            del self._tables_by_key[table.namespace, table.group]


def _split(block_ids: IndexArray, is_cut: npt.NDArray[np.bool_]) -> Iterator[IndexArray]:
    """Cut `block_ids` behind every index where `is_cut` is set."""
    start = 0
    for end in (np.flatnonzero(is_cut) + 1).tolist():
        yield block_ids[start:end]
        start = end
    if len(block_ids):
        yield block_ids[start:]
