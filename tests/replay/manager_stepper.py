"""A replay's stepper without a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvcache.manager import KVCacheManager
from kvcache.protocol.step import NO_STEP, StepRequest, StepResult
from kvcache.replay import CacheCounters, ForwardProgress


class ManagerStepper:
    """A bare manager whose forwards take no time: nothing is computed and nothing checked.

    `fails` says which steps fail (none by default); such a step and those scheduled after it are
    void. `lag` steps are always unfinished, like running forwards.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        lag: int = 0,
        fails: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self._manager = manager
        self._lag = lag
        self._fails = fails
        self._results: dict[int, StepResult] = {}
        self._last_step = 0
        self._seen_step = 0  # forwards up to here have ended
        self._failing_step = NO_STEP  # the first void step the manager has not been told of
        self._void = range(0)

    def submit(self, step: StepRequest) -> int:
        """Have the manager serve the step at once."""
        self._last_step += 1
        number = self._last_step
        self._results[number] = self._manager.step(
            replace(step, client_id="replay", step=number, epoch=1)
        )
        if step.failed_step != NO_STEP:
            self._void = range(step.failed_step, number)
            self._failing_step = NO_STEP
        elif self._failing_step == NO_STEP and self._fails(number):
            self._failing_step = number
        self.wait_finished(number - self._lag)
        return number

    def wait_result(self, step: int) -> StepResult:
        """Return the answer, once."""
        return self._results.pop(step)

    def wait_finished(self, step: int) -> None:
        """Let the forwards up to `step` end."""
        self._seen_step = max(self._seen_step, step)

    def attach(self) -> None:
        """Does nothing: a bare manager has one epoch, which ends with it."""

    def progress(self) -> ForwardProgress:
        """Nothing is checked, so nothing is wrong."""
        if NO_STEP < self._failing_step <= self._seen_step:
            return ForwardProgress(self._failing_step - 1, self._failing_step)
        finished = self._void.start - 1 if self._seen_step in self._void else self._seen_step
        return ForwardProgress(finished)

    def statistics(self) -> CacheCounters:
        """Read the manager's statistics."""
        core = self._manager.statistics().core
        return CacheCounters(core.num_blocks, core.num_evictions, 0, self._manager.usage)
