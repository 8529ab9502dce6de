"""Wrappers that record all calls between a manager and its tiers, in order.

They change nothing. Calls within a step are recorded as part of it; calls between steps are
recorded at once.

    manager ──look_up, on_swap_out, on_request_finished──▶ RecordedHooks ──▶ tiers
            ◀──begin, finish, release── RecordedLoads ◀─────────────────────┘
                                             └──▶ StepRecorder
"""

from __future__ import annotations

from typing import Protocol

from kvcache.coordinator.step_recorder import (
    Gone,
    LoadBegun,
    LoadFinished,
    LoadReleased,
    LookedUp,
    StepRecorder,
    SwappedOut,
)
from kvcache.core import OffloadHit, StepHooks
from kvcache.manager.loads import PrefixLoad, PrefixLoads
from kvcache.manager.step_ledger import StepsUnderWay
from kvcache.manager.tiers import SwapHooks
from kvcache.requests.request import Request


class TierHooks(StepHooks, SwapHooks, Protocol):
    """Both hooks of a manager, and prefetches."""

    def prefetch(self, request: Request, num_device_tokens: int) -> OffloadHit:
        """Begin to load a prefix ahead of its requests."""


class RecordedLoads:
    """A manager's `PrefixLoads`, as its tiers see them; `recorder` gets every change."""

    def __init__(self, loads: PrefixLoads, recorder: StepRecorder) -> None:
        """Wrap `loads`."""
        self._loads = loads
        self._recorder = recorder
        self._released_within: list[int] | None = None

    def under_way(self) -> StepsUnderWay:
        """Return the steps of all clients that are neither complete nor void."""
        return self._loads.under_way()

    def are_over(self, steps: StepsUnderWay) -> bool:
        """Return whether no rank can run any of these steps any more."""
        return self._loads.are_over(steps)

    def num_device_tokens(self, request: Request) -> int:
        """Return how many tokens of `request` are cached now. Changes nothing."""
        return self._loads.num_device_tokens(request)

    def may_be_written(self, load_id: int) -> bool:
        """Return whether no step from before a load can read its blocks any more."""
        return self._loads.may_be_written(load_id)

    def was_taken(self, load_id: int) -> bool:
        """Return whether a load that was not released yet has been handed over."""
        return self._loads.was_taken(load_id)

    def begin(
        self,
        request: Request,
        num_tokens: int,
        num_spare_blocks: int = 0,
        *,
        has_tail: bool = False,
    ) -> PrefixLoad | None:
        """Take blocks for a prefix, and record it; see `PrefixLoads.begin`."""
        load = self._loads.begin(request, num_tokens, num_spare_blocks, has_tail=has_tail)
        self._recorder.record(LoadBegun(request, num_tokens, num_spare_blocks, has_tail, load))
        return load

    def finish(self, load_id: int) -> None:
        """Cache a load's blocks, and record it."""
        self._loads.finish(load_id)
        self._recorder.record(LoadFinished(load_id))

    def release(self, load_id: int) -> None:
        """Free a load's blocks, and record it now or with the step or call it is part of."""
        self._loads.release(load_id)
        if self._released_within is None:
            self._recorder.record(LoadReleased(load_id))
        else:
            self._released_within.append(load_id)

    def enter_call(self) -> None:
        """Treat later releases as part of a call of the manager."""
        self._released_within = []

    def leave_call(self) -> tuple[int, ...]:
        """Return the releases since `enter_call`, and record later ones at once."""
        released, self._released_within = self._released_within, None
        return tuple(released or ())


class RecordedHooks:
    """The tiers, as their manager sees them; `recorder` gets every call and answer."""

    def __init__(self, tiers: TierHooks, loads: RecordedLoads, recorder: StepRecorder) -> None:
        """Wrap `tiers`, which work with `loads`."""
        self._tiers = tiers
        self._loads = loads
        self._recorder = recorder

    def look_up(self, request: Request, num_device_tokens: int) -> OffloadHit:
        """Pass it on, and record the answer."""
        answer = self._tiers.look_up(request, num_device_tokens)
        self._recorder.record(LookedUp(request.request_id, num_device_tokens, answer))
        return answer

    def prefetch(self, request: Request, num_device_tokens: int) -> OffloadHit:
        """Pass it on, and record the answer as that of a look-up."""
        answer = self._tiers.prefetch(request, num_device_tokens)
        self._recorder.record(LookedUp(request.request_id, num_device_tokens, answer))
        return answer

    def on_swap_out(
        self,
        request: Request,
        num_tokens: int,
        num_cached_tokens: int,
        block_ids: tuple[list[int], ...],
    ) -> None:
        """Pass it on, and record it."""
        self._tiers.on_swap_out(request, num_tokens, num_cached_tokens, block_ids)
        self._recorder.record(SwappedOut(request.request_id, num_tokens, num_cached_tokens))

    def on_request_finished(self, request_id: str) -> None:
        """Pass it on, and record which loads it has released."""
        self._loads.enter_call()
        try:
            self._tiers.on_request_finished(request_id)
        finally:
            released = self._loads.leave_call()
            self._recorder.record(Gone(request_id, released))
