"""The tiers below the device, as one manager knows them: whom to ask, how to load, whom to tell.

Where whoever runs the tiers is connected with a manager, once, before anybody asks it for anything.
Without tiers nobody is asked. Refuses to know what a tier is.
"""

from __future__ import annotations

from typing import Protocol

from kvcache.core import CacheEvent, EventSink, NullOffloadHooks, OffloadHooks
from kvcache.errors import RequestError
from kvcache.hash_algorithms import BlockHash
from kvcache.manager.loads import PrefixLoads
from kvcache.request import Request


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


class TierLink:
    """What a manager and its tiers have of each other.

    `hooks` are asked before a request is let in, and `swap` is told who is swapped out, None where
    there are none. `block_sizes` are tokens per block of each KV cache group, and `none_hash` the
    parent of every first block.
    """

    def __init__(
        self,
        hooks: OffloadHooks,
        loads: PrefixLoads,
        events: EventSink,
        *,
        block_sizes: tuple[int, ...],
        none_hash: BlockHash,
    ) -> None:
        """Ask `hooks`, unless they are the null ones."""
        self.hooks = None if type(hooks) is NullOffloadHooks else hooks
        self.swap: SwapHooks | None = None
        self.loads = loads
        self.block_sizes = block_sizes
        self.none_hash = none_hash
        self._events = events

    def connect(self, hooks: OffloadHooks, swap: SwapHooks | None = None) -> None:
        """Ask `hooks` and tell `swap` from now on. Raises RequestError where others are asked."""
        if self.hooks is not None:
            raise RequestError("this manager has tiers already: make another manager for others")
        self.hooks, self.swap = hooks, swap

    def emit(self, event: CacheEvent) -> None:
        """Tell who listens to the manager what happened in a tier."""
        self._events.emit(event)

    def on_request_finished(self, request_id: str) -> None:
        """The request has gone."""
        if self.hooks is not None:
            self.hooks.on_request_finished(request_id)
