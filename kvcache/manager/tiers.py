"""The connection between a manager and the tiers below the device.

The owner of the tiers connects them once, before the manager is first used. A manager without tiers
calls no hooks. Nothing here knows how a tier works.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvcache.base.arguments import check_kind
from kvcache.base.arrays import Int32Array
from kvcache.base.errors import RequestError
from kvcache.base.logs import CallbackErrors, get_logger
from kvcache.core import CacheEvent, EventSink, OffloadAnswer, OffloadHit, OffloadHooks, StepHooks
from kvcache.manager.loads import PrefixLoads
from kvcache.requests.hash_algorithms import BlockHash
from kvcache.requests.request import Request

logger = get_logger(__name__)


class SwapHooks(Protocol):
    """Keeps the content that preempted requests would lose. Never blocks."""

    def on_swap_out(
        self,
        request: Request,
        num_tokens: int,
        num_cached_tokens: int,
        block_ids: tuple[list[int], ...],
    ) -> None:
        """Keep the content of a request that the engine preempts with a swap.

        The request is about to lose its tables `block_ids`, one per group. The bytes of its first
        `num_tokens` tokens are complete on every rank. The first `num_cached_tokens` are in the
        prefix cache.
        """


class GuardedHooks:
    """A caller's hooks, guarded: their errors are logged and do not reach the manager's calls.

    A look-up that raises, or returns anything but an `OffloadHit`, is a miss: the prompt is
    computed.
    """

    def __init__(self, hooks: OffloadHooks) -> None:
        """Guard `hooks`."""
        self._hooks = hooks
        self._errors = CallbackErrors(logger, "offload_hooks")

    def look_up(self, request: Request, num_device_tokens: int) -> OffloadHit:
        """See `OffloadHooks`."""
        try:
            hit = self._hooks.look_up(request, num_device_tokens)
            check_kind("what look_up returned", hit, OffloadHit)
            check_kind("its answer", hit.answer, OffloadAnswer)
        except Exception:
            self._errors.note("the look-up is a miss: fix look_up")
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
            self._errors.note(f"{hook.__name__} missed a call: fix it")


class TierLink:
    """The interface between a manager and its tiers.

    The manager asks `hooks` before it admits a request, and tells `swap` which requests are swapped
    out; both are None without tiers. `block_sizes` are tokens per block of each KV cache group,
    and `none_hash` is the parent of every first block.
    """

    def __init__(
        self,
        hooks: StepHooks | None,
        loads: PrefixLoads,
        events: EventSink,
        block_sizes: tuple[int, ...],
        none_hash: BlockHash,
    ) -> None:
        """Connect `hooks`, if there are any."""
        self.hooks = hooks
        self.swap: SwapHooks | None = None
        self.on_hints: Callable[[Request], None] | None = None
        """Called with each request that ends with hints, so that tiers follow them, too."""
        self.on_prefetch: Callable[[Request, int], OffloadHit] | None = None
        """Begins to load a prefix, the part behind so many device tokens."""
        self.loads = loads
        self.block_sizes = block_sizes
        self.none_hash = none_hash
        self._events = events

    def connect(self, hooks: StepHooks, swap: SwapHooks | None = None) -> None:
        """Use `hooks` and `swap` from now on. Raises RequestError if there are hooks already."""
        if self.hooks is not None:
            raise RequestError("this manager has tiers already: make another manager for others")
        self.hooks, self.swap = hooks, swap

    def emit(self, event: CacheEvent) -> None:
        """Pass an event of a tier to the manager's event sink."""
        self._events.emit(event)
