"""A coordinator with a meter around it.

Has the methods that a message loop calls, passes every call on, and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec

from kvcache.coordinator import Coordinator
from kvcache.metrics.ages import AgeMeter
from kvcache.metrics.step_meter import StepMeter
from kvcache.protocol.messages import Call, Detach, FromClient, FromWorker, Outgoing
from kvcache.protocol.step import StepRequest

P = ParamSpec("P")


class MeteredCoordinator:
    """The interface of a `Coordinator` for a message loop, measured. One user, one thread.

    Invariant: while no step is followed, `settle` is the coordinator's own method, as
    `on_plain_applied` always is: they are called for every step, at no extra cost.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        meter: StepMeter,
        ages: AgeMeter,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordinator = coordinator
        self._meter = meter
        self._tick = ages.tick
        self._now = now
        self._ask = coordinator.on_client_message
        self._num_left = meter.stride  # messages until the next followed step
        self._is_open = False
        self.on_plain_applied = coordinator.on_plain_applied
        self.on_client_lost = coordinator.on_client_lost
        self.on_unreadable = self._watched(coordinator.on_unreadable)
        self.on_unsendable = self._watched(coordinator.on_unsendable)
        self.on_error = self._watched(coordinator.on_error)
        self.settle = coordinator.settle
        self._settle = self._watched(coordinator.settle)

    @property
    def epoch(self) -> int:
        return self._coordinator.epoch

    def on_client_message(self, message: FromClient) -> list[Outgoing]:
        """Call the `Coordinator`; the time is that of the decision."""
        self._tick()
        self._num_left -= 1
        if self._num_left > 0 and not self._is_open:
            return self._ask(message)
        begun_s, meter = self._now(), self._meter
        if isinstance(message, Detach):
            meter.forget(message.client_id)
        elif self._num_left <= 0 and isinstance(message, StepRequest | Call):
            self._num_left = meter.stride
            meter.arrived(message.client_id, message.step, begun_s)
        return self._looked_at(self._ask(message), begun_s)

    def on_worker_message(self, rank: int, message: FromWorker) -> list[Outgoing]:
        self._tick()
        begun_s = self._now()
        return self._looked_at(self._coordinator.on_worker_message(rank, message), begun_s)

    def on_tick(self) -> list[Outgoing]:
        self._tick()
        begun_s = self._now()
        if self._is_open:
            self._meter.forget_silent(begun_s)
        return self._looked_at(self._coordinator.on_tick(), begun_s)

    def _watched(self, decide: Callable[P, list[Outgoing]]) -> Callable[P, list[Outgoing]]:
        """Return a decision of the `Coordinator` after which its messages are inspected."""

        def look(*args: P.args, **kwargs: P.kwargs) -> list[Outgoing]:
            begun_s = self._now()
            return self._looked_at(decide(*args, **kwargs), begun_s)

        return look

    def _looked_at(self, outgoing: list[Outgoing], begun_s: float) -> list[Outgoing]:
        """Inspect the messages to send while a step is followed; return them."""
        meter = self._meter
        if outgoing and meter.num_open:
            meter.left(outgoing, begun_s, self._now())
        is_open = meter.num_open > 0
        if is_open != self._is_open:
            self._is_open = is_open
            self.settle = self._settle if is_open else self._coordinator.settle
        return outgoing
