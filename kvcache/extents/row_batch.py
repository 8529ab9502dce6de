"""The running rows of a step, served together: skip, take, publish, each for all rows at once.

Inside the core, for `reserve_rows`. Rows for which nothing is to be done are told from the others
by comparing whole columns, and never looked at one by one; a row that fills a unit, as one in
`unit_tokens` does, costs its digest and little else. Refuses to choose: where room is short, the
first ones that fit get theirs. Rows that keep states or share blocks are served singly.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from kvcache.arrays import IndexArray, Int32Array, int32_array
from kvcache.commands import EMPTY_PATCH, BlockTablePatch
from kvcache.core import NewestState, Reservation, RowBatch, RowsReserved, TableChange, patch_of
from kvcache.errors import RequestError
from kvcache.extents.leaf_growth import LeafGrower
from kvcache.extents.parts import CoreParts
from kvcache.extents.pins import BoolArray
from kvcache.extents.reserver import Reserver
from kvcache.extents.row_columns import (
    BEHIND,
    CACHED,
    COMPUTED,
    FILLED,
    GROUP,
    LATE,
    NUM_FOUND,
    PLACES,
    ROWS,
    SHORT,
    SLOT_TOKENS,
    UNSLOTTED,
    extend_rows,
    find_busy,
    plan_skips,
    take_skipped,
)
from kvcache.extents.rows import NO_ROW, Int64Array
from kvcache.tenants import TenantAccount, TenantLedger
from kvcache.tenants.ledger import required


class _Busy(NamedTuple):
    """The rows of a batch for which something is to be done: what `find_busy` found.

    `found` is valid until the next batch. `most_lacking` and `most_slot_tokens` are of the rows
    that lack slots; `is_behind`: one was computed beyond its slots.
    """

    found: Int64Array
    num_rows: int
    num_late: int
    num_short: int
    num_filled: int
    most_lacking: int
    most_slot_tokens: int
    oddity: int

    @property
    def places(self) -> IndexArray:
        """Places in the batch."""
        return self.found[PLACES, : self.num_rows]

    @property
    def rows(self) -> IndexArray:
        """Rows of the tables."""
        return self.found[ROWS, : self.num_rows]

    @property
    def computed(self) -> Int64Array:
        """Tokens that are computed for good."""
        return self.found[COMPUTED, : self.num_rows]

    @property
    def slot_tokens(self) -> Int64Array:
        """Tokens for which there are to be slots."""
        return self.found[SLOT_TOKENS, : self.num_rows]

    @property
    def cached(self) -> Int64Array:
        """Tokens that are to be cached."""
        return self.found[CACHED, : self.num_rows]

    @property
    def filled(self) -> IndexArray:
        """Which of the rows fill a unit."""
        return self.found[FILLED, : self.num_filled]

    def select(self, is_chosen: BoolArray) -> _Busy:
        """Return some of the rows, which get their slots, and which of them fill a unit."""
        found = np.ascontiguousarray(self.found[:, : self.num_rows][:, is_chosen])
        is_filled = np.zeros(self.num_rows, dtype=np.bool_)
        is_filled[self.filled] = True
        filled = is_filled[is_chosen].nonzero()[0]
        found[FILLED, : len(filled)] = filled
        return self._replace(found=found, num_rows=found.shape[1], num_filled=len(filled))


class RowServer:
    """Serves batches of rows of one core."""

    def __init__(self, parts: CoreParts, reserver: Reserver, grower: LeafGrower) -> None:
        """Work on the parts of one core."""
        self._shape = parts.shape
        self._store = parts.store
        self._tenants = parts.store.tenants
        self._tables = parts.tables
        self._evictor = parts.evictor
        self._look_up = reserver.look_up
        self._publisher = reserver.publisher
        self._forks = reserver.forks
        self._reserver = reserver
        self._grower = grower
        self._lists = parts.lists
        self._in_rows = [group.index for group in parts.shape.in_rows]
        sizes = [group.block_size for group in parts.shape.groups]
        self._block_sizes: Int64Array = np.array(sizes, dtype=np.int64).reshape(-1, 1)
        # Where all tables are rows of equal blocks, a row has as many columns in each.
        self._is_uniform = len(set(sizes)) == 1 and not parts.lists.by_group
        self._skip_rules: Int64Array = np.array(
            [
                (group.index, rule.window, rule.chunk, rule.block_size)
                for group, rule in zip(parts.shape.groups, reserver.skips, strict=True)
                if rule.is_skipping
            ],
            dtype=np.int64,
        ).reshape(-1, 4)
        self._skipping = self._skip_rules[:, GROUP].tolist()
        self._found: Int64Array = np.empty((NUM_FOUND, 0), dtype=np.int64)

    def serve(self, batch: RowBatch) -> RowsReserved:
        """Give every row its slots, or none of them; see `Core.reserve_rows`.

        Raises:
            RequestError: a row cannot mean what it asks for; nothing was changed.
        """
        count = len(batch.slots)
        batch.require_columns()
        is_reserved = _ones(count)
        if not count or not self._shape.groups:
            return RowsReserved(is_reserved, EMPTY_PATCH)
        busy = self._busy(batch, self._rows(batch))
        if not busy.num_rows:
            return RowsReserved(is_reserved, EMPTY_PATCH)
        self._require_possible(batch, busy)
        self._look_up.forget()
        if busy.num_late:
            if self._lists.states:
                self._free_skipped_singly(busy)
            else:
                self._free_skipped(busy)
        if not self._can_serve_together(busy):
            is_reserved[busy.places], patch = self._serve_singly(batch, busy)
            return RowsReserved(is_reserved, patch)
        if self._are_short_by_one(busy):
            patch = self._take_one_each(batch, busy)
        else:
            missing = self._missing(busy)
            if int(missing.sum()) > self._store.num_free:
                has_room = self._find_room(missing)
                is_reserved[busy.places[~has_room]] = 0
                busy, missing = busy.select(has_room), missing[:, has_room]
            patch = self._take_blocks(batch, busy, missing)
        if busy.num_filled:
            self._publish(batch, busy)
        return RowsReserved(is_reserved, patch)

    # --- inside --------------------------------------------------------------------------------

    def _rows(self, batch: RowBatch) -> IndexArray:
        """Return the rows that the batch names by slots, after binding new ones."""
        tables = self._tables
        rows = tables.rows_of(batch.slots)
        if rows is None:
            rows = np.full(len(batch.slots), NO_ROW, dtype=np.intp)
        if rows is tables.last_rows:
            return rows
        for place in (rows < 0).nonzero()[0].tolist():
            slot, request = int(batch.slots[place]), batch.requests[place]
            row = tables.get(request.request_id)
            if row is None or slot < 0:
                raise RequestError(
                    f"request {request.request_id} in slot {slot} has no blocks: reserve for it "
                    "before it runs on, and number slots from 0"
                )
            if row.slot != slot:
                tables.name(row, slot)
            rows[place] = row.index
        return rows

    def _busy(self, batch: RowBatch, rows: IndexArray) -> _Busy:
        """Return the rows for which something may be to be done."""
        if len(rows) > self._found.shape[1]:
            self._found = np.empty((NUM_FOUND, 2 * len(rows)), dtype=np.int64)
        counts = find_busy(
            self._tables.figures,
            rows,
            batch.num_computed_tokens,
            batch.num_slot_tokens,
            batch.num_cached_tokens,
            self._found,
        )
        return _Busy(self._found, *counts)

    def _require_possible(self, batch: RowBatch, busy: _Busy) -> None:
        if self._lists.states and batch.states is None:
            raise RequestError(
                "a batch of rows without states, but a KV cache group keeps states: say where each "
                "row's forwards end"
            )
        if busy.oddity & UNSLOTTED:
            place = int((busy.cached > busy.slot_tokens).argmax())
            request = batch.requests[busy.places[place]]
            raise RequestError(
                f"request {request.request_id}: {busy.cached[place]} tokens to cache, but "
                f"slots for {busy.slot_tokens[place]}: reserve slots for all of them"
            )
        if batch.are_tokens_known or not busy.num_filled:
            return
        filled = busy.filled
        cached = busy.cached.take(filled)
        known = batch.tokens.num_tokens(busy.places.take(filled))
        if not np.count_nonzero(known < cached):
            return
        unit = self._shape.unit_tokens
        lacking = cached // unit > known // unit
        if lacking.any():
            place = int(lacking.argmax())
            request = batch.requests[busy.places[filled[place]]]
            raise RequestError(
                f"request {request.request_id} has {known[place]} tokens, blocks up to token "
                f"{cached[place]} cannot be full: append its tokens first"
            )

    def _free_skipped_singly(self, busy: _Busy) -> None:
        """Give back what no row reads any more, where states are kept."""
        for place in busy.found[LATE, : busy.num_late].tolist():
            row = self._tables.by_index[int(busy.rows[place])]
            if row is not None:
                self._reserver.free_skipped(row, int(busy.computed[place]))

    def _free_skipped(self, busy: _Busy) -> None:
        """Give back what no row reads any more: row by row, group by group, right to left."""
        tables, count = self._tables, busy.num_late
        ends = np.empty((len(self._skipping), count), dtype=np.int64)
        places = np.empty_like(ends)
        total = plan_skips(tables.figures, self._skip_rules, busy.found, count, ends, places)
        if not total:
            return
        ids = np.empty(total, dtype=np.intp)
        for k, g in enumerate(self._skipping):
            table = tables.tables[g]
            take_skipped(table, tables.figures, g, busy.found, ends[k], places[k], count, ids)
        self._store.give_back(ids)

    def _missing(self, busy: _Busy) -> Int64Array:
        """Return how many columns the tables lack, shape `(groups, n)`."""
        wanted = -(-busy.slot_tokens // self._block_sizes)
        missing: Int64Array = np.maximum(wanted - self._tables.num_columns[:, busy.rows], 0)
        for group in self._lists.by_group:
            missing[group] = 0
        return missing

    def _can_serve_together(self, busy: _Busy) -> bool:
        """Say whether no row keeps states, shares blocks, has some to offer, or begins behind
        its slots."""
        if self._lists.states or self._forks.any_sharing(busy.rows):
            return False
        if self._tables.any_unoffered(busy.rows):
            return False
        if self._tenants is not None and not self._have_room(busy, self._tenants):
            return False
        return not (self._skipping and busy.oddity & BEHIND)

    def _are_short_by_one(self, busy: _Busy) -> bool:
        """Say whether each row lacks a block per group at most, and there is room for all.

        So it is where requests decode token by token.
        """
        num_wanted = busy.num_short * len(self._shape.groups)
        return (
            self._is_uniform
            and num_wanted <= self._store.num_free
            and busy.most_lacking <= self._shape.unit_tokens
        )

    def _take_one_each(self, batch: RowBatch, busy: _Busy) -> BlockTablePatch:
        """Extend each table of the rows that lack slots by a block; row by row, group by group."""
        if not busy.num_short:
            return EMPTY_PATCH
        tables, num_groups = self._tables, len(self._shape.groups)
        if self._tenants is None:
            ids = self._evictor.take_bare(busy.num_short * num_groups)
        else:
            short = busy.found[SHORT, : busy.num_short]
            rows = busy.rows.take(short).repeat(num_groups)
            ids = self._evictor.take_for(self._accounts(rows))
        size, references = self._shape.unit_tokens, self._store.references
        num_columns = -(-busy.most_slot_tokens // size)
        patch = np.empty((4, len(ids)), dtype=np.int32)
        for g in range(num_groups):
            tables.reach(g, num_columns)
            table = tables.tables[g]
            extend_rows(
                table, tables.figures, g, size, busy.found, ids, references, batch.slots, patch
            )
        slots, groups, columns, counts = patch
        return BlockTablePatch(slots, groups, columns, counts, ids)

    def _take(self, rows: IndexArray) -> Int32Array:
        """Take a block for each of these rows; there is room."""
        if self._tenants is None:
            return self._evictor.take(len(rows))
        return self._evictor.take_for(self._accounts(rows))

    def _accounts(self, rows: IndexArray) -> list[TenantAccount]:
        by_index = self._tables.by_index
        found = [by_index[index] for index in rows.tolist()]
        return [required(row.run.tenant) for row in found if row is not None]

    def _have_room(self, busy: _Busy, tenants: TenantLedger) -> bool:
        """Say whether each tenant has room for all that its rows lack."""
        missing = self._missing(busy).sum(axis=0)
        if not np.count_nonzero(missing):
            return True
        wanted = Counter(self._accounts(np.repeat(busy.rows, missing)))
        return tenants.has_room(wanted, self._store.num_free)

    def _find_room(self, missing: Int64Array) -> BoolArray:
        """Say which rows get their blocks where not all can: in order, all they lack or none."""
        num_free = self._store.num_free
        has_room = []
        for needed in missing.sum(axis=0).tolist():
            has_room.append(needed <= num_free)
            num_free -= needed if needed <= num_free else 0
        return np.array(has_room, dtype=np.bool_)

    def _take_blocks(self, batch: RowBatch, busy: _Busy, missing: Int64Array) -> BlockTablePatch:
        """Extend all tables; row by row, group by group, as `missing` says."""
        places, groups = np.nonzero(missing.T)
        if not len(places):
            return EMPTY_PATCH
        tables = self._tables
        rows = busy.rows.take(places)
        counts = missing[groups, places]
        firsts = tables.num_columns[groups, rows]
        total = int(counts.sum())
        ids = self._take(np.repeat(rows, counts))
        if total == len(places):
            self._put(groups, rows, firsts, ids)
        else:
            ends = np.cumsum(counts)
            columns = np.arange(total) + np.repeat(firsts - ends + counts, counts)
            self._put(np.repeat(groups, counts), np.repeat(rows, counts), columns, ids)
        tables.num_columns[groups, rows] += counts
        capacity = tables.num_columns[:, busy.rows] * self._block_sizes
        if self._lists.by_group:
            capacity = capacity[self._in_rows]
        tables.note_capacity(busy.rows, capacity.min(axis=0))
        return BlockTablePatch(
            slots=batch.slots[busy.places.take(places)],
            groups=int32_array(groups),
            first_indices=int32_array(firsts),
            counts=int32_array(counts),
            block_ids=ids,
        )

    def _put(
        self, groups: IndexArray, rows: IndexArray, columns: Int64Array, ids: Int32Array
    ) -> None:
        tables = self._tables
        for g in range(len(self._shape.groups)):
            if len(self._shape.groups) == 1:
                tables.reach(g, int(columns.max()) + 1)
                tables.tables[g][rows, columns] = ids
                return
            here = groups == g
            if here.any():
                tables.reach(g, int(columns[here].max()) + 1)
                tables.tables[g][rows[here], columns[here]] = ids[here]

    def _publish(self, batch: RowBatch, busy: _Busy) -> None:
        """Publish the rows whose cached tokens fill a unit."""
        single = self._grower.publish_units(busy.found, busy.num_filled, batch.tokens)
        if not len(single):
            return
        tables, rows = self._tables, busy.rows.take(single)
        places, cached = busy.places.take(single), busy.cached.take(single)
        batch.tokens.sync(places)
        for index, place, num_tokens in zip(rows, places, cached.tolist(), strict=True):
            row = tables.by_index[index]
            if row is not None:
                row.request = batch.requests[place]
                self._publisher.publish(row, num_tokens)
        tables.note_full(rows, (tables.published.take(rows) + 1) * self._shape.unit_tokens)

    def _serve_singly(self, batch: RowBatch, busy: _Busy) -> tuple[Int32Array, BlockTablePatch]:
        is_reserved: list[int] = []
        changes: list[tuple[int, TableChange]] = []
        batch.tokens.sync(busy.places)
        for i, place in enumerate(busy.places.tolist()):
            own_end, newest = _state(batch, place)
            reservation = Reservation(
                int(busy.computed[i]),
                int(busy.slot_tokens[i]),
                int(busy.cached[i]),
                0,
                own_end,
                newest,
            )
            request = batch.requests[place]
            row = self._tables.by_id[request.request_id]
            changed = self._reserver.extend(row, request, reservation)
            is_reserved.append(changed is not None)
            changes += [(int(batch.slots[place]), change) for change in changed or ()]
        return int32_array(is_reserved), patch_of(changes)


def _ones(count: int) -> Int32Array:
    """Return that many ones, in a third of the time that `np.ones` takes for a few."""
    ones: Int32Array = np.empty(count, dtype=np.int32)
    ones.fill(1)
    return ones


def _state(batch: RowBatch, place: int) -> tuple[int | None, NewestState | None]:
    """Return where a row's forward ends and where its newest state is."""
    states = batch.states
    if states is None:
        return None, None
    return int(states.num_own_tokens[place]), NewestState(
        int(states.num_last_own_tokens[place]), int(states.num_accepted_drafts[place])
    )
