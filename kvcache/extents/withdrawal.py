"""Contents taken out of the tree while somebody may hold them: failed steps, and blocks to forget.

Beside the tree, for the core. A run is cut where its content is void; everything behind goes. Rows
and pins that ended there end at the cut, and keep their blocks as their own, without content.
Refuses to know why.

    row A ────────────┐                              row A ──┐ + blocks of its own
    [0, 40) ── [40, 64) ── [64, 70)     cut at 44    [0, 40) ── [40, 44)
    row B ─────────────────────┘                     row B ──┘ + blocks of its own
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcache.arrays import IndexArray, index_array
from kvcache.errors import BlockError, InvariantError
from kvcache.extents.parts import CoreParts
from kvcache.extents.pins import BoolArray, PinnedRuns
from kvcache.extents.rows import Row
from kvcache.extents.run import Run
from kvcache.extents.shape import GroupShape
from kvcache.ids import NULL_BLOCK_ID


class Withdrawal:
    """Cuts the tree of one core."""

    def __init__(self, parts: CoreParts, pins: PinnedRuns) -> None:
        """Work on the parts of one core."""
        self._parts = parts
        self._shape = parts.shape
        self._store = parts.store
        self._tree = parts.tree
        self._tables = parts.tables
        self._evictor = parts.evictor
        self._pins = pins

    def cut(self, run: Run, unit: int) -> list[Row]:
        """Forget everything from `unit` on that goes through `run`; return the rows it touched.

        `unit` lies in `[run.start, run.end)`.
        """
        if not self._is_linked(run) or not run.start <= unit < run.end:
            raise InvariantError(f"{run} is to be cut at unit {unit}, where it is not in the tree")
        if unit > run.start:
            self._split_at(run, unit)
        stump = run.parent
        if stump is None or not self._is_linked(run):
            return []  # cut off, it had no block to stay for
        gone = self._tree.below(run)
        runs = set(map(id, gone))
        rows = [row for row in self._tables.by_id.values() if id(row.run) in runs]
        lost = self._forget(gone)
        # Who ended in what goes holds the stump before the stump loses a child.
        for row in rows:
            self._end_at(row, stump, lost)
        self._pins.end_at(stump, runs, lost)
        self._tree.detach(run)
        block_ids = np.flatnonzero(lost)
        self._store.put_fresh(block_ids[self._store.references[block_ids] == 0])
        return rows

    def shorten(self, row: Row, unit: int) -> None:
        """Forget what a row has published from `unit` on, so that it ends there."""
        run = row.run
        while run.start > unit and run.parent is not None:
            run = run.parent
        if run.end > unit:
            self.cut(run, unit)

    def rewind(self, request_id: str, unit: int) -> Row | None:
        """Let a request's row end at `unit` if it ends behind it, and publish again from there.

        For plans without ordered groups, whose units cost nothing, and for rows that hold only
        doubles of the units behind: these stay in the tree.
        """
        row = self._tables.get(request_id)
        if row is None or int(self._tables.published[row.index]) <= unit:
            return row
        return self._rewind(row, unit)

    def rewind_doubles(self, row: Row, unit: int) -> Row | None:
        """Let a row end at `unit` if all its blocks behind are doubles; return it then.

        It has to compute them again, and need not hold those of the tree beside them meanwhile.
        """
        published = int(self._tables.published[row.index])
        if self._tables.get(row.request.request_id) is not row or published <= unit:
            return None
        for group in self._shape.ordered:
            columns = range(unit // group.num_units, published // group.num_units)
            if not set(columns) <= set(row.doubles.get(group.index, ())):
                return None
        for group in self._shape.ordered:
            first = unit // group.num_units
            if group.index in row.doubles:
                kept = [column for column in row.doubles[group.index] if column < first]
                row.doubles[group.index] = kept
        return self._rewind(row, unit)

    def unoffer(self, request_id: str, unit: int) -> Row | None:
        """Let a request's row put blocks beside its units from `unit` on once more; return it."""
        row = self._tables.get(request_id)
        if row is not None and int(self._tables.published[row.index]) > unit:
            self._tables.leave_unoffered(row.index, unit)
        return row

    def evict(self, block_ids: Sequence[int]) -> None:
        """Forget the contents of these blocks, and of what continues them.

        Whoever has one of them caches nothing any more: it would be these contents, or what
        continues them.

        Raises:
            BlockError: one of them does not exist; nothing was changed.
        """
        num_blocks = self._store.num_blocks
        bad = [b for b in block_ids if not 0 <= b < num_blocks]
        if bad:
            raise BlockError(f"blocks {bad[:5]} do not exist: ids are below {num_blocks}")
        wanted = np.zeros(num_blocks, dtype=np.bool_)
        wanted[index_array(block_ids)] = True
        wanted[NULL_BLOCK_ID] = False
        forgotten = np.zeros(num_blocks, dtype=np.bool_)
        for run in list(self._tree.runs()):
            if not self._is_linked(run):
                continue
            run.settle()
            self._evict_beside(run, wanted, forgotten)
            named = np.flatnonzero(wanted[run.ids].any(axis=0))
            if len(named):
                for row in self.cut(run, run.start + int(named[0])):
                    row.is_mute = True
        if forgotten.any():
            for row in self._tables.by_id.values():
                tables = [self._parts.table_of(row, group.index) for group in self._shape.others]
                row.is_mute = row.is_mute or any(forgotten[table].any() for table in tables)

    # --- inside --------------------------------------------------------------------------------

    def _rewind(self, row: Row, unit: int) -> Row:
        run = row.run
        while run.start >= unit and run.parent is not None:
            run = run.parent
        if unit < run.end:
            run = self._tree.split(run, unit - run.start)
        self._tree.hold(run)
        self._tree.release(row.run)
        row.run = run
        self._tables.end_at(row.index, unit)
        return row

    def _split_at(self, run: Run, unit: int) -> None:
        """Make `run` begin at `unit`; the part before it stays in its place in the policy."""
        head = self._tree.split(run, unit - run.start)
        if run.entry and self._tree.num_blocks(head):
            self._tree.hand_over_entry(run, head)

    def _forget(self, runs: list[Run]) -> BoolArray:
        """Forget what these runs have; return a mark for each block of ordered groups."""
        lost = np.zeros(self._store.num_blocks, dtype=np.bool_)
        for run in reversed(runs):
            run.settle()
            lost[self._evictor.forget_units(run, 0)] = True
        return lost

    def _end_at(self, row: Row, stump: Run, lost: BoolArray) -> None:
        """Let a row end at `stump`; the blocks it had of the lost runs are its own."""
        tables, index = self._tables, row.index
        published = int(tables.published[index])
        for group in self._shape.ordered:
            g = group.index
            first = stump.end // group.num_units
            ids = tables.columns(g, index)[first:]
            ids = ids[: published // group.num_units - first]
            self._store.references[ids[lost[ids]]] += 1
            if g in row.doubles:
                row.doubles[g] = [column for column in row.doubles[g] if column < first]
        self._tree.hold(stump)
        row.run = stump
        tables.end_at(index, stump.end)

    def _evict_beside(self, run: Run, wanted: BoolArray, forgotten: BoolArray) -> None:
        """Forget wanted blocks beside a run, and those that continue them without a gap; mark them
        in `forgotten`."""
        for group in self._shape.others:
            handles = run.handles[group.place]
            valid = self._store.are_valid(handles)
            named = np.flatnonzero(valid & wanted[self._store.ids_of(handles)])
            for unit in named.tolist():
                self._forget_chain(run, unit, group, forgotten)

    def _forget_chain(self, run: Run, unit: int, group: GroupShape, forgotten: BoolArray) -> None:
        pending = [(run, unit)]
        while pending:
            run, unit = pending.pop()
            run.settle()
            handles = run.handles[group.place, unit :: group.num_units]
            valid = self._store.are_valid(handles)
            count = len(valid) if valid.all() else int(valid.argmin())
            if count:
                ids: IndexArray = index_array(self._store.ids_of(handles[:count]))
                self._evictor.forget_single(ids)
                forgotten[ids] = True
            following = unit + count * group.num_units
            if count == len(valid):
                pending += [(child, following - run.num_units) for child in run.children.values()]

    def _is_linked(self, run: Run) -> bool:
        """Say whether a run still hangs in the tree."""
        while run.parent is not None:
            if run.parent.children.get(run.tokens[: self._shape.unit_bytes]) is not run:
                return False
            run = run.parent
        return True
