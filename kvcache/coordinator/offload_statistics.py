"""Figures of the tiers at work, as a coordinator reports them. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.offload.statistics import HierarchyStatistics


@dataclass(frozen=True)
class OffloadStatistics:
    """Figures of the tiers and of the requests that wait for them.

    `num_loaded_tokens` were not computed because the tiers had them, `num_fetched_tokens` of them
    came from files. `num_adopted_blocks` were there when the epoch began.
    """

    tiers: HierarchyStatistics
    num_waiting_requests: int = 0
    num_loaded_tokens: int = 0
    num_fetched_tokens: int = 0
    num_loads_given_up: int = 0
    num_failed_jobs: int = 0
    last_failure: str = ""
    num_adopted_blocks: int = 0
