"""Statistics of the tiers at work, as a coordinator reports them. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.offload.statistics import HierarchyStatistics


@dataclass(frozen=True)
class OffloadStatistics:
    """Statistics of the tiers and of the requests that wait for them.

    `num_loaded_tokens` were not computed because the tiers had them, `num_fetched_tokens` of them
    came from files. `num_adopted_blocks` were there when the epoch began.

    Of `num_swapped_out` preempted requests something was kept that has no content hash;
    `num_swapped_in` of them went on where they had been, and `num_swap_saved_tokens` were not
    computed again for it, in addition to what was found by its content.
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
