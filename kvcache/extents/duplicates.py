"""Two blocks of one content: which of them goes, once the step that filled the second is complete.

Beside the publisher, which notes where a row followed what the tree had already, and the settlement
of steps. Where nobody but the row holds the tree's block, the row's own takes its place: no table
changes. As an option the row gives way instead, whoever holds the tree's: its table takes the
tree's blocks, which saves memory, and the engine is told. Only complete steps count: no failure
makes a request write there again, and forwards under way with the old table run before anybody else
gets the blocks. Refuses to touch states, which stand where their request's forwards look for them.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass

import numpy as np

from kvcache.arrays import IndexArray, Int32Array, index_array, int32_array
from kvcache.core import TableChange
from kvcache.extents.block_store import NO_CONTENT, NULL_HANDLE, SEALED
from kvcache.extents.parts import CoreParts
from kvcache.extents.pins import BoolArray, PinnedRuns
from kvcache.extents.published import NO_STEP, Published, Segment
from kvcache.extents.rows import Row
from kvcache.extents.run import HandleArray, Run
from kvcache.extents.shape import GroupShape
from kvcache.extents.unit_swaps import UnitSwaps
from kvcache.ids import NULL_BLOCK_ID


@dataclass(frozen=True, slots=True, eq=False)
class _Note:
    """In this step the row computed the units of `segment`, which the tree had."""

    step: int
    row: Row
    segment: Segment

    @property
    def start(self) -> int:
        """The first of the units."""
        return self.segment.first_unit

    @property
    def end(self) -> int:
        """The unit behind the last one."""
        return self.segment.first_unit + self.segment.num_units


@dataclass(frozen=True, slots=True, eq=False)
class _Units:
    """What the tree has at units `[start, end)`: one row per group, one column per unit."""

    start: int
    end: int
    ids: Int32Array
    handles: HandleArray


class DuplicateMerger:
    """Merges in the tables of one core, and keeps the changes until they are taken.

    Notes wait per client, in order of steps.
    """

    def __init__(self, parts: CoreParts, pins: PinnedRuns, *, is_wanted: bool) -> None:
        """Have settled nothing yet. Only if it `is_wanted`, tables change."""
        self._pins = pins
        self.num_merged = 0
        self._is_wanted = is_wanted
        self._shape = parts.shape
        self._store = parts.store
        self._tables = parts.tables
        self._lists = parts.lists
        self._ledger = parts.ledger
        self._evictor = parts.evictor
        self._announcer = parts.announcer
        self._waiting: dict[str, deque[_Note]] = {}
        self._changes: list[tuple[str, TableChange]] = []
        self._left: dict[Row, list[_Note]] = {}
        self._replaced: list[Published] = []
        self._swaps = UnitSwaps(parts)

    @property
    def num_waiting(self) -> int:
        """Notes whose steps are neither complete nor failed."""
        return sum(map(len, self._waiting.values()))

    def note(self, row: Row, segment: Segment) -> None:
        """The row followed the tree over the units of `segment`, for which it has blocks too.

        Outside any step they count as complete.
        """
        ledger = self._ledger
        note = _Note(ledger.step, row, segment)
        if ledger.is_open:
            self._waiting.setdefault(ledger.client_id, deque()).append(note)
            handles = np.full((len(self._shape.groups), segment.num_units), NULL_HANDLE, np.int64)
            ledger.add(Published([segment], handles, is_content=False, doubles_of=row))
        else:
            self.take_over(row, segment)
            if not self._is_wanted:
                self._take_place(note)
                self._tell_replaced()

    def take_over(self, row: Row, segment: Segment) -> None:
        """Where the tree's blocks still wait for another client, let the row's own, which are
        complete, take their place."""
        if self._store.num_unsealed:
            self._take_over(_Note(NO_STEP, row, segment))

    def complete(self, client_id: str, through_step: int) -> None:
        """Settle what the client's steps up to `through_step` noted, after they were sealed."""
        waiting = self._waiting.get(client_id)
        while waiting and waiting[0].step <= through_step:
            note = waiting.popleft()
            if self._is_wanted:
                self._merge(note)
            elif not self._swaps.add(note.row, note.segment):
                self._settle_swaps()
                self._take_place(note)
        self._settle_swaps()
        self._tell_replaced()
        self._forget_if_idle(client_id)

    def fail(self, client_id: str, from_step: int) -> None:
        """Forget what the client's steps from `from_step` on noted."""
        waiting = self._waiting.get(client_id)
        while waiting and waiting[-1].step >= from_step:
            waiting.pop()
        self._forget_if_idle(client_id)

    def clear(self) -> None:
        """Let nothing wait."""
        self._waiting.clear()
        self._left.clear()

    def row_left(self, row: Row) -> None:
        """A row has gone: doubles of others may now take the place of what it held too."""
        if not self._left:
            return
        self._left.pop(row, None)
        left, self._left = self._left, {}
        for each, notes in left.items():
            # Towards the root a run is held by more and more: where one note waits, all before do.
            while notes and self._is_alone(notes[-1]):
                self._take_place(notes.pop())
            if notes and any(each.doubles.values()):
                self._left[each] = notes + self._left.get(each, [])
        self._tell_replaced()

    def take_changes(self) -> list[tuple[str, TableChange]]:
        """Return the changes since the last call, by request."""
        changes, self._changes = self._changes, []
        return changes

    # --- inside --------------------------------------------------------------------------------

    def _forget_if_idle(self, client_id: str) -> None:
        if not self._waiting.get(client_id, True):
            del self._waiting[client_id]

    def _take_place(self, note: _Note) -> None:
        """Let doubles among the noted units take the place of blocks that only their row holds."""
        row, start = note.row, note.start
        if self._tables.get(row.request.request_id) is not row or not row.doubles:
            return
        if not self._is_alone(note):
            self._leave(note)
            return
        handles = np.full((len(self._shape.groups), note.end - start), NULL_HANDLE, np.int64)
        run = row.run
        while run.parent is not None and run.num_holders == 1 and run.end > start:
            if run.start < note.end:
                run.settle()
                for group in self._shape.ordered:
                    self._replace_in(run, group, note, handles)
            run = run.parent
        if self._has_doubles(note):
            self._leave(note)
        if (handles != NULL_HANDLE).any():
            self._replaced.append(Published([note.segment], handles, is_content=True))

    def _settle_swaps(self) -> None:
        replaced = self._swaps.settle()
        if replaced is not None:
            self._replaced.append(replaced)

    def _tell_replaced(self) -> None:
        """Have the blocks labelled that took the place of others, after those lost their labels."""
        replaced, self._replaced = self._replaced, []
        for published in replaced:
            handles = published.handles
            is_new = self._store.are_valid(handles) & (handles != NULL_HANDLE)
            self._announcer.replaced(published, self._store.ids_of(handles), is_new)

    def _leave(self, note: _Note) -> None:
        """Let a note wait for rows to leave; those of one row in order of units."""
        insort(self._left.setdefault(note.row, []), note, key=lambda each: each.start)

    def _has_doubles(self, note: _Note) -> bool:
        """Say whether some of the noted units are doubles still."""
        return any(
            note.start < (column + 1) * group.num_units <= note.end
            for group in self._shape.ordered
            for column in note.row.doubles.get(group.index, ())
        )

    def _is_alone(self, note: _Note) -> bool:
        """Say whether nobody but its row holds the last of the noted units."""
        run = note.row.run
        while run.num_holders == 1 and run.start >= note.end and run.parent is not None:
            run = run.parent
        return run.num_holders == 1

    def _replace_in(self, run: Run, group: GroupShape, note: _Note, handles: HandleArray) -> None:
        """Let a row's doubles take the place of sealed blocks of one run; note their handles."""
        row, g = note.row, group.index
        columns = index_array(row.doubles.get(g, ()))
        units = (columns + 1) * group.num_units - 1
        is_here = (units >= max(run.start, note.start)) & (units < min(run.end, note.end))
        theirs = np.where(is_here, run.ids[group.place, (units - run.start) * is_here], 0)
        is_here &= self._store.seals[theirs] == SEALED
        if not is_here.any():
            return
        self._put_in(run, note, group, columns[is_here], handles)

    def _put_in(
        self, run: Run, note: _Note, group: GroupShape, columns: IndexArray, handles: HandleArray
    ) -> None:
        """Let a row's doubles in these columns be the tree's, in one run; note their handles."""
        g = group.index
        columns = columns[self._are_doubles_only(group, note.row, columns)]
        units = (columns + 1) * group.num_units - 1
        ours = self._tables.tables[g][note.row.index, columns]
        is_of_one = self._is_of_one(ours)
        self._evictor.replace(run, group, units - run.start, ours)
        handles[g, units - note.start] = self._store.handles_of(ours)
        if is_of_one:
            self._store.references[ours] -= 1
            taken = set(columns.tolist())
            left = [column for column in note.row.doubles[g] if column not in taken]
            note.row.doubles[g] = left
            return
        for row in self._tables.by_id.values():
            doubles = row.doubles.get(g)
            if not doubles:
                continue
            # Forks have the same doubles: they hold the run as well.
            noted = index_array(doubles)
            table = self._tables.tables[g][row.index]
            is_of_tree = np.isin(noted, columns) & np.isin(table[noted], ours)
            self._store.references[table[noted[is_of_tree]]] -= 1
            row.doubles[g] = noted[~is_of_tree].tolist()

    def _are_doubles_only(self, group: GroupShape, row: Row, columns: IndexArray) -> BoolArray:
        """Say which of a row's doubles nobody has a reference to but as a double."""
        table = self._tables.tables[group.index]
        ours = table[row.index, columns]
        if self._is_of_one(ours):
            return np.ones(len(columns), dtype=np.bool_)
        known = np.zeros(len(columns), dtype=np.int64)
        for other in self._tables.by_id.values():
            doubles = other.doubles.get(group.index)
            if doubles:
                known += np.isin(ours, table[other.index, doubles])
        only: BoolArray = self._store.own_references(ours) == known
        return only

    def _is_of_one(self, doubles: Int32Array) -> bool:
        """Say whether each of a row's doubles is referred to by that row alone."""
        return bool((self._store.references[doubles] == 1).all())

    def _take_over(self, note: _Note) -> None:
        """Let doubles take the place of blocks that wait for others, whose rows keep theirs."""
        row, start = note.row, note.start
        if self._tables.get(row.request.request_id) is not row or not row.doubles:
            return
        way, run, num_waiting = [], row.run, 0
        while run.parent is not None and run.end > start:
            run.settle()
            way.append(run)
            noted = run.ids[:, max(0, start - run.start) : max(0, note.end - run.start)]
            num_waiting += np.count_nonzero(self._store.seals[noted] > SEALED)
            run = run.parent
        if not num_waiting:
            return
        handles = np.full((len(self._shape.groups), note.end - start), NULL_HANDLE, np.int64)
        for group in self._shape.ordered:
            if not self._ends_unsealed(run, group):
                for each in reversed(way):
                    # Nobody may find, or be told of, a content before the one it continues.
                    if not self._replace_unsealed(each, group, note, handles):
                        break
        ids = self._store.ids_of(handles)
        if ids.any():
            self._announcer.sealed(
                Published([note.segment], handles, is_content=True), ids, ids != 0
            )

    def _ends_unsealed(self, run: Run, group: GroupShape) -> bool:
        """Say whether a run's last block of a group waits for its step."""
        if run.parent is None:
            return False
        run.settle()
        ids = run.ids[group.place]
        ids = ids[ids != 0]
        return len(ids) > 0 and bool(self._store.seals[ids[-1]] > SEALED)

    def _replace_unsealed(
        self, run: Run, group: GroupShape, note: _Note, handles: HandleArray
    ) -> bool:
        """Let doubles take the place of a run's unsealed blocks, as far as there are such.

        Says whether none of the run's noted units is unsealed any more.
        """
        row, g, store = note.row, group.index, self._store
        columns = index_array(row.doubles.get(g, ()))
        units = (columns + 1) * group.num_units - 1
        is_here = (units >= max(run.start, note.start)) & (units < min(run.end, note.end))
        theirs = np.where(is_here, run.ids[group.place, (units - run.start) * is_here], 0)
        is_here &= store.seals[theirs] > SEALED
        if is_here.any():
            is_here[is_here] = self._are_doubles_only(group, row, columns[is_here])
            is_here &= ~self._pins.are_pinned(theirs)
        ids = run.ids[group.place, : note.end - run.start]
        waiting = np.setdiff1d(
            run.start + np.flatnonzero(store.seals[ids] > SEALED), units[is_here]
        )
        if len(waiting):
            is_here &= units < waiting[0]
        if is_here.any():
            self._replace_waiting(run, group, note, handles, (columns[is_here], theirs[is_here]))
        return not len(waiting)

    def _replace_waiting(
        self,
        run: Run,
        group: GroupShape,
        note: _Note,
        handles: HandleArray,
        columns_and_blocks: tuple[IndexArray, Int32Array],
    ) -> None:
        """Put a row's doubles in these columns in the place of blocks that rows keep as theirs."""
        (taken, gone), g, store = columns_and_blocks, group.index, self._store
        for other in self._tables.by_id.values():
            table = self._tables.columns(g, other.index)
            reached = taken < min(len(table), other.run.end // group.num_units)
            mine = taken[reached][table[taken[reached]] == gone[reached]]
            if len(mine):
                store.references[table[mine]] += 1
                other.doubles.setdefault(g, []).extend(mine.tolist())
        self._put_in(run, note, group, taken, handles)

    def _merge(self, note: _Note) -> None:
        row = note.row
        if self._tables.get(row.request.request_id) is not row:
            return
        units = self._units(row, note)
        if units is None:
            return
        for group in self._shape.groups:
            if group.is_ordered:
                self._merge_doubles(group, row, units)
            elif group.index not in self._lists.by_group:
                self._merge_beside(group, row, units)

    def _units(self, row: Row, note: _Note) -> _Units | None:
        """Return what the tree has at the noted units that the row still follows."""
        end = min(note.end, row.run.end)
        if end <= note.start:
            return None
        run, path = row.run, [row.run]
        while run.start > note.start and run.parent is not None:
            run = run.parent
            path.append(run)
        path.reverse()
        for each in path:
            each.settle()
        kept = slice(note.start - run.start, end - run.start)
        return _Units(
            note.start,
            end,
            np.concatenate([each.ids for each in path], axis=1)[:, kept],
            np.concatenate([each.handles for each in path], axis=1)[:, kept],
        )

    def _merge_doubles(self, group: GroupShape, row: Row, units: _Units) -> None:
        """Let doubles among the units give way to the tree's sealed blocks."""
        doubles = row.doubles.get(group.index)
        if not doubles:
            return
        columns = index_array(doubles)
        at = (columns + 1) * group.num_units - 1 - units.start
        is_here = (at >= 0) & (at < units.end - units.start)
        theirs = np.where(is_here, units.ids[group.place, at * is_here], NULL_BLOCK_ID)
        is_merged = is_here & (self._store.seals[theirs] == SEALED)
        if not is_merged.any():
            return
        # The row holds the tree's blocks by its run already.
        self._replace(group, row, columns[is_merged], int32_array(theirs[is_merged]))
        left = columns[~is_merged].tolist()
        if left:
            row.doubles[group.index] = left
        else:
            del row.doubles[group.index]

    def _merge_beside(self, group: GroupShape, row: Row, units: _Units) -> None:
        """Let private blocks give way to sealed ones that stand beside the units."""
        store, length, g = self._store, group.num_units, group.index
        first, last = units.start // length, units.end // length
        first = max(first, int(self._tables.first_kept[g, row.index]))
        if first >= last:
            return
        handles = units.handles[group.place]
        handles = handles[(first + 1) * length - 1 - units.start :: length][: last - first]
        theirs = store.ids_of(handles)
        ours = self._tables.columns(g, row.index)[first:last]
        is_merged = store.are_valid(handles) & (store.seals[theirs] == SEALED)
        is_merged &= (ours != NULL_BLOCK_ID) & (store.seals[ours] == NO_CONTENT)
        if is_merged.any():
            taken = int32_array(theirs[is_merged])
            store.touch(taken)
            self._replace(group, row, np.flatnonzero(is_merged) + first, taken)

    def _replace(
        self, group: GroupShape, row: Row, columns: IndexArray, block_ids: Int32Array
    ) -> None:
        """Put blocks that the row holds into these columns; give those that stood there back."""
        order = columns.argsort()
        columns, block_ids = columns[order], block_ids[order]
        table = self._tables.tables[group.index][row.index]
        given_up = table[columns]
        table[columns] = block_ids
        self._store.give_back(given_up)
        self.num_merged += int(np.count_nonzero(self._store.references[given_up] == 0))
        cuts = np.flatnonzero(np.diff(columns) != 1) + 1
        for start, end in zip([0, *cuts], [*cuts, len(columns)], strict=True):
            change = TableChange(group.index, int(columns[start]), block_ids[start:end])
            self._changes.append((row.request.request_id, change))
