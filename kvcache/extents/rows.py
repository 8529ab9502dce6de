"""Block tables of running requests as dense rows, and how far each row can go on untouched.

Between the core, which serves one request or a thousand, and the tables that a step changes a few
columns of. One row per request, the lowest free one first; rows and columns grow when they must.
Refuses to know contents: a row's blocks are ids.

    row            0    1    2      of each group: `tables[g][row, column]`
    num_columns    4    0    7      columns in use
    first_kept     0    0    5      columns before are null: nobody reads them any more
    published     40    0  112      units that are in the tree, up to where the row's run ends
    unoffered      -    -  108      from there on others published them: the row's blocks of other
                                    groups may be lacking beside them
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcache.arrays import IndexArray, Int32Array, index_array
from kvcache.extents.row_columns import NEXT, NUM_LIMITS, PUBLISHED, SKIP
from kvcache.extents.run import Run
from kvcache.extents.shape import GroupShape, TreeShape
from kvcache.request import Request

NO_ROW = -1

Int64Array = npt.NDArray[np.int64]
TableArray = npt.NDArray[np.int32]

_FEW_ROWS = 64
_FEW_COLUMNS = 64


@dataclass(eq=False)
class Row:
    """What a running request has beside its columns.

    `run` ends where the row's published units end; the row holds it. `doubles[g]` are published
    columns of ordered group `g` whose block is not the tree's but one of the row's own, with the
    same content. `has_images`: multimodal items are in the request; `is_plain`: no unit of it but
    the first depends on more than tokens. `is_mute`: no further block of it becomes hittable.
    `slot` is the slot by which batches of rows name it, once one has.
    """

    index: int
    request: Request
    run: Run
    doubles: dict[int, list[int]] = field(default_factory=dict)
    is_mute: bool = False
    has_images: bool = False
    is_plain: bool = True
    slot: int = NO_ROW


class RowTables:
    """The rows of one core.

    Invariants: `by_id` and `by_index` agree; a free row has no columns. A row needs nothing before
    its slots pass `capacity_tokens`, its cached tokens reach `full_tokens` or its computed tokens
    `skip_tokens`. `next_tokens` is the lesser of the first two: where neither slots nor cached
    tokens have reached it, one comparison says so.
    """

    def __init__(self, shape: TreeShape) -> None:
        """Have no row yet."""
        self._num_groups = len(shape.groups)
        self.by_id: dict[str, Row] = {}
        self.by_index: list[Row | None] = []
        self.tables: list[TableArray] = [np.zeros((0, 0), dtype=np.int32) for _ in shape.groups]
        self.num_columns: Int64Array
        self.first_kept: Int64Array
        self.published: Int64Array
        self.capacity_tokens: Int64Array
        self.full_tokens: Int64Array
        self.skip_tokens: Int64Array
        self.next_tokens: Int64Array
        # All of these figures are rows of one array, a column for each row of the tables.
        self.figures: Int64Array
        num_figures = 2 * self._num_groups + NUM_LIMITS
        self._name_figures(np.zeros((num_figures, 0), dtype=np.int64))
        self.unoffered: dict[int, int] = {}  # by row; few rows have any, and not for long
        self._row_of_slot: IndexArray = index_array(())
        self._last_slots: bytes | None = None
        self.last_rows: IndexArray = index_array(())
        """Those that the last batch named which named none without a row."""
        self.num_special = 0
        """Rows whose units depend on more than tokens."""
        self._free: list[int] = []

    def get(self, request_id: str) -> Row | None:
        """Return a request's row, None if it has none."""
        return self.by_id.get(request_id)

    def open(self, request: Request, run: Run) -> Row:
        """Give a request a row without columns, ending at `run`."""
        if not self._free:
            self._add_rows(max(_FEW_ROWS, len(self.by_index)))
        row = Row(heapq.heappop(self._free), request, run)
        row.has_images = bool(request.mm_positions)
        row.is_plain = request.lora is None and not row.has_images
        self.num_special += not row.is_plain
        self.by_id[request.request_id] = self.by_index[row.index] = row
        self.published[row.index] = run.end
        return row

    def close(self, row: Row) -> None:
        """Take a row's columns away; its blocks have been given back."""
        index = row.index
        if row.slot != NO_ROW:
            self._row_of_slot[row.slot] = NO_ROW
            self._last_slots = None
        self.figures[:, index] = 0
        self.unoffered.pop(index, None)
        self.by_index[index] = None
        self.num_special -= not row.is_plain
        del self.by_id[row.request.request_id]
        heapq.heappush(self._free, index)

    def columns(self, group: int, index: int) -> Int32Array:
        """Return a row's columns of one group. A view: valid until the row changes."""
        return self.tables[group][index, : self.num_columns.item(group, index)]

    def blocks_of_units(self, group: GroupShape, index: int, start: int, end: int) -> Int32Array:
        """Return, per unit of `[start, end)`, a row's block that ends there; 0 if none does."""
        table: Int32Array = self.tables[group.index][index]
        length = group.num_units
        if length == 1:
            return table[start:end]
        ids = np.zeros(end - start, dtype=np.int32)
        first, last = start // length, end // length
        ids[(first + 1) * length - 1 - start :: length] = table[first:last]
        return ids

    def fill(self, group: int, index: int, block_ids: Int32Array, first_kept: int) -> None:
        """Put blocks into the empty columns of a new row; those before `first_kept` are null."""
        end = len(block_ids)
        if end > self.tables[group].shape[1]:
            self.reach(group, end)
        self.tables[group][index, :end] = block_ids
        self.num_columns[group, index] = end
        if first_kept:
            self.first_kept[group, index] = first_kept

    def append(self, group: int, index: int, block_ids: Int32Array) -> None:
        """Put blocks (0: null) behind a row's last column."""
        start = self.num_columns.item(group, index)
        end = start + len(block_ids)
        if end > self.tables[group].shape[1]:
            self.reach(group, end)
        self.tables[group][index, start:end] = block_ids
        self.num_columns[group, index] = end

    def reach(self, group: int, num_columns: int) -> None:
        """Make tables of a group at least so wide."""
        table = self.tables[group]
        if num_columns > table.shape[1]:
            width = max(num_columns, 2 * table.shape[1], _FEW_COLUMNS)
            wider = np.zeros((table.shape[0], width), dtype=np.int32)
            wider[:, : table.shape[1]] = table
            self.tables[group] = wider

    def note_limits(self, index: int, capacity_tokens: int, full_tokens: int) -> None:
        """Note up to where a row has slots, and which number of cached tokens fills a unit."""
        self.capacity_tokens[index] = capacity_tokens
        self.full_tokens[index] = full_tokens
        next_tokens = capacity_tokens + 1
        self.next_tokens[index] = next_tokens if next_tokens < full_tokens else full_tokens

    def note_capacity(self, rows: IndexArray, capacity_tokens: Int64Array) -> None:
        """Note up to where many rows have slots."""
        self.capacity_tokens[rows] = capacity_tokens
        self.next_tokens[rows] = np.minimum(capacity_tokens + 1, self.full_tokens.take(rows))

    def note_full(self, rows: IndexArray, full_tokens: Int64Array) -> None:
        """Note which number of cached tokens fills the next unit of many rows."""
        self.full_tokens[rows] = full_tokens
        self.next_tokens[rows] = np.minimum(self.capacity_tokens.take(rows) + 1, full_tokens)

    def first_open_unit(self, index: int) -> int:
        """Return the first unit of a row that it has still to publish, or to put blocks beside."""
        published = self.published.item(index)
        return self.unoffered.get(index, published) if self.unoffered else published

    def any_unoffered(self, rows: IndexArray) -> bool:
        """Say whether one of these rows has blocks to put beside units that others published."""
        return bool(self.unoffered) and not self.unoffered.keys().isdisjoint(rows.tolist())

    def end_at(self, index: int, unit: int) -> None:
        """Note that a row ends at `unit`, and publishes again from there."""
        self.published[index] = unit
        if self.unoffered.get(index, -1) >= unit:
            del self.unoffered[index]

    def leave_unoffered(self, index: int, start: int) -> None:
        """Note that a row has not offered its blocks beside its units from `start` on."""
        self.unoffered[index] = min(start, self.unoffered.get(index, start))

    def rows_of(self, slots: Int32Array) -> IndexArray | None:
        """Return the rows that batches name by `slots`, `NO_ROW` for those that none is named by;
        None if a slot is beyond all that rows have been named by. Do not change them.

        Batches name the same slots again and again: those of the last one are found at once.
        """
        key = slots.tobytes()
        if key == self._last_slots:
            return self.last_rows
        if int(np.maximum.reduce(slots.view(np.uint32))) >= len(self._row_of_slot):
            return None
        rows = self._row_of_slot.take(slots)
        if not np.count_nonzero(rows < 0):
            self._last_slots, self.last_rows = key, rows
        return rows

    def name(self, row: Row, slot: int) -> None:
        """Let batches name a row by `slot` from now on."""
        if slot >= len(self._row_of_slot):
            grown = np.full(max(slot + 1, 2 * len(self._row_of_slot)), NO_ROW, dtype=np.intp)
            grown[: len(self._row_of_slot)] = self._row_of_slot
            self._row_of_slot = grown
        before = int(self._row_of_slot[slot])
        if before != NO_ROW and (other := self.by_index[before]) is not None:
            other.slot = NO_ROW
        if row.slot != NO_ROW:
            self._row_of_slot[row.slot] = NO_ROW
        row.slot = slot
        self._row_of_slot[slot] = row.index
        self._last_slots = None

    def _add_rows(self, count: int) -> None:
        start, end = len(self.by_index), len(self.by_index) + count
        self.by_index += [None] * count
        for index in range(start, end):
            heapq.heappush(self._free, index)
        for group, table in enumerate(self.tables):
            grown = np.zeros((end, table.shape[1]), dtype=np.int32)
            grown[:start] = table
            self.tables[group] = grown
        self._name_figures(np.pad(self.figures, ((0, 0), (0, count))))

    def _name_figures(self, figures: Int64Array) -> None:
        """Let the figures be rows of this array, a view each."""
        self.figures, num_groups = figures, self._num_groups
        self.num_columns = figures[:num_groups]
        self.first_kept = figures[num_groups:-NUM_LIMITS]
        self.published, self.capacity_tokens, self.full_tokens = figures[PUBLISHED:SKIP]
        self.skip_tokens, self.next_tokens = figures[SKIP], figures[NEXT]
