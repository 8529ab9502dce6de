"""Rows of running requests: who sits in which slot, and how far each row has come, as arrays.

Between the requests, which own tokens, and a step, which moves a thousand of them at once: what
every step changes lives here in one array per figure, and a request object is brought up to date
when somebody looks at it. Refuses nothing: callers have checked before they come here.

    slot           0     1     2     3
    num_tokens   [ 33 | 120 |   0 | 17 ]      tokens of the row, those its request lacks included
    num_computed [ 32 | 119 |   0 | 17 ]      positions computed or scheduled, drafts included
    generation   [  7 |   3 |  -1 | 12 ]      which occupancy this is; -1 is a free slot

A row's newest tokens are in a ring, token `t` in column `t % width`. A unit of tokens, whose end
may be the end of a block, is never torn apart there:

    ring         [ .... unit 6 .... | .... unit 7 .... | unit 8 >>| .... unit 5 .... ]
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import types

from kvcache.arrays import EMPTY_INT32, IndexArray, Int32Array, index_array
from kvcache.compiled import array_type, compiled
from kvcache.errors import InvariantError
from kvcache.request import Request

Int64Array: TypeAlias = npt.NDArray[np.int64]

FREE = -1
"""Generation and client index of a slot in which nobody sits."""

CALLER = 0
"""Client index of requests whose caller appends tokens himself; they are always up to date, and
the table keeps no figures of them."""

_RING_TOKENS = 512
_MAX_RING_BYTES = 32 << 20
_TOKEN_BYTES = 4


class SeatedRows(NamedTuple):
    """Who sits in some slots. Shapes `(n,)`; `indices` are the slots once more, to index with."""

    slots: Int32Array
    indices: IndexArray
    generations: Int64Array
    requests: npt.NDArray[np.object_]


class RowFigures(NamedTuple):
    """How far some rows have come. Shapes `(n,)`; do not change them."""

    num_computed: Int32Array
    num_tokens: Int32Array


class SlotTable:
    """The slots of one manager. The lowest free one is taken first.

    `num_changes` grows whenever somebody sits down or leaves: while it stays, so do
    `SeatedRows`.

    Invariants: `generation[s] == FREE` exactly when slot `s` is free; a request in slot `s` holds
    `_num_synced[s]` of its `num_tokens[s]` tokens itself. Of the last `_width` tokens those from
    `_first_in_ring[s]` on are in the ring: the start of a unit, at or before `_num_synced[s]`. Of a
    request that a caller owns, nothing but itself, generation and client index is here.
    """

    def __init__(self, num_slots: int, unit_tokens: int) -> None:
        """Make `num_slots` free slots, whose rows hold back a few hundred tokens: two units at
        least. A unit is what divides every group's block size."""
        self.num_slots = num_slots
        self.num_tokens: Int32Array = np.zeros(num_slots, dtype=np.int32)
        self.num_computed: Int32Array = np.zeros(num_slots, dtype=np.int32)
        self.num_own: Int32Array = np.zeros(num_slots, dtype=np.int32)
        self.generation: Int64Array = np.full(num_slots, FREE, dtype=np.int64)
        self.client_index: Int32Array = np.full(num_slots, FREE, dtype=np.int32)
        self._num_synced: Int32Array = np.zeros(num_slots, dtype=np.int32)
        self._first_in_ring: Int32Array = np.zeros(num_slots, dtype=np.int32)
        self._requests: npt.NDArray[np.object_] = np.full(num_slots, None, dtype=object)
        self._free = list(range(num_slots))
        self.num_changes = 0
        # What was written last of rows that decode: most often, what is asked for next.
        self._decoded: IndexArray | None = None
        self._decoded_tokens = EMPTY_INT32
        self._decoded_figures: RowFigures | None = None
        # No row has more tokens, or lacks more of them in its request.
        self._most_tokens = self._most_waiting = 0
        self.newest_generation = -1
        """That of the slot which was taken last."""
        most = min(_RING_TOKENS, _MAX_RING_BYTES // (_TOKEN_BYTES * num_slots))
        self._unit_tokens = unit_tokens
        self._width = max(2, most // unit_tokens) * unit_tokens
        # Pages that no row has reached are not touched, and so take no memory.
        self._ring: npt.NDArray[np.int32] = np.zeros((num_slots, self._width), dtype=np.int32)
        self._ring_places = self._ring.reshape(-1)

    @property
    def num_free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    @property
    def num_taken(self) -> int:
        """Slots in which a request sits."""
        return self.num_slots - len(self._free)

    def take(self, request: Request, client_index: int, num_computed: int) -> int:
        """Seat the request in the lowest free slot and return it. There must be one."""
        slot = heapq.heappop(self._free)
        self.num_changes += 1
        self._requests[slot] = request
        self.generation[slot] = self.newest_generation = self.newest_generation + 1
        self.client_index[slot] = client_index
        if client_index != CALLER:
            self.adopt(slot, num_computed)
        return slot

    def release(self, slot: int) -> None:
        """Bring the request up to date and free its slot."""
        self.sync(slot)
        self.vacate(slot)

    def vacate(self, slot: int) -> None:
        """Free the slot of a request whose tokens nobody wants any more."""
        self.num_changes += 1
        self._forget_decoded()
        self._requests[slot] = None
        self.generation[slot] = FREE
        self.client_index[slot] = FREE
        self.num_tokens[slot] = self.num_computed[slot] = self._num_synced[slot] = 0
        heapq.heappush(self._free, slot)

    def request_in(self, slot: int) -> Request | None:
        """Return the request in `slot`, up to date, or None."""
        if self._requests[slot] is not None:
            self.sync(slot)
        request: Request | None = self._requests[slot]
        return request

    def seated(self, slots: Int32Array, indices: IndexArray) -> SeatedRows:
        """Return who sits in these slots, all of which exist; `indices` are the slots once more.
        The requests stay as they are."""
        return SeatedRows(
            slots, indices, self.generation.take(indices), self._requests.take(indices)
        )

    def figures_of(self, indices: IndexArray) -> RowFigures:
        """Return the figures of some rows. Of the same `indices` as last time they are at hand."""
        if indices is self._decoded and self._decoded_figures is not None:
            return self._decoded_figures
        return RowFigures(self.num_computed.take(indices), self.num_tokens.take(indices))

    def adopt(self, slot: int, num_computed: int) -> None:
        """Take the row's figures from its request, which has all its tokens."""
        self._forget_decoded()
        request: Request = self._requests[slot]
        num_tokens = request.num_tokens
        self._most_tokens = max(self._most_tokens, num_tokens)
        self.num_tokens[slot] = self._num_synced[slot] = num_tokens
        self.num_computed[slot] = num_computed
        num_begun = num_tokens % self._unit_tokens
        self._first_in_ring[slot] = first = num_tokens - num_begun
        if num_begun:
            column = first % self._width
            self._ring[slot, column : column + num_begun] = request.all_token_ids[first:]

    def append(self, slots: IndexArray, counts: Int32Array, token_ids: Int32Array) -> None:
        """Append `counts[i]` of `token_ids`, in order, to the row in slot `slots[i]`."""
        if not len(token_ids):
            return
        self._forget_decoded()
        num_before = self.num_tokens[slots]
        num_after = num_before + counts
        is_crowded = num_after - self._num_synced[slots] > self._width
        if np.count_nonzero(is_crowded):
            self._sync_rows(slots[is_crowded])
            if int(counts.max()) > self._width:
                self._append_long_rows(slots, counts, token_ids)
                return
        if np.count_nonzero(counts == 1) == len(slots):
            places = slots * self._width
            places += num_before % self._width
        else:
            starts = np.cumsum(counts) - counts
            positions = np.arange(len(token_ids)) + np.repeat(num_before - starts, counts)
            places = np.repeat(slots * self._width, counts) + positions % self._width
        self._ring_places[places] = token_ids
        self.num_tokens[slots] = num_after
        most_more = int(np.maximum.reduce(counts))
        self._most_tokens += most_more
        self._most_waiting += most_more

    def least_spare(self, max_tokens: int) -> int:
        """Return how many tokens can be appended to whatever row before one is synced or has more
        than `max_tokens`, as far as that is known at once: few or none mean nothing."""
        if self._most_waiting >= self._width or self._most_tokens >= max_tokens:
            self._most_tokens = int(np.maximum.reduce(self.num_tokens))
            self._most_waiting = int(np.maximum.reduce(self.num_tokens - self._num_synced))
        return min(self._width - self._most_waiting, max_tokens - self._most_tokens)

    def num_spare(self, slots: IndexArray) -> int:
        """Return how many tokens can be appended to each of these rows before one is synced."""
        num_waiting = self.num_tokens.take(slots) - self._num_synced.take(slots)
        return self._width - int(np.maximum.reduce(num_waiting))

    def append_one_each(
        self, seated: SeatedRows, num_tokens: Int32Array, token_ids: Int32Array
    ) -> None:
        """Append a token to each of these rows, which have `num_tokens` and can spare one."""
        num_after = np.empty(len(num_tokens), dtype=np.int32)
        _append_one_each(
            self._ring, seated.indices, num_tokens, token_ids, self.num_tokens, num_after
        )
        self._most_tokens += 1
        self._most_waiting += 1
        self._decoded, self._decoded_tokens = seated.indices, num_after
        self._decoded_figures = None

    def note_computed(self, slots: IndexArray, num_computed: Int32Array) -> None:
        """Note how many positions of these rows are computed or scheduled now."""
        self.num_computed[slots] = num_computed
        if slots is self._decoded:
            self._decoded_figures = RowFigures(num_computed, self._decoded_tokens)
        else:
            self._forget_decoded()

    def sync(self, slot: int) -> None:
        """Bring the request in `slot` up to date: its tokens and how many are computed."""
        if self.client_index[slot] == CALLER:
            return
        request: Request = self._requests[slot]
        num_tokens, num_synced = int(self.num_tokens[slot]), int(self._num_synced[slot])
        if num_tokens > num_synced:
            start, end = num_synced % self._width, num_tokens - num_synced
            end += start
            request.append_checked_token_ids(self._ring[slot, start:end])
            if end > self._width:
                request.append_checked_token_ids(self._ring[slot, : end - self._width])
            self._num_synced[slot] = num_tokens
        request.num_computed_tokens = min(int(self.num_computed[slot]), num_tokens)

    def newest_units(self, slots: IndexArray, units: IndexArray) -> npt.NDArray[np.int32]:
        """Return the tokens of unit `units[i]` of the row in slot `slots[i]`, `(k, unit_tokens)`.

        Of units that the ring does not hold (any more) they are read from the requests.
        """
        tokens = np.empty((len(slots), self._unit_tokens), dtype=np.int32)
        missing = np.empty(len(slots), dtype=np.intp)
        num_missing = _read_units(
            self._ring, self._first_in_ring, self.num_tokens, slots, units, tokens, missing
        )
        for row in missing[:num_missing].tolist():
            slot, start = int(slots[row]), int(units[row]) * self._unit_tokens
            self.sync(slot)
            request: Request = self._requests[slot]
            tokens[row] = request.all_token_ids[start : start + self._unit_tokens]
        return tokens

    def roll_back(self, slot: int, num_computed: int, num_tokens: int) -> None:
        """Take back what a row did: `num_tokens` remain, `num_computed` of them are computed."""
        self.sync(slot)
        request: Request = self._requests[slot]
        if num_tokens < request.num_tokens:
            request.truncate_tokens(num_tokens)
        self.adopt(slot, num_computed)
        request.num_computed_tokens = min(num_computed, num_tokens)

    def check(self) -> None:
        """Raise `InvariantError` if slots and requests do not agree."""
        if sorted(self._free) != np.flatnonzero(self.generation == FREE).tolist():
            raise InvariantError(
                f"free slots {sorted(self._free)[:8]} are not those without an occupant "
                f"{np.flatnonzero(self.generation == FREE).tolist()[:8]}"
            )
        most_tokens = int(self.num_tokens.max())
        most_waiting = int((self.num_tokens - self._num_synced).max())
        if most_tokens > self._most_tokens or most_waiting > self._most_waiting:
            raise InvariantError(
                f"a row has {most_tokens} tokens, and one lacks {most_waiting} in its request: "
                f"{self._most_tokens} and {self._most_waiting} are thought to be the most"
            )
        for slot in range(self.num_slots):
            request = self._requests[slot]
            if (request is None) != (self.generation[slot] == FREE):
                raise InvariantError(f"slot {slot} holds {request}, its generation says otherwise")
            if request is None or self.client_index[slot] == CALLER:
                continue
            num_synced, num_tokens = int(self._num_synced[slot]), int(self.num_tokens[slot])
            if request.num_tokens < num_synced or num_tokens - num_synced > self._width:
                raise InvariantError(
                    f"slot {slot}: request {request.request_id} has {request.num_tokens} tokens, "
                    f"the table counts {num_synced} of {num_tokens} as handed over"
                )

    def _forget_decoded(self) -> None:
        self._decoded = self._decoded_figures = None

    def _sync_rows(self, slots: IndexArray) -> None:
        for slot in slots.tolist():
            self.sync(slot)

    def _append_long_rows(
        self, slots: IndexArray, counts: Int32Array, token_ids: Int32Array
    ) -> None:
        start = 0
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            self.sync(slot)
            self._requests[slot].append_output_token_ids(token_ids[start : start + count])
            self.adopt(slot, int(self.num_computed[slot]))
            start += count


@dataclass(frozen=True, eq=False)
class BatchTokens:
    """The tokens of the rows in `slots`, as `RowTokens`. True until the table changes."""

    table: SlotTable
    slots: IndexArray

    def sync(self, rows: IndexArray) -> None:
        """Bring the requests of these rows up to date with all their tokens."""
        for slot in self.slots[rows].tolist():
            self.table.sync(slot)

    def num_tokens(self, rows: IndexArray) -> npt.NDArray[np.integer]:
        """Return how many tokens these rows have, those their requests lack included."""
        return self.table.num_tokens.take(self.slots[rows])

    def newest_units(self, rows: IndexArray, units: IndexArray) -> npt.NDArray[np.int32]:
        """Return the tokens of full units, `(k, unit_tokens)`; see `SlotTable.newest_units`."""
        return self.table.newest_units(self.slots.take(rows), index_array(units))


_READ_INDICES = array_type("intp", is_read=True)
_READ = array_type("int32", is_read=True)
_TABLE = array_type("int32", 2)


@compiled(types.void(_TABLE, _READ_INDICES, _READ, _READ, array_type("int32"), array_type("int32")))
def _append_one_each(  # noqa: PLR0917 - the columns of a table
    ring: Int32Array,
    slots: IndexArray,
    num_tokens: Int32Array,
    token_ids: Int32Array,
    num_tokens_of_slots: Int32Array,
    num_after: Int32Array,
) -> None:
    """Append a token to each row, in the ring and in the table's count; note the new counts."""
    width = ring.shape[1]
    for i in range(len(slots)):
        slot, count = slots[i], num_tokens[i]
        ring[slot, count % width] = token_ids[i]
        num_tokens_of_slots[slot] = num_after[i] = count + 1


@compiled(
    types.intp(
        array_type("int32", 2, is_read=True),
        _READ,
        _READ,
        _READ_INDICES,
        _READ_INDICES,
        _TABLE,
        array_type("intp"),
    )
)
def _read_units(  # noqa: PLR0917 - what a ring holds, and where it goes
    ring: Int32Array,
    first_in_ring: Int32Array,
    num_tokens: Int32Array,
    slots: IndexArray,
    units: IndexArray,
    tokens: Int32Array,
    missing: IndexArray,
) -> int:
    """Copy the tokens of row `i`'s unit `units[i]` into `tokens[i]`; return how many units are
    `missing` in the ring, whose indices these become."""
    width, unit_tokens = ring.shape[1], tokens.shape[1]
    num_missing = 0
    for i in range(len(slots)):
        slot, start = slots[i], units[i] * unit_tokens
        if start < max(first_in_ring[slot], num_tokens[slot] - width):
            missing[num_missing] = i
            num_missing += 1
            continue
        column = start % width
        for k in range(unit_tokens):
            tokens[i, k] = ring[slot, column + k]
    return num_missing
