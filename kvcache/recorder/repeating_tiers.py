"""The tiers of a recorded manager: what they answered and did then, they answer and do again.

Connected with a replayed manager whose recorded one had tiers. Refuses to think: a question that
was not asked then is a difference, and is answered as by tiers that have nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvcache.base.arrays import Int32Array
from kvcache.base.errors import RequestError
from kvcache.coordinator.tier_calls import Gone, LookedUp, SwappedOut, TierCall
from kvcache.core import OffloadAnswer, OffloadHit
from kvcache.manager.loads import PrefixLoads
from kvcache.requests.request import Request

MISS = OffloadHit(OffloadAnswer.MISS)


class RepeatingTiers:
    """Both hooks of a manager. `expect` the calls of an operation before it, and ask afterwards
    what was different."""

    def __init__(self, loads: PrefixLoads) -> None:
        """Know no call yet; `loads` are the manager's."""
        self._loads = loads
        self._expected: deque[TierCall] = deque()
        self._difference = ""

    def expect(self, calls: Sequence[TierCall]) -> None:
        """These are the next ones, whatever is left of those before."""
        self._expected = deque(calls)
        self._difference = ""

    @property
    def difference(self) -> str:
        """How the calls since `expect` were others; empty if they were not."""
        if not self._difference and self._expected:
            return f"the tiers were not called, recorded: {_told(self._expected[0])}"
        return self._difference

    def look_up(self, request: Request, num_device_tokens: int) -> OffloadHit:
        """Answer as it was answered then."""
        call = self._next(LookedUp(request.request_id, num_device_tokens, MISS))
        return call.answer if isinstance(call, LookedUp) else MISS

    def on_swap_out(
        self,
        request: Request,
        num_tokens: int,
        num_cached_tokens: int,
        block_ids: tuple[list[int], ...],
    ) -> None:
        """Keep nothing: what comes back is in other records."""
        self._next(SwappedOut(request.request_id, num_tokens, num_cached_tokens))

    def on_request_finished(self, request_id: str) -> None:
        """Release what was released then."""
        call = self._next(Gone(request_id))
        for load_id in call.released_loads if isinstance(call, Gone) else ():
            try:
                self._loads.release(load_id)
            except RequestError as error:
                self._difference = self._difference or str(error)

    def on_eviction_candidates(self, group: int, block_ids: Int32Array) -> None:
        """Let them go."""

    def on_sealed(self, group: int, block_ids: Int32Array) -> None:
        """Store nothing."""

    def _next(self, call: TierCall) -> TierCall | None:
        """Return the recorded call in the place of this one; None where it was another."""
        recorded = self._expected.popleft() if self._expected else None
        if recorded is not None and _question(recorded) == _question(call):
            return recorded
        then = "nothing" if recorded is None else _told(recorded)
        self._difference = self._difference or f"the tiers were {_told(call)}, recorded: {then}"
        return None


def _question(call: TierCall) -> tuple[object, ...]:
    """Return all of a call but what the tiers answered and did."""
    match call:
        case LookedUp():
            return LookedUp, call.request_id, call.num_device_tokens
        case SwappedOut():
            return SwappedOut, call.request_id, call.num_tokens, call.num_cached_tokens
        case Gone():
            return Gone, call.request_id


def _told(call: TierCall) -> str:
    match call:
        case LookedUp():
            return f"asked for {call.request_id} behind {call.num_device_tokens} tokens"
        case SwappedOut():
            return (
                f"told that {call.request_id} is swapped out with {call.num_tokens} tokens, "
                f"{call.num_cached_tokens} of them cached"
            )
        case Gone():
            return f"told that {call.request_id} has gone"
