"""The running sums of a replay, from which its report is made."""

from __future__ import annotations

from collections.abc import Iterable

from kvcache.replay.report import ReplayReport
from kvcache.replay.rows import ReplayedRequest
from kvcache.replay.stepper import CacheCounters, TierCounters


class ReplayTally:
    """Sums of one replay. The manager's own counts are relative to the first sample."""

    def __init__(self, workload: str) -> None:
        self.num_steps = 0
        self.num_failed_steps = 0
        self.num_preemptions = 0
        self.num_returns = 0
        self.num_skipped_requests = 0
        self.num_computed_tokens = 0
        self.bytes_checked = 0
        self.num_wrong_blocks = 0
        self.history = ""
        self._workload = workload
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_hit_tokens = 0
        self._num_resumed_hit_tokens = 0
        self._num_recomputed_tokens = 0
        self._peak_usage = 0.0
        self._num_evictions = 0
        self._num_copies = 0
        self._tiers: TierCounters | None = None
        self._latest: CacheCounters | None = None

    def count_finished(self, requests: Iterable[ReplayedRequest]) -> None:
        """Count finished requests."""
        for request in requests:
            self._num_requests += 1
            self._num_output_tokens += request.request.num_output_tokens

    def count_admission(
        self, request: ReplayedRequest, num_hit_tokens: int, num_scheduled_tokens: int
    ) -> None:
        """Count an admission with `num_hit_tokens`, before the request is marked as admitted.

        A request counts as looked up once: later hits and recomputed tokens of preempted and
        withdrawn requests are counted separately.
        """
        self.num_computed_tokens += num_scheduled_tokens
        if request.admission == 0:
            self._num_prompt_tokens += request.request.num_prompt_tokens
            self._num_hit_tokens += num_hit_tokens
        else:
            self._num_resumed_hit_tokens += num_hit_tokens
            self._num_recomputed_tokens += max(0, request.num_ever_computed - num_hit_tokens)

    def sample(self, statistics: CacheCounters) -> None:
        """Record the manager's present statistics."""
        if self._latest is not None:
            self._num_evictions += _grown(statistics.num_evictions, self._latest.num_evictions)
            self._num_copies += _grown(statistics.num_copies, self._latest.num_copies)
            if statistics.tiers is not None:
                before = self._latest.tiers or TierCounters()
                grown = statistics.tiers.grown_since(before)
                self._tiers = (self._tiers or TierCounters()).plus(grown)
        self._latest = statistics
        self._peak_usage = max(self._peak_usage, statistics.usage)

    def report(self, wall_time_s: float) -> ReplayReport:
        """Return all statistics so far."""
        return ReplayReport(
            workload=self._workload,
            num_requests=self._num_requests,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_computed_tokens=self.num_computed_tokens,
            num_preemptions=self.num_preemptions,
            num_resumed_hit_tokens=self._num_resumed_hit_tokens,
            num_recomputed_tokens=self._num_recomputed_tokens,
            num_evictions=self._num_evictions,
            num_copies=self._num_copies,
            num_steps=self.num_steps,
            num_failed_steps=self.num_failed_steps,
            num_returns=self.num_returns,
            num_skipped_requests=self.num_skipped_requests,
            wall_time_s=wall_time_s,
            peak_usage=self._peak_usage,
            bytes_checked=self.bytes_checked,
            num_wrong_blocks=self.num_wrong_blocks,
            history=self.history,
            tiers=self._tiers,
        )


def _grown(count: int, before: int) -> int:
    """Return the increase of a count; one that fell was reset by a new epoch."""
    return count - before if count >= before else count
