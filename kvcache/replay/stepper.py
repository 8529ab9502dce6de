"""The interface below the replay engine: takes steps and runs their forwards.

Implemented by a cluster's client, and by a cluster in this process. The engine decides the content
of each step; a stepper numbers steps, sends them, and reports the progress of forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

from kvcache.protocol.messages import FailedForward
from kvcache.protocol.step import NO_STEP, StepRequest, StepResult


@dataclass(frozen=True)
class ForwardProgress:
    """The progress of forwards on all ranks.

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
    """Traffic of the tiers below the device since the epoch began: tokens that were loaded instead
    of computed, how many of them came from files, and bytes over all ranks. And swaps: requests
    that were swapped out and in, and unhashed tokens that were not computed again because of
    that."""

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
        """Return the increase of each counter. A counter that fell was reset."""
        pairs = zip(astuple(self), astuple(before), strict=True)
        return TierCounters(*(now - then if now >= then else now for now, then in pairs))

    def plus(self, more: TierCounters) -> TierCounters:
        return TierCounters(*map(sum, zip(astuple(self), astuple(more), strict=True)))


@dataclass(frozen=True)
class CacheCounters:
    """Counters of the cluster since its start: blocks evicted, and blocks copied by each rank.
    `usage` is the present share, 0 to 1. `tiers` is None without tiers."""

    num_blocks: int
    num_evictions: int
    num_copies: int
    usage: float
    tiers: TierCounters | None = None


class Stepper(Protocol):
    """Carries steps to a manager and their forwards to the workers that run them."""

    def submit(self, step: StepRequest) -> int:
        """Send `step` and return its number.

        Overwrites `client_id`, `step` and `epoch`.
        """

    def wait_result(self, step: int) -> StepResult:
        """Return the manager's answer to step number `step`, or to the later number under which it
        was sent again after a temporary refusal: see `StepResult.step`.

        Raises DeadlineError; StaleEpochError or WorkerLostError if the epoch has ended.
        """

    def wait_finished(self, step: int) -> None:
        """Wait until `progress` has reached `step` or shows a failure. Raises as `wait_result`."""

    def attach(self) -> None:
        """Continue in a new epoch after the old one has ended: all scheduled steps are void, and
        all requests unknown. Raises DeadlineError if no epoch begins."""

    def progress(self) -> ForwardProgress:
        """Return the progress of forwards, without waiting."""

    def statistics(self) -> CacheCounters:
        """Return the manager's statistics. May be slow: not for every step."""


def describe_failures(failures: Sequence[FailedForward]) -> str:
    """Return one paragraph per forward with wrong bytes, including the block's history."""
    return "\n".join(
        f"step {failure.step}, rank {failure.rank}: {failure.detail}" for failure in failures
    )
