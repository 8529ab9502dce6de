"""Blocks for one request: free what it skips, count, adopt, take, publish. All or nothing.

Stands under the core for per-request calls and admissions, and serves those rows of a batch that
cannot be served together. Refuses nothing for want of sense: the core has checked; it says None
where there is no room.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvcache.arrays import EMPTY_INT32, Int32Array, int32_array
from kvcache.core import CacheHit, Reservation, TableChange
from kvcache.errors import RequestError
from kvcache.extents.block_moves import seat
from kvcache.extents.block_store import NULL_HANDLE
from kvcache.extents.forks import RowForks
from kvcache.extents.look_up import LookUp, Match
from kvcache.extents.parts import CoreParts
from kvcache.extents.publisher import Publisher
from kvcache.extents.row_columns import NEVER
from kvcache.extents.rows import Row
from kvcache.extents.run import Run
from kvcache.extents.shape import GroupShape
from kvcache.extents.skips import SkipRule, skip_rule
from kvcache.ids import NULL_BLOCK_ID
from kvcache.request import Request


class Columns(NamedTuple):
    """How a row grows in one group: so many null columns, then so many blocks."""

    group: GroupShape
    num_null: int
    num_blocks: int


class Reserver:
    """Serves one request at a time."""

    def __init__(
        self, parts: CoreParts, look_up: LookUp, publisher: Publisher, forks: RowForks
    ) -> None:
        """Work on the parts of one core. Nothing is published unless `can_publish`."""
        self.can_publish = True
        self.skips: tuple[SkipRule, ...] = tuple(
            skip_rule(group.spec) for group in parts.shape.groups
        )
        self._parts = parts
        self._shape = parts.shape
        self._in_rows = parts.shape.in_rows
        self._is_simple = parts.shape.is_simple
        self._store = parts.store
        self._tenants = parts.store.tenants
        self._tree = parts.tree
        self._tables = parts.tables
        self._evictor = parts.evictor
        self._lists = parts.lists
        self._match_tokens = parts.match_tokens
        self.look_up = look_up
        self.publisher = publisher
        self.forks = forks

    def extend(
        self, row: Row, request: Request, reservation: Reservation
    ) -> list[TableChange] | None:
        """Give the request of a row more blocks; None, unchanged but for skipped blocks, without
        room."""
        row.request = request
        if self._tenants is not None:
            self._tenants.serve(self._tenants.account(request.namespace))
        if self._needs_nothing(row, reservation):
            if self._lists.states and self.may_publish(row):
                self._lists.note_own_end(request.request_id, reservation)
            return []
        self.free_skipped(row, reservation.num_computed_tokens)
        due = self.forks.due_copies(row, reservation)
        wanted = [self._columns(group, row, reservation) for group in self._in_rows]
        needed = sum([columns.num_blocks for columns in wanted]) + len(due)
        for keeper in self._lists.by_group.values():
            needed += keeper.get_num_blocks_to_allocate(request.request_id, reservation)
        if not self._has_room(needed, reservation):
            return None
        self.look_up.forget()
        changes = self.forks.copy(row, reservation, due)
        changes += self._grow(row, reservation, wanted)
        self._publish(row, reservation)
        return changes

    def free_skipped(self, row: Row, num_computed_tokens: int) -> None:
        """Give back the blocks that nobody reads any more, group by group, right to left."""
        skipped = []
        tables, index = self._tables, row.index
        for group, rule in zip(self._shape.groups, self.skips, strict=True):
            g = group.index
            if g in self._lists.by_group:
                keeper = self._lists.by_group[g]
                ids = keeper.take_skipped_blocks(row.request.request_id, num_computed_tokens)
                if ids:
                    skipped.append(int32_array(ids))
                continue
            if not rule.is_skipping:
                continue
            start = int(tables.first_kept[g, index])
            end = min(rule.num_skipped(num_computed_tokens), int(tables.num_columns[g, index]))
            if end > start:
                columns = tables.tables[g][index, start:end]
                skipped.append(columns[::-1].copy())
                columns[:] = NULL_BLOCK_ID
                tables.first_kept[g, index] = end
        if skipped:
            self.look_up.forget()
            self._store.give_back(np.concatenate(skipped))
            self.note_limits(row)

    def give_back(self, row: Row) -> None:
        """Give back the single blocks of a row, tail first, those of ordered groups last."""
        self.forks.forget(row)
        tables, index, store = self._tables, row.index, self._store
        if self._is_simple and not row.doubles.get(0):
            start, end = tables.published.item(index), tables.num_columns.item(0, index)
            if start < end:
                store.give_back(tables.tables[0][index, start:end][::-1])
            return
        for group in self._shape.others:
            g = group.index
            kept = self._parts.table_of(row, g)
            if g in self._lists.by_group:
                self._lists.by_group[g].forget_request(row.request.request_id)
            else:
                kept = kept[int(tables.first_kept[g, index]) :]
            store.give_back(kept[::-1])
        published = int(tables.published[index])
        for group in self._shape.ordered:
            columns = tables.columns(group.index, index)
            own = columns[published // group.num_units :]
            if row.doubles and group.index in row.doubles:
                own = np.concatenate((columns[row.doubles[group.index]], own))
            if len(own):
                store.give_back(own[::-1])

    def note_limits(self, row: Row) -> None:
        """Note how far the row can go on before anything must be done for it."""
        tables, index = self._tables, row.index
        capacity = skip = NEVER
        if self._lists.by_group:
            capacity = self._lists.capacity_tokens(row.request.request_id)
            skip = self._lists.next_skip_tokens(row.request.request_id)
        for group in self._in_rows:
            g, rule = group.index, self.skips[group.index]
            capacity = min(capacity, tables.num_columns.item(g, index) * group.block_size)
            if rule.is_skipping:
                skip = min(skip, rule.next_skip(tables.first_kept.item(g, index)))
        # A row that shares what it may write must be looked at before every write.
        if self.forks.is_sharing(row):
            capacity = 0
        full = NEVER
        if self.can_publish and not row.is_mute:
            full = (tables.first_open_unit(index) + 1) * self._shape.unit_tokens
        tables.note_limits(index, capacity, full)
        tables.skip_tokens[index] = skip

    def may_publish(self, row: Row) -> bool:
        """Say whether further blocks of a row become hittable."""
        return self.can_publish and not row.is_mute

    def _needs_nothing(self, row: Row, reservation: Reservation) -> bool:
        tables, index = self._tables, row.index
        return (
            reservation.num_slot_tokens <= tables.capacity_tokens[index]
            and reservation.num_cached_tokens < tables.full_tokens[index]
            and reservation.num_computed_tokens < tables.skip_tokens[index]
            and not reservation.num_spare_blocks
            and not self.forks.is_sharing(row)
        )

    def admit(
        self, request: Request, reservation: Reservation, hit: CacheHit | None
    ) -> list[TableChange] | None:
        """Give a request without a row one, and its blocks; None, unchanged, without room."""
        match = None
        if hit is not None and hit.num_tokens:
            match = self.look_up.find_again(request, hit)
        if self._is_simple:
            return self._admit_simply(request, reservation, match)
        wanted = [self._first_columns(group, reservation, match) for group in self._in_rows]
        needed = sum([columns.num_blocks for columns in wanted])
        for g, keeper in self._lists.by_group.items():
            adopted = () if match is None else match.hit.block_ids[g].tolist()
            needed += keeper.get_num_blocks_to_allocate(request.request_id, reservation, adopted)
        if match is not None:
            needed += self._num_unheld(match, reservation)
        if self._tenants is not None:
            self._tenants.serve(self._tenants.account(request.namespace))
        if not self._has_room(needed, reservation):
            return None
        self.look_up.forget()
        row = self._open_row(request, reservation, match)
        changes = self._fill_tables(row, reservation, wanted, match)
        if self._lists.by_group:
            changes += self._grow_lists(row, reservation)
            if hit is not None:
                changes = self._whole_tables(row)
        self._publish(row, reservation, are_new=True)
        return changes

    def _admit_simply(
        self, request: Request, reservation: Reservation, match: Match | None
    ) -> list[TableChange] | None:
        """Do `admit` where there is one table, with a block for each unit."""
        unit_tokens, store, tables = self._shape.unit_tokens, self._store, self._tables
        tree, num_held, num_adopted = self._tree, 0, 0
        if match is not None and match.last is not None:
            num_held = match.num_units
            num_adopted = max(0, num_held - tree.held_end(match.last))
        num_new = max(0, -(-reservation.num_slot_tokens // unit_tokens) - num_held)
        if self._tenants is not None:
            self._tenants.serve(self._tenants.account(request.namespace))
        if not self._has_room(num_new + num_adopted, reservation):
            return None
        self.look_up.forget()
        if match is None:
            run = tree.root(request.namespace)
            tree.hold(run)
        else:
            run = self.hold(match, request)
        row = tables.open(request, run)
        index = row.index
        taken = self._evictor.take_bare(num_new)
        num_units, full_tokens = num_held, NEVER
        if self.can_publish:
            num_cached = min(reservation.num_cached_tokens, request.num_tokens)
            num_units = max(num_held, num_cached // unit_tokens)
            full_tokens = (num_units + 1) * unit_tokens
        adopted = EMPTY_INT32 if match is None else int32_array(match.hit.block_ids[0])
        num_blocks = num_held + num_new
        if num_blocks > tables.tables[0].shape[1]:
            tables.reach(0, num_blocks)
        # Those that are published get no reference: they are the tree's at once.
        num_bare = num_units - num_held
        table: Int32Array = np.empty(num_blocks, dtype=np.int32)
        seat(adopted, 0, taken, num_bare, store.references, tables.tables[0][index], table)
        tables.num_columns[0, index] = num_blocks
        if num_units > num_held:
            self.publisher.publish_new(row, num_held, num_units)
        tables.note_limits(index, num_blocks * unit_tokens, full_tokens)
        tables.skip_tokens[index] = NEVER
        return [TableChange(0, 0, table)] if num_blocks else []

    def _has_room(self, num_blocks: int, reservation: Reservation) -> bool:
        """Say whether so many blocks can be had, cached ones included, by whoever is served."""
        num_free = self._store.num_free - reservation.num_spare_blocks
        if self._tenants is None:
            return num_blocks <= num_free
        return self._tenants.has_room_for_served(num_blocks, num_free)

    def _num_unheld(self, match: Match, reservation: Reservation) -> int:
        """Return how many free blocks adopting a hit takes."""
        last, count = match.last, 0
        if last is not None and self._shape.ordered:
            start = self._tree.held_end(last)
            if start < match.num_units:
                count = self._shape.num_ordered_blocks(start, match.num_units)
        for group in self._in_rows:
            if not group.is_ordered:
                rule = self.skips[group.index]
                skipped = rule.num_skipped(reservation.num_computed_tokens)
                count += self._store.num_unheld(match.hit.block_ids[group.index][skipped:])
        return count

    def _open_row(self, request: Request, reservation: Reservation, match: Match | None) -> Row:
        """Open a row that ends with the hit; its tables in rows are empty."""
        tables, tree = self._tables, self._tree
        if match is None:
            root = tree.root(request.namespace)
            tree.hold(root)
            return tables.open(request, root)
        row = tables.open(request, self.hold(match, request))
        for g, keeper in self._lists.by_group.items():
            ids = match.hit.block_ids[g]
            keeper.save_new_computed_blocks(
                request.request_id, ids.tolist(), reservation.num_computed_tokens
            )
        return row

    def _fill_tables(
        self, row: Row, reservation: Reservation, wanted: list[Columns], match: Match | None
    ) -> list[TableChange]:
        """Put what a hit has, and new blocks, into the tables of a new row; there is room.

        Of ordered groups the blocks that are published at once get no reference.
        """
        # Singles are held before blocks are taken: what a hit has must not be evicted for them.
        adopted = [] if match is None else [self._adopted(c, reservation, match) for c in wanted]
        num_units = 0
        if self.can_publish:
            num_tokens = min(reservation.num_cached_tokens, row.request.num_tokens)
            num_units = num_tokens // self._shape.unit_tokens
        changes, references = [], self._store.references
        taken = self._evictor.take_bare(sum([columns.num_blocks for columns in wanted]))
        start = 0
        for place, columns in enumerate(wanted):
            group, end = columns.group, start + columns.num_blocks
            held, num_kept_null = adopted[place] if adopted else (EMPTY_INT32, 0)
            num_before = len(held) + columns.num_null
            num_bare = 0
            if group.is_ordered and num_units:
                num_bare = max(0, num_units // group.num_units - num_before)
            table: Int32Array = np.empty(num_before + columns.num_blocks, dtype=np.int32)
            if len(table):
                g, index = group.index, row.index
                self._tables.reach(g, len(table))
                in_row = self._tables.tables[g][index]
                own = taken[start:end]
                seat(int32_array(held), columns.num_null, own, num_bare, references, in_row, table)
                self._tables.num_columns[g, index] = len(table)
                self._tables.first_kept[g, index] = (
                    num_before if columns.num_null else num_kept_null
                )
                changes.append(TableChange(g, 0, table))
            start = end
        return changes

    def _adopted(
        self, columns: Columns, reservation: Reservation, match: Match
    ) -> tuple[Int32Array, int]:
        """Hold what a hit has of a group; return it, and how many null columns it begins with."""
        group = columns.group
        ids = match.hit.block_ids[group.index]
        if group.is_ordered:
            return ids, 0
        skipped = self.skips[group.index].num_skipped(reservation.num_computed_tokens)
        ids = ids.copy()
        ids[:skipped] = NULL_BLOCK_ID
        self._store.touch(ids)
        kept = ids.nonzero()[0]
        return ids, int(kept[0]) if len(kept) else len(ids)

    def hold(self, match: Match, request: Request | None) -> Run:
        """Hold the run with which a match ends; return it.

        `request` is the one it was found for; only one that ends behind the tree needs it.
        """
        tree, shape = self._tree, self._shape
        run = match.last
        if run is None:
            run = tree.root(_known(request).namespace)
        start, end = run.end, match.num_units
        if match.num_matched < start:
            start = match.num_matched
            run = tree.split(run, start - run.start)
        tree.hold(run)
        if start == end:
            return run
        # Units that nobody reads are not there: they take no block, but have their place.
        request = _known(request)
        tokens = self._match_tokens.of(request, start, end)
        parent = run.last_digest(shape.digest_bytes)
        digests = self.publisher.digest(request, start, end, parent)
        ids = np.zeros((0, end - start), dtype=np.int32)
        handles = np.full((len(shape.others), end - start), NULL_HANDLE, dtype=np.int64)
        return tree.extend(run, tokens, ids, handles, digests)

    def _first_columns(
        self, group: GroupShape, reservation: Reservation, match: Match | None
    ) -> Columns:
        held = 0 if match is None else len(match.hit.block_ids[group.index])
        return self._missing(group, reservation, held)

    def _columns(self, group: GroupShape, row: Row, reservation: Reservation) -> Columns:
        held = self._tables.num_columns.item(group.index, row.index)
        return self._missing(group, reservation, held)

    def _missing(self, group: GroupShape, reservation: Reservation, held: int) -> Columns:
        total = -(-reservation.num_slot_tokens // group.block_size)
        if total <= held:
            return Columns(group, 0, 0)
        rule, num_null = self.skips[group.index], 0
        if rule.is_skipping:
            skipped = min(rule.num_skipped(reservation.num_computed_tokens), total)
            num_null = max(0, skipped - held)
        return Columns(group, num_null, total - held - num_null)

    def _grow(self, row: Row, reservation: Reservation, wanted: list[Columns]) -> list[TableChange]:
        """Extend a row's tables; there is room. `wanted` is for the groups in rows."""
        changes = []
        taken = self._evictor.take(sum([columns.num_blocks for columns in wanted]))
        start = 0
        for columns in wanted:
            g, end = columns.group.index, start + columns.num_blocks
            ids: Int32Array = taken[start:end]
            if columns.num_null:
                ids = np.concatenate((np.zeros(columns.num_null, dtype=np.int32), ids))
            if len(ids):
                first = self._tables.num_columns.item(g, row.index)
                self._tables.append(g, row.index, ids)
                if columns.num_null:
                    self._tables.first_kept[g, row.index] = first + columns.num_null
                changes.append(TableChange(g, first, ids))
            start = end
        return changes + self._grow_lists(row, reservation)

    def _grow_lists(self, row: Row, reservation: Reservation) -> list[TableChange]:
        """Extend a row's tables that are lists; there is room."""
        changes = []
        for g, keeper in self._lists.by_group.items():
            entered = keeper.allocate_new_blocks(row.request.request_id, reservation)
            if entered:
                first = len(keeper.table(row.request.request_id)) - len(entered)
                changes.append(TableChange(g, first, int32_array(entered)))
        return changes

    def _whole_tables(self, row: Row) -> list[TableChange]:
        tables = [self._parts.table_of(row, g.index).copy() for g in self._shape.groups]
        return [TableChange(g, 0, table) for g, table in enumerate(tables) if len(table)]

    def _publish(self, row: Row, reservation: Reservation, *, are_new: bool = False) -> None:
        """Publish what is to be cached; `are_new`: nobody has references to the blocks for it."""
        if self.may_publish(row):
            if self._lists.states:
                self._lists.note_own_end(row.request.request_id, reservation)
            if reservation.num_cached_tokens:
                self.publisher.publish(row, reservation.num_cached_tokens, are_new=are_new)
        self.note_limits(row)


def _known(request: Request | None) -> Request:
    if request is None:
        raise RequestError(
            "a hit that ends behind all cached blocks is pinned, but not right after its look-up: "
            "look it up again"
        )
    return request
