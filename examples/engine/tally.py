"""The running statistics behind `EngineStatistics`."""

from __future__ import annotations

from dataclasses import dataclass

from examples.engine.outputs import EngineStatistics
from examples.engine.scheduler import Scheduler


@dataclass
class EngineTally:
    """Counts since the launch; `EngineStatistics` describes them."""

    num_finished: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    num_restarts: int = 0
    step_s: float = 0.0
    coordinator_s: float = 0.0
    compute_s: float = 0.0

    def statistics(self, scheduler: Scheduler) -> EngineStatistics:
        """Return the statistics, including the scheduler's present ones."""
        return EngineStatistics(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_preemptions=scheduler.num_preemptions,
            **vars(self),
        )
