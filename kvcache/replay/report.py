"""The results of a replay. Pure data; the commands render it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from kvcache.replay.stepper import TierCounters


@dataclass(frozen=True)
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
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_hit_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    num_resumed_hit_tokens: int
    num_recomputed_tokens: int
    num_evictions: int
    num_copies: int
    num_steps: int
    num_failed_steps: int
    wall_time_s: float
    peak_usage: float
    bytes_checked: int
    num_wrong_blocks: int
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
