"""A coordinator with a meter around it: everything passes through, and is looked at.

Between a message loop and the plain Coordinator, with the methods that a loop calls. Refuses to
change what passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvcache.coordinator import Coordinator
from kvcache.messages import Call, Detach, FromClient, FromWorker, Outgoing
from kvcache.metrics.step_meter import StepMeter
from kvcache.step import StepRequest


class MeteredCoordinator:
    """What a message loop needs of a `Coordinator`, measured. One owner, one thread."""

    def __init__(
        self,
        coordinator: Coordinator,
        meter: StepMeter,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Pass everything on to `coordinator`."""
        self._coordinator = coordinator
        self._meter = meter
        self._now = now
        self._ask = coordinator.on_client_message
        self._settle = coordinator.settle
        self._stride = meter.stride
        # Not measured, and called for each rank in each step: as if nobody stood between.
        self.on_plain_applied = coordinator.on_plain_applied

    @property
    def epoch(self) -> int:
        """The present epoch."""
        return self._coordinator.epoch

    def on_client_message(self, message: FromClient) -> list[Outgoing]:
        """See `Coordinator`; the time it takes is the decision's."""
        kind, meter = type(message), self._meter
        is_step = (kind is StepRequest or kind is Call) and not message.step % self._stride  # type: ignore[union-attr]
        if not (is_step or meter.num_open):
            return self._ask(message)
        begun_s = self._now()
        if is_step:
            meter.arrived(message.client_id, message.step, begun_s)  # type: ignore[union-attr]
        elif kind is Detach:
            meter.forget(message.client_id)
        outgoing = self._ask(message)
        meter.left(outgoing, begun_s, self._now())
        return outgoing

    def on_worker_message(self, rank: int, message: FromWorker) -> list[Outgoing]:
        """See `Coordinator`."""
        return self._looked_at(lambda: self._coordinator.on_worker_message(rank, message))

    def settle(self) -> list[Outgoing]:
        """See `Coordinator`."""
        if not self._meter.num_open:
            return self._settle()
        return self._looked_at(self._settle)

    def on_tick(self) -> list[Outgoing]:
        """See `Coordinator`."""
        if self._meter.num_open:
            self._meter.forget_silent(self._now())
        return self._looked_at(self._coordinator.on_tick)

    def _looked_at(self, decide: Callable[[], list[Outgoing]]) -> list[Outgoing]:
        begun_s = self._now()
        outgoing = decide()
        if outgoing and self._meter.num_open:
            self._meter.left(outgoing, begun_s, self._now())
        return outgoing
