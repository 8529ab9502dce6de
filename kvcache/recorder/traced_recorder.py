"""A recorder of steps that also tells a tracer of requests.

What a `StepRecorder` is told goes on to the one behind it; the tracer hears of steps and of clients
that are gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.coordinator.step_recorder import LabelSource, RecorderStatistics, StepRecorder
from kvcache.coordinator.tier_calls import TierCall, WantedLoad
from kvcache.manager import KVCacheManager
from kvcache.manager.loads import PrefixLoad
from kvcache.protocol.commands import Command
from kvcache.protocol.step import NewRequest, StepRequest, StepResult
from kvcache.protocol.step_delivery import StepAnswer, StepMessage
from kvcache.recorder.request_tracer import RequestTracer


class TracedRecorder:
    """A `StepRecorder` that tells `recorder` everything and `tracer` of requests."""

    def __init__(self, recorder: StepRecorder, tracer: RequestTracer) -> None:
        self._recorder = recorder
        self._tracer = tracer

    def begin_epoch(
        self,
        epoch: int,
        manager: KVCacheManager,
        labels: LabelSource | None = None,
        commands: Sequence[Command] = (),
    ) -> None:
        """Pass it on."""
        self._recorder.begin_epoch(epoch, manager, labels, commands)

    def executed(
        self, message: StepMessage, answer: StepAnswer, commands: Sequence[Command]
    ) -> None:
        """Pass it on, and steps to the tracer."""
        self._recorder.executed(message, answer, commands)
        if isinstance(message, StepRequest) and isinstance(answer, StepResult):
            self._tracer.executed(message, answer)

    def refused(self, message: StepMessage, error: Exception) -> None:
        """Pass it on."""
        self._recorder.refused(message, error)

    def released(self, client_id: str) -> None:
        """Pass it on, also to the tracer."""
        self._recorder.released(client_id)
        self._tracer.released(client_id)

    def held(self, client_id: str, requests: Sequence[NewRequest], num_tokens: int) -> None:
        """Pass it on."""
        self._recorder.held(client_id, requests, num_tokens)

    def let_go(self, client_id: str) -> None:
        """Pass it on."""
        self._recorder.let_go(client_id)

    def withdrawn(self, block_ids: Sequence[int], commands: Sequence[Command]) -> None:
        """Pass it on."""
        self._recorder.withdrawn(block_ids, commands)

    def tiers_called(self, call: TierCall) -> None:
        """Pass it on."""
        self._recorder.tiers_called(call)

    def load_begun(self, wanted: WantedLoad, load: PrefixLoad | None) -> None:
        """Pass it on."""
        self._recorder.load_begun(wanted, load)

    def load_finished(self, load_id: int) -> None:
        """Pass it on."""
        self._recorder.load_finished(load_id)

    def load_released(self, load_id: int) -> None:
        """Pass it on."""
        self._recorder.load_released(load_id)

    def end_epoch(self) -> None:
        """Pass it on, also to the tracer."""
        self._recorder.end_epoch()
        self._tracer.end_epoch()

    def on_tick(self) -> None:
        """Pass it on."""
        self._recorder.on_tick()

    def close(self) -> None:
        """Pass it on."""
        self._recorder.close()

    def statistics(self) -> RecorderStatistics | None:
        """Return those of the recorder behind."""
        return self._recorder.statistics()
