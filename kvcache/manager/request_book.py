"""Who is known: running requests in their slots, and preempted ones that wait without blocks.

Shared by the per-request calls and the batched step, so that both seat, preempt and forget a
request in the same way. Refuses to decide: which request runs is the engine's choice, which blocks
it gets the core's.

        admit             preempt            resume
    ──────────▶ running ──────────▶ preempted ─────▶ running
                   │                    │
                   └──── forget ────────┴─── forget ──▶ unknown
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.core import Core
from kvcache.errors import InvariantError, RequestError
from kvcache.manager.slots import CALLER, FREE, SlotTable
from kvcache.request import Request
from kvcache.step import NO_SLOT


@dataclass(eq=False, slots=True)
class KnownRequest:
    """A request, who it belongs to, and where it sits.

    `client_index` is `CALLER` where a caller of per-request methods owns it. `generation` tells
    this occupancy of `slot` from all others; it keeps its last value while preempted.
    `num_encoder_tokens` come back with a request that is resumed. `num_draft_tokens` were in the
    last forward of a caller's request.
    """

    request: Request
    client_index: int
    slot: int = NO_SLOT
    generation: int = FREE
    num_encoder_tokens: int = 0
    num_draft_tokens: int = 0

    @property
    def is_running(self) -> bool:
        """Whether it has a slot, and with it blocks."""
        return self.slot != NO_SLOT


class RequestBook:
    """All requests of a manager by id, each in its slot or without one.

    Invariant: the slots of running requests are exactly the taken ones.
    """

    def __init__(self, slots: SlotTable, core: Core, slot_by_request: dict[str, int]) -> None:
        """Know nobody yet. `slot_by_request` is kept up to date for others to read."""
        self.slots = slots
        self.num_preemptions = 0
        self._core = core
        self._slot_by_request = slot_by_request
        self.known: dict[str, KnownRequest] = {}
        """All requests, by id."""

    def get(self, request_id: str) -> KnownRequest | None:
        """Return what is known of a request, or None."""
        return self.known.get(request_id)

    def up_to_date(self, request_id: str) -> Request | None:
        """Return the request with all its tokens, or None if it is not known."""
        known = self.known.get(request_id)
        if known is None:
            return None
        if known.is_running:
            self.slots.sync(known.slot)
        return known.request

    def running_ids(self) -> list[str]:
        """Return the ids of the requests that have a slot."""
        return list(self._slot_by_request)

    def preempted(self) -> list[KnownRequest]:
        """Return the known requests without a slot."""
        return [known for known in self.known.values() if not known.is_running]

    def of_client(self, client_index: int) -> list[KnownRequest]:
        """Return the requests of one client, in order of arrival."""
        return [known for known in self.known.values() if known.client_index == client_index]

    def admit(self, request: Request, client_index: int, num_computed: int) -> KnownRequest:
        """Know the request, new or preempted, and seat it. A slot must be free.

        `num_computed` of its positions are computed or scheduled, drafts left out.
        """
        request_id, slots = request.request_id, self.slots
        known = self.known.get(request_id)
        if known is None:
            known = self.known[request_id] = KnownRequest(request, client_index)
        known.slot = self._slot_by_request[request_id] = slots.take(
            request, client_index, num_computed
        )
        known.generation = slots.newest_generation
        return known

    def preempt(self, known: KnownRequest) -> None:
        """Take slot and blocks from a running request; its tokens stay known."""
        self._leave(known)
        known.request.num_computed_tokens = 0
        known.request.num_preemptions += 1
        self.num_preemptions += 1

    def undo_resume(self, known: KnownRequest) -> None:
        """Make a resumed request preempted again, as if it had not been resumed."""
        self._leave(known)
        known.request.num_computed_tokens = 0

    def forget(self, known: KnownRequest) -> None:
        """Take slot and blocks, if it has any, and know the request no more.

        Its object is not brought up to date for that: nobody reads tokens to free blocks.
        """
        if known.is_running:
            self._core.free(known.request)
            self.slots.vacate(known.slot)
            self._unseat(known)
        del self.known[known.request.request_id]

    def require_caller_owned(self, request: Request) -> KnownRequest | None:
        """Return what is known of a request for a per-request call; None if nothing is.

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

    def counts(self) -> tuple[int, int]:
        """Return how many requests run and how many are preempted."""
        return self.slots.num_taken, len(self.known) - self.slots.num_taken

    def check(self) -> None:
        """Raise `InvariantError` if requests, slots and blocks do not agree."""
        self.slots.check()
        seats = {known.slot: known for known in self.known.values() if known.is_running}
        num_running = sum(known.is_running for known in self.known.values())
        if not len(seats) == num_running == self.slots.num_taken:
            raise InvariantError(
                f"{num_running} running requests sit in {len(seats)} slots, {self.slots.num_taken} "
                "are taken"
            )
        if self._slot_by_request != {k.request.request_id: s for s, k in seats.items()}:
            raise InvariantError(f"slots by request {self._slot_by_request} are not the taken ones")
        for request_id, known in self.known.items():
            if known.is_running:
                self._check_running(known)
            elif any(self._core.block_ids(request_id)):
                raise InvariantError(f"preempted request {request_id} has blocks")

    def _check_running(self, known: KnownRequest) -> None:
        request_id, slot = known.request.request_id, known.slot
        if known.generation != self.slots.generation[slot]:
            raise InvariantError(
                f"request {request_id} is occupant {known.generation} of slot {slot}, which has "
                f"occupant {self.slots.generation[slot]}"
            )
        if self.slots.request_in(slot) is not known.request:
            raise InvariantError(f"slot {slot} does not hold request {request_id}")

    def dump_state(self) -> dict[str, object]:
        """Return all requests as plain values, in order of id."""
        state: dict[str, object] = {}
        for request_id, known in sorted(self.known.items()):
            request = self.up_to_date(request_id)
            if request is None:
                continue
            num_computed = request.num_computed_tokens
            if known.is_running and known.client_index != CALLER:
                num_computed = int(self.slots.num_computed[known.slot])
            state[request_id] = {
                "slot": known.slot,
                "tokens": request.all_token_ids.tolist(),
                "num_computed_tokens": min(num_computed, request.num_tokens),
                "num_unsettled_drafts": max(0, num_computed - request.num_tokens),
                "num_preemptions": request.num_preemptions,
                "block_ids": [list(ids) for ids in self._core.block_ids(request_id)],
            }
        return state

    def _leave(self, known: KnownRequest) -> None:
        self.slots.sync(known.slot)
        self._core.free(known.request)
        self.slots.release(known.slot)
        self._unseat(known)

    def _unseat(self, known: KnownRequest) -> None:
        del self._slot_by_request[known.request.request_id]
        known.slot = NO_SLOT
