"""Statistics of the tiers, as a coordinator reports them. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.offload.statistics import HierarchyStatistics


@dataclass(frozen=True)
class OffloadStatistics:
    """Statistics of the tiers and of the requests that wait for them.

    `num_loaded_tokens` were loaded instead of computed, `num_fetched_tokens` of them from files.
    `num_adopted_blocks` were there when the epoch began.

    `num_swapped_out` preempted requests had unhashed blocks stored; `num_swapped_in` of them
    continued from those; `num_swap_saved_tokens` were not computed again because of that, in
    addition to hits.
    """

    tiers: HierarchyStatistics
    num_waiting_requests: int = 0
    num_loaded_tokens: int = 0
    num_fetched_tokens: int = 0
    num_loads_given_up: int = 0
    num_failed_jobs: int = 0
    last_failure: str = ""
    num_adopted_blocks: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_swap_saved_tokens: int = 0
