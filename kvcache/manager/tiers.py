"""The tiers below the device, as one manager knows them: whom to ask, how to load, whom to tell.

Where whoever runs the tiers is connected with a manager, once, before anybody asks it for anything.
Without tiers nobody is asked. Refuses to know what a tier is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvcache.base.arguments import check_kind
from kvcache.base.arrays import Int32Array
from kvcache.base.errors import RequestError
from kvcache.base.logs import CallbackErrors, get_logger
from kvcache.core import (
    CacheEvent,
    EventSink,
    OffloadAnswer,
    OffloadHit,
    OffloadHooks,
    StepHooks,
)
from kvcache.manager.loads import PrefixLoads
from kvcache.requests.hash_algorithms import BlockHash
from kvcache.requests.request import Request

logger = get_logger(__name__)


class SwapHooks(Protocol):
    """Who keeps what preempted requests would lose. Never blocks."""

    def on_swap_out(
        self,
        request: Request,
        num_tokens: int,
        num_cached_tokens: int,
        block_ids: tuple[list[int], ...],
    ) -> None:
        """The engine preempts a request and asks to keep its content: it is about to lose its
        tables, which are `block_ids`, one per group. The bytes of its first `num_tokens` tokens
        are complete on every rank; the first `num_cached_tokens` are found by their content."""


class GuardedHooks:
    """Hooks that a caller handed in, which cannot harm the call that asks or tells them.

    What they raise is logged. A look-up that raises, or answers anything but an `OffloadHit`, is a
    miss: the prompt is computed.
    """

    def __init__(self, hooks: OffloadHooks) -> None:
        """Ask and tell `hooks`."""
        self._hooks = hooks
        self._errors = CallbackErrors(logger, "offload_hooks")

    def look_up(self, request: Request, num_device_tokens: int) -> OffloadHit:
        """See `OffloadHooks`."""
        try:
            hit = self._hooks.look_up(request, num_device_tokens)
            check_kind("what look_up returned", hit, OffloadHit)
            check_kind("its answer", hit.answer, OffloadAnswer)
        except Exception:
            self._errors.note("the look-up is a miss: mend look_up")
            return OffloadHit(OffloadAnswer.MISS)
        return hit

    def on_eviction_candidates(self, group: int, block_ids: Int32Array) -> None:
        """See `OffloadHooks`."""
        self._tell(self._hooks.on_eviction_candidates, group, block_ids)

    def on_sealed(self, group: int, block_ids: Int32Array) -> None:
        """See `OffloadHooks`."""
        self._tell(self._hooks.on_sealed, group, block_ids)

    def on_request_finished(self, request_id: str) -> None:
        """See `OffloadHooks`."""
        self._tell(self._hooks.on_request_finished, request_id)

    def _tell(self, hook: Callable[..., None], *arguments: object) -> None:
        try:
            hook(*arguments)
        except Exception:
            self._errors.note(f"it was not told by {hook.__name__}: mend that")


class TierLink:
    """What a manager and its tiers have of each other.

    `hooks` are asked before a request is let in, and `swap` is told who is swapped out, None where
    there are none. `block_sizes` are tokens per block of each KV cache group, and `none_hash` the
    parent of every first block.
    """

    def __init__(
        self,
        hooks: StepHooks | None,
        loads: PrefixLoads,
        events: EventSink,
        block_sizes: tuple[int, ...],
        none_hash: BlockHash,
    ) -> None:
        """Ask `hooks`, if there are any."""
        self.hooks = hooks
        self.swap: SwapHooks | None = None
        self.loads = loads
        self.block_sizes = block_sizes
        self.none_hash = none_hash
        self._events = events

    def connect(self, hooks: StepHooks, swap: SwapHooks | None = None) -> None:
        """Ask `hooks` and tell `swap` from now on. Raises RequestError where others are asked."""
        if self.hooks is not None:
            raise RequestError("this manager has tiers already: make another manager for others")
        self.hooks, self.swap = hooks, swap

    def emit(self, event: CacheEvent) -> None:
        """Tell who listens to the manager what happened in a tier."""
        self._events.emit(event)
