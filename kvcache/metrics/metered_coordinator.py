"""A coordinator with a meter around it: everything passes through, and is looked at.

Between a message loop and the plain Coordinator, with the methods that a loop calls. Refuses to
change what passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvcache.coordinator import Coordinator
from kvcache.messages import Call, FromClient, FromWorker, Outgoing
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
        # Not measured, and called for each rank in each step: as if nobody stood between.
        self.on_plain_applied = coordinator.on_plain_applied

    @property
    def epoch(self) -> int:
        """The present epoch."""
        return self._coordinator.epoch

    def on_client_message(self, message: FromClient) -> list[Outgoing]:
        """See `Coordinator`; the time it takes is the decision's."""
        begun_s = self._now()
        if isinstance(message, StepRequest | Call):
            self._meter.arrived(message.client_id, message.step, begun_s)
        return self._looked_at(self._coordinator.on_client_message(message), begun_s)

    def on_worker_message(self, rank: int, message: FromWorker) -> list[Outgoing]:
        """See `Coordinator`."""
        begun_s = self._now()
        return self._looked_at(self._coordinator.on_worker_message(rank, message), begun_s)

    def settle(self) -> list[Outgoing]:
        """See `Coordinator`."""
        begun_s = self._now()
        return self._looked_at(self._coordinator.settle(), begun_s)

    def on_tick(self) -> list[Outgoing]:
        """See `Coordinator`."""
        begun_s = self._now()
        return self._looked_at(self._coordinator.on_tick(), begun_s)

    def _looked_at(self, outgoing: list[Outgoing], begun_s: float) -> list[Outgoing]:
        if outgoing:
            self._meter.left(outgoing, begun_s, self._now())
        return outgoing
