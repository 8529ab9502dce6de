"""Whom the replay engine drives: anything that takes steps and runs their forwards.

Stands between the engine and a cluster's client, a cluster in this process, or a bare manager. The
engine decides what each step holds; a stepper numbers the steps, carries them, and says how far
their forwards have got. Refuses to schedule anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Protocol

from kvcache.manager import KVCacheManager
from kvcache.protocol.messages import FailedForward
from kvcache.protocol.step import NO_STEP, StepRequest, StepResult


@dataclass(frozen=True)
class ForwardProgress:
    """How far forwards have got on every rank.

    Every step up to `finished_step` is complete. `failed_step` is the first step that was void
    and has not been reported to the manager yet, else `NO_STEP`; it is given only when no rank can
    still run it or a later one that is scheduled. `failures` are forwards that found wrong bytes.
    """

    finished_step: int
    failed_step: int = NO_STEP
    bytes_checked: int = 0
    failures: tuple[FailedForward, ...] = ()


@dataclass(frozen=True)
class TierCounters:
    """What went through the tiers below the device since the epoch began: tokens that requests did
    not compute because they were loaded, those of them that came from files, and bytes over all
    ranks. Of the requests that were swapped out some came back where they had been: so many tokens
    were not computed again although they have no content hash."""

    num_loaded_tokens: int = 0
    num_fetched_tokens: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    spilled_bytes: int = 0
    fetched_bytes: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_swap_saved_tokens: int = 0

    def grown_since(self, before: TierCounters) -> TierCounters:
        """Return by how much each counter has grown. One that is lower was reset."""
        pairs = zip(astuple(self), astuple(before), strict=True)
        return TierCounters(*(now - then if now >= then else now for now, then in pairs))

    def plus(self, more: TierCounters) -> TierCounters:
        """Return the sums."""
        return TierCounters(*map(sum, zip(astuple(self), astuple(more), strict=True)))


@dataclass(frozen=True)
class CacheCounters:
    """What the cluster knows, since it was started: blocks evicted, and blocks copied by each rank.
    `usage` is of this moment, 0 to 1. `tiers` is None where there are none."""

    num_blocks: int
    num_evictions: int
    num_copies: int
    usage: float
    tiers: TierCounters | None = None


class Stepper(Protocol):
    """Carries steps to a manager and their forwards to the workers that run them."""

    def submit(self, step: StepRequest) -> int:
        """Send `step` and return its number.

        `client_id`, `step` and `epoch` are filled in here, whatever they were.
        """

    def wait_result(self, step: int) -> StepResult:
        """Return the manager's answer to step number `step`, or to the later number under which it
        was sent again because it had been refused for a while: see `StepResult.step`.

        Raises DeadlineError; StaleEpochError or WorkerLostError when the epoch is over.
        """

    def wait_finished(self, step: int) -> None:
        """Return once `progress` has reached `step` or shows a failure. Raises as `wait_result`."""

    def attach(self) -> None:
        """Go on in a new epoch, after the old one has ended: everything scheduled is void, and
        every request unknown. Raises DeadlineError when no epoch begins."""

    def progress(self) -> ForwardProgress:
        """Say how far forwards have got, without waiting."""

    def statistics(self) -> CacheCounters:
        """Return the manager's statistics. May take a while: not for every step."""


class ManagerStepper:
    """A bare manager whose forwards take no time: nothing is computed and nothing checked.

    `fails` says which steps fail (none by default); such a step and those scheduled after it are
    void. `lag` steps are always unfinished, as if a forward were still running.
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
        self._seen_step = 0  # forwards up to here have ended, well or not
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
        """A bare manager has one epoch, which ends with it: there is nothing to do."""

    def progress(self) -> ForwardProgress:
        """Nothing is checked, so nothing is ever wrong."""
        if NO_STEP < self._failing_step <= self._seen_step:
            return ForwardProgress(self._failing_step - 1, self._failing_step)
        finished = self._void.start - 1 if self._seen_step in self._void else self._seen_step
        return ForwardProgress(finished)

    def statistics(self) -> CacheCounters:
        """Read the manager's statistics."""
        core = self._manager.statistics().core
        return CacheCounters(core.num_blocks, core.num_evictions, 0, self._manager.usage)


def describe_failures(failures: Sequence[FailedForward]) -> str:
    """Return one paragraph per forward that found wrong bytes, the block's history included."""
    return "\n".join(
        f"step {failure.step}, rank {failure.rank}: {failure.detail}" for failure in failures
    )
