"""The running rows of a step, served together: skip, take, publish, each for all rows at once.

Inside the core, for `reserve_rows`. Rows for which nothing is to be done are told from the others
by comparing whole columns, and never looked at one by one; a row that fills a unit, as one in
`unit_tokens` does, costs its digest and little else. Refuses to choose: where room is short, the
first ones that fit get theirs. Rows that keep states or share blocks are served singly.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache.arrays import IndexArray, Int32Array, int32_array
from kvcache.commands import EMPTY_PATCH, BlockTablePatch
from kvcache.core import NewestState, Reservation, RowBatch, RowsReserved, TableChange, patch_of
from kvcache.errors import RequestError
from kvcache.extents.leaf_growth import LeafGrower
from kvcache.extents.parts import CoreParts
from kvcache.extents.pins import BoolArray
from kvcache.extents.reserver import Reserver
from kvcache.extents.rows import NO_ROW
from kvcache.ids import NULL_BLOCK_ID
from kvcache.tenants import TenantAccount, TenantLedger
from kvcache.tenants.ledger import required

Int64Array = npt.NDArray[np.int64]


@dataclass(eq=False)
class _Busy:
    """The rows of a batch for which something is to be done: places in the batch, and rows."""

    places: IndexArray
    rows: IndexArray
    computed: Int32Array
    slot_tokens: Int32Array
    cached: Int32Array

    def select(self, is_chosen: BoolArray) -> _Busy:
        """Return some of the rows."""
        return _Busy(
            self.places[is_chosen],
            self.rows[is_chosen],
            self.computed[is_chosen],
            self.slot_tokens[is_chosen],
            self.cached[is_chosen],
        )


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
        self._skipping = [
            (group.index, rule)
            for group, rule in zip(parts.shape.groups, reserver.skips, strict=True)
            if rule.is_skipping
        ]

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
        if busy is None:
            return RowsReserved(is_reserved, EMPTY_PATCH)
        filled = self._filled(busy)
        self._require_possible(batch, busy, filled)
        self._look_up.forget()
        if self._lists.states:
            self._free_skipped_singly(batch, busy)
        elif self._skipping:
            self._free_skipped(busy)
        if not self._can_serve_together(busy):
            is_reserved[busy.places], patch = self._serve_singly(batch, busy)
            return RowsReserved(is_reserved, patch)
        short = self._short_by_one(busy)
        if short is not None:
            patch = self._take_one_each(batch, busy, short)
        else:
            missing = self._missing(busy)
            if int(missing.sum()) > self._store.num_free:
                has_room = self._find_room(missing)
                is_reserved[busy.places[~has_room]] = 0
                busy, missing = busy.select(has_room), missing[:, has_room]
                filled = self._filled(busy)
            patch = self._take_blocks(batch, busy, missing)
        if len(filled):
            self._publish(batch, busy, filled)
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

    def _busy(self, batch: RowBatch, rows: IndexArray) -> _Busy | None:
        """Return the rows for which something may be to be done."""
        tables = self._tables
        wanted, cached = batch.num_slot_tokens, batch.num_cached_tokens
        furthest = wanted if cached is wanted else np.maximum(wanted, cached)
        is_busy = furthest >= tables.next_tokens.take(rows)
        if self._skipping or self._lists.states:
            is_busy |= batch.num_computed_tokens >= tables.skip_tokens.take(rows)
        places = is_busy.nonzero()[0]
        if not len(places):
            return None
        slot_tokens = wanted.take(places)
        return _Busy(
            places,
            rows.take(places),
            batch.num_computed_tokens.take(places),
            slot_tokens,
            slot_tokens if cached is wanted else cached.take(places),
        )

    def _filled(self, busy: _Busy) -> IndexArray:
        """Return which of the rows fill a unit."""
        is_filled = busy.cached >= self._tables.full_tokens.take(busy.rows)
        return is_filled.nonzero()[0]

    def _require_possible(self, batch: RowBatch, busy: _Busy, filled: IndexArray) -> None:
        if self._lists.states and batch.states is None:
            raise RequestError(
                "a batch of rows without states, but a KV cache group keeps states: say where each "
                "row's forwards end"
            )
        if busy.cached is not busy.slot_tokens:
            bad = busy.cached > busy.slot_tokens
            if bad.any():
                place = int(bad.argmax())
                request = batch.requests[busy.places[place]]
                raise RequestError(
                    f"request {request.request_id}: {busy.cached[place]} tokens to cache, but "
                    f"slots for {busy.slot_tokens[place]}: reserve slots for all of them"
                )
        if batch.are_tokens_known or not len(filled):
            return
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

    def _free_skipped_singly(self, batch: RowBatch, busy: _Busy) -> None:
        """Give back what no row reads any more, where states are kept."""
        late = busy.computed >= self._tables.skip_tokens.take(busy.rows)
        for place in np.flatnonzero(late).tolist():
            row = self._tables.by_index[int(busy.rows[place])]
            if row is not None:
                self._reserver.free_skipped(row, int(busy.computed[place]))

    def _free_skipped(self, busy: _Busy) -> None:
        """Give back what no row reads any more: row by row, group by group, right to left."""
        tables = self._tables
        freed: list[tuple[IndexArray, IndexArray, Int32Array]] = []
        late = (busy.computed >= tables.skip_tokens.take(busy.rows)).nonzero()[0]
        if not len(late):
            return
        rows, computed = busy.rows[late], busy.computed[late].astype(np.int64)
        for order, (g, rule) in enumerate(self._skipping):
            start = tables.first_kept[g].take(rows)
            end = np.minimum(rule.skipped_of_rows(computed), tables.num_columns[g].take(rows))
            counts = np.maximum(end - start, 0)
            if np.count_nonzero(counts == 1) == len(rows):
                places, owners, columns = np.arange(len(rows)), rows, start
            else:
                places = np.repeat(np.arange(len(rows)), counts)
                if not len(places):
                    continue
                # Right to left: a row's last skipped column first.
                ends = np.cumsum(counts)
                columns = np.repeat(end + ends - counts, counts) - 1 - np.arange(len(places))
                owners = rows[places]
            ids = tables.tables[g][owners, columns]
            tables.tables[g][owners, columns] = NULL_BLOCK_ID
            tables.first_kept[g][rows] = np.maximum(end, start)
            freed.append((places, np.full(len(places), order), ids))
        self._note_skips(rows)
        if freed:
            ids = np.concatenate([part[2] for part in freed])
            if len(freed) > 1:
                places = np.concatenate([part[0] for part in freed])
                orders = np.concatenate([part[1] for part in freed])
                ids = ids[np.lexsort((orders, places))]
            self._store.give_back(ids)

    def _note_skips(self, rows: IndexArray) -> None:
        tables = self._tables
        next_skips = [
            rule.next_skip_tokens(tables.first_kept[g].take(rows)) for g, rule in self._skipping
        ]
        tables.skip_tokens[rows] = next_skips[0] if len(next_skips) == 1 else np.min(next_skips, 0)

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
        if not self._skipping:
            return True
        return not np.count_nonzero(busy.computed > self._tables.capacity_tokens.take(busy.rows))

    def _short_by_one(self, busy: _Busy) -> IndexArray | None:
        """Return which rows lack slots, if each lacks a block per group and there is room for all.

        So it is where requests decode token by token. None where it is not so.
        """
        if not self._is_uniform:
            return None
        tables, size = self._tables, self._shape.unit_tokens
        lacking = busy.slot_tokens - tables.capacity_tokens.take(busy.rows)
        short = (lacking > 0).nonzero()[0]
        num_wanted = len(short) * len(self._shape.groups)
        if num_wanted > self._store.num_free or np.count_nonzero(lacking > size):
            return None
        return short

    def _take_one_each(self, batch: RowBatch, busy: _Busy, short: IndexArray) -> BlockTablePatch:
        """Extend each table of these rows by a block; row by row, group by group."""
        if not len(short):
            return EMPTY_PATCH
        tables, num_groups = self._tables, len(self._shape.groups)
        rows = busy.rows.take(short)
        columns = tables.num_columns[0].take(rows)
        after = columns + 1
        ids = self._take(rows if num_groups == 1 else rows.repeat(num_groups))
        for g in range(num_groups):
            if np.count_nonzero(columns >= tables.tables[g].shape[1]):
                tables.reach(g, int(after.max()))
            tables.tables[g][rows, columns] = ids if num_groups == 1 else ids[g::num_groups]
            tables.num_columns[g][rows] = after
        tables.note_capacity(rows, after * self._shape.unit_tokens)
        slots = batch.slots.take(busy.places.take(short))
        groups = np.zeros((len(rows), num_groups), dtype=np.int32)
        if num_groups > 1:
            groups[:] = self._in_rows
            slots, columns = slots.repeat(num_groups), columns.repeat(num_groups)
        counts = _ones(len(ids))
        return BlockTablePatch(slots, groups.ravel(), columns.astype(np.int32), counts, ids)

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

    def _publish(self, batch: RowBatch, busy: _Busy, filled: IndexArray) -> None:
        """Publish the rows whose cached tokens fill a unit."""
        tables = self._tables
        rows = busy.rows.take(filled)
        places = busy.places.take(filled)
        cached = busy.cached.take(filled)
        single = self._grower.publish_units(rows, cached, batch.tokens, places)
        if len(single):
            batch.tokens.sync(places.take(single))
            for i in single.tolist():
                row = tables.by_index[int(rows[i])]
                if row is not None:
                    row.request = batch.requests[places[i]]
                    self._publisher.publish(row, int(cached[i]))
            rows = rows.take(single)
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
