"""The requests of a manager: running ones in their slots, preempted ones without slot and blocks.

Per-request calls and steps share it, so both admit, preempt and forget requests in the same way.
The values that every step changes in a row are kept in columns (core/running.py), and its newest
tokens in a ring; a request object is brought up to date when it is read. The table knows no blocks:
callers make the core free them. It does not decide which request runs.

        admit             preempt            admit
    ──────────▶ running ──────────▶ preempted ─────▶ running
                   │                    │
                   └──── forget ────────┴─── forget ──▶ unknown
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from heapq import heappop, heappush
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.base.arguments import MAX_INT32
from kvcache.base.errors import InvariantError, RequestError
from kvcache.core.running import (
    CLIENT,
    COMPUTED,
    FIRST_IN_RING,
    FREE,
    MARK,
    NUM_COLUMNS,
    OWN,
    ROW,
    SYNCED,
    TOKENS,
    RunningRows,
)
from kvcache.protocol.step import NO_SLOT
from kvcache.requests.request import Request

Int64Array: TypeAlias = npt.NDArray[np.int64]

CALLER = 0
"""Client index of requests of per-request calls. Their caller appends the tokens, so they are
always up to date; of the columns, only CLIENT and OWN are valid for them."""

_RING_TOKENS = 512
_MAX_RING_BYTES = 32 << 20
_TOKEN_BYTES = 4


@dataclass(eq=False, slots=True)
class KnownRequest:
    """A request, its owner and its slot.

    `client_index` is `CALLER` if a caller of per-request methods owns it. `generation` tells this
    occupancy of `slot` from all others; a preempted request keeps its last one. A resumed request
    gets `num_encoder_tokens` again. The last forward of a caller's request had `num_draft_tokens`.
    """

    request: Request
    client_index: int
    slot: int = NO_SLOT
    generation: int = FREE
    num_encoder_tokens: int = 0
    num_draft_tokens: int = 0

    @property
    def is_running(self) -> bool:
        """Whether it has a slot, and so blocks."""
        return self.slot != NO_SLOT


class RequestTable:
    """All requests of a manager by id, with or without a slot. The lowest free slot is taken first.

    Invariants: CLIENT is FREE exactly where slot `s` is free; `generation[s]` is that of its newest
    occupant. The request object in slot `s` has SYNCED of the row's TOKENS tokens. The ring
    has those of the last `width` tokens that are at or behind FIRST_IN_RING, which is the start of
    a hash block, at or before SYNCED.
    """

    def __init__(self, num_slots: int, unit_tokens: int) -> None:
        """Begin without requests. A row buffers a few hundred tokens, at least two hash blocks of
        `unit_tokens` each, which divides every group's block size."""
        self.num_slots = num_slots
        self.num_preemptions = 0
        self.known: dict[str, KnownRequest] = {}
        """All requests, by id."""
        self.rows: npt.NDArray[np.int32] = np.zeros((num_slots, NUM_COLUMNS), dtype=np.int32)
        self.rows[:, CLIENT] = FREE
        self.generation: Int64Array = np.full(num_slots, FREE, dtype=np.int64)
        self.requests: list[Any] = [None] * num_slots
        """The request in each slot, not brought up to date; None in a free slot."""
        self._cells = self.rows.reshape(-1).data  # faster for single numbers
        self.num_free_slots = num_slots
        self._given_back: list[int] = []  # a heap, without the free slots behind all taken ones
        self._newest_generation = -1
        self._stamp = 0
        most = min(_RING_TOKENS, _MAX_RING_BYTES // (_TOKEN_BYTES * num_slots))
        self.unit_tokens = unit_tokens
        self.width = max(2, most // unit_tokens) * unit_tokens
        # Pages that no row has reached are untouched, so they take no memory.
        self.ring: npt.NDArray[np.int32] = np.zeros((num_slots, self.width), dtype=np.int32)

    # --- requests ------------------------------------------------------------------------------

    @property
    def num_taken(self) -> int:
        """How many slots have a request."""
        return self.num_slots - self.num_free_slots

    def up_to_date(self, request_id: str) -> Request | None:
        """Return the request with all its tokens, or None if it is not known."""
        known = self.known.get(request_id)
        if known is None:
            return None
        if known.slot != NO_SLOT:
            self.sync(known.slot)
        return known.request

    def request_in(self, slot: int) -> Request | None:
        """Return the request in `slot`, up to date, or None."""
        if self.requests[slot] is not None:
            self.sync(slot)
        request: Request | None = self.requests[slot]
        return request

    def slot_of(self, request_id: str) -> int:
        """Return the slot of a request; NO_SLOT if it is preempted or not known."""
        known = self.known.get(request_id)
        return NO_SLOT if known is None else known.slot

    def of_client(self, client_index: int) -> list[KnownRequest]:
        """Return the requests of one client, in order of arrival."""
        return [known for known in self.known.values() if known.client_index == client_index]

    def admit(
        self,
        request: Request,
        client_index: int,
        num_computed: int,
        num_encoder_tokens: int = 0,
        row: int = 0,
    ) -> KnownRequest:
        """Give a new or preempted request the lowest free slot. One must be free.

        `num_computed` of its positions are computed or scheduled, without drafts. `row` is its
        number in the core, which only steps need.
        """
        slot = self._take_slot()
        known = self.seat(request, slot, client_index, num_encoder_tokens)
        cells, at = self._cells, slot * NUM_COLUMNS
        cells[at + CLIENT], cells[at + OWN], cells[at + ROW] = client_index, num_computed, row
        if client_index != CALLER:
            self._adopt(slot, num_computed)
        return known

    def seat(
        self, request: Request, slot: int, client_index: int, num_encoder_tokens: int
    ) -> KnownRequest:
        """Add the request to the table, in a slot taken before; its row is not written."""
        request_id = request.request_id
        generation = self._newest_generation = self._newest_generation + 1
        known = self.known.get(request_id)
        if known is None:
            known = self.known[request_id] = KnownRequest(
                request, client_index, slot, generation, num_encoder_tokens
            )
        else:
            known.slot, known.generation = slot, generation
            known.num_encoder_tokens = num_encoder_tokens
        self.generation[slot] = generation
        self.requests[slot] = request
        return known

    def take_slots(self, count: int) -> list[int]:
        """Take the `count` lowest free slots, or all if there are fewer."""
        return [self._take_slot() for _ in range(min(count, self.num_free_slots))]

    def give_back_slots(self, slots: Sequence[int]) -> None:
        """Free slots that were taken but got no request."""
        for slot in slots:
            heappush(self._given_back, slot)
        self.num_free_slots += len(slots)

    def preempt(self, known: KnownRequest) -> None:
        """Free the slot of a running request whose blocks are already freed; it stays known."""
        self.undo_resume(known)
        known.request.num_preemptions += 1
        self.num_preemptions += 1

    def undo_resume(self, known: KnownRequest) -> None:
        """Make a resumed request preempted again, as if never resumed."""
        self.sync(known.slot)
        self._vacate(known)
        known.request.num_computed_tokens = 0

    def forget(self, known: KnownRequest) -> None:
        """Remove a request from the table, without bringing its object up to date."""
        if known.slot != NO_SLOT:
            self._vacate(known)
        del self.known[known.request.request_id]

    def owned_by_caller(self, request: Request) -> KnownRequest | None:
        """Return the entry of a request for a per-request call; None if it is not known.

        Raises:
            RequestError: steps own it, or another object has its id.
        """
        known = self.known.get(request.request_id)
        if known is None:
            return None
        if known.client_index != CALLER:
            raise RequestError(
                f"request {request.request_id} was admitted by a step: change it by steps, or use "
                "another request id"
            )
        if known.request is not request:
            raise RequestError(
                f"request {request.request_id} is known as another object ({known.request}): pass "
                "that one, or free it first"
            )
        return known

    # --- rows ----------------------------------------------------------------------------------

    def num_own(self, slot: int) -> int:
        """Return where the row's last forward ended, without drafts."""
        return self._cells[slot * NUM_COLUMNS + OWN]

    def note_own(self, slot: int, num_own: int) -> None:
        """Note where the row's last forward ended."""
        self._cells[slot * NUM_COLUMNS + OWN] = num_own

    def num_computed(self, slot: int) -> int:
        """Return how many positions of a row are computed or scheduled."""
        return self._cells[slot * NUM_COLUMNS + COMPUTED]

    def next_stamp(self) -> int:
        """Return a mark that no row has."""
        self._stamp += 1
        if self._stamp == MAX_INT32:
            self.rows[:, MARK] = 0
            self._stamp = 1
        return self._stamp

    def make_room(self, rows: RunningRows) -> RunningRows:
        """Make room in the ring for the tokens of these rows, and return the rows.

        A row that would fill more than half of its ring hands its tokens to its request, so it has
        room for hundreds of steps. If a row gets more tokens than the ring holds, the requests get
        all of the tokens now, and the rows are returned without them.
        """
        counts = rows.offsets[1:] - rows.offsets[:-1]
        num_waiting = self.rows[rows.slots, TOKENS] + counts - self.rows[rows.slots, SYNCED]
        for slot in rows.slots[num_waiting > self.width // 2].tolist():
            self.sync(slot)
        if int(counts.max()) <= self.width:
            return rows
        self.append(rows)
        return rows._replace(offsets=np.zeros_like(rows.offsets))

    def append(self, rows: RunningRows) -> None:
        """Append the tokens of these rows to their requests."""
        ends = rows.offsets.tolist()
        for slot, start, end in zip(rows.slots.tolist(), ends, ends[1:], strict=False):
            self.sync(slot)
            self.requests[slot].append_output_token_ids(rows.token_ids[start:end])
            self._adopt(slot, self.num_computed(slot))

    def sync(self, slot: int) -> None:
        """Bring the request in `slot` up to date: its tokens and its computed tokens."""
        at, cells = slot * NUM_COLUMNS, self._cells
        if cells[at + CLIENT] == CALLER:
            return
        request: Request = self.requests[slot]
        num_tokens, num_synced = cells[at + TOKENS], cells[at + SYNCED]
        if num_tokens > num_synced:
            start, end = num_synced % self.width, num_tokens - num_synced
            end += start
            request.append_checked_token_ids(self.ring[slot, start:end])
            if end > self.width:
                request.append_checked_token_ids(self.ring[slot, : end - self.width])
            cells[at + SYNCED] = num_tokens
        request.num_computed_tokens = min(cells[at + COMPUTED], num_tokens)

    def roll_back(self, slot: int, num_computed: int, num_tokens: int) -> None:
        """Roll a row back to `num_tokens` tokens and `num_computed` computed positions."""
        self.sync(slot)
        request: Request = self.requests[slot]
        if num_tokens < request.num_tokens:
            request.truncate_tokens(num_tokens)
        self._adopt(slot, num_computed)
        request.num_computed_tokens = min(num_computed, num_tokens)

    # --- state ---------------------------------------------------------------------------------

    def counts(self) -> tuple[int, int]:
        """Return the numbers of running and of preempted requests."""
        return self.num_taken, len(self.known) - self.num_taken

    def check(self, block_ids: Callable[[str], tuple[list[int], ...]]) -> None:
        """Raise `InvariantError` if requests, slots and blocks do not agree."""
        free = np.flatnonzero(self.rows[:, CLIENT] == FREE).tolist()
        num_reached = self.num_taken + len(self._given_back)
        known_free = sorted(self._given_back) + list(range(num_reached, self.num_slots))
        if known_free != free:
            raise InvariantError(
                f"free slots {known_free[:8]} are not those without an occupant {free[:8]}"
            )
        seats = {known.slot: known for known in self.known.values() if known.is_running}
        num_running = sum(known.is_running for known in self.known.values())
        if not len(seats) == num_running == self.num_taken:
            raise InvariantError(
                f"{num_running} running requests sit in {len(seats)} slots, {self.num_taken} "
                "are taken"
            )
        for slot, request in enumerate(self.requests):
            known = seats.get(slot)
            if (None if known is None else known.request) is not request:
                raise InvariantError(f"slot {slot} holds {request}, {known} is known to sit there")
            if known is not None:
                self._check_row(slot, known)
        for known in self.known.values():
            if not known.is_running and any(block_ids(known.request.request_id)):
                raise InvariantError(f"preempted request {known.request.request_id} has blocks")

    def dump_state(self, block_ids: Callable[[str], tuple[list[int], ...]]) -> dict[str, object]:
        """Return all requests as plain values, in order of id."""
        state: dict[str, dict[str, object]] = {}
        for request_id, known in sorted(self.known.items()):
            request = self.up_to_date(request_id)
            if request is None:
                continue
            num_computed = request.num_computed_tokens
            if known.is_running and known.client_index != CALLER:
                num_computed = self.num_computed(known.slot)
            state[request_id] = {
                "slot": known.slot,
                "tokens": request.all_token_ids.tolist(),
                "num_computed_tokens": min(num_computed, request.num_tokens),
                "num_unsettled_drafts": max(0, num_computed - request.num_tokens),
                "num_preemptions": request.num_preemptions,
                "block_ids": [list(ids) for ids in block_ids(request_id)],
            }
            if request.hints:
                state[request_id] |= {"hints": [astuple(hint) for hint in request.hints]}
        return dict(state)

    # --- private -------------------------------------------------------------------------------

    def _check_row(self, slot: int, known: KnownRequest) -> None:
        if known.generation != self.generation[slot]:
            raise InvariantError(
                f"request {known.request.request_id} is occupant {known.generation} of slot "
                f"{slot}, which has occupant {self.generation[slot]}"
            )
        num_tokens, num_synced = self.rows[slot, TOKENS], self.rows[slot, SYNCED]
        is_odd = known.request.num_tokens < num_synced or num_tokens - num_synced > self.width
        if known.client_index != CALLER and is_odd:
            raise InvariantError(
                f"slot {slot}: request {known.request.request_id} has {known.request.num_tokens} "
                f"tokens, the table counts {num_synced} of {num_tokens} as handed over"
            )

    def _take_slot(self) -> int:
        given_back = self._given_back
        slot = heappop(given_back) if given_back else self.num_slots - self.num_free_slots
        self.num_free_slots -= 1
        return slot

    def _vacate(self, known: KnownRequest) -> None:
        """Free the slot of a request whose tokens are up to date or no longer needed."""
        slot = known.slot
        self.requests[slot] = None
        self._cells[slot * NUM_COLUMNS + CLIENT] = FREE
        heappush(self._given_back, slot)
        self.num_free_slots += 1
        known.slot = NO_SLOT

    def _adopt(self, slot: int, num_computed: int) -> None:
        """Set the row's columns and ring from its request, which has all its tokens."""
        request: Request = self.requests[slot]
        num_tokens = request.num_tokens
        num_begun = num_tokens % self.unit_tokens
        first, at, cells = num_tokens - num_begun, slot * NUM_COLUMNS, self._cells
        cells[at + TOKENS] = cells[at + SYNCED] = num_tokens
        cells[at + COMPUTED], cells[at + FIRST_IN_RING] = num_computed, first
        if num_begun:
            column = first % self.width
            tokens = request.token_buffer[first:num_tokens]
            self.ring[slot, column : column + num_begun] = tokens
