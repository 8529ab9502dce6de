"""Rows of running requests: who sits in which slot, and how far each row has come, as arrays.

Between the requests, which own tokens, and a step, which moves a thousand of them at once: what
every step changes lives here in one array per figure, and a request object is brought up to date
when somebody looks at it. Refuses nothing: callers have checked before they come here.

    slot           0     1     2     3
    num_tokens   [ 33 | 120 |   0 | 17 ]      tokens of the row, those still in `_pending` included
    num_computed [ 32 | 119 |   0 | 17 ]      positions computed or scheduled, drafts included
    generation   [  7 |   3 |  -1 | 12 ]      which occupancy this is; -1 is a free slot
"""

from __future__ import annotations

import heapq
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.arrays import IndexArray, Int32Array, index_array
from kvcache.errors import InvariantError
from kvcache.request import Request

Int64Array: TypeAlias = npt.NDArray[np.int64]

FREE = -1
"""Generation and client index of a slot in which nobody sits."""

CALLER = 0
"""Client index of requests whose caller appends tokens himself; they are always up to date."""

_MIN_PENDING_TOKENS = 32


class SlotTable:
    """The slots of one manager. The lowest free one is taken first.

    Invariants: `generation[s] == FREE` exactly when slot `s` is free; a request in slot `s` holds
    `_num_synced[s]` of its `num_tokens[s]` tokens itself, the rest are the first
    `num_tokens[s] - _num_synced[s]` ids of `_pending[s]`.
    """

    def __init__(self, num_slots: int, hash_block_size: int) -> None:
        """Make `num_slots` free slots, where rows hold back up to two blocks of tokens."""
        self.num_slots = num_slots
        self.num_tokens: Int32Array = np.zeros(num_slots, dtype=np.int32)
        self.num_computed: Int32Array = np.zeros(num_slots, dtype=np.int32)
        self.num_own: Int32Array = np.zeros(num_slots, dtype=np.int32)
        self.generation: Int64Array = np.full(num_slots, FREE, dtype=np.int64)
        self.client_index: Int32Array = np.full(num_slots, FREE, dtype=np.int32)
        self._num_synced: Int32Array = np.zeros(num_slots, dtype=np.int32)
        self._width = max(_MIN_PENDING_TOKENS, 2 * hash_block_size)
        self._pending: npt.NDArray[np.int32] = np.zeros((num_slots, self._width), dtype=np.int32)
        self._requests: npt.NDArray[np.object_] = np.full(num_slots, None, dtype=object)
        self._free = list(range(num_slots))
        self._next_generation = 0
        self._hash_block_size = hash_block_size

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
        self._requests[slot] = request
        self.generation[slot] = self._next_generation
        self._next_generation += 1
        self.client_index[slot] = client_index
        self.adopt(slot, num_computed)
        return slot

    def release(self, slot: int) -> None:
        """Bring the request up to date and free its slot."""
        self.sync(slot)
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

    def requests_of(self, slots: Int32Array) -> list[Request]:
        """Return the requests of taken slots as they are, without bringing them up to date."""
        requests: list[Request] = self._requests[slots].tolist()
        return requests

    def adopt(self, slot: int, num_computed: int) -> None:
        """Take the row's figures from its request, whose owner may have appended tokens."""
        num_tokens = self._requests[slot].num_tokens
        self.num_tokens[slot] = self._num_synced[slot] = num_tokens
        self.num_computed[slot] = num_computed

    def append(self, taken: Int32Array, counts: Int32Array, token_ids: Int32Array) -> None:
        """Append `counts[i]` of `token_ids`, in order, to the row in slot `taken[i]`."""
        if not len(token_ids):
            return
        slots = index_array(taken)
        held = self.num_tokens[slots] - self._num_synced[slots]
        crowded = np.flatnonzero(held + counts > self._width)
        if len(crowded):
            held[crowded] = 0
            self._sync_rows(slots[crowded])
            if int(counts.max()) > self._width:
                self._append_long_rows(slots, counts, token_ids)
                return
        if len(token_ids) == len(slots) and int(counts.min()) == 1:
            self._pending[slots, held] = token_ids
        else:
            ends = np.cumsum(counts)
            columns = np.arange(len(token_ids)) + np.repeat(held - ends + counts, counts)
            self._pending[np.repeat(slots, counts), columns] = token_ids
        self.num_tokens[slots] += counts

    def sync(self, slot: int) -> None:
        """Bring the request in `slot` up to date: its tokens and how many are computed."""
        if self.client_index[slot] == CALLER:
            return
        request: Request = self._requests[slot]
        num_tokens, num_synced = int(self.num_tokens[slot]), int(self._num_synced[slot])
        if num_tokens > num_synced:
            request.append_checked_token_ids(self._pending[slot, : num_tokens - num_synced])
            self._num_synced[slot] = num_tokens
        request.num_computed_tokens = min(int(self.num_computed[slot]), num_tokens)

    def sync_filled(self, slots: Int32Array, num_cached_tokens: Int32Array) -> None:
        """Bring those rows up to date whose request lacks tokens of a full block.

        `num_cached_tokens[i]` is how far the blocks of row `i` become hittable. Requests that hold
        the tokens of all their full blocks stay as they are.
        """
        size = self._hash_block_size
        behind = self._num_synced[slots] // size < num_cached_tokens // size
        if behind.any():
            self._sync_rows(slots[behind])

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
        for slot in range(self.num_slots):
            request = self._requests[slot]
            if (request is None) != (self.generation[slot] == FREE):
                raise InvariantError(f"slot {slot} holds {request}, its generation says otherwise")
            if request is None:
                continue
            num_synced, num_tokens = int(self._num_synced[slot]), int(self.num_tokens[slot])
            if request.num_tokens < num_synced or num_tokens - num_synced > self._width:
                raise InvariantError(
                    f"slot {slot}: request {request.request_id} has {request.num_tokens} tokens, "
                    f"the table counts {num_synced} of {num_tokens} as handed over"
                )

    def _sync_rows(self, slots: npt.NDArray[np.integer]) -> None:
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
