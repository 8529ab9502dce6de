"""The results of a replay, and the running sums from which they are made. Commands render them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from kvcache.replay.rows import ReplayedRequest
from kvcache.replay.stepper import CacheCounters, TierCounters


@dataclass
class ReplayReport:
    """The results of a replay, finished or not.

    Hits are those of first admissions: `num_hit_tokens` of `num_prompt_tokens` were cached and not
    computed again. Tokens that preempted requests hit or computed again are counted separately.
    `peak_usage` is the largest sampled share of blocks in use. `num_wrong_blocks`: blocks with
    other bytes than their tokens demand; the first one ends the replay. `num_returns`: how often
    all requests returned to a cluster that had lost its coordinator or a worker.
    `num_skipped_requests` were longer than `max_model_len` and not played. `tiers` is None without
    tiers below the device.
    """

    workload: str
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_hit_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_resumed_hit_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_evictions: int = 0
    num_copies: int = 0
    num_steps: int = 0
    num_failed_steps: int = 0
    wall_time_s: float = 0.0
    peak_usage: float = 0.0
    bytes_checked: int = 0
    num_wrong_blocks: int = 0
    num_returns: int = 0
    num_skipped_requests: int = 0
    history: str = ""
    tiers: TierCounters | None = None

    @property
    def hit_rate(self) -> float:
        """Share of cached prompt tokens, 0 to 1; 0.0 without any."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def steps_per_s(self) -> float:
        """Scheduling steps per second; 0.0 before time has passed."""
        return self.num_steps / self.wall_time_s if self.wall_time_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second that were hit or computed; 0.0 before time has passed."""
        tokens = self.num_hit_tokens + self.num_computed_tokens
        return tokens / self.wall_time_s if self.wall_time_s > 0 else 0.0

    def to_json(self) -> str:
        """Return the report as JSON, with the fields' names as keys, including rates."""
        rates = {
            "hit_rate": self.hit_rate,
            "steps_per_s": self.steps_per_s,
            "tokens_per_s": self.tokens_per_s,
        }
        return json.dumps({**asdict(self), **rates}, indent=2)


class ReplayTally:
    """The running sums of one replay: fields of the report, at 0 in the beginning.

    The manager's own counts are relative to the first sample.
    """

    def __init__(self, workload: str) -> None:
        self.sums = ReplayReport(workload)
        self._latest: CacheCounters | None = None

    def count_finished(self, requests: Iterable[ReplayedRequest]) -> None:
        for request in requests:
            self.sums.num_requests += 1
            self.sums.num_output_tokens += request.request.num_output_tokens

    def count_admission(
        self, request: ReplayedRequest, num_hit_tokens: int, num_scheduled_tokens: int
    ) -> None:
        """Count an admission with `num_hit_tokens`, before the request is marked as admitted.

        A request counts as looked up once: later hits and recomputed tokens of preempted and
        withdrawn requests are counted separately.
        """
        self.sums.num_computed_tokens += num_scheduled_tokens
        if request.admission == 0:
            self.sums.num_prompt_tokens += request.request.num_prompt_tokens
            self.sums.num_hit_tokens += num_hit_tokens
        else:
            self.sums.num_resumed_hit_tokens += num_hit_tokens
            self.sums.num_recomputed_tokens += max(0, request.num_ever_computed - num_hit_tokens)

    def sample(self, statistics: CacheCounters) -> None:
        """Record the manager's present statistics."""
        if self._latest is not None:
            self.sums.num_evictions += _grown(statistics.num_evictions, self._latest.num_evictions)
            self.sums.num_copies += _grown(statistics.num_copies, self._latest.num_copies)
            if statistics.tiers is not None:
                before = self._latest.tiers or TierCounters()
                grown = statistics.tiers.grown_since(before)
                self.sums.tiers = (self.sums.tiers or TierCounters()).plus(grown)
        self._latest = statistics
        self.sums.peak_usage = max(self.sums.peak_usage, statistics.usage)

    def report(self, wall_time_s: float) -> ReplayReport:
        """Return all statistics so far."""
        return replace(self.sums, wall_time_s=wall_time_s)


def _grown(count: int, before: int) -> int:
    """Return the increase of a count; one that fell was reset by a new epoch."""
    return count - before if count >= before else count
